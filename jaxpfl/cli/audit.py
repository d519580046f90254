"""``jaxpfl privacy audit``: an empirical test of a method's own privacy claim."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from tyro.conf import Positional, UseAppendAction, arg

from jaxpfl.runs.config import RunConfig, resolve
from jaxpfl.support.console import claim_file, signed
from jaxpfl.support.output_paths import NEW_FILE

if TYPE_CHECKING:
    from jaxpfl.audit import Audit


@dataclass(frozen=True)
class _Run(RunConfig):
    set: UseAppendAction[tuple[str, ...]] = ()
    """A hyper-parameter or option of the method, name=value; may be repeated."""


@dataclass(frozen=True)
class _Audit:
    worlds: int = 400
    """Runs of the game with one canary, about half of them with it; more show more."""
    worlds_delta: float = 0.1
    """delta at which that game's bound and the claim are compared; 0.01 to 0.2 shows most."""
    canaries: int | None = None
    """Clients that are canaries in the one-run audit; all, but 500 at most, unless given."""
    canary_runs: int = 1
    """Runs of the one-run audit, whose canaries are counted together."""
    confidence: float = 0.95
    """Confidence of each bound."""
    plot: Annotated[Path | None, NEW_FILE] = None
    """PNG file for a plot of the worlds' scores."""
    json: bool = False
    """Print one JSON object, the only thing on standard output."""


def audit(
    method: Annotated[Positional[str], arg(metavar="METHOD", help="The method.")],
    settings: Annotated[_Run, arg(name="")] = _Run(),
    how: Annotated[_Audit, arg(name="")] = _Audit(),
) -> None:
    """Try to refute a method's privacy claim, on the data and settings of a run.

    Clients with detectable uploads (canaries) take part in the run's own rounds: one of them in many runs, with it and
    without, and many in one run, each included by a fair coin. Both give a lower bound on epsilon, to be compared with
    the claim. Noise and cohorts are also tested against the accounted ones. Exits with status 1 if the claim is
    refuted; a claim that is not refuted is not proved. Flags that only score or store a run (--seeds, --eval-every,
    ...) have no effect.
    """
    from jaxpfl.audit import audit as play
    from jaxpfl.audit import subject_of
    from jaxpfl.engine import use_cpu_cores
    from jaxpfl.runs import compile_cache, export
    from jaxpfl.runs.setup import prepare, require
    from jaxpfl.support.console import Console

    claim_file(how.plot, "--plot", "jaxpfl privacy audit")
    use_cpu_cores()
    compile_cache.enable()
    config = resolve(settings)
    initial = None if config.warm_start is None else export.read_parameters(config.warm_start)
    subject = subject_of(prepare(config, (method,), initial=initial).runs[method], method)
    with Console(stderr=True).status("") as status:
        found = play(
            subject,
            delta=require(config.privacy.delta),
            accountant=None if config.privacy.accountant == "pld" else "rdp",
            worlds=how.worlds,
            worlds_delta=how.worlds_delta,
            canaries=how.canaries,
            canary_runs=how.canary_runs,
            confidence=how.confidence,
            seed=config.seed,
            progress=status.update,
        )
    if how.plot is not None:
        from jaxpfl.privacy.plot import plot_worlds

        with signed("jaxpfl privacy audit"):
            plot_worlds(found.game.present, found.game.absent, found.claimed, found.game.bound, how.plot)
    if how.json:
        print(json.dumps({"method": method, **found.to_json()}))
    else:
        _say(method, found)
    if found.against:
        raise SystemExit(1)


def _say(method: str, found: Audit) -> None:
    from functools import partial

    from jaxpfl.support.console import Console

    say = partial(Console().print, highlight=False, markup=False, soft_wrap=True)
    game, one, noise = found.game, found.one_run, found.noise
    worlds = len(game.present) + len(game.absent)
    say(f"{method}: {found.claim.relation}, z = {found.claim.noise_multiplier:.4g}, {found.claim.rounds} rounds")
    for name, claimed, bound, of in (
        ("worlds", found.claimed, game.bound, f"{worlds} runs, by {game.statistic}"),
        (
            "one run",
            found.claimed_one_run,
            one,
            f"{one.correct} of {one.guesses} guesses right, {one.canaries} canaries",
        ),
    ):
        say(
            f"{name + ':':<9} epsilon >= {bound.epsilon:.3g} ({bound.confidence:.0%} confidence), {claimed:.4g} "
            f"claimed at delta {bound.delta:g}; {of}; no more than {bound.ceiling:.3g} could be shown"
        )
    if isinstance(noise, str):
        say(f"noise:    not compared: {noise}")
    else:
        say(f"noise:    {noise.scale:.4f} ± {noise.error:.4f} of what is claimed")
    say(f"cohorts:  {', '.join(f'{finding.test} p = {finding.p_value:.2g}' for finding in found.cohorts)}")
    for line in found.against:
        say(f"against the claim: {line}")
    say("refuted" if found.against else "not refuted, which is no proof")

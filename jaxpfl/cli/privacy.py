"""The group ``jaxpfl privacy``: calculators for epsilon and noise, and ``audit``, which tests a method's claim."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from tyro.conf import Positional, UseAppendAction, arg

from jaxpfl.runs.config import RunConfig, resolve
from jaxpfl.support.console import claim_file, signed
from jaxpfl.support.errors import JaxpflError
from jaxpfl.support.output_paths import NEW_FILE

if TYPE_CHECKING:
    from jaxpfl.audit import Audit
    from jaxpfl.privacy import PrivacyPlan


@dataclass(frozen=True)
class _Claim:
    rounds: int
    """Number of rounds R."""
    delta: float
    """Delta of the privacy claim, which consists of epsilon and delta."""
    sampling_rate: float | None = None
    """Probability q with which each client takes part in a round (poisson); by default, all clients take part in every
    round."""
    clients: int | None = None
    """Number of clients m, needed with --cohort or --cap; a delta of 1 / m or more causes a warning."""
    cohort: int | None = None
    """Size of cohorts that are drawn uniformly without replacement; needs --accountant rdp and the relation
    replace-one."""
    cap: int | None = None
    """Maximum size of Poisson cohorts; larger cohorts are cut to this size."""
    cycle: int | None = None
    """Number of rounds from one turn of a client to its next turn (cyclic); in its turn, a client takes part with
    probability --sampling-rate."""
    bands: int | None = None
    """Number of bands of correlated noise, at most the cycle (default: independent noise)."""
    relation: Annotated[str | None, arg(metavar="{add-or-remove-one,replace-one}")] = None
    """Relation between neighboring data sets: one user is added or removed, or one user's data are replaced. The
    default is add-or-remove-one; with --cohort, it is replace-one; with --cycle, zero-out (a user's data are present or
    absent)."""
    accountant: Annotated[str, arg(metavar="{pld,rdp,paper}")] = "pld"
    """Accountant: pld (tight), rdp, or paper (Theorem 5 of Ozkara et al. 2023, which is not a valid bound)."""


_Shared = Annotated[_Claim, arg(name="")]
_Json = Annotated[bool, arg(help="Print one JSON object; these commands always do.")]


def commands(args: Sequence[str] = ()) -> tuple[Callable[..., None], ...]:
    """Return the commands of the group, which do not depend on the arguments."""
    del args
    return epsilon, noise, paper, audit


def epsilon(noise_multiplier: float, claim: _Shared, json: _Json = False) -> None:
    """Compute the epsilon of a run in which Gaussian noise is added to the sum of clipped uploads in every round.

    Args:
        noise_multiplier: Noise multiplier z, the standard deviation of the noise divided by the clipping norm.
    """
    _print(_claim_json(_plan(noise_multiplier, claim), claim))


def noise(epsilon: float, claim: _Shared, json: _Json = False) -> None:
    """Compute the noise multiplier for a given epsilon.

    Args:
        epsilon: Target epsilon.
    """
    from jaxpfl.privacy import accountant_named, calibrate

    plan = calibrate(_plan(1.0, claim), epsilon, claim.delta, accountant_named(claim.accountant))
    _print({"noise_multiplier": plan.noise_multiplier, **_claim_json(plan, claim)})


def paper(
    c1: float,
    sigma1: float,
    clients_per_round: int,
    clients: int,
    tau: int,
    steps: int,
    delta: float,
    c2: float = 0.0,
    sigma2: float = 0.0,
    json: _Json = False,
) -> None:
    """Compare the epsilon of Theorem 5 of Ozkara et al. 2023 with valid values for the same noise.

    In the results, per_step means noise in every local step, as in the theorem, and end_of_round means noise of the
    same variance added to the sum after the local steps. With zero_out, a user's data are present or absent; with
    replace_one, they are replaced by another user's data.

    Args:
        c1: Clipping norm of the gradient in a local step.
        sigma1: Standard deviation of the noise in a local step.
        clients_per_round: Number of clients K in a round.
        clients: Number of clients m.
        tau: Number of local steps in a round.
        steps: Total number of local steps T.
        delta: Delta for which the epsilons are computed.
        c2: Clipping norm of psi's gradient; 0 leaves psi out.
        sigma2: Standard deviation of the noise in psi's step.
    """
    from jaxpfl.privacy.claim import check_delta
    from jaxpfl.privacy.comparison import theorem5_beside_sound

    parts = {"c1": c1, "sigma1": sigma1, "c2": c2, "sigma2": sigma2}
    run = {"clients_per_round": clients_per_round, "clients": clients, "tau": tau, "steps": steps}
    _print(theorem5_beside_sound(**parts, **run, delta=delta))
    check_delta(delta, clients)


def _plan(noise_multiplier: float, claim: _Claim) -> PrivacyPlan:
    from jaxpfl.privacy import CentralNoise, Cyclic, FixedSize, Full, Poisson, PrivacyPlan, descriptions
    from jaxpfl.privacy.accounting import relation_of
    from jaxpfl.privacy.claim import check_delta

    rate, clients, cohort, cap = claim.sampling_rate, claim.clients, claim.cohort, claim.cap
    if claim.cycle is not None:
        if cohort is not None or cap is not None:
            raise JaxpflError(
                "--cycle excludes --cohort and --cap: give --sampling-rate, the rate among clients whose turn it is"
            )
        sampling = Cyclic(claim.cycle, 1.0 if rate is None else rate, clients)
    elif cohort is not None:
        if clients is None:
            raise JaxpflError("--cohort requires --clients, the number of all clients")
        if rate is not None or cap is not None:
            raise JaxpflError("--cohort draws a fixed number of clients: leave out --sampling-rate and --cap")
        sampling = FixedSize(clients, cohort)
    elif cap is not None and rate is None:
        raise JaxpflError("--cap applies to Poisson sampling: give --sampling-rate too")
    else:
        sampling = Full(clients) if rate is None else Poisson(rate, clients, cap)
    if clients is not None:
        check_delta(claim.delta, clients)
    c = (1.0,) if claim.bands is None else descriptions.banded_coefficients(claim.bands, claim.rounds)
    noise = CentralNoise(noise_multiplier, coefficients=c)
    return PrivacyPlan(noise, sampling, claim.rounds, relation_of(noise, sampling, claim.relation))


def _claim_json(plan: PrivacyPlan, claim: _Claim) -> dict[str, Any]:
    from jaxpfl.privacy import accountant_named
    from jaxpfl.privacy.accounting import CAVEAT

    epsilon = plan.epsilon(claim.delta, accountant_named(claim.accountant))
    note = {"note": CAVEAT} if claim.accountant == "paper" else {}
    return {
        "epsilon": epsilon,
        "delta": claim.delta,
        "accountant": claim.accountant,
        "relation": plan.relation,
        **({} if claim.bands is None else {"bands": claim.bands, "noise_ratio": plan.noise_ratio}),
        **note,
    }


def _print(value: dict[str, Any]) -> None:
    from jaxpfl.support.files import jsonable

    print(json.dumps(jsonable(value), indent=2))  # jsonable replaces infinity, which JSON does not have


@dataclass(frozen=True)
class _AuditedRun(RunConfig):
    set: UseAppendAction[tuple[str, ...]] = ()
    """Hyper-parameter or option of the method, name=value; may be repeated."""


@dataclass(frozen=True)
class _Audit:
    worlds: int = 400
    """Number of runs (worlds) in the audit with a single canary, which takes part in about half of them; more runs can
    show a larger epsilon."""
    worlds_delta: float = 0.1
    """Delta at which the audit with a single canary is compared with the privacy claim; values from 0.01 to 0.2
    are the most informative."""
    canaries: int | None = None
    """Number of clients that are canaries in the audit with a single run; by default, all clients, but at most 500."""
    canary_runs: int = 1
    """Number of times the audit with a single run is repeated; the canaries of all repetitions are counted together."""
    confidence: float = 0.95
    """Confidence level of each bound."""
    plot: Annotated[Path | None, NEW_FILE] = None
    """PNG file for a plot of the worlds' scores."""
    json: bool = False
    """Print one JSON object and nothing else on standard output."""


def audit(
    method: Annotated[Positional[str], arg(metavar="METHOD", help="The method.")],
    settings: Annotated[_AuditedRun, arg(name="")] = _AuditedRun(),
    how: Annotated[_Audit, arg(name="")] = _Audit(),
) -> None:
    """Try to refute a method's privacy claim, on the data and settings of a run.

    Canaries are clients whose uploads are easy to detect. One audit makes many runs, with and without a single canary;
    another audit makes one run with many canaries, each of which a coin flip includes or leaves out. Each audit gives a
    lower bound on epsilon, which is compared with the claim. If examples are protected, the canary is an example of a
    silo, and there is no audit with one run. The command also tests whether the noise and the cohorts are drawn as the
    accountant assumes. The exit status is 1 if the claim is refuted; a claim that is not refuted is not proved. Flags
    that only concern scoring or storing a run (--seeds, --eval-every, ...) have no effect.
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
        from jaxpfl.privacy.audit import plot_worlds

        with signed("jaxpfl privacy audit"):
            plot_worlds(found.game.present, found.game.absent, found.claimed, found.game.bound, how.plot)
    if how.json:
        print(json.dumps({"method": method, **found.to_json()}))
    else:
        _print_audit(method, found)
    if found.against:
        raise SystemExit(1)


def _print_audit(method: str, found: Audit) -> None:
    from functools import partial

    from jaxpfl.support.console import Console

    say = partial(Console().print, highlight=False, markup=False, soft_wrap=True)
    game, one, noise = found.game, found.one_run, found.noise
    worlds = f"{len(game.present) + len(game.absent)} runs, by {game.statistic}"
    steps = f"{found.claim.rounds} {'rounds' if one is not None else 'batches of the silo with the canary'}"
    claim = f"{found.claim.relation}, z = {found.claim.noise_multiplier:.4g}, {steps}"
    unseen = f"; the noise cannot be tested: {noise}" if isinstance(noise, str) else ""
    say(f"{method}: {claim}{unseen}")
    parts: list[Any] = [("worlds:  ", found.claimed, game.bound, worlds)]
    if one is not None:
        guesses = f"{one.correct} of {one.guesses} guesses right, {one.canaries} canaries"
        parts.append(("one run: ", found.claimed_one_run, one, guesses))
    for name, claimed, bound, what in parts:
        say(
            f"{name} epsilon >= {bound.epsilon:.3g} ({bound.confidence:.0%} confidence), {claimed:.4g} "
            f"claimed at delta {bound.delta:g}; {what}; the test can show at most {bound.ceiling:.3g}"
        )
    if not isinstance(noise, str):
        say(f"noise:    {noise.scale:.4f} ± {noise.error:.4f} times the claimed scale")
    for name, findings in (("draws:  ", found.draws), ("cohorts:", found.cohorts)):
        if findings:
            say(f"{name}  {', '.join(f'{finding.test} p = {finding.p_value:.2g}' for finding in findings)}")
    for line in found.against:
        say(f"against the claim: {line}")
    say("refuted" if found.against else "not refuted, which does not prove the claim")

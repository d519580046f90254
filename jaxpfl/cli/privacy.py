"""``jaxpfl privacy``: what noise costs and what a budget needs, without a run. Each prints one JSON object."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from jaxpfl.errors import JaxpflError

if TYPE_CHECKING:
    from jaxpfl.privacy import PrivacyPlan

_Accountant = Literal["pld", "rdp", "paper"]


def commands() -> tuple[Callable[..., None], ...]:
    """The commands of the group."""
    return epsilon, noise, paper, curve, audit


def epsilon(
    noise_multiplier: float,
    rounds: int,
    delta: float,
    sampling_rate: float | None = None,
    accountant: _Accountant = "pld",
    clients: int | None = None,
    cohort: int | None = None,
    cap: int | None = None,
) -> None:
    """The epsilon of a run: clipped uploads are summed with Gaussian noise in every round.

    Args:
        noise_multiplier: z: the noise's standard deviation over the clipping norm.
        rounds: R.
        delta: At which epsilon is asked for.
        sampling_rate: q: Poisson participation; 1 (full) unless given.
        accountant: pld (tight), rdp, or paper (Theorem 5 as printed: no valid bound).
        clients: m, with --cohort or --cap.
        cohort: Fixed-size cohorts, without replacement: replace-one, by rdp.
        cap: Poisson cohorts cut to at most this many.
    """
    plan = _plan(noise_multiplier, rounds, sampling_rate, clients, cohort, cap)
    _print(_claim(plan, delta, accountant))


def noise(
    epsilon: float,
    rounds: int,
    delta: float,
    sampling_rate: float | None = None,
    accountant: _Accountant = "pld",
    clients: int | None = None,
    cohort: int | None = None,
    cap: int | None = None,
) -> None:
    """The noise multiplier that an epsilon needs.

    Args:
        epsilon: The target.
        rounds: R.
        delta: At which epsilon is promised.
        sampling_rate: q: Poisson participation; 1 (full) unless given.
        accountant: pld (tight), rdp, or paper (Theorem 5 as printed: no valid bound).
        clients: m, with --cohort or --cap.
        cohort: Fixed-size cohorts, without replacement: replace-one, by rdp.
        cap: Poisson cohorts cut to at most this many.
    """
    from jaxpfl.privacy import calibrate

    plan = calibrate(_plan(1.0, rounds, sampling_rate, clients, cohort, cap), epsilon, delta, accountant)
    _print({"noise_multiplier": plan.noise_multiplier, **_claim(plan, delta, accountant)})


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
) -> None:
    """Theorem 5 of the paper beside sound values for the same noise.

    end_of_round: noise of the same variance added to the sum when the local steps are over. per_step: noise in every
    local step, as printed. zero_out: a user's data are there or not; replace_one: they are another user's.

    Args:
        c1: Clip of a local step's gradient.
        sigma1: Noise of a local step.
        clients_per_round: K.
        clients: m.
        tau: Local steps of a round.
        steps: T: local steps in all.
        delta: At which epsilon is asked for.
        c2: Clip of psi's gradient; 0 leaves psi out.
        sigma2: Noise of psi's step.
    """
    from jaxpfl.privacy.comparison import theorem5_beside_sound

    noises = {"c1": c1, "sigma1": sigma1, "c2": c2, "sigma2": sigma2}
    run = {"cohort": clients_per_round, "clients": clients, "tau": tau, "steps": steps}
    _print(theorem5_beside_sound(**noises, **run, delta=delta))


def curve(
    noise_multiplier: float,
    rounds: int,
    delta: float,
    sampling_rate: float | None = None,
    accountant: _Accountant = "pld",
    clients: int | None = None,
    cohort: int | None = None,
    cap: int | None = None,
    points: int = 20,
    plot: Path | None = None,
    table: bool = False,
) -> None:
    """Epsilon against rounds.

    Args:
        noise_multiplier: z: the noise's standard deviation over the clipping norm.
        rounds: R: the last round of the curve.
        delta: At which epsilon is asked for.
        sampling_rate: q: Poisson participation; 1 (full) unless given.
        accountant: pld (tight), rdp, or paper (Theorem 5 as printed: no valid bound).
        clients: m, with --cohort or --cap.
        cohort: Fixed-size cohorts, without replacement: replace-one, by rdp.
        cap: Poisson cohorts cut to at most this many.
        points: Points of the curve.
        plot: PNG file for a picture of it.
        table: Print a table, not JSON.
    """
    from dataclasses import replace

    from jaxpfl.privacy import checks

    checks.count("points", points)
    last = _plan(noise_multiplier, rounds, sampling_rate, clients, cohort, cap)
    plans = [replace(last, rounds=r) for r in _spread(rounds, points)]
    counts = [plan.rounds for plan in plans]
    epsilons = [plan.epsilon(delta, accountant) for plan in plans]
    printed = [plan.epsilon(delta, "paper") for plan in plans]
    if plot is not None:
        from jaxpfl.privacy.plot import plot_curve

        what = f"z = {noise_multiplier:g}, q = {last.sampling.rate:.4g}, delta = {delta:g}"
        title = f"{what} ({last.relation}, {accountant})"
        plot_curve(counts, epsilons, printed if accountant != "paper" else [], plot, title)
    if table:
        _table(counts, epsilons, printed)
        return
    claim = {"rounds": counts, "epsilon": epsilons, "paper_epsilon": printed}
    _print({**claim, "delta": delta, "accountant": accountant, "relation": last.relation})


def audit(
    noise_multiplier: float,
    rounds: int = 1,
    clients: int = 10,
    cohort: int | None = None,
    participation: Literal["full", "uniform", "poisson"] | None = None,
    noise: Literal["central", "distributed", "per_step"] = "central",
    min_uploads: int | None = None,
    quantile: float | None = None,
    local_steps: int = 1,
    worlds: int = 4000,
    delta: float = 0.1,
    confidence: float = 0.95,
    seed: int = 0,
    plot: Path | None = None,
) -> None:
    """Play the distinguishing game on the engine's own rounds: a lower bound on epsilon, beside the claim.

    One client's data are there or not in many worlds, all in one program. Ends with status 1 where the bound is above
    the claim: then the claim is false, up to the confidence.

    Args:
        noise_multiplier: z.
        rounds: R.
        clients: m.
        cohort: Clients in a round (for poisson the expected number); all unless given.
        participation: How they are drawn; poisson unless given, or full where the cohort is everybody.
        noise: Who adds the noise.
        min_uploads: Least uploads of a released round, where clients add it; the cohort unless given.
        quantile: Adapt the clipping norm to this quantile.
        local_steps: tau.
        worlds: Worlds with, and as many without, the audited client's data.
        delta: At which claim and bound are compared; 0.01 to 0.2 shows most.
        confidence: Of the bound.
        seed: First seed of the worlds.
        plot: PNG file for a picture of what the released models say.
    """
    from jaxpfl.engine.fit import draw_cohorts
    from jaxpfl.experiment.audit import audit as play
    from jaxpfl.privacy import Mechanism

    expected = clients if cohort is None else cohort
    mechanism = Mechanism(
        noise_multiplier,
        noise=noise,
        min_uploads=expected if noise == "distributed" and min_uploads is None else min_uploads,
        quantile=quantile,
        count_stddev=None if quantile is None else max(expected / 20, noise_multiplier),
    )
    found = play(
        mechanism,
        draw_cohorts(clients, expected, participation, None, private=True),
        rounds=rounds,
        worlds=worlds,
        delta=delta,
        confidence=confidence,
        steps=local_steps,
        seed=seed,
    )
    if plot is not None:
        from jaxpfl.privacy.plot import plot_worlds

        plot_worlds(found.present, found.absent, found.claimed, found.bound, plot)
    bound = {"epsilon_lower_bound": found.bound.epsilon, "largest_bound_possible": found.bound.ceiling}
    claim = {"claimed_epsilon": found.claimed, "delta": delta, "confidence": confidence}
    _print({**bound, **claim, "worlds": 2 * worlds, "refuted": found.refuted})
    if found.refuted:
        raise SystemExit(1)


def _plan(
    noise_multiplier: float,
    rounds: int,
    sampling_rate: float | None,
    clients: int | None,
    cohort: int | None,
    cap: int | None,
) -> PrivacyPlan:
    from jaxpfl.privacy import CentralNoise, FixedSize, Full, Poisson, PrivacyPlan

    if cohort is not None:
        if clients is None:
            raise JaxpflError("cohort needs the number of clients: give clients")
        if sampling_rate is not None or cap is not None:
            raise JaxpflError("cohort (fixed size) excludes sampling_rate and cap (poisson)")
        sampling = FixedSize(clients, cohort)
    elif clients is not None and cap is None:
        raise JaxpflError("clients belongs to cohort or cap: give one of them")
    else:
        sampling = Poisson(1.0 if sampling_rate is None else sampling_rate, clients, cap)
        if sampling.rate == 1 and not sampling.truncated:
            sampling = Full()
    return PrivacyPlan(CentralNoise(noise_multiplier), sampling, rounds)


def _claim(plan: PrivacyPlan, delta: float, accountant: _Accountant) -> dict[str, Any]:
    from jaxpfl.privacy.paper import CAVEAT

    claim = {"epsilon": plan.epsilon(delta, accountant), "delta": delta, "accountant": accountant}
    note = {"note": CAVEAT} if accountant == "paper" else {}
    return {**claim, "relation": plan.relation, **note}


def _spread(last: int, points: int) -> list[int]:
    """``points`` whole numbers up to ``last``, evenly; all of them where there are no more."""
    return sorted({max(1, round(last * (i + 1) / points)) for i in range(points)})


def _table(rounds: list[int], epsilons: list[float], printed: list[float]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("rounds", "epsilon", "paper", caption="paper: Theorem 5 as printed, no valid bound")
    for row in zip(rounds, epsilons, printed, strict=True):
        table.add_row(str(row[0]), f"{row[1]:.4g}", f"{row[2]:.4g}")
    Console().print(table)


def _print(value: dict[str, Any]) -> None:
    print(json.dumps(value, indent=2))

r"""Two distinguishing games with the engine's own rounds: one canary in many worlds, many canaries in one run.

In the first, thousands of runs differ in their seeds and in the presence of one client, the canary. Each world is
scored by several statistics of all its releases: their component in the canary's direction, as a whole, leaf by leaf,
as differences between rounds and between leaves (in which shared noise cancels), their length, and the divisors.
`epsilon_lower_bound` selects one of them on half of the worlds and computes the bound on the other half.

In the second, each of many clients of one run is included or not; `one_run_lower_bound` counts how many of them can be
identified. It costs one training run and gives a bound at the claim's own delta, but a looser one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import combinations, pairwise
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxpfl.algorithms import LocalWork
from jaxpfl.audit.canaries import Canaries, sign, with_canaries
from jaxpfl.audit.subject import Subject
from jaxpfl.audit.transcript import Round, by_name, recorded, rounds
from jaxpfl.core.protocol import Algorithm, Upload
from jaxpfl.core.types import PyTree
from jaxpfl.engine import Simulation
from jaxpfl.engine.build import build
from jaxpfl.privacy.audit import EpsilonBound, epsilon_lower_bound
from jaxpfl.privacy.one_run import OneRunBound, one_run_lower_bound
from jaxpfl.support.errors import JaxpflError

_AT_ONCE = 2**28
"""Limit on the bytes of uploads in the worlds of one call, one upload per client."""
_WORLDS, _CANARIES = 40, 500
_PAIRED_ROUNDS, _PAIRED_LEAVES = 6, 6


class Game(NamedTuple):
    """Result of many worlds with and without a canary.

    Attributes:
      bound: the lower bound.
      statistic: name of the one that gave it.
      present, absent: that statistic in the worlds with and without the canary.
    """

    bound: EpsilonBound
    statistic: str
    present: np.ndarray
    absent: np.ndarray


def play(
    subject: Subject,
    *,
    worlds: int,
    delta: float,
    confidence: float = 0.95,
    seed: int = 0,
    progress: Callable[[str], None] = lambda what: None,
) -> Game:
    """Play with many worlds, about half of them with the canary: the first client.

    Args:
      worlds: minimum number.
      delta: at which claim and bound are compared. A claim holds at every delta, and some thousand worlds are
        informative at one of 0.01 ... 0.2.
      seed: the worlds' seeds are ``seed, seed + 1, ...``.
      progress: called with the number of finished worlds.

    Raises:
      JaxpflError: for fewer than 40 worlds, or if the run cannot be accounted.
    """
    check_worlds(worlds)
    canaries = _canaries(subject, 1, even=True)
    simulation, upload = _simulation(subject, canaries)
    direction = by_name(canaries.direction(int(canaries.ids[0]), _released_like(upload)))
    size = sum(leaf.size for leaf in direction.values())
    calls = min(worlds, -(-worlds * 4 * size * len(subject.ids) // _AT_ONCE))
    at_once = -(-worlds // calls)  # of one length, for one program
    names: list[str] = []
    scores, there = [], []
    for start in range(seed, seed + calls * at_once, at_once):
        progress(f"one canary, {start - seed} of {calls * at_once} worlds")
        state = simulation.init(range(start, start + at_once))
        there.append(canaries.tosses(state.key)[:, 0])
        table = statistics(list(_projected(subject, rounds(simulation, state, subject.run.spec.rounds), direction)))
        names = list(table)
        scores.append(np.stack(list(table.values()), axis=1))
    table, present = np.concatenate(scores), np.concatenate(there)
    bound = epsilon_lower_bound(table[present], table[~present], delta=delta, confidence=confidence)
    chosen = table[:, bound.statistic]
    return Game(bound, names[bound.statistic], chosen[present], chosen[~present])


def one_run(
    subject: Subject,
    *,
    canaries: int | None = None,
    delta: float,
    confidence: float = 0.95,
    seed: int = 0,
    runs: int = 1,
) -> OneRunBound:
    """Play with many canaries in each of a few runs.

    Args:
      canaries: number of clients that are canaries; all, but 500 at most, unless given.
      delta: of the claim, far below one over the number of canaries.
      runs: independent runs, whose canaries are counted together.

    Raises:
      JaxpflError: for canaries outside 2 ... m, or if the run cannot be accounted.
    """
    m, n = len(subject.ids), check_canaries(subject, canaries, runs)
    chosen = _canaries(subject, n, even=False)
    simulation, upload = _simulation(subject, chosen)
    like = _released_like(upload)
    rows = [np.concatenate(list(by_name(chosen.direction(int(i), like)).values())) for i in chosen.ids]
    directions = np.stack(rows)
    state = simulation.init(range(seed, seed + runs))
    included = chosen.tosses(state.key)
    total = 0.0
    for t, seen in enumerate(rounds(simulation, state, subject.run.spec.rounds)):
        mean = _mean(subject, seen)
        total = total + float(sign(t)) * np.concatenate([mean[name] for name in mean], axis=1) / subject.unit
    # Component of the sum that belongs to each canary, as far as noise of the claimed size allows to separate them.
    gram = directions @ directions.T
    noise = subject.claim.noise_multiplier**2 / (subject.run.spec.rounds * subject.run.cohorts.expected_cohort / m)
    scores = np.linalg.solve(gram + noise * np.eye(n), directions @ np.asarray(total).T).T
    return one_run_lower_bound(scores.ravel(), included.ravel(), delta=delta, confidence=confidence)


def check_worlds(worlds: int) -> None:
    """Refuse too few worlds to show anything."""
    if worlds < _WORLDS:
        raise JaxpflError(f"worlds must be at least {_WORLDS}, got {worlds}")


def check_canaries(subject: Subject, canaries: int | None, runs: int) -> int:
    """Number of canaries of a run; refused unless between 2 and m, with at least one run."""
    m = len(subject.ids)
    if not 2 <= (n := min(m, _CANARIES) if canaries is None else canaries) <= m:
        raise JaxpflError(f"canaries must be between 2 and the {m} clients, got {n}")
    if runs < 1:
        raise JaxpflError(f"canary_runs must be at least 1, got {runs}")
    return n


def _canaries(subject: Subject, count: int, *, even: bool) -> Canaries:
    relation = subject.claim.relation
    assert relation is not None
    return Canaries(subject.ids[:count], relation, even)


def _simulation(subject: Subject, canaries: Canaries) -> tuple[Simulation, Upload]:
    upload = subject.upload()

    def rebuild(work: LocalWork) -> Algorithm:
        return build(subject.run.spec.method, subject.run.task, work, subject.run.spec.options)

    steers = rebuild if subject.mechanism.noise == "per_step" else None
    put_in = with_canaries(canaries, subject.unit, steers)
    simulation = subject.simulation(
        lambda algorithm, work: recorded(put_in(algorithm, work), upload),
        canaries.availability(subject.run.spec.availability),
    )
    return simulation, upload


def _released_like(upload: Upload) -> PyTree:
    return jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), upload.total)


def _mean(subject: Subject, seen: Round) -> dict[str, np.ndarray]:
    """A round's release as used by the server, times the public divisor; zero without a release."""
    divisor = np.where(seen.weight > 0, seen.weight, np.inf)[:, None]
    return {name: leaf / divisor * subject.run.cohorts.expected_cohort for name, leaf in seen.leaves.items()}


class _Projected(NamedTuple):
    """A round's release in the canary's direction, over C, by leaf and by pair of leaves; its squared length, and the
    divisor; each [S]."""

    leaves: dict[str, np.ndarray]
    pairs: dict[str, np.ndarray]
    square: np.ndarray
    divisor: np.ndarray


def _projected(subject: Subject, seen: Iterable[Round], direction: dict[str, np.ndarray]) -> Iterator[_Projected]:
    pairs = list(combinations(direction, 2))
    if len(direction) > _PAIRED_LEAVES:
        pairs = list(pairwise(direction))
    for t, release in enumerate(seen):
        scale = float(sign(t)) / subject.unit
        mean = {name: leaf * scale for name, leaf in _mean(subject, release).items()}
        leaves = {name: mean[name] @ c for name, c in direction.items()}
        differences = {}
        for a, b in pairs:
            n = min(direction[a].size, direction[b].size)
            apart = direction[a][:n] - direction[b][:n]
            if apart.any():
                differences[f"{a} - {b}"] = (mean[a][:, :n] - mean[b][:, :n]) @ apart
        square = _sum((leaf**2).sum(axis=1) for leaf in mean.values())
        yield _Projected(leaves, differences, square, release.weight)


def statistics(seen: list[_Projected]) -> dict[str, np.ndarray]:
    """Scores of the worlds by name, each [S]."""
    of_round = [_sum(each.leaves.values()) for each in seen]
    table = {"sum": _sum(of_round)}
    if len(seen[0].leaves) > 1:
        table |= {f"leaf {name}": _sum(each.leaves[name] for each in seen) for name in seen[0].leaves}
    table |= {f"leaves {name}": _sum(each.pairs[name] for each in seen) for name in seen[0].pairs}
    # The releases are already multiplied by their signs: if these differ, the sum is of the releases' difference.
    signs = [int(sign(t)) for t in range(min(len(seen), _PAIRED_ROUNDS))]
    table |= {
        f"rounds {s} - {t}": of_round[s] + of_round[t]
        for s, t in combinations(range(len(signs)), 2)
        if signs[s] != signs[t]
    }
    # Noise whose amount depends on the canary has no direction.
    table["length"] = _sum(each.square for each in seen)
    return table | {"divisor": _sum(each.divisor for each in seen)}


def _sum(arrays: Iterable[np.ndarray]) -> np.ndarray:
    return np.stack(list(arrays)).sum(axis=0)

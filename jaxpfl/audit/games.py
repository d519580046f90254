"""Two distinguishing games with the engine's own rounds: one canary in many worlds, many canaries in one run.

A canary's upload has its own direction, a large weight and a norm far above the clipping norm C, so that after clipping
it changes the sum by C. The privacy claim must cover this upload too. The upload's sign in each round is given by the
Thue-Morse sequence (+ - - + - + + - ...). If two rounds share their noise, the noise cancels in the difference of their
releases, but the canary does not. A coin decides whether a canary is included. If the canary is not included, the run
uses the neighboring data set under the claim's relation: the client sends nothing (add-or-remove-one), zeros
(zero-out), or the opposite upload (replace-one).

With noise in every step, the canary's gradients, instead of its upload, have this direction and a large norm, because
noise is added to each gradient. An excluded canary then has no examples. This reveals whether the number of noisy steps
depends on a client's examples.

In the first game, many runs (worlds) differ in their seeds and in the presence of one canary. Several statistics of a
world's releases serve as scores: the component in the canary's direction (of the whole release, of each leaf, and of
differences between rounds or leaves, in which shared noise cancels), the release's length, and the divisor of its sum.
`epsilon_lower_bound` selects one statistic on half of the worlds and computes the bound on the other half.

In the second game there are many canaries in one run, and a coin decides for each canary whether it is included.
`one_run_lower_bound` counts how many coins can be guessed. This game costs a single training run and gives a bound at
the claim's own delta, but the bound is looser.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from itertools import combinations, pairwise
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxpfl.algorithms import LocalWork
from jaxpfl.audit.silos import silo_scores
from jaxpfl.audit.subject import Change, Round, Scores, Subject, coin, leaf_vectors, recorded, rounds, tosses
from jaxpfl.core import trees
from jaxpfl.core.participation import Availability
from jaxpfl.core.protocol import Algorithm, Client, Upload
from jaxpfl.core.randomness import Purpose, stream
from jaxpfl.core.types import Array, Key, PyTree, Scalar
from jaxpfl.engine import Simulation
from jaxpfl.engine.build import build
from jaxpfl.privacy import Relation
from jaxpfl.privacy.audit import EpsilonBound, OneRunBound, epsilon_lower_bound, one_run_lower_bound
from jaxpfl.support.errors import JaxpflError

_LENGTH, _WEIGHT = 100.0, 8.0
_UNIT: dict[Relation, float] = {"add-or-remove-one": 0.0, "zero-out": 0.0, "replace-one": -1.0}
"""Factor by which an excluded canary's upload is multiplied, by relation."""


class Canaries(NamedTuple):
    """Canaries of a run.

    Attributes:
      ids: client ids of the canaries, [n].
      relation: neighboring relation, which determines the upload of an excluded canary.
      even: whether the direction's squared length is divided equally among the leaves of the upload, to detect faults
        in small leaves. Otherwise, the squared length is divided equally among the upload's entries, to separate many
        canaries.
    """

    ids: np.ndarray
    relation: Relation
    even: bool

    def has(self, client_id: Array) -> Array:
        """True if a client is a canary, [] bool."""
        return (client_id == jnp.asarray(self.ids)).any()

    def direction(self, client_id: Scalar, like: PyTree) -> PyTree:
        """Direction of a canary: a tree of random signs, shaped like ``like`` and scaled to length 1."""
        leaves, structure = jax.tree.flatten(like)
        size = sum(leaf.size for leaf in leaves)

        def part(place: int, leaf: Any) -> Array:
            share = leaf.size * len(leaves) if self.even else size
            return (_signs(client_id, place, leaf.shape) / np.sqrt(max(share, 1))).astype(leaf.dtype)

        return jax.tree.unflatten(structure, [part(place, leaf) for place, leaf in enumerate(leaves)])

    def availability(self, usual: Availability) -> Availability:
        """Extend the clients' availability so that excluded canaries send nothing under add-or-remove-one."""
        if self.relation != "add-or-remove-one":
            return usual

        canaries = self

        class Missing(Availability):
            def drops_out(self, run_key: Key, round: Array, client_id: Array) -> Array:
                there = coin(stream(run_key, Purpose.BATCHES, client_id))
                return (canaries.has(client_id) & ~there) | usual.drops_out(run_key, round, client_id)

        return Missing(**vars(usual))


def _signs(client_id: Scalar, place: int, shape: tuple[int, ...]) -> Array:
    """Compute pseudo-random signs, 1 or -1 for every entry of leaf number ``place``, with the finalizer of MurmurHash3.

    A hash compiles ten times faster than a random draw.
    """
    seed = jnp.asarray(client_id).astype(jnp.uint32) * np.uint32(0x9E3779B1) + np.uint32(place * 0x85EBCA77 % 2**32)
    bits = jnp.arange(math.prod(shape), dtype=jnp.uint32) * np.uint32(0xC2B2AE3D) + seed
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35), (16, 1)):
        bits = (bits ^ (bits >> shift)) * np.uint32(factor)
    return (1.0 - 2.0 * (bits % 2)).reshape(shape)


def sign(round: Scalar) -> Array:
    """Sign of a canary in a round, 1 or -1: the Thue-Morse sequence."""
    return 1 - 2 * (jax.lax.population_count(jnp.asarray(round, jnp.int32)) % 2)


def insert_canaries(
    canaries: Canaries, clipping_norm: float, rebuild: Callable[[LocalWork], Algorithm] | None
) -> Change:
    """Return the function that changes an algorithm so that the canaries' uploads are replaced.

    Args:
      canaries: canaries to insert.
      clipping_norm: clipping norm C.
      rebuild: function that builds the method's algorithm with different local work. With noise in every step, this
        function is used to replace the canaries' gradients; without such noise, it is None.
    """

    def change(algorithm: Algorithm, work: LocalWork) -> Algorithm:
        def changed(number: int) -> Client:
            usual = algorithm.clients[number]

            def update(key, hp, ctx, message, state, splits):
                side = jnp.where(coin(ctx.batch_key), 1.0, _UNIT[canaries.relation]) * sign(ctx.round)
                length = _LENGTH * clipping_norm * side

                def vector(like: PyTree) -> PyTree:
                    direction = canaries.direction(ctx.client_id, like)
                    return jax.tree.map(lambda a: (length * a).astype(a.dtype), direction)

                real = usual.update(key, hp, ctx, message, state, splits)
                if rebuild is None:
                    upload: Upload = real[1]
                    total = jax.tree.map(lambda a: _WEIGHT * a, vector(upload.total))
                    weight = jax.tree.map(lambda a: jnp.full_like(a, _WEIGHT), upload.weight)
                    chosen = (real[0], upload._replace(total=total, weight=weight), real[2])
                else:  # a step moves against the gradient, hence the negative vector
                    values = (getattr(work, each.name) for each in fields(LocalWork))
                    steered = _Steered(*values, steer=lambda g: jax.tree.map(jnp.negative, vector(g)))
                    size = jnp.where(coin(ctx.batch_key), splits.train.size, 0)
                    own = splits._replace(train=replace(splits.train, size=size))
                    chosen = rebuild(steered).clients[number].update(key, hp, ctx, message, state, own)
                return trees.where(canaries.has(ctx.client_id), chosen, real)

            return usual._replace(update=update)

        return algorithm._replace(clients=tuple(map(changed, range(len(algorithm.clients)))))

    return change


@dataclass(frozen=True, eq=False)
class _Steered(LocalWork):
    """Local work in which ``steer`` replaces the gradients of the uploaded parameters."""

    steer: Callable[[PyTree], PyTree] = lambda gradient: gradient

    def released(self, key: Key, gradient: PyTree) -> PyTree:
        return super().released(key, self.steer(gradient))


_AT_ONCE = 2**28
"""Largest size, in bytes, of the uploads of all clients in all worlds of one call."""
# Smallest number of worlds, and default for the largest number of canaries.
_WORLDS, _CANARIES = 40, 500
# All pairs of rounds among the first six are compared, and all pairs of leaves if there are at most six. If there are
# more leaves, only neighboring leaves are compared.
_PAIRED_ROUNDS, _PAIRED_LEAVES = 6, 6


class Game(NamedTuple):
    """Result of the game with many worlds.

    Attributes:
      bound: lower bound on epsilon.
      statistic: name of the statistic that gave the bound.
      present, absent: values of this statistic in the worlds with the canary, and in the worlds without it.
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
    """Play the game with many worlds. The first client is the canary, which about half of the worlds include.

    Args:
      subject: private run to audit.
      worlds: smallest number of worlds; rounded up so that every call of the compiled program simulates equally many
        worlds.
      delta: delta at which claim and bound are compared. A claim gives an epsilon for every delta; a few thousand
        worlds are informative at 0.01 ... 0.2.
      confidence: confidence level of the bound.
      seed: first seed; the worlds have the seeds ``seed, seed + 1, ...``.
      progress: function that is called with a message that contains the number of finished worlds.

    Raises:
      JaxpflError: if the run cannot be accounted for, or under the conditions of `epsilon_lower_bound`.
    """
    score = _client_scores(subject) if subject.silo is None else silo_scores(subject)
    size = max(sum(leaf.size for leaf in jax.tree.leaves(subject.upload().total)), 1)
    calls = min(worlds, -(-worlds * 4 * size * len(subject.ids) // _AT_ONCE))
    at_once = -(-worlds // calls)  # the same number in every call, so that one compiled program serves all
    names: list[str] = []
    scores, there = [], []
    for start in range(seed, seed + calls * at_once, at_once):
        progress(f"one canary, {start - seed} of {calls * at_once} worlds")
        present, table = score(range(start, start + at_once))
        there.append(present)
        names = list(table)
        scores.append(np.stack(list(table.values()), axis=1))
    table, present = np.concatenate(scores), np.concatenate(there)
    bound = epsilon_lower_bound(table[present], table[~present], delta=delta, confidence=confidence)
    chosen = table[:, bound.statistic]
    return Game(bound, names[bound.statistic], chosen[present], chosen[~present])


def _client_scores(subject: Subject) -> Scores:
    canaries = _canaries(subject, 1, even=True)
    simulation, upload = _simulation(subject, canaries)
    direction = leaf_vectors(canaries.direction(int(canaries.ids[0]), _released_like(upload)))

    def play(seeds: Sequence[int]) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        state = simulation.init(seeds)
        there = tosses(state.key, canaries.ids)[:, 0]
        seen = rounds(simulation, state, subject.run.spec.rounds)
        return there, statistics(list(_projected(subject, seen, direction)))

    return play


def one_run(
    subject: Subject,
    *,
    canaries: int | None = None,
    delta: float,
    confidence: float = 0.95,
    seed: int = 0,
    runs: int = 1,
) -> OneRunBound:
    """Play the game with many canaries in one run, or in a few runs.

    Args:
      subject: private run to audit.
      canaries: number of canaries; None selects all clients, but at most 500.
      delta: delta of the privacy claim; the bound is useful only if delta is far below 1 / ``canaries``.
      confidence: confidence level of the bound.
      seed: first seed of the runs.
      runs: number of independent runs, whose canaries are counted together.

    Raises:
      JaxpflError: if ``canaries`` is below 2 or above the number of clients, if ``runs`` is below 1, or if the run
        cannot be accounted for.
    """
    m, n = len(subject.ids), check_canaries(subject, canaries, runs)
    chosen = _canaries(subject, n, even=False)
    simulation, upload = _simulation(subject, chosen)
    like = _released_like(upload)
    rows = [np.concatenate(list(leaf_vectors(chosen.direction(int(i), like)).values())) for i in chosen.ids]
    directions = np.stack(rows)
    state = simulation.init(range(seed, seed + runs))
    included = tosses(state.key, chosen.ids)
    total = 0.0
    for t, seen in enumerate(rounds(simulation, state, subject.run.spec.rounds)):
        mean = _mean(subject, seen)
        total = total + float(sign(t)) * np.concatenate([mean[name] for name in mean], axis=1) / subject.unit
    # Ridge regression of the released sum on the canaries' directions; the penalty suits noise of the claimed size.
    gram = directions @ directions.T
    noise = subject.claim.noise_multiplier**2 / (subject.run.spec.rounds * subject.run.cohorts.expected_cohort / m)
    scores = np.linalg.solve(gram + noise * np.eye(n), directions @ np.asarray(total).T).T
    return one_run_lower_bound(scores.ravel(), included.ravel(), delta=delta, confidence=confidence)


def check_worlds(worlds: int) -> None:
    """Check that there are enough worlds for a bound.

    Raises:
      JaxpflError: if there are too few.
    """
    if worlds < _WORLDS:
        raise JaxpflError(f"worlds must be at least {_WORLDS}, got {worlds}")


def check_canaries(subject: Subject, canaries: int | None, runs: int) -> int:
    """Determine the number of canaries in a run.

    Raises:
      JaxpflError: if the number is below 2 or above the number of clients, or if ``runs`` is below 1.
    """
    m = len(subject.ids)
    if not 2 <= (n := min(m, _CANARIES) if canaries is None else canaries) <= m:
        raise JaxpflError(f"canaries must be between 2 and {m} (the number of clients), got {n}")
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
    put_in = insert_canaries(canaries, subject.unit, steers)
    simulation = subject.simulation(
        lambda algorithm, work: recorded(put_in(algorithm, work), upload),
        canaries.availability(subject.run.spec.availability),
    )
    return simulation, upload


def _released_like(upload: Upload) -> PyTree:
    return jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), upload.total)


def _mean(subject: Subject, seen: Round) -> dict[str, np.ndarray]:
    """Compute the mean that the server uses in a round, times the expected cohort size; zero without a release."""
    divisor = np.where(seen.weight > 0, seen.weight, np.inf)[:, None]
    return {name: leaf / divisor * subject.run.cohorts.expected_cohort for name, leaf in seen.leaves.items()}


class _Projected(NamedTuple):
    """Measurements of a round's mean in S runs, multiplied by the canary's sign and divided by the clipping norm; each
    [S].

    Attributes:
      leaves: component in the canary's direction, by leaf.
      pairs: difference of two leaves, projected on the difference of their directions, by pair of leaves.
      square: squared length.
      divisor: divisor of the release, without this multiplication and division.
    """

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
    """Statistics of the releases of S runs, with or without the canary, by name, each [S]."""
    of_round = [_sum(each.leaves.values()) for each in seen]
    table = {"sum": _sum(of_round)}
    if len(seen[0].leaves) > 1:
        table |= {f"leaf {name}": _sum(each.leaves[name] for each in seen) for name in seen[0].leaves}
    table |= {f"leaves {name}": _sum(each.pairs[name] for each in seen) for name in seen[0].pairs}
    # Releases are already multiplied by their rounds' signs. If two signs differ, the sum is a difference of releases.
    signs = [int(sign(t)) for t in range(min(len(seen), _PAIRED_ROUNDS))]
    table |= {
        f"rounds {s} - {t}": of_round[s] + of_round[t]
        for s, t in combinations(range(len(signs)), 2)
        if signs[s] != signs[t]
    }
    # The length of the release detects noise whose amount depends on the canary, because such noise has no direction.
    table["length"] = _sum(each.square for each in seen)
    return table | {"divisor": _sum(each.divisor for each in seen)}


def _sum(arrays: Iterable[np.ndarray]) -> np.ndarray:
    return np.stack(list(arrays)).sum(axis=0)

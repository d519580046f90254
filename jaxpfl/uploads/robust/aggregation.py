r"""Robust aggregation: rules that replace the mean of the uploads, and the server that applies them.

A rule is a function ``(rows, valid) -> estimate``. The rows are a tree with leaves [C, ...], one row (a client's
upload) for each of the cohort's C slots. The mask ``valid`` [C] marks the n slots that the rule uses. The estimate has
leaves [...] and is zero for n = 0. All clients have the same weight. A slot's vector consists of its rows in all
leaves, so norms and distances are over all leaves. Slots that are not valid may have any values, including NaN.

Let :math:`x_{(1)} \le \dots \le x_{(n)}` be the sorted values of a coordinate. The coordinatewise rules are

.. math::
   \text{median} = \tfrac12 \left( x_{(\lceil n/2 \rceil)} + x_{(\lfloor n/2 \rfloor + 1)} \right), \qquad
   \text{trimmed mean} = \frac{1}{n - 2k} \sum_{i=k+1}^{n-k} x_{(i)}, \quad k = \lfloor \beta n \rfloor

The other rules use whole vectors. Krum assumes f attackers. The Krum score of :math:`x_i` is the sum of the squared
distances from :math:`x_i` to the max(n - f - 2, 1) nearest other vectors. In a tie of scores, the first slot is
selected. The geometric median minimizes :math:`\sum_i \|x_i - z\|` by smoothed Weiszfeld steps from the coordinatewise
median,

.. math:: z \leftarrow \frac{\sum_i x_i / \max(\nu, \|x_i - z\|)}{\sum_i 1 / \max(\nu, \|x_i - z\|)}

where nu is the smoothing. Norm bounding is the mean of :math:`x_i \min(1, M / \|x_i\|)`, where M is the bound.

References: Yin et al. 2018, "Byzantine-Robust Distributed Learning: Towards Optimal Statistical Rates",
https://arxiv.org/abs/1803.01498 (median, trimmed mean); Blanchard et al. 2017, "Machine Learning with Adversaries:
Byzantine Tolerant Gradient Descent", https://arxiv.org/abs/1703.02757 (Krum); Pillutla et al. 2022, "Robust Aggregation
for Federated Learning", https://arxiv.org/abs/1912.13445 (geometric median); Sun et al. 2019, "Can You Really Backdoor
Federated Learning?", https://arxiv.org/abs/1911.07963 (norm bounding).

- ``mean``: the method's own weighted mean.
- ``median``: the median of each coordinate.
- ``trimmed-mean:fraction=0.2``: the mean of each coordinate without the smallest and the largest 20 % of the values.
- ``krum:attackers=2``: the single update with the best (smallest) Krum score, assuming two attackers in a round.
- ``multi-krum:attackers=2``: the mean of the n - attackers - 2 updates with the best Krum scores; ``select=3`` sets
  another number.
- ``geometric-median:steps=100,smoothing=1e-6,tolerance=1e-5``: the geometric median after at most this many steps. The
  iteration stops when a step is shorter than the tolerance times the updates' median distance from the current point.
- ``norm-bound:bound=1``: the mean of the updates after clipping each to this norm; the default bound is the median of
  the norms in the round.

Client i uploads its weight :math:`w_i` (``Upload.weight``) and an increment :math:`\Delta_i` times this weight
(``Upload.total``). Instead of :math:`\sum_i w_i \Delta_i / \sum_i w_i`, the method's server receives a robust estimate
of the center of the cohort's :math:`\Delta_i`, in the form of an upload from one client with weight 1.

Weights. Clients report their own weights, and an attacker could report any weight. All clients are therefore weighted
equally, and a weight above zero only means that the client contributes. If ``Upload.weight`` has several leaves,
each leaf is the weight of one part of the upload, and the parts are estimated separately. For a leaf [k] (IFCA's
models), each of the k models is estimated from the clients that contribute to it.

The estimate needs all uploads of a round together. The reduction is therefore `Reduction.STACK`, which takes the memory
of one upload for each slot of the cohort on every device. The estimate ignores clients that are outside the cohort,
dropped out, diverged or uploaded a number that is not finite.

Some servers use the mean upload to update a sum over all clients (SCAFFOLD's and FedDyn's variates, L2GD). These
servers add the estimate times the number of contributors.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from fractions import Fraction
from functools import partial
from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxpfl.core import checks, settings, trees
from jaxpfl.core.protocol import Algorithm, Reduced, Reduction, Server, ServerContext, Stacked, wrapped_server
from jaxpfl.core.types import Array, Key, Metrics, PyTree, Scalar
from jaxpfl.support.errors import JaxpflError

Rule: TypeAlias = Callable[[PyTree, Array], PyTree]
"""Function that computes a robust estimate, ``(rows [C, ...], valid [C]) -> estimate [...]``."""


def median(rows: PyTree, valid: Array) -> PyTree:
    """Median of each coordinate; for an even count, the mean of the two middle values."""
    count = valid.sum()

    def leaf_median(leaf: Array) -> Array:
        ordered = _ordered(leaf, valid)
        low, high = ordered[jnp.maximum(count - 1, 0) // 2], ordered[count // 2]
        return low / 2 + high / 2  # low + high could overflow

    return _unless_empty(count, jax.tree.map(leaf_median, rows))


def trimmed_mean(rows: PyTree, valid: Array, fraction: float) -> PyTree:
    """Mean of each coordinate without its ``floor(fraction n)`` smallest and ``floor(fraction n)`` largest values."""
    slots = valid.shape[0]
    count, rank = valid.sum(), jnp.arange(slots)
    cut = jnp.asarray([trimmed(fraction, n) for n in range(slots + 1)])[count]
    kept = (rank >= cut) & (rank < count - cut)
    return _mean(jax.tree.map(lambda leaf: _ordered(leaf, valid), rows), kept)


def trimmed(fraction: float, count: int) -> int:
    """Number of values trimmed on each side, ``floor(fraction count)``, exact for the decimal form of the fraction.

    Examples:
      >>> trimmed(0.29, 100), trimmed(0.2, 4)
      (29, 0)
    """
    return math.floor(Fraction(str(fraction)) * count)


def krum(rows: PyTree, valid: Array, attackers: int) -> PyTree:
    """The vector with the lowest Krum score, for an assumed number f of attackers."""
    best = jnp.argmin(_scores(rows, valid, attackers))
    return _unless_empty(valid.sum(), jax.tree.map(lambda leaf: leaf[best], rows))


def multi_krum(rows: PyTree, valid: Array, attackers: int, select: int = 0) -> PyTree:
    """Mean of the ``select`` vectors with the lowest Krum scores.

    If ``select`` is 0, the mean is over max(n - f - 2, 1) vectors, for n valid vectors and f assumed attackers.
    Robustness is guaranteed for at most n - f - 2 vectors (Damaskinos et al. 2019, "AggregaThor: Byzantine Machine
    Learning via Robust Gradient Aggregation").
    """
    most = jnp.maximum(valid.sum() - attackers - 2, 1) if select == 0 else select
    # argsort of argsort gives the rank of each score; ties are ranked by slot.
    rank = jnp.argsort(jnp.argsort(_scores(rows, valid, attackers)))
    return _mean(rows, valid & (rank < most))


_State: TypeAlias = tuple[Array, PyTree, Array]
"""State of the Weiszfeld loop: number of steps, current point, and whether the last step was longer than the
tolerance.
"""


def geometric_median(
    rows: PyTree, valid: Array, steps: int = 100, smoothing: float = 1e-6, tolerance: float = 1e-5
) -> PyTree:
    """Geometric median by at most ``steps`` Weiszfeld steps from the coordinatewise median.

    The iteration stops when a step is shorter than ``tolerance`` times the median distance of the vectors from the
    current point.
    """

    def step(state: _State) -> _State:
        count, z, _ = state
        away = _norms(jax.tree.map(jnp.subtract, rows, z))
        new = _mean(rows, valid, 1 / jnp.maximum(away, smoothing))
        moved = optax.tree.norm(optax.tree.sub(new, z))
        return count + 1, new, moved > tolerance * median(away, valid)

    def goes_on(state: _State) -> Array:
        return (state[0] < steps) & state[2]

    start = jnp.int32(0), median(rows, valid), jnp.array(True)
    return jax.lax.while_loop(goes_on, step, start)[1]


def norm_bound(rows: PyTree, valid: Array, bound: float = 0.0) -> PyTree:
    """Mean of the vectors after clipping each to the norm ``bound``, or, if ``bound`` is 0, to their median norm."""
    norms = _norms(rows)
    most = median(norms, valid) if bound == 0 else bound
    return _mean(rows, valid, jnp.minimum(1, most / jnp.where(norms > 0, norms, 1)), of_weights=False)


def _scores(rows: PyTree, valid: Array, attackers: int) -> Array:
    """Krum's score of each slot, [C]; infinite for a slot that is not valid."""
    count, slots = valid.sum(), valid.shape[0]

    def distances_to(one: PyTree) -> Array:
        return _squares(jax.tree.map(jnp.subtract, rows, one))

    # Distances are computed from differences, not inner products. Distances of close vectors with large norms thus lose
    # no digits, and the distance matrix is exactly symmetric.
    distances = jax.lax.map(distances_to, rows)
    others = valid[None, :] & ~jnp.eye(slots, dtype=bool)
    nearest = jnp.sort(jnp.where(others, distances, jnp.inf), axis=1)
    neighbours = jnp.minimum(jnp.maximum(count - attackers - 2, 1), count - 1)
    scores = jnp.where(jnp.arange(slots) < neighbours, nearest, 0).sum(axis=1)
    return jnp.where(valid, scores, jnp.inf)


def _ordered(leaf: Array, valid: Array) -> Array:
    """Sort the values of each coordinate in ascending order; invalid values become infinite and come last."""
    return jnp.sort(jnp.where(_beside(valid, leaf), leaf, jnp.inf), axis=0)


def _mean(rows: PyTree, kept: Array, factors: Scalar = 1.0, *, of_weights: bool = True) -> PyTree:
    """Sum of the rows in the mask ``kept``, times ``factors``, divided by the factors' sum or, unless ``of_weights``,
    by the number of rows.
    """
    factors = jnp.where(kept, factors, 0)
    total = factors.sum() if of_weights else kept.sum()

    def leaf_mean(leaf: Array) -> Array:
        chosen = jnp.where(_beside(kept, leaf), leaf, 0)
        return ((_beside(factors, leaf) * chosen).sum(axis=0) / jnp.where(total > 0, total, 1)).astype(leaf.dtype)

    return jax.tree.map(leaf_mean, rows)


def _squares(rows: PyTree) -> Array:
    """Squared norm of each slot's vector, [C]."""
    wide = jnp.promote_types(jnp.float32, jnp.result_type(*jax.tree.leaves(rows)))
    leaves = [leaf.astype(wide).reshape(leaf.shape[0], -1) for leaf in jax.tree.leaves(rows)]
    return sum((jnp.square(leaf).sum(axis=1) for leaf in leaves[1:]), jnp.square(leaves[0]).sum(axis=1))


def _norms(rows: PyTree) -> Array:
    return jnp.sqrt(_squares(rows))


def _beside(by_slot: Array, leaf: Array) -> Array:
    """Reshape one value for each slot, [C], to broadcast against a leaf [C, ...]."""
    return by_slot.reshape(-1, *[1] * (np.ndim(leaf) - 1))


def _unless_empty(count: Array, estimate: PyTree) -> PyTree:
    return trees.where(count > 0, estimate, jax.tree.map(jnp.zeros_like, estimate))


MEAN = "mean"


class Aggregator(NamedTuple):
    """Rule for aggregating a round's uploads.

    Attributes:
      name: name and arguments, as a string.
      rule: function that computes the estimate; None for the weighted mean.
      quorum: smallest number of uploads for which the rule's guarantee holds.
      trims: fraction of the values that is trimmed on each side; 0 for a rule that does not trim.
    """

    name: str
    rule: Rule | None = None
    quorum: int = 1
    trims: float = 0.0

    def check(self, cohort: int) -> None:
        """Check that a cohort is large enough: the rule must have an effect, and its guarantee must hold.

        Raises:
          JaxpflError: if the cohort is smaller than the quorum, or a rule that trims would trim no client.
        """
        if cohort < self.quorum:
            raise JaxpflError(f"aggregate = {self.name} requires a cohort of at least {self.quorum}, got {cohort}")
        if self.trims and not trimmed(self.trims, cohort):
            raise JaxpflError(
                f"aggregate = {self.name} trims no client in rounds of {cohort}: use a fraction of at least "
                f"{1 / cohort:.3g}, or a larger cohort"
            )


def resolve(aggregate: str) -> Aggregator:
    """Parse an aggregation such as ``krum:attackers=2``.

    Examples:
      >>> resolve("krum:attackers=2").quorum
      7

    Raises:
      JaxpflError: if the name or an argument is unknown, an argument is missing, or a value is out of range.
    """
    name, values = settings.parse_choice("aggregate", aggregate, AGGREGATORS)
    return AGGREGATORS[name](**values)._replace(name=aggregate)


def _trimmed_mean(fraction: float = 0.2) -> Aggregator:
    if not 0 < fraction < 0.5:
        raise JaxpflError(f"trimmed-mean:fraction must be > 0 and < 0.5, got {fraction:g}")
    return Aggregator("trimmed-mean", partial(trimmed_mean, fraction=fraction), trims=fraction)


def _krum(attackers: int) -> Aggregator:
    checks.not_negative("krum:attackers", attackers)
    return Aggregator("krum", partial(krum, attackers=attackers), 2 * attackers + 3)


def _multi_krum(attackers: int, select: int = 0) -> Aggregator:
    checks.not_negative("multi-krum:attackers", attackers)
    checks.not_negative("multi-krum:select", select)
    rule = partial(multi_krum, attackers=attackers, select=select)
    return Aggregator("multi-krum", rule, max(2 * attackers + 3, select))


def _geometric_median(steps: int = 100, smoothing: float = 1e-6, tolerance: float = 1e-5) -> Aggregator:
    checks.count("geometric-median:steps", steps)
    checks.positive("geometric-median:smoothing", smoothing)
    checks.positive("geometric-median:tolerance", tolerance)
    given = {"steps": steps, "smoothing": smoothing, "tolerance": tolerance}
    return Aggregator("geometric-median", partial(geometric_median, **given))


def _norm_bound(bound: float = 0.0) -> Aggregator:
    checks.not_negative("norm-bound:bound", bound)
    return Aggregator("norm-bound", partial(norm_bound, bound=bound))


AGGREGATORS: Mapping[str, Callable[..., Aggregator]] = {
    MEAN: lambda: Aggregator(MEAN),
    "median": lambda: Aggregator("median", median),
    "trimmed-mean": _trimmed_mean,
    "krum": _krum,
    "multi-krum": _multi_krum,
    "geometric-median": _geometric_median,
    "norm-bound": _norm_bound,
}
"""Factory functions of the aggregators by name; their arguments are keywords."""


def robust(algorithm: Algorithm, aggregator: Aggregator, method: str = "the method") -> Algorithm:
    """Wrap an algorithm so that its server receives a robust estimate instead of the uploads' mean.

    For a rule with a quorum (Krum), the metric ``below_quorum`` is 1 in a round with too few uploads for the rule's
    guarantee.

    Args:
      algorithm: algorithm whose server receives a mean.
      aggregator: aggregation that replaces the mean; ``mean`` returns the algorithm unchanged.
      method: the algorithm's name, for errors.

    Raises:
      JaxpflError: if the method's server reads individual uploads or, when the result is traced, if uploads are not
        floating-point numbers.
    """
    rule = aggregator.rule
    if rule is None:
        return algorithm
    if algorithm.reduction is not Reduction.SUM:
        raise JaxpflError(
            f"aggregate = {aggregator.name} replaces a mean of uploads, but the server of {method} uses individual "
            "uploads: leave out aggregate"
        )
    return algorithm._replace(
        server=_server(algorithm.server, rule, aggregator.quorum),
        reduction=Reduction.STACK,
    )


def _server(inner: Server, rule: Rule, quorum: int) -> Server:
    def update(key: Key, hp: PyTree, ctx: ServerContext, state: PyTree, uploads: Stacked) -> tuple[PyTree, Metrics]:
        reduced, counts = _estimated(rule, uploads)
        state, metrics = inner.update(key, hp, ctx, state, reduced)
        if quorum > 1:
            short = jnp.stack([((count > 0) & (count < quorum)).any() for count in counts]).any()
            metrics |= {"below_quorum": short.astype(jnp.float32)}
        return state, metrics

    return wrapped_server(inner, init=inner.init, update=update, state=lambda state: state)


def _estimated(rule: Rule, uploads: Stacked) -> tuple[Reduced, list[Array]]:
    """Compute the estimate, as a `Reduced` of weight 1, and the number of contributing clients for each weight."""
    weights, structure = jax.tree.flatten(uploads.weight)
    increments = jax.vmap(trees.prefix_divide)(uploads.total, uploads.weight)
    if not all(jnp.issubdtype(leaf.dtype, jnp.inexact) for leaf in jax.tree.leaves(increments)):
        raise JaxpflError("a robust aggregate requires uploads of floating-point numbers")

    def one(part: PyTree, weight: Array) -> tuple[PyTree, Array]:
        present = uploads.valid & (weight > 0) & jax.vmap(trees.all_finite)(part)
        return rule(part, present), present.sum(dtype=jnp.int32)

    totals, counts = [], []
    for weight, part in zip(weights, structure.flatten_up_to(increments), strict=True):
        by_entry = one
        for _ in range(weight.ndim - 1):
            by_entry = jax.vmap(by_entry, in_axes=1)
        total, count = by_entry(part, weight)
        totals.append(total)
        counts.append(count)
    ones = [(count > 0).astype(weight.dtype) for count, weight in zip(counts, weights, strict=True)]
    total, weight = (jax.tree.unflatten(structure, leaves) for leaves in (totals, ones))
    return Reduced(total, weight, uploads.contributors), counts

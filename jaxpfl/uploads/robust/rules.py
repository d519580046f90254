r"""Robust estimates of the centre of n vectors, of which some may be anything.

A rule is ``(rows, valid) -> estimate``: rows are a tree with leaves [C, ...], one vector for each of C slots; valid [C]
says which n of them count; the estimate has leaves [...], zero for n = 0. All clients count the same. A vector is the
whole tree: norms and distances are over all of its leaves. Slots that are not valid may hold anything, NaN too.

Coordinatewise, with :math:`x_{(1)} \le \dots \le x_{(n)}` the sorted values of a coordinate:

.. math::
   \text{median} = \tfrac12 \left( x_{(\lceil n/2 \rceil)} + x_{(\lfloor n/2 \rfloor + 1)} \right), \qquad
   \text{trimmed mean} = \frac{1}{n - 2k} \sum_{i=k+1}^{n-k} x_{(i)}, \quad k = \lfloor \beta n \rfloor

Of whole vectors: Krum's score of :math:`x_i` is the sum of its squared distances to the n - f - 2 nearest of the
others, at least one; ties go to the first slot. The geometric median minimises :math:`\sum_i \|x_i - z\|` by smoothed
Weiszfeld steps from the coordinatewise median,

.. math:: z \leftarrow \frac{\sum_i x_i / \max(\nu, \|x_i - z\|)}{\sum_i 1 / \max(\nu, \|x_i - z\|)}

and norm bounding is the mean of :math:`x_i \min(1, M / \|x_i\|)`.

References: Yin et al. 2018, "Byzantine-Robust Distributed Learning: Towards Optimal Statistical Rates",
https://arxiv.org/abs/1803.01498 (median, trimmed mean); Blanchard et al. 2017, "Machine Learning with Adversaries:
Byzantine Tolerant Gradient Descent", https://arxiv.org/abs/1703.02757 (Krum); Pillutla et al. 2022, "Robust Aggregation
for Federated Learning", https://arxiv.org/abs/1912.13445 (geometric median); Sun et al. 2019, "Can You Really Backdoor
Federated Learning?", https://arxiv.org/abs/1911.07963 (norm bounding).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction
from typing import TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxpfl.core import trees
from jaxpfl.core.types import Array, PyTree, Scalar

Rule: TypeAlias = Callable[[PyTree, Array], PyTree]
"""``(rows [C, ...], valid [C]) -> estimate [...]``."""


def median(rows: PyTree, valid: Array) -> PyTree:
    """Median of each coordinate; the mean of the two middle values of an even number."""
    count = valid.sum()

    def of(leaf: Array) -> Array:
        ordered = _ordered(leaf, valid)
        low, high = ordered[jnp.maximum(count - 1, 0) // 2], ordered[count // 2]
        return low / 2 + high / 2

    return _unless_empty(count, jax.tree.map(of, rows))


def trimmed_mean(rows: PyTree, valid: Array, fraction: float) -> PyTree:
    """Mean of each coordinate without its ``floor(fraction n)`` smallest and as many largest values."""
    slots = valid.shape[0]
    count, rank = valid.sum(), jnp.arange(slots)
    cut = jnp.asarray([trimmed(fraction, n) for n in range(slots + 1)])[count]
    kept = (rank >= cut) & (rank < count - cut)
    return _mean(jax.tree.map(lambda leaf: _ordered(leaf, valid), rows), kept)


def trimmed(fraction: float, count: int) -> int:
    """Values trimmed on each side, ``floor(fraction count)`` of the fraction as it is written.

    Examples:
      >>> trimmed(0.29, 100), trimmed(0.2, 4)
      (29, 0)
    """
    return math.floor(Fraction(str(fraction)) * count)


def krum(rows: PyTree, valid: Array, attackers: int) -> PyTree:
    """The one vector of least score against f assumed attackers."""
    best = jnp.argmin(_scores(rows, valid, attackers))
    return _unless_empty(valid.sum(), jax.tree.map(lambda leaf: leaf[best], rows))


def multi_krum(rows: PyTree, valid: Array, attackers: int, select: int = 0) -> PyTree:
    """Mean of the ``select`` vectors of least scores; of n - f - 2, at least one, if it is 0.

    n - f - 2 is the largest number with a guarantee: Damaskinos et al. 2019, "AggregaThor: Byzantine Machine Learning
    via Robust Gradient Aggregation".
    """
    most = jnp.maximum(valid.sum() - attackers - 2, 1) if select == 0 else select
    rank = jnp.argsort(jnp.argsort(_scores(rows, valid, attackers)))
    return _mean(rows, valid & (rank < most))


_State: TypeAlias = tuple[Array, PyTree, Array]
"""Number of steps, point, and whether the last step was longer than the tolerance."""


def geometric_median(
    rows: PyTree, valid: Array, steps: int = 100, smoothing: float = 1e-6, tolerance: float = 1e-5
) -> PyTree:
    """Geometric median by Weiszfeld steps from the coordinatewise median, at most so many.

    They end with one that is shorter than ``tolerance`` of the median distance of the vectors from it.
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
    """Mean of the vectors, each shortened to the norm ``bound``; to the median of the n norms if it is 0."""
    norms = _norms(rows)
    most = median(norms, valid) if bound == 0 else bound
    return _mean(rows, valid, jnp.minimum(1, most / jnp.where(norms > 0, norms, 1)), of_weights=False)


def _scores(rows: PyTree, valid: Array, attackers: int) -> Array:
    """Krum's score of each slot, [C]; infinite where not valid."""
    count, slots = valid.sum(), valid.shape[0]

    def from_one(one: PyTree) -> Array:
        return _squares(jax.tree.map(jnp.subtract, rows, one))

    # Differences, not products: nearby vectors of large norm keep their digits, and distances are symmetric to the bit.
    distances = jax.lax.map(from_one, rows)
    others = valid[None, :] & ~jnp.eye(slots, dtype=bool)
    nearest = jnp.sort(jnp.where(others, distances, jnp.inf), axis=1)
    neighbours = jnp.minimum(jnp.maximum(count - attackers - 2, 1), count - 1)
    scores = jnp.where(jnp.arange(slots) < neighbours, nearest, 0).sum(axis=1)
    return jnp.where(valid, scores, jnp.inf)


def _ordered(leaf: Array, valid: Array) -> Array:
    """Values of each coordinate in ascending order, those that are not valid behind all others."""
    return jnp.sort(jnp.where(_beside(valid, leaf), leaf, jnp.inf), axis=0)


def _mean(rows: PyTree, kept: Array, factors: Scalar = 1.0, *, of_weights: bool = True) -> PyTree:
    """Sum of the kept rows times their factors, over the sum of these factors or, without ``of_weights``, their
    number."""
    factors = jnp.where(kept, factors, 0)
    total = factors.sum() if of_weights else kept.sum()

    def of(leaf: Array) -> Array:
        chosen = jnp.where(_beside(kept, leaf), leaf, 0)
        return ((_beside(factors, leaf) * chosen).sum(axis=0) / jnp.where(total > 0, total, 1)).astype(leaf.dtype)

    return jax.tree.map(of, rows)


def _squares(rows: PyTree) -> Array:
    """Squared norm of each row's vector, [C]."""
    wide = jnp.promote_types(jnp.float32, jnp.result_type(*jax.tree.leaves(rows)))
    leaves = [leaf.astype(wide).reshape(leaf.shape[0], -1) for leaf in jax.tree.leaves(rows)]
    return sum((jnp.square(leaf).sum(axis=1) for leaf in leaves[1:]), jnp.square(leaves[0]).sum(axis=1))


def _norms(rows: PyTree) -> Array:
    return jnp.sqrt(_squares(rows))


def _beside(by_slot: Array, leaf: Array) -> Array:
    """A value for each slot, [C], in the shape of a leaf [C, ...]."""
    return by_slot.reshape(-1, *[1] * (np.ndim(leaf) - 1))


def _unless_empty(count: Array, estimate: PyTree) -> PyTree:
    return trees.where(count > 0, estimate, jax.tree.map(jnp.zeros_like, estimate))

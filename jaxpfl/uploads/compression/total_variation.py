r"""Total-variation update: a proximal map from a gradient to a piecewise constant vector, which has a short code.

.. math:: u = \operatorname{argmin}_u \tfrac12 \|u - g\|^2 + \gamma \Big( \sum_{i<d} |u_i - u_{i+1}| + |u_d| \Big)

This is one-dimensional total-variation denoising of g with a zero boundary, u_{d+1} = 0. The dual variable w has one
number for each pair of neighboring entries, and satisfies, with w_0 = 0,

.. math:: u_i = g_i - w_i + w_{i-1}, \qquad |w_i| \le \gamma, \qquad w_i = \gamma \operatorname{sign}(u_i - u_{i+1})
   \text{ where } u_i \ne u_{i+1}.

Hence u = 0 if and only if ``max |cumsum g| <= gamma``.

The algorithm uses level sets. For a level t, the indices i with u_i > t form one side of a minimal cut of a chain
graph. Let a_i = clip(a_{i-1}, -gamma, gamma) + g_i - t. Then u_i is above t if a_i > gamma and below t if a_i < -gamma;
otherwise u_i is on the same side of t as u_{i+1}. A first cut at t = 0 determines the signs and the zeros. Then each
segment is cut at the best constant value for this segment. If all its entries are on one side of this cut, u is
constant on the segment. Otherwise the segment is divided into parts above and below the cut, which are coupled to their
neighbors only through +-gamma. The maps x -> clip(x + s, lo, hi) are closed under composition, so the clipped sums can
be computed by an associative scan. A round, which cuts every segment once, takes four scans over all segments of all
vectors. The number of rounds is at most the number of segments, and usually about its logarithm: 0 to 18 for fifty test
vectors of length 61706.

References: Zhao et al., equation (7), from which their x_t and eta cancel; Hochbaum 2001 and Darbon and Sigelle 2006
for the level sets.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxpfl.core.types import Array, PyTree, Scalar
from jaxpfl.uploads.compression.codes import run_bits
from jaxpfl.uploads.compression.quantizers import Compressed, room, times_power

_TOLERANCE = 4
"""Number of rounding units by which |a_i| must exceed gamma; rounding errors then do not cut a constant segment."""


class Update(NamedTuple):
    """The update u [d] and the dual variable w [d]."""

    value: Array
    dual: Array


def compress(g: Array, gamma: Scalar) -> Compressed:
    """Compute the total-variation update of g [d], and its length in the run-length code.

    The update is biased. With a constant gamma, gradient descent stops as soon as no cumulative sum of the gradient
    exceeds gamma. `decayed` or error feedback prevents this.

    Implements: Zhao et al., Algorithm 3.
    """
    value = update(g, gamma).value
    return Compressed(value, run_bits(value))


def decayed(gamma: Scalar, step: Scalar) -> Array:
    """Decay gamma to ``gamma / sqrt(step + 1)``, for steps that count from 0."""
    return gamma / jnp.sqrt(jnp.asarray(step, float) + 1)


class _Cut(NamedTuple):
    """Current segments, as arrays in the layout of `_blocks`.

    Attributes:
      excess: g - u; at both ends of a segment, the +-gamma terms that couple neighboring segments are added.
      value: current value of u.
      starts: true for the first entry of a segment.
      edge: the dual variable w at the cuts between segments.
      again: whether a segment was cut in the last round, [] bool.
    """

    excess: Array
    value: Array
    starts: Array
    edge: Array
    again: Array


def update(g: Array, gamma: Scalar) -> Update:
    """Compute the update and the dual variable; both are NaN if g is not finite.

    Args:
      g: vector, [d] with d >= 1, float32 or float64; use ``jax.vmap`` for batches.
      gamma: weight of the total variation, not negative.
    """
    d = g.shape[0]
    e = room(g)  # cumulative sums of huge numbers may overflow
    g, gamma = times_power(g, -e), times_power(jnp.asarray(gamma, g.dtype), -e)
    limit = gamma + _TOLERANCE * jnp.finfo(g.dtype).eps * jnp.maximum(gamma, jnp.abs(g).max())
    here, data = _blocks(jnp.ones(d, bool), False), _blocks(g, 0)
    whole = _Cut(
        data, jnp.zeros_like(data), jnp.zeros_like(here).at[0, 0].set(True), jnp.zeros_like(data), jnp.array(True)
    )

    sums = _clipped_sums(data, whole.starts, gamma)
    side = _sides(sums, here & (jnp.abs(sums) <= limit), here)
    settled = side == 0  # true for the last entries, on which u equals the boundary value zero
    first = _split(whole, side, gamma)
    first = first._replace(excess=jnp.where(settled, 0, first.excess), starts=first.starts | settled)

    def cut(at: _Cut) -> _Cut:
        sums, last = _clipped_sums(at.excess, at.starts, gamma), _following(at.starts, True)
        return _centered(_split(at, _sides(sums, ~last & (jnp.abs(sums) <= limit), here), gamma))

    end = jax.lax.while_loop(lambda at: at.again, cut, _centered(first))
    sums_inside, sizes, means = _means(end)
    inside = sums_inside - sizes * means
    dual = jnp.where(settled, jnp.clip(sums, -gamma, gamma), jnp.where(_following(end.starts, True), end.edge, inside))
    finite = jnp.isfinite(g).all()
    return Update(*(jnp.where(finite, times_power(_flat(a, d), e), jnp.nan) for a in (end.value, dual)))


def _clipped_sums(x: Array, starts: Array, gamma: Array) -> Array:
    """Compute ``a_i = x_i + clip(a_{i-1}, -gamma, gamma)``, with ``a_i = x_i`` at the start of each segment."""

    def then(f: tuple[Array, ...], h: tuple[Array, ...]) -> tuple[Array, ...]:
        return f[0] + h[0], jnp.clip(f[1] + h[0], h[1], h[2]), jnp.clip(f[2] + h[0], h[1], h[2])

    alone = jnp.clip(x, -gamma, gamma)
    maps = x, jnp.where(starts, alone, -gamma), jnp.where(starts, alone, gamma)
    add, low, high = _blocked_scan(then, maps, (0, -jnp.inf, jnp.inf))
    return x + jnp.where(starts, 0, _previous(jnp.clip(add, low, high), 0))


def _sides(sums: Array, undecided: Array, here: Array) -> Array:
    """Sign of each sum. An undecided entry has the sign of the next decided entry, or 0 if there is none."""
    known = ~undecided, jnp.where(here, jnp.sign(sums), 0).astype(jnp.int8)
    return _blocked_scan(_latest, known, (False, 0), reverse=True)[1]


def _split(at: _Cut, side: Array, gamma: Array) -> _Cut:
    """Cut the segments of ``at`` where ``side`` changes, and couple the two parts by adding +-gamma to their excess."""
    before = _previous(side, 0)
    new = ~at.starts & (side != before)
    pull = jnp.where(new, gamma * jnp.sign(before - side).astype(gamma.dtype), 0)
    starts = at.starts | new
    edge = at.edge + _following(pull, 0)
    excess = at.excess + pull - _following(pull, 0)
    return _Cut(excess, at.value, starts, edge, new.any())


def _centered(at: _Cut) -> _Cut:
    """Add the mean excess of each segment to the segment's value, so that its excess sums to zero.

    If the solution is constant on the segment, the new value is the solution.
    """
    means = _means(at)[2]
    return at._replace(excess=_less(at.excess, means), value=at.value + means)


def _less(x: Array, y: Array) -> Array:
    """Compute ``x - y`` with dithered rounding, so that sums over many entries are unbiased.

    If x has few distinct values, rounding to nearest makes the same error at all entries with the same value, and the
    errors add up.
    """
    nearest = x - y
    back = nearest - x
    lost = (x - (nearest - back)) - (y + back)
    other = jnp.nextafter(nearest, jnp.where(lost > 0, jnp.inf, -jnp.inf).astype(x.dtype))
    # Multiples of 2^32 / golden ratio, modulo 2^32, are spread evenly over the range.
    golden = jnp.arange(x.size, dtype=jnp.uint32) * jnp.uint32(2654435769)
    share = (golden >> 8).astype(x.dtype).reshape(x.shape) / 2**24
    return jnp.where(jnp.abs(lost) > share * jnp.abs(other - nearest), other, nearest)


def _means(at: _Cut) -> tuple[Array, Array, Array]:
    """For each entry: the sum and the number of its segment's entries up to the entry, and the mean of the segment."""
    sums, sizes = _segment_sums(at.excess, at.starts)
    last = _following(at.starts, True)
    return sums, sizes, _blocked_scan(_latest, (last, sums / sizes), (False, 0), reverse=True)[1]


def _segment_sums(x: Array, starts: Array) -> tuple[Array, Array]:

    def add(f: tuple[Array, ...], h: tuple[Array, ...]) -> tuple[Array, ...]:
        more = tuple(jnp.where(h[0], b, a + b) for a, b in zip(f[1:], h[1:], strict=True))
        return f[0] | h[0], *more

    _, sums, sizes = _blocked_scan(add, (starts, x, jnp.ones_like(x)), (False, 0, 0))
    return sums, sizes


def _latest(f: tuple[Array, Array], h: tuple[Array, Array]) -> tuple[Array, Array]:
    return f[0] | h[0], jnp.where(h[0], h[1], f[1])


def _blocks(x: Array, fill: Scalar) -> Array:
    """Pad [d] with at least one ``fill`` and reshape to [length, blocks]; entry i is at [i % length, i // length]."""
    length = max(1, math.isqrt(x.shape[0]))
    blocks = x.shape[0] // length + 1
    return jnp.pad(x, (0, length * blocks - x.shape[0]), constant_values=fill).reshape(blocks, length).T


def _flat(x: Array, d: int) -> Array:
    """Invert `_blocks`: return the vector [d] of an array [length, blocks]."""
    return x.T.reshape(-1)[:d]


def _previous(x: Array, before: Scalar) -> Array:
    """Predecessor of each entry; ``before`` for the first entry."""
    ends = jnp.concatenate([jnp.full((1,), before, x.dtype), x[-1, :-1]])
    return jnp.concatenate([ends[None], x[:-1]])


def _following(x: Array, after: Scalar) -> Array:
    """Successor of each entry; ``after`` for the last entry."""
    starts = jnp.concatenate([x[0, 1:], jnp.full((1,), after, x.dtype)])
    return jnp.concatenate([x[1:], starts[None]])


def _blocked_scan(combine: Callable[..., PyTree], x: PyTree, unit: PyTree, *, reverse: bool = False) -> PyTree:
    """Prefix products ``x_1, x_1 x_2, x_1 x_2 x_3, ...`` of an associative operation.

    The blocks are scanned in parallel; a second scan then combines their totals. This takes a few hundred wide steps
    instead of one step per entry.

    Args:
      combine: the associative operation, elementwise; its first argument is the one closer to the start of the scan.
      x: leaves [length, blocks], from `_blocks`.
      unit: identity of the operation, leaves [].
      reverse: whether to scan from the last entry to the first.
    """

    def step(carry: PyTree, entry: PyTree) -> tuple[PyTree, PyTree]:
        carry = combine(carry, entry)
        return carry, carry

    def scan(x: PyTree) -> tuple[PyTree, PyTree]:
        start = jax.tree.map(lambda u, a: jnp.full(a.shape[1:], u, a.dtype), unit, x)
        return jax.lax.scan(step, start, x, reverse=reverse)

    whole, inside = scan(x)
    through = scan(whole)[1]

    def shifted(u: Scalar, a: Array) -> Array:
        first = jnp.full((1,), u, a.dtype)
        return jnp.concatenate([a[1:], first] if reverse else [first, a[:-1]])

    # Each block starts from the product of all blocks before it, in the order of the scan.
    before = jax.tree.map(shifted, unit, through)
    return combine(before, inside)

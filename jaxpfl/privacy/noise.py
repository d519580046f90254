r"""Clipping, which bounds the sensitivity of a release, and Gaussian and Laplace noise without truncated tails.

**Tails.** A standard normal drawn by inversion of one float32 uniform never exceeds 5.42 standard deviations, so a
larger value in a release would identify a user. Here two draws are the coordinates of a point with random radius and
angle (Box and Muller 1958):

.. math:: (x, y) = \sqrt{2 E} \, (\cos \theta, \sin \theta), \qquad E = -\log U

U has 64 random bits. While its upper 32 bits are zero they are redrawn, and each time :math:`32 \log 2` is added to E.
An exponential variable is memoryless, so E has the right distribution at any depth. No tail is truncated:
probabilities of 1e-12 (7.03 standard deviations) and even of 1e-100 have a relative error of at most 1e-5 in float32.

**Lattice.** The last bits of a floating-point sum depend on its terms, so a value near zero may have digits that other
inputs cannot produce (Mironov 2012, "On significance of the least significant bits for differential privacy").
Therefore `add_gaussian`, `add_banded` and `add_laplace` round their result to multiples of a power of two near
:math:`2^{-9}` standard deviations (:math:`2^{-24}` in float64). The lattice's step depends only on the public scale of
the noise, and rounding is post-processing. For any input, thousands of floats are rounded to the same lattice point.
This hides the grid of floats from which the noise is drawn. Summing several draws hides it too (Holohan and Braghin
2021, "Secure random sampling in differential privacy"). It is not proved that each lattice point occurs with its exact
probability.

The generator is JAX's counter-based generator, which is reproducible but not cryptographic. The noise is for
simulation: anyone who knows the key can subtract it.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.xla_metadata import set_xla_metadata

from jaxpfl.core import trees
from jaxpfl.core.types import Array, Key, PyTree, Scalar

_FAR = 4.0
"""Ratio of clipping norm to upload norm, or its inverse, above which a run prints a remark."""
_FEW = 100
"""Number of clients below which user-level noise is large relative to the sum of the uploads."""


def clip(tree: PyTree, clipping_norm: Scalar) -> tuple[PyTree, Array]:
    r"""Scale a tree down to an L2 norm of at most C over all leaves together.

    .. math:: x \min(1, C / \|x\|_2)

    Formal guarantees: for any input, the result is finite and its norm is at most C, up to rounding of the norm (a
    relative error of 1e-6 in float32). A tree with an entry that is not finite becomes zero. A tree of finite entries
    whose squares overflow is clipped like any other.

    Args:
      tree: tree of floating-point arrays. Narrower types than float32 are widened to float32 first, because their norm
        would have a relative error of 1e-2.
      clipping_norm: clipping norm C, positive.

    Returns:
      Two results: the clipped tree; and the norm before clipping, []. The norm is 0 for a tree without leaves, and not
      finite if an entry is not finite.
    """
    leaves = jax.tree.leaves(tree)
    if not leaves:
        return tree, jnp.zeros(())
    tree = jax.tree.map(lambda a: a.astype(jnp.promote_types(a.dtype, jnp.float32)), tree)
    size = norm(tree)
    scale = jnp.where(size > clipping_norm, clipping_norm / size, 1)
    finite = trees.all_finite(tree)
    # Select zeros instead of multiplying by zero: zero times a non-finite number is NaN.
    return jax.tree.map(lambda a: jnp.where(finite, a * scale, 0).astype(a.dtype), tree), size


def norm(tree: PyTree) -> Array:
    """L2 norm over all leaves, []; squares do not overflow, as in BLAS's nrm2."""
    vectors = trees.pack(tree).vectors
    peak = jnp.stack([jnp.abs(v).max(initial=0) for v in vectors]).max()
    # Multiply by 1 / sqrt(peak) twice: 1 / peak is flushed to zero for a peak above 1e38, and the norm would be 0.
    shrink = 1 / jnp.sqrt(jnp.where(peak > 0, peak, 1))
    return peak * jnp.sqrt(sum(((v * shrink * shrink) ** 2).sum() for v in vectors))


def remark(norms: np.ndarray, limits: np.ndarray, clients: int) -> str | None:
    """Remark on a fixed clipping norm that is far from the uploads' norms in every run.

    "Far" means above four times their median, or below a quarter of it.

    Args:
      norms: norms of the uploads before clipping, averaged over a round's cohort, [S runs, rounds]; NaN for an empty
        cohort.
      limits: clipping norms C, [S runs, rounds].
      clients: number of clients m.

    Returns:
      The remark; None if the clipping norm adapts, or if a run has no uploads or norms that are not far from it.
    """
    if np.ptp(limits, axis=1).any() or np.isnan(norms).all(axis=1).any():  # the clipping norm adapts, or no uploads
        return None
    size, limit = np.nanmedian(norms, axis=1), limits[:, 0]
    if not ((limit > _FAR * size) | (size > _FAR * limit)).all():
        return None
    loses = "the noise is larger than the uploads require" if limit[0] > size[0] else "most of each upload is clipped"
    text = (
        f"the clipping norm is {np.median(limit):.2g}, and the median norm of the uploads is {np.median(size):.2g}: "
        f"{loses}; privacy.quantile = 0.5 adapts the clipping norm privately, whereas epsilon covers neither these "
        "norms nor a choice based on them"
    )
    few = f"; for {clients} clients, privacy.unit = example protects individual examples with less noise"
    return text + few * (clients < _FEW)


class Draw(NamedTuple):
    """Record of one draw of noise by a program.

    Attributes:
      protects: name of the released quantity to which the noise is added.
      key: key data of the draw.
      entries: number of entries drawn; leaves of the same type share one draw.
      stddev: standard deviation of an entry; for Laplace noise, the scale.
    """

    protects: str
    key: tuple[int, ...]
    entries: int
    stddev: float


ledger: list[Draw] | None = None
"""Draws that `record` has recorded, or None. A program that is traced while there is a list records its draws."""

_one_ledger = threading.Lock()


@contextmanager
def record() -> Iterator[list[Draw]]:
    """Record every draw of noise in a list while the block runs.

    Programs are compiled again for the block, because only a program compiled for recording records its draws. Draws
    whose results are discarded are recorded too: for clients that pad a cohort on several devices, for example, and in
    branches that are not taken. With several processes, each process records the rounds that it runs.

    Raises:
      RuntimeError: if another such block is active.

    Example::

        with privacy.record() as draws:
            jaxpfl.fit("fedavg", federation, rounds=3, privacy=mechanism)
        assert len({draw.key for draw in draws}) == len(draws) == 3
    """
    global ledger
    if not _one_ledger.acquire(blocking=False):
        raise RuntimeError("privacy.record() is already active: leave its block before you enter another")
    try:
        ledger = []
        with set_xla_metadata(records_draws=1):  # part of JAX's cache key, so functions are traced anew
            yield ledger
        jax.effects_barrier()
    finally:
        ledger = None
        _one_ledger.release()


def enter(protects: str, key: Key, entries: int, stddev: Scalar) -> None:
    """Make the program that is being traced append a draw to the list of `record`, if a ``record`` block is active.

    Args:
      protects: name of the released quantity to which the noise is added.
      key: key of the draw, []; in a vectorized program, one key for each draw.
      entries: number of entries.
      stddev: standard deviation, []; NaN for a random choice, as in randomized response.
    """
    if ledger is None:
        return

    def append(data: np.ndarray, stddev: np.ndarray) -> None:
        if ledger is not None:  # read at run time: the program may run in a later block than it was traced in
            ledger.append(Draw(protects, tuple(np.asarray(data).tolist()), entries, float(stddev)))

    jax.debug.callback(append, jax.random.key_data(key), jnp.asarray(stddev))


_HALF = np.uint32(2**31)
_WORD = 32
_LATTICE = {jnp.dtype(jnp.float32): 9, jnp.dtype(jnp.float64): 24}
"""For each dtype, the exponent n in the lattice step: 2^-n times the largest power of two not above the standard
deviation.
"""


def gaussian(key: Key, like: PyTree, stddev: Scalar, protects: str) -> PyTree:
    """Independent N(0, stddev^2) noise for every entry of a tree.

    Args:
      key: key of the draw.
      like: tree with the shapes and types of the noise.
      stddev: standard deviation of every entry, [].
      protects: name under which `record` lists the released quantity to which the noise is added.

    Returns:
      Tree with leaves in float32 or float64; narrower types are widened, because they can represent neither the tails
      nor the lattice to which noisy values are rounded.
    """
    with trees.leaves_apart(False):  # an entry's noise depends on its index in the packed vector, which must not change
        packed = trees.pack(jax.tree.map(lambda a: a.astype(jnp.promote_types(a.dtype, jnp.float32)), like))
    keys = jax.random.split(key, max(len(packed.vectors), 1))
    for k, v in zip(keys, packed.vectors, strict=False):
        enter(protects, k, v.size, stddev)
    vectors = tuple(
        (stddev * standard_normal(k, v.shape, v.dtype)).astype(v.dtype)
        for k, v in zip(keys, packed.vectors, strict=False)
    )
    return trees.Packed(vectors, packed.structure, packed.shapes).unpack()


def add_gaussian(key: Key, tree: PyTree, stddev: Scalar, protects: str) -> PyTree:
    """Add N(0, stddev^2) noise to every entry of a tree, and round to the lattice for this scale.

    The module's docstring defines the lattice.

    Args:
      key: key of the draw.
      tree: tree to which the noise is added.
      stddev: standard deviation of every entry, []; 0 leaves the values unchanged.
      protects: name under which `record` lists the released quantity.

    Returns:
      The noisy tree, with leaves in float32 or float64 as in `gaussian`.
    """
    noisy = jax.tree.map(jnp.add, tree, gaussian(key, tree, stddev, protects))
    return jax.tree.map(lambda a: _on_lattice(a, stddev), noisy)


def add_banded(
    key: Key, tree: PyTree, stddev: Scalar, coefficients: tuple[float, ...], past: PyTree, protects: str
) -> tuple[PyTree, PyTree]:
    r"""Add a round's banded noise z_t (see `privacy.descriptions`), and round to the lattice for s:

    .. math:: z_t = \frac{1}{c_0} \Bigl( Z_t - \sum_{j=1}^{b-1} c_j z_{t-j} \Bigr), \qquad Z_t \sim N(0, s^2 I)

    Args:
      key: key of the draw.
      tree: tree to which the noise is added.
      stddev: standard deviation s of the entries of Z, [].
      coefficients: coefficients :math:`c_0, ..., c_{b-1}`.
      past: noise of earlier rounds :math:`z_{t-1}, ..., z_{t-b+1}`, a tree of arrays [b - 1, ...]; zeros for rounds
        before the first.
      protects: name under which `record` lists the released quantity.

    Returns:
      The noisy tree, and ``past`` for the next round.
    """
    first, *rest = coefficients

    def correlated(fresh: Array, before: Array) -> Array:
        known = sum((c * before[j] for j, c in enumerate(rest)), jnp.zeros_like(fresh))
        return (fresh - known) / first

    noise = jax.tree.map(correlated, gaussian(key, tree, stddev, protects), past)
    noisy = jax.tree.map(lambda a, z: _on_lattice(a + z, stddev), tree, noise)
    return noisy, jax.tree.map(lambda z, before: jnp.concatenate([z[None], before])[: len(rest)], noise, past)


def add_laplace(key: Key, x: Array, scale: Scalar, protects: str) -> Array:
    """Add Laplace noise with density ``exp(-|t| / scale) / (2 scale)``, and round to the lattice for this scale.

    The module's docstring defines the lattice.

    Args:
      key: key of the draw.
      x: values in float32 or float64.
      scale: scale of the noise, [], positive.
      protects: name under which `record` lists the released quantity.
    """
    enter(protects, key, x.size, scale)
    of_size, of_sign = jax.random.split(key)
    size = exponential(of_size, x.shape, x.dtype)
    noise = jnp.where(bits(of_sign, x.shape) < _HALF, -size, size)
    return _on_lattice(x + (scale * noise).astype(x.dtype), scale)


def standard_normal(key: Key, shape: tuple[int, ...], dtype: Any = jnp.float32) -> Array:
    """Draw independent N(0, 1) values with complete tails; ``dtype`` is float32 or float64."""
    size = math.prod(shape)
    half = (-(-size // 2),)
    of_radius, of_angle = jax.random.split(key)
    radius = jnp.sqrt(2 * exponential(of_radius, half, dtype))
    turn = jax.lax.bitcast_convert_type(bits(of_angle, half), jnp.int32).astype(dtype)
    angle = turn * (math.pi * 2.0**-31)
    return jnp.concatenate([radius * jnp.cos(angle), radius * jnp.sin(angle)])[:size].reshape(shape)


def exponential(key: Key, shape: tuple[int, ...], dtype: Any = jnp.float32) -> Array:
    """Draw independent exponential values with mean 1, accurate to a few units in the last place in both tails.

    ``dtype`` is float32 or float64.
    """
    of_high, of_low, of_more = jax.random.split(key, 3)
    high, low = bits(of_high, shape), bits(of_low, shape)

    def deeper(at: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        nth, high, depth = at
        again = high == 0
        more = bits(jax.random.fold_in(of_more, nth), shape)
        return nth + 1, jnp.where(again, more, high), depth + again

    # A word is zero once in 2^32 draws, so this loop almost never runs.
    start = jnp.int32(0), high, jnp.zeros(shape, jnp.int32)
    _, high, depth = jax.lax.while_loop(lambda at: (at[1] == 0).any(), deeper, start)
    # Above one half, U is represented by 1 - U (the complement of the bits), for accuracy near 1.
    above = high >= _HALF
    high, low = (jnp.where(above, ~word, word).astype(dtype) for word in (high, low))
    u = (high + (low + 0.5) * 2.0**-_WORD) * 2.0**-_WORD
    return jnp.where(above, -jnp.log1p(-u), -jnp.log(u)) + depth.astype(dtype) * (_WORD * math.log(2))


def bits(key: Key, shape: tuple[int, ...]) -> Array:
    """Draw 32 random bits per entry. All randomness in releases comes from this function and from `uniform`."""
    return jax.random.bits(key, shape, jnp.uint32)


def uniform(key: Key, shape: tuple[int, ...], dtype: Any = jnp.float32) -> Array:
    """Draw multiples of 2^-23 (2^-52 in float64), uniform on [0, 1); for random choices, not for noise."""
    return jax.random.uniform(key, shape, dtype)


def _on_lattice(x: Array, scale: Scalar) -> Array:
    """Round ``x`` to the lattice for noise with this scale.

    Entries are unchanged if the scale is 0, or if their quotient by the lattice's step overflows.
    """
    scale = jnp.asarray(scale, x.dtype)
    step = jnp.ldexp(jnp.ones((), x.dtype), jnp.frexp(scale)[1] - 1 - _LATTICE[x.dtype])
    steps = jnp.round(x / step)
    return jnp.where((scale > 0) & jnp.isfinite(steps), steps * step, x)

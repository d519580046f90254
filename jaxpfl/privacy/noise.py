r"""Clipping, which bounds the sensitivity of a release, and the noise: Gaussian and Laplace, complete in their tails.

Tails. A standard normal draw by inversion of one float32 uniform ends at 5.42 standard deviations, and a value beyond
would identify a user. Here a pair of draws has the radius and the angle of a point (Box and Muller 1958),

.. math:: (x, y) = \sqrt{2 E} \, (\cos \theta, \sin \theta), \qquad E = -\log U

with U of 64 random bits, of which the upper 32 are redrawn while they are zero, with :math:`32 \log 2` added to E each
time: an exponential variable is memoryless, so that this is its distribution at any depth. No tail is truncated;
probabilities of 1e-12 (7.03 deviations) and of 1e-100 alike are accurate to a relative 1e-5 in float32.

Lattice. The last bits of a floating-point sum depend on its terms: a value near zero may have digits that other inputs
cannot produce (Mironov 2012, "On significance of the least significant bits for differential privacy").
So `add_gaussian` and `add_laplace` round their result to multiples of a power of two near :math:`2^{-9}` standard
deviations (:math:`2^{-24}` in float64), which depends on the public scale of the noise alone. Rounding is
post-processing; each lattice point collects thousands of floats for any input, which hides the grid of the draws as a
sum of several draws does (Holohan and Braghin 2021, "Secure random sampling in differential privacy"). It is not proved
that each of those floats occurs with its exact probability, only that they are many.

The generator is JAX's, counter-based: reproducible, but not cryptographic. Anyone who knows the key can subtract the
noise: it is for simulation.
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
"""Ratio of clipping norm and upload norms, either way, beyond which a run remarks on it."""
_FEW = 100
"""Number of clients below which the noise for a whole client is large against the sum of their uploads."""


def clip(tree: PyTree, clipping_norm: Scalar) -> tuple[PyTree, Array]:
    r"""Scale a tree down to an L2 norm of at most C, over all its leaves together.

    .. math:: x \min(1, C / \|x\|_2)

    Formal guarantees: whatever the input, the result is finite and its norm is at most C (up to the rounding of the
    norm, a relative 1e-6 in float32). A tree with an entry that is not finite becomes zero; finite entries whose
    squares overflow do not.

    Args:
      tree: floating-point leaves; types narrower than float32 are widened to it first, as otherwise the norm before
        and after scaling would have a relative error of 1e-2.
      clipping_norm: C, positive.

    Returns:
      The clipped tree, and the norm before, [] (0 for a tree without leaves; not finite if an entry is not).
    """
    leaves = jax.tree.leaves(tree)
    if not leaves:
        return tree, jnp.zeros(())
    tree = jax.tree.map(lambda a: a.astype(jnp.promote_types(a.dtype, jnp.float32)), tree)
    size = norm(tree)
    scale = jnp.where(size > clipping_norm, clipping_norm / size, 1)
    finite = trees.all_finite(tree)
    # Selected, not multiplied: zero times a non-finite number is NaN.
    return jax.tree.map(lambda a: jnp.where(finite, a * scale, 0).astype(a.dtype), tree), size


def norm(tree: PyTree) -> Array:
    """L2 norm over all leaves, [], without overflow of the squares (as in BLAS's nrm2)."""
    vectors = trees.pack(tree).vectors
    peak = jnp.stack([jnp.abs(v).max(initial=0) for v in vectors]).max()
    # By the root twice: the reciprocal of a peak beyond 1e38 is flushed to zero, and the norm would be too small.
    shrink = 1 / jnp.sqrt(jnp.where(peak > 0, peak, 1))
    return peak * jnp.sqrt(sum(((v * shrink * shrink) ** 2).sum() for v in vectors))


def remark(norms: np.ndarray, limits: np.ndarray, clients: int) -> str | None:
    """Remark on a fixed clipping norm that is over four times the norm of uploads, or under a quarter, in every run.

    Args:
      norms: norms of uploads before clipping, means over the cohort of a round, [S, rounds].
      limits: clipping norms C, [S, rounds].
      clients: m.
    """
    if np.ptp(limits, axis=1).any():  # it adapts
        return None
    size, limit = np.median(norms, axis=1), limits[:, 0]
    if not ((limit > _FAR * size) | (size > _FAR * limit)).all():
        return None
    loses = "the noise is larger than the uploads require" if limit[0] > size[0] else "most of each upload is clipped"
    text = (
        f"the clipping norm is {np.median(limit):.2g}, and the median norm of the uploads is {np.median(size):.2g}: "
        f"{loses}; privacy.quantile = 0.5 adapts the clipping norm privately, whereas epsilon covers neither these "
        "norms nor a choice based on them"
    )
    few = f"; for {clients} clients, privacy.unit = example protects single examples with less noise"
    return text + few * (clients < _FEW)


class Draw(NamedTuple):
    """A draw of noise, as a program made it.

    Attributes:
      protects: what is released under the noise, as the place that draws it says.
      key: key data of the draw.
      entries: number of entries of the noise; leaves of one type are one draw.
      stddev: standard deviation of an entry; of Laplace noise, its scale.
    """

    protects: str
    key: tuple[int, ...]
    entries: int
    stddev: float


_ledger: list[Draw] | None = None
_one_ledger = threading.Lock()


@contextmanager
def record() -> Iterator[list[Draw]]:
    """Enter every draw of noise in a list, while the block runs.

    Programs are compiled for the block, as those that record are other programs. Draws of clients whose results are
    discarded are entered too: padding that makes cohorts even on several devices, branches that are not taken. Rounds
    of several processes are entered in the process that runs them.

    Raises:
      RuntimeError: within another such block.

    Example::

        with privacy.record() as draws:
            jaxpfl.fit("fedavg", federation, rounds=3, privacy=mechanism)
        assert len({draw.key for draw in draws}) == len(draws) == 3
    """
    global _ledger
    if not _one_ledger.acquire(blocking=False):
        raise RuntimeError("privacy.record() is already active: leave its block before you enter another")
    try:
        _ledger = []
        with set_xla_metadata(records_draws=1):  # a part of the key under which JAX keeps a traced function
            yield _ledger
        jax.effects_barrier()
    finally:
        _ledger = None
        _one_ledger.release()


def recording() -> bool:
    """True while draws are entered; a program that is traced depends on it."""
    return _ledger is not None


def enter(protects: str, key: Key, entries: int, stddev: Scalar) -> None:
    """Enter a draw in the list of `record`, if there is one, whenever the program that is being traced makes it.

    Args:
      protects: what is released under the draw.
      key: its key, []; in a vectorised program one for each draw.
      entries: number of entries.
      stddev: [], standard deviation; NaN for a choice, as of randomised response.
    """
    if not recording():
        return

    def append(data: np.ndarray, stddev: np.ndarray) -> None:
        if _ledger is not None:  # the list of the block in which the program runs, not of the one that traced it
            _ledger.append(Draw(protects, tuple(np.asarray(data).tolist()), entries, float(stddev)))

    jax.debug.callback(append, jax.random.key_data(key), jnp.asarray(stddev))


_HALF = np.uint32(2**31)
_WORD = 32
_LATTICE = {jnp.dtype(jnp.float32): 9, jnp.dtype(jnp.float64): 24}
"""Lattice steps per standard deviation, as a power of two."""


def gaussian(key: Key, like: PyTree, stddev: Scalar, protects: str) -> PyTree:
    """Independent N(0, stddev^2) noise for every entry of a tree.

    Args:
      stddev: [], of every entry.
      protects: what is released under the noise, for `record`.

    Returns:
      Leaves of float32 or float64: narrower types, which represent neither tails nor lattice, are widened.
    """
    with trees.leaves_apart(False):  # the noise of an entry depends on its place in the vector
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
    """Add N(0, stddev^2) noise to every entry of a tree, rounded to the lattice of its scale.

    Args:
      stddev: [], of every entry; 0 returns the tree unchanged.
      protects: argument of `gaussian`.

    Returns:
      Leaves of the types that `gaussian` returns.
    """
    noisy = jax.tree.map(jnp.add, tree, gaussian(key, tree, stddev, protects))
    return jax.tree.map(lambda a: _on_lattice(a, stddev), noisy)


def add_banded(
    key: Key, tree: PyTree, stddev: Scalar, coefficients: tuple[float, ...], past: PyTree, protects: str
) -> tuple[PyTree, PyTree]:
    r"""Add a round's noise of a banded factorisation (`privacy.descriptions`), rounded to its lattice.

    .. math:: z_t = \frac{1}{c_0} \Bigl( Z_t - \sum_{j=1}^{b-1} c_j z_{t-j} \Bigr), \qquad Z_t \sim N(0, s^2 I)

    Args:
      stddev: s, [].
      coefficients: c.
      past: :math:`z_{t-1}, ..., z_{t-b+1}`, leaves [b - 1, ...]; zeros for rounds before the first.
      protects: argument of `gaussian`.

    Returns:
      The noisy tree, and ``past`` of the next round.
    """
    first, *rest = coefficients

    def correlated(fresh: Array, before: Array) -> Array:
        known = sum((c * before[j] for j, c in enumerate(rest)), jnp.zeros_like(fresh))
        return (fresh - known) / first

    noise = jax.tree.map(correlated, gaussian(key, tree, stddev, protects), past)
    noisy = jax.tree.map(lambda a, z: _on_lattice(a + z, stddev), tree, noise)
    return noisy, jax.tree.map(lambda z, before: jnp.concatenate([z[None], before])[: len(rest)], noise, past)


def add_laplace(key: Key, x: Array, scale: Scalar, protects: str) -> Array:
    """Add Laplace noise of density ``exp(-|t| / scale) / (2 scale)`` to ``x``, rounded to the lattice of its scale.

    Args:
      x: float32 or float64.
      scale: [], positive.
      protects: argument of `gaussian`.
    """
    enter(protects, key, x.size, scale)
    of_size, of_sign = jax.random.split(key)
    size = exponential(of_size, x.shape, x.dtype)
    noise = jnp.where(bits(of_sign, x.shape) < _HALF, -size, size)
    return _on_lattice(x + (scale * noise).astype(x.dtype), scale)


def standard_normal(key: Key, shape: tuple[int, ...], dtype: Any = jnp.float32) -> Array:
    """Independent N(0, 1) draws with complete tails, from 1.5 random words each; ``dtype`` is float32 or float64."""
    size = math.prod(shape)
    half = (-(-size // 2),)
    of_radius, of_angle = jax.random.split(key)
    radius = jnp.sqrt(2 * exponential(of_radius, half, dtype))
    turn = jax.lax.bitcast_convert_type(bits(of_angle, half), jnp.int32).astype(dtype)
    angle = turn * (math.pi * 2.0**-31)
    return jnp.concatenate([radius * jnp.cos(angle), radius * jnp.sin(angle)])[:size].reshape(shape)


def exponential(key: Key, shape: tuple[int, ...], dtype: Any = jnp.float32) -> Array:
    """Independent exponential variables of mean 1, accurate to a few units in the last place at both ends.

    ``dtype`` is float32 or float64.
    """
    of_high, of_low, of_more = jax.random.split(key, 3)
    high, low = bits(of_high, shape), bits(of_low, shape)

    def deeper(at: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        nth, high, depth = at
        again = high == 0
        more = bits(jax.random.fold_in(of_more, nth), shape)
        return nth + 1, jnp.where(again, more, high), depth + again

    # A word is zero once in 2^32 draws, so that this loop hardly ever runs.
    start = jnp.int32(0), high, jnp.zeros(shape, jnp.int32)
    _, high, depth = jax.lax.while_loop(lambda at: (at[1] == 0).any(), deeper, start)
    # Above one half U is represented by its distance from 1, the complement of the bits.
    above = high >= _HALF
    high, low = (jnp.where(above, ~word, word).astype(dtype) for word in (high, low))
    u = (high + (low + 0.5) * 2.0**-_WORD) * 2.0**-_WORD
    return jnp.where(above, -jnp.log1p(-u), -jnp.log(u)) + depth.astype(dtype) * (_WORD * math.log(2))


def bits(key: Key, shape: tuple[int, ...]) -> Array:
    """32 random bits per entry. All randomness of releases comes from here and from `uniform`."""
    return jax.random.bits(key, shape, jnp.uint32)


def uniform(key: Key, shape: tuple[int, ...], dtype: Any = jnp.float32) -> Array:
    """Uniform on [0, 1), multiples of 2^-23 (2^-52 in float64): for choices, not for noise."""
    return jax.random.uniform(key, shape, dtype)


def _on_lattice(x: Array, scale: Scalar) -> Array:
    """Round ``x`` to the lattice of noise of this scale; unchanged without noise, or if it cannot be scaled."""
    scale = jnp.asarray(scale, x.dtype)
    step = jnp.ldexp(jnp.ones((), x.dtype), jnp.frexp(scale)[1] - 1 - _LATTICE[x.dtype])
    steps = jnp.round(x / step)
    return jnp.where((scale > 0) & jnp.isfinite(steps), steps * step, x)

"""Clipping of uploads, which bounds the sensitivity of every later release."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from jaxpfl.core import trees
from jaxpfl.core.types import Array, PyTree, Scalar

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
    loses = "the noise is scaled to more than clients send" if limit[0] > size[0] else "most of an upload is clipped"
    text = (
        f"the clipping norm is {np.median(limit):.2g}, uploads have a median norm of {np.median(size):.2g} before it: "
        f"{loses}; privacy.quantile = 0.5 adapts it privately, whereas epsilon covers neither these norms nor a choice "
        "by them"
    )
    few = f"; for {clients} clients, privacy.unit = example protects single examples with less noise"
    return text + few * (clients < _FEW)

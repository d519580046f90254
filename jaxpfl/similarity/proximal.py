r"""Proximal operators of norms, ``argmin_w kappa |w|_p + |w - v|_2^2 / 2``, for p = 1, 2 and infinity.

- p = 1: every entry shrunk by ``kappa`` towards zero;
- p = 2: :math:`(1 - \kappa / \|v\|_2)_+ v`;
- p = inf: :math:`v - \operatorname{Proj}(v)`, onto the l1 ball of radius kappa.

In each case, v - w is the projection of v onto the ball of radius kappa of the dual norm (Moreau). The formula that
Zhao et al. print for all p is correct for p = 2 alone.
"""

from __future__ import annotations

import math

import jax.numpy as jnp

from jaxpfl.core.types import Array, Scalar
from jaxpfl.support.errors import JaxpflError

NORMS = (1.0, 2.0, math.inf)


def check_norm(p: float) -> float:
    """The norm as a float, if it has an operator here.

    Raises:
      JaxpflError: for p other than 1, 2 and infinity.
    """
    if p not in NORMS:
        raise JaxpflError(f"p must be 1, 2 or inf, got {p}")
    return float(p)


def prox(v: Array, kappa: Scalar, p: float) -> Array:
    """Proximal operator of ``kappa |.|_p`` on each vector [..., d]; kappa is non-negative and may be infinite.

    Implements: Zhao et al., section IV-B.

    Raises:
      JaxpflError: for p other than 1, 2 and infinity.
    """
    if check_norm(p) == 1:
        return jnp.sign(v) * jnp.maximum(jnp.abs(v) - kappa, 0)
    if p == 2:
        length = norm(v, 2)[..., None]
        keep = jnp.where(length > kappa, 1 - kappa / jnp.where(length > 0, length, 1), 0)
        return jnp.where(length > kappa, keep * v, jnp.zeros_like(v))
    # w is v clipped at the level for which the excess sums to kappa.
    level = jnp.where(norm(v, 1) > kappa, _level(jnp.abs(v), kappa), 0)[..., None]
    return jnp.clip(v, -level, level)


def norm(v: Array, p: float) -> Array:
    """Norm ``|v|_p`` of each vector [..., d]."""
    return jnp.linalg.norm(v, ord=int(p) if p in (1, 2) else p, axis=-1)


def _level(size: Array, kappa: Scalar) -> Array:
    """The t >= 0 with ``sum_i (size_i - t)_+ = kappa``, for sizes [..., d] that sum to more than kappa."""
    ordered = jnp.flip(jnp.sort(size, axis=-1), axis=-1)
    count = jnp.arange(1, size.shape[-1] + 1, dtype=size.dtype)
    # With the c largest above t, t = (their sum - kappa) / c; of these the largest is the one that is consistent.
    levels = (jnp.cumsum(ordered, axis=-1) - kappa) / count
    return jnp.maximum(levels.max(axis=-1), 0)

"""The regression and the spread about it of the area model, by the likelihood of all clients (see `area`)."""

from __future__ import annotations

from functools import partial
from typing import Literal, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jax.scipy.linalg import cho_solve, solve_triangular

from jaxpfl.core.types import Array
from jaxpfl.estimators.intervals import bisect

Likelihood: TypeAlias = Literal["reml", "ml"]
_SCALES = 32
_NARROWEST = 1e-3  # the least spread beside none, in parts of the smallest error


class Fitted(NamedTuple):
    """Weights 1 / V [m], the lower factor of C [p, p], the coefficients [p], and residuals [m], at one A."""

    weight: Array
    factor: Array
    coefficients: Array
    residual: Array


def least_squares(A: Array, Q: Array, y: Array, D: Array) -> Fitted:
    """Generalised least squares of y on the columns Q [m, p], at one A; D are squared standard errors [m]."""
    w = 1 / (A + D)
    factor = jnp.linalg.cholesky((Q * w[:, None]).T @ Q)
    b = cho_solve((factor, True), Q.T @ (w * y))
    return Fitted(w, factor, b, y - Q @ b)


def log_likelihood(A: Array, Q: Array, y: Array, D: Array, *, restricted: bool) -> Array:
    """Log likelihood of one A, but for a constant, []."""
    w, factor, _, r = least_squares(A, Q, y, D)
    return (jnp.log(w).sum() - w @ r**2) / 2 - jnp.log(jnp.diag(factor)).sum() * restricted


def likeliest(Q: Array, y: Array, D: Array, fit: Likelihood) -> tuple[Array, Array]:
    """The likeliest A, and its log likelihood but for a constant: the best of a grid, then the derivative's root."""
    kind, restricted = y.dtype, fit == "reml"
    value = partial(log_likelihood, Q=Q, y=y, D=D, restricted=restricted)

    def rises(log_sd: Array) -> Array:
        w, factor, _, r = least_squares(jnp.exp(2 * log_sd), Q, y, D)
        return ((w * r) ** 2).sum() + trace(factor, Q, w) * restricted > w.sum()

    low, high = jnp.log(_NARROWEST * jnp.sqrt(D.min())), jnp.log(jnp.abs(y).max() + jnp.sqrt(D.max()))
    step = (high - low) / (_SCALES - 1)
    grid = low + step * jnp.arange(_SCALES, dtype=kind)
    about = grid[jnp.argmax(jax.lax.map(lambda log_sd: value(jnp.exp(2 * log_sd)), grid))]
    best = jnp.exp(2 * bisect(rises, about - step, about + step))
    none, some = value(jnp.zeros((), kind)), value(best)
    # A spread below the rounding error of the likelihood is none.
    alike = none >= some - 16 * jnp.finfo(kind).eps * (len(y) + jnp.abs(some))
    return jnp.where(alike, 0, best), jnp.where(alike, none, some)


def trace(factor: Array, Q: Array, w: Array) -> Array:
    """tr(C^-1 sum_j z_j z_j' / V_j^2), []."""
    return (solve_triangular(factor, Q.T * w, lower=True) ** 2).sum()

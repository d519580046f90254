r"""Intervals of the area model that integrate over the spread about the regression.

The interval of plus and minus a normal quantile times the root of the mean squared error is right to the order 1/m for
an A well above zero. Where A is small beside the errors, its likeliest value is zero for a good part of all files, and
so is the first term of the error: such intervals cover too little. Here A has the flat prior on :math:`(0, \infty)`,
and beta one on all of :math:`R^p`. Given A, theta_i is a posteriori normal with the mean :math:`x_i - B_i (x_i -
z_i^\top \hat\beta)` and the variance :math:`g_{1i} + g_{2i}`; A has the density of the restricted likelihood, which is
integrable for m - p >= 3. Ends are quantiles of the mixture over A, by Gauss and Legendre's quadrature in
:math:`\log(A + d)`, d the errors' typical variance, over the range in which the density is above exp(-16) of its
greatest.

References: Morris 1983, "Parametric empirical Bayes inference: theory and applications"; Morris and Tang 2011,
"Estimating random effects via adjustment for density maximization", for the flat prior on A and its coverage.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.scipy.linalg import solve_triangular
from jax.scipy.special import erfc

from jaxpfl.core import full_precision
from jaxpfl.core.types import Array, Scalar
from jaxpfl.estimators.intervals import bisect
from jaxpfl.estimators.normal_means.answer import in_blocks
from jaxpfl.estimators.normal_means.area_fit import least_squares, log_likelihood

_NODES, _WEIGHTS = np.polynomial.legendre.leggauss(48)
_SCANNED, _SCANS = 32, 2
_DROP = 16.0  # of the log density, at the ends of the range
_REACH = 9.0


@partial(full_precision.jit, static_argnames="free")
def integrated(Q: Array, y: Array, D: Array, level: Scalar, free: int) -> tuple[Array, Array]:
    """Ends of the equal-tailed intervals of theta, [m] each.

    Args:
      Q: orthonormal columns that span the covariates, [m, p].
      y: the estimates, or what is left of them beside any combination of the columns, [m].
      D: squared standard errors, [m], about one.
      level: probability inside.
      free: m - p, at least 3.
    """
    kind = y.dtype
    typical = jnp.exp(jnp.log(D).mean())

    def log_density(v: Array) -> Array:
        return log_likelihood(typical * jnp.expm1(v), Q, y, D, restricted=True) + v

    low = jnp.zeros((), kind)
    high = jnp.log1p(y @ y / typical) + 2 * _DROP / (free - 2)  # beyond y'y the density falls by (free - 2) / 2
    for _ in range(_SCANS):
        grid = low + (high - low) * jnp.linspace(0, 1, _SCANNED, dtype=kind)
        density = jax.lax.map(log_density, grid)
        inside = density > density.max() - _DROP
        first, last = jnp.argmax(inside), _SCANNED - 1 - jnp.argmax(inside[::-1])
        low, high = grid[jnp.maximum(first - 1, 0)], grid[jnp.minimum(last + 1, _SCANNED - 1)]

    v = low + (high - low) * (1 + jnp.asarray(_NODES, kind)) / 2
    A = typical * jnp.expm1(v)
    share = jax.nn.softmax(jax.lax.map(log_density, v) + jnp.log(jnp.asarray(_WEIGHTS, kind)))
    of_nodes = jax.lax.map(lambda A: least_squares(A, Q, y, D)[1:3], A)

    def of(client: Array) -> tuple[Array, Array]:
        own, at, error = Q[client], y[client], D[client]

        def given(A: Array, factor: Array, b: Array) -> tuple[Array, Array]:
            B = error / (A + error)
            spread = (solve_triangular(factor, own.T, lower=True) ** 2).sum(axis=0)
            return at - B * (at - own @ b), jnp.sqrt(A * B + B**2 * spread)

        mean, sd = jax.vmap(given)(A, *of_nodes)  # [nodes, clients]

        def quantile(p: Scalar) -> Array:
            def below(t: Array) -> Array:
                return share @ erfc((mean - t) / (sd * 2**0.5)) / 2 < p

            return bisect(below, (mean - _REACH * sd).min(axis=0), (mean + _REACH * sd).max(axis=0))

        return quantile((1 - level) / 2), quantile((1 + level) / 2)

    return in_blocks(of, jnp.arange(len(y)))

r"""Credible intervals for Gaussian clients, which account for the uncertainty of the learned population.

The intervals are valid even for few clients. The mean :math:`\bar X_i` of client i's samples is normal about theta_i
with the variance :math:`\varphi s_i^2`, where s_i^2 is an estimate, and theta_i ~ N(mu, st2). mu and st2 are unknown.
The common factor :math:`\varphi` is also unknown if the samples' variance was pooled with few degrees of freedom.
`posterior` integrates over all three unknowns; `morris` returns intervals from this posterior.

References: Morris 1983, "Parametric empirical Bayes inference"; Tiao and Tan 1965, "Bayesian analysis of random-effect
models in the analysis of variance", for the factor.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxpfl.core import full_precision
from jaxpfl.core.types import Array, Scalar

_POINTS = 64  # cells of the grid of lambda
_ZOOMS = 4  # number of times that the grid is narrowed to the region of high density
_NEGLIGIBLE = 20.0  # grid points whose log density is this far below the maximum are left out
_TINY = 1e-30  # lower bound on variances, in squared units


@full_precision.jit
def posterior(own: Array, s2: Array | Scalar, degrees: Scalar = math.inf) -> tuple[Array, Array]:
    r"""Posterior means and scales of the theta_i.

    The priors of mu and st2 are flat, and the prior density of :math:`\varphi` is :math:`1 / \varphi`.

    Let :math:`\lambda = st^2 / \varphi`, :math:`w_i = 1 / (s_i^2 + \lambda)` and :math:`B_i = s_i^2 w_i`. Let M be the
    mean of the :math:`\bar X_i` with weights w_i, and :math:`Q = \sum_i w_i |\bar X_i - M|^2`. Given lambda, theta_i
    has Student's t distribution with :math:`N = \nu + (m - 1) d - 2` degrees of freedom. The center of this
    distribution is :math:`\bar X_i - B_i (\bar X_i - M)`, and the squared scale is :math:`\frac{\nu + Q}{N} (\lambda
    B_i + B_i^2 / \sum_j w_j)`. The density of lambda is

    .. math:: \Big(\prod_i w_i \Big/ \sum_i w_i\Big)^{d/2} (1 + Q / \nu)^{-N/2}

    Means and scales are sums over a grid of lambda. For infinite nu the last factor is :math:`e^{-Q/2}`. If, in
    addition, all s_i^2 are equal, the mean and the variance agree with Morris 1983. For (m - 1) d <= 2 a flat prior of
    st2 would give an improper posterior. The prior is then flat in :math:`s^2 / (s^2 + \lambda)`, where s^2 is the mean
    of the s_i^2, and N is :math:`\nu + (m - 1) d`.

    Args:
      own: the clients' own means, [m, d].
      s2: estimated variances of these means, [m], or one for all.
      degrees: degrees of freedom nu of the pooled variance to which all ``s2`` are proportional; infinite if the
        variance is known.

    Returns:
      Means and scales, [m, d] each. The half width of an interval is the scale times `student` with `degrees_left`
      degrees of freedom.
    """
    m, d = own.shape
    mean = own.mean(axis=0)
    # A power of two near the largest distance or error, because division by a power of two is exact.
    typical = jnp.maximum(jnp.abs(own - mean).max(), jnp.sqrt(jnp.max(s2)))
    unit = jnp.ldexp(jnp.ones_like(typical), jnp.where(typical > 0, jnp.frexp(typical)[1], 0))
    y = (own - mean) / unit
    s2 = jnp.broadcast_to(jnp.maximum(s2 / unit / unit, _TINY), (m,))
    squares = (y**2).sum(axis=1)
    scale = jnp.maximum(s2.mean(), squares.sum() / max((m - 1) * d, 1))
    known, left = jnp.isinf(degrees), degrees_left(m, d, degrees)
    nu = jnp.where(known, 1.0, degrees)

    def conditional(u: Array) -> tuple[Array, Array, Array, Array, Array]:
        """Return lambda, the log density of u, the weights w_i, the weighted mean M, and the posterior mean of phi.

        Here u in (0, 1) defines lambda = scale (1 / u^2 - 1). The density of u is bounded for every m.
        """
        ratio = scale * (1 - u) * (1 + u) / u**2
        w = 1 / (ratio[:, None] + s2)
        total = w.sum(axis=1)
        off = w @ y / total[:, None]
        Q = jnp.maximum(w @ squares - total * (off**2).sum(axis=1), 0)
        log_p = d / 2 * (jnp.log(w).sum(axis=1) - jnp.log(total)) - 3 * jnp.log(u)
        log_p -= jnp.where(known, Q, jnp.where(known, 1.0, left) * jnp.log1p(Q / nu)) / 2
        if _few(m, d):
            log_p -= 2 * jnp.log(s2.mean() + ratio)
        return ratio, log_p, w, off, jnp.where(known, 1.0, (nu + Q) / jnp.where(known, 1.0, left))

    def narrow(_: Array, ends: tuple[Array, Array]) -> tuple[Array, Array]:
        u, step = _cells(*ends)
        log_p = conditional(u)[1]
        likely = log_p > log_p.max() - _NEGLIGIBLE
        low, high = jnp.where(likely, u, 1).min(), jnp.where(likely, u, 0).max()
        return jnp.maximum(low - step, ends[0]), jnp.minimum(high + step, ends[1])

    u, _ = _cells(*jax.lax.fori_loop(0, _ZOOMS, narrow, (jnp.zeros_like(scale), jnp.ones_like(scale))))
    ratio, log_p, w, off, factor = conditional(u)
    p = jax.nn.softmax(log_p)[:, None]
    B = s2 * w
    EB, of_mean = (p * B).sum(axis=0)[:, None], (p * B).T @ off
    shrunken = ratio[:, None] * B + B**2 / w.sum(axis=1, keepdims=True)
    within = (p * factor[:, None] * shrunken).sum(axis=0)[:, None]
    # Variance of B (y - off) over the grid.
    spread = B - EB[:, 0]
    between = (p * spread**2).sum(axis=0)[:, None] * y**2 - 2 * y * ((p * spread * B).T @ off)
    between += (p * B**2).T @ off**2 - of_mean**2
    return own - unit * (EB * y - of_mean), unit * jnp.sqrt(within + jnp.maximum(between, 0))


def degrees_left(clients: int, dim: int, degrees: Any) -> Any:
    """Degrees of freedom N in `posterior`."""
    return degrees + (clients - 1) * dim - (0 if _few(clients, dim) else 2)


def morris(own: Array, s2: Array | Scalar, level: float, *, degrees: float = math.inf) -> tuple[Array, Array]:
    """Lower and upper endpoints [m, d] of credible intervals. The arguments are as in `posterior`.

    The endpoints are the posterior means, minus and plus Student's quantile times the scales.
    """
    mean, scale = posterior(own, s2, degrees)
    m, d = own.shape
    reach = student(level, degrees_left(m, d, degrees)) * scale
    return mean - reach, mean + reach


def student(level: float, degrees: Any) -> np.ndarray:
    """Half width of a central interval of Student's t distribution (normal distribution for infinite ``degrees``)."""
    from scipy import special

    tail = (1 + level) / 2
    degrees = np.asarray(degrees, float)
    finite = np.where(np.isinf(degrees), 1, degrees)
    return np.where(np.isinf(degrees), special.ndtri(tail), special.stdtrit(finite, tail))


def _few(clients: int, dim: int) -> bool:
    """True if a flat prior of st2 would give an improper posterior (see `posterior`)."""
    return (clients - 1) * dim <= 2


def _cells(low: Array, high: Array) -> tuple[Array, Array]:
    """Midpoints of `_POINTS` cells between ``low`` and ``high``, and the cells' width."""
    step = (high - low) / _POINTS
    return low + step * (jnp.arange(_POINTS) + 0.5), step

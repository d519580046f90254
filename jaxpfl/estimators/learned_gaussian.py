r"""Intervals of Gaussian clients whose population is learned from the same clients, maybe few.

The clients' means are normal about theta_i with variances :math:`\varphi s_i^2`, theta_i ~ N(mu, st2). mu and st2 are
unknown, and so is the common factor :math:`\varphi` where the variance of the samples was pooled with few degrees of
freedom. `posterior` averages over all three; `morris` makes intervals of it.

References: Morris 1983, "Parametric empirical Bayes inference"; Tiao and Tan 1965, "Bayesian analysis of random-effect
models in the analysis of variance", for the factor.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxpfl.types import Array, Scalar

_POINTS = 64
_ZOOMS = 4
_NEGLIGIBLE = 20.0  # in units of the log density, below its maximum
_TINY = 1e-30


@jax.jit
def posterior(own: Array, s2: Array | Scalar, degrees: Scalar = math.inf) -> tuple[Array, Array]:
    r"""Means and scales of what is believed of theta_i, with flat priors on mu and st2, and one in proportion to
    :math:`1 / \varphi` on the factor.

    With :math:`\lambda = st^2 / \varphi`, :math:`w_i = 1 / (s_i^2 + \lambda)`, :math:`B_i = s_i^2 w_i`, M the mean with
    these weights and :math:`Q = \sum_i w_i |\bar X_i - M|^2`, theta_i given lambda has Student's t distribution with
    :math:`N = \nu + (m - 1) d - 2` degrees of freedom, about :math:`\bar X_i - B_i (\bar X_i - M)` with the squared
    scale :math:`\frac{\nu + Q}{N} (\lambda B_i + B_i^2 / \sum_j w_j)`; and lambda has the density

    .. math:: \Big(\prod_i w_i \Big/ \sum_i w_i\Big)^{d/2} (1 + Q / \nu)^{-N/2}

    which is summed over a grid. For infinite nu that is :math:`e^{-Q/2}`, and for equal sizes besides the mean and
    variance are Morris's. Where (m - 1) d <= 2 a flat prior leaves st2 infinite: there the prior is flat in
    :math:`s^2 / (s^2 + \lambda)`, and N is :math:`\nu + (m - 1) d`.

    Args:
      own: the clients' own means, [m, d].
      s2: their estimated variances, [m] or one for all.
      degrees: nu, of freedom of the pooled variance that all of ``s2`` is in proportion to; infinite where it is known.

    Returns:
      Means and scales, [m, d] each; `student` of `degrees_left` scales is an interval.
    """
    m, d = own.shape
    s2 = jnp.broadcast_to(jnp.maximum(s2, _TINY), (m,))
    mean = own.mean(axis=0)
    y = own - mean
    squares = (y**2).sum(axis=1)
    scale = jnp.maximum(s2.mean(), squares.sum() / max((m - 1) * d, 1))
    known, left = jnp.isinf(degrees), degrees_left(m, d, degrees)
    nu = jnp.where(known, 1.0, degrees)

    def given(u: Array) -> tuple[Array, Array, Array, Array, Array]:
        """At lambda = scale (1 / u^2 - 1), in which the density is bounded for every m: lambda, its log density, w, M,
        and the posterior mean of the factor."""
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
        log_p = given(u)[1]
        likely = log_p > log_p.max() - _NEGLIGIBLE
        low, high = jnp.where(likely, u, 1).min(), jnp.where(likely, u, 0).max()
        return jnp.maximum(low - step, ends[0]), jnp.minimum(high + step, ends[1])

    u, _ = _cells(*jax.lax.fori_loop(0, _ZOOMS, narrow, (jnp.zeros_like(scale), jnp.ones_like(scale))))
    ratio, log_p, w, off, factor = given(u)
    p = jax.nn.softmax(log_p)[:, None]
    B = s2 * w
    EB, of_mean = (p * B).sum(axis=0)[:, None], (p * B).T @ off
    shrunken = ratio[:, None] * B + B**2 / w.sum(axis=1, keepdims=True)
    within = (p * factor[:, None] * shrunken).sum(axis=0)[:, None]
    # The variance of B (y - off) over the grid.
    spread = B - EB[:, 0]
    between = (p * spread**2).sum(axis=0)[:, None] * y**2 - 2 * y * ((p * spread * B).T @ off)
    between += (p * B**2).T @ off**2 - of_mean**2
    return own - EB * y + of_mean, jnp.sqrt(within + jnp.maximum(between, 0))


def degrees_left(clients: int, dim: int, degrees: Any) -> Any:
    """N of `posterior`."""
    return degrees + (clients - 1) * dim - (0 if _few(clients, dim) else 2)


def morris(own: Array, s2: Array | Scalar, level: float, *, degrees: float = math.inf) -> tuple[Array, Array]:
    """Intervals from `posterior`, which has the arguments: its means, and its scales times Student's quantile."""
    mean, scale = posterior(own, s2, degrees)
    m, d = own.shape
    reach = student(level, degrees_left(m, d, degrees)) * scale
    return mean - reach, mean + reach


def student(level: float, degrees: Any) -> np.ndarray:
    """The half width, in scales, of Student's interval; the normal one for infinite degrees. On the host, by SciPy."""
    from scipy import special

    tail = (1 + level) / 2
    degrees = np.asarray(degrees, float)
    finite = np.where(np.isinf(degrees), 1, degrees)
    return np.where(np.isinf(degrees), special.ndtri(tail), special.stdtrit(finite, tail))


def _few(clients: int, dim: int) -> bool:
    return (clients - 1) * dim <= 2


def _cells(low: Array, high: Array) -> tuple[Array, Array]:
    """The middles of `_POINTS` cells, and their width."""
    step = (high - low) / _POINTS
    return low + step * (jnp.arange(_POINTS) + 0.5), step

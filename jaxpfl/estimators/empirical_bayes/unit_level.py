r"""Clients' means from individual samples with covariates: the nested-error regression of Battese, Harter and Fuller.

Sample j of client i is :math:`y_{ij} = x_{ij}^\top \beta + v_i + e_{ij}`, with :math:`v_i \sim N(0, \sigma_v^2)` and
:math:`e_{ij} \sim N(0, \sigma_e^2)`. A client's mean is :math:`\theta_i = \bar X_i^\top \beta + v_i`. Here :math:`\bar
X_i` is the mean of the covariates over the population that the client represents. :math:`\bar x_i` and :math:`\bar y_i`
are means over the client's n_i samples; if :math:`\bar X_i` is not known, :math:`\bar x_i` is used instead. With
:math:`\gamma_i = \sigma_v^2 / (\sigma_v^2 + \sigma_e^2 / n_i)`, the empirical best linear unbiased predictor and the
terms of its mean squared error, to the order 1/m, are

.. math:: \hat\theta_i = \bar X_i^\top \hat\beta + \gamma_i (\bar y_i - \bar x_i^\top \hat\beta), \quad
   g_{1i} = \gamma_i \sigma_e^2 / n_i, \quad
   g_{2i} = d_i^\top \Phi\, d_i, \; d_i = \bar X_i - \gamma_i \bar x_i, \quad
   g_{3i} = \frac{h}{n_i^2 (\sigma_v^2 + \sigma_e^2 / n_i)^3}

where g_1 is the error at known parameters, g_2 is due to the estimated beta (with covariance Phi), and g_3 is due to
the two estimated variances. Here :math:`h = \sigma_e^4 V_{vv} - 2 \sigma_e^2 \sigma_v^2 V_{ve} + \sigma_v^4 V_{ee}`,
where V is the inverse of the Fisher information of sigma_v^2 and sigma_e^2. At the fitted variances, g_1 is too small
by g_3 on average, so the error is estimated by g_1 + g_2 + 2 g_3. The restricted likelihood is maximized over one
parameter, :math:`\sigma_v^2 / \sigma_e^2`.

A client sends n_i, the means of its samples and covariates, and sums of squares and products about these means. A step
of the fit needs the totals of these sums over all clients, and weighted sums over clients of squares and products of
the means. The weights depend on n_i and change with every step. If all n_i are equal, unweighted sums are enough for
the whole fit.

References: Battese, Harter and Fuller 1988, "An error-components model for prediction of county crop areas using survey
and satellite data"; Prasad and Rao 1990, "The estimation of the mean squared error of small-area estimators"; Datta and
Lahiri 2000.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.scipy.linalg import cho_solve, solve_triangular
from jax.scipy.special import ndtr

from jaxpfl.core import full_precision
from jaxpfl.core.search import climb
from jaxpfl.core.types import Array, Scalar
from jaxpfl.estimators.empirical_bayes import inputs
from jaxpfl.estimators.empirical_bayes.area import about, covariates, refuse_dependent, triangle
from jaxpfl.support.errors import JaxpflError

LEAST_CLIENTS = 3
LEAST_FREE = 2
"""Smallest number of degrees of freedom between clients, after fitting the covariates, for which sigma_v can be
estimated.
"""
_NO_SCATTER = 64  # residuals of at most this many rounding errors count as zero
_SCALES = 24  # starting values of the ratio of variances
_RATIOS = (-14.0, 14.0)  # range of the logarithm of sigma_v^2 / sigma_e^2


class UnitMeans(NamedTuple):
    """Predicted means of m clients, from N samples and p columns of covariates; the first column is the intercept.

    Attributes:
      size: numbers of samples n_i, [m].
      own: means of the clients' samples, [m].
      regression: value of the regression at the clients' covariates, [m].
      mean: empirical best linear unbiased predictors, [m].
      mse: estimated mean squared errors of ``mean``, [m].
      g1, g2, g3: terms of the error at the fitted variances, [m] each; ``mse`` is g1 + g2 + 2 g3.
      shrinkage: fraction 1 - gamma by which ``mean`` moves from the client's own estimate toward the regression, [m].
      effect: predictions of v_i, [m].
      residual: standardized residuals of the clients' means about the regression, [m]; N(0, 1) if the model holds.
      beta: coefficients, [p].
      beta_covariance: covariance of ``beta`` at the fitted variances, [p, p].
      between: variance sigma_v^2 between clients, [], which may be zero.
      within: variance sigma_e^2 of the samples within a client, [].
      log_likelihood: restricted log likelihood, []: the log likelihood of N - p orthonormal contrasts of the samples.
      ratio: likelihood-ratio statistic, []: twice the amount by which the log likelihood exceeds its maximum with
        sigma_v = 0.
      p_value: probability of a ratio at least as large if clients do not differ, []. This is half the tail probability
        of a chi-square with one degree of freedom, an approximation for many clients. The p-value is 1 if sigma_v = 0
        maximizes the likelihood.
      labels: the clients' names; None if the number of clients was given.
    """

    size: Array
    own: Array
    regression: Array
    mean: Array
    mse: Array
    g1: Array
    g2: Array
    g3: Array
    shrinkage: Array
    effect: Array
    residual: Array
    beta: Array
    beta_covariance: Array
    between: Array
    within: Array
    log_likelihood: Array
    ratio: Array
    p_value: Array
    labels: inputs.Labels | None = None

    def interval(self, level: Scalar = 0.95) -> tuple[Array, Array]:
        """Interval endpoints, [m] each: ``mean`` minus and plus the normal quantile times the root of ``mse``."""
        return about(self.mean, self.mse, level)

    def to_frame(self, level: float | None = None) -> Any:
        """Return a pandas frame with a row per client; with ``level``, also interval endpoints ``low`` and ``high``."""
        return inputs.frame(self, len(self.mean), level, leave=("beta", "beta_covariance"))


def unit_level(
    y: Any,
    x: Any,
    client: Any,
    *,
    population: Any = None,
    intercept: bool = True,
    clients: int | None = None,
) -> UnitMeans:
    """Fit the nested-error regression and its two variances, and predict every client's mean.

    This function works under ``jax.jit``, and under ``jax.vmap`` over problems. ``intercept`` and ``clients`` are
    static.

    Args:
      y: the samples, [N]: an array, a list, or a column of a data frame.
      x: the samples' covariates, [N], [N, k], or columns of a data frame.
      client: client of each sample, [N]: numbers or names. The sorted distinct values are the clients. If ``clients``
        is given, the values are numbers in 0 ... clients - 1, and every client has a sample.
      population: mean of each covariate over the population that a client represents, [m] or [m, k]: an array in the
        order of the clients; by default the means over the client's samples.
      intercept: whether to prepend a column of ones to the covariates, which must then not already contain such a
        column.
      clients: number of clients m; required within a JAX transformation, where the values of ``client`` are not known.

    Raises:
      JaxpflError: if y or x are not finite numbers, or have different lengths; if covariates are linearly dependent; if
        there are fewer than three clients, or no client has two samples; if there are too many covariates, so that
        fewer than two degrees of freedom are left between clients, or none within clients; if ``population`` is a data
        frame, or has a different number of clients or columns; or if all residuals of y within clients are zero. Within
        a JAX transformation, values are not checked.

    Examples:
      >>> rng = np.random.default_rng(0)
      >>> client, x = np.repeat(np.arange(60), 5), rng.normal(size=300)
      >>> theta = 0.5 * rng.normal(size=60)
      >>> found = unit_level(1 + 2 * x + theta[client] + rng.normal(size=300), x, client, population=np.zeros(60))
      >>> bool(((found.mean - 1 - theta) ** 2).mean() < 0.15)  # .2 for each client alone at known coefficients
      True
    """
    y, x, client = inputs.aligned(y=y, x=x, client=client)
    own = inputs.numbers("y", y, "one for each sample")
    if own.ndim != 1:
        raise JaxpflError(f"y must have one number for each sample, got shape {own.shape}")
    columns = covariates(x, len(own), "x", "samples")
    index, names = inputs.places("client", client, clients, len(own), "samples")
    m = len(names) if clients is None else int(clients)
    if m < LEAST_CLIENTS:
        raise JaxpflError(f"at least {LEAST_CLIENTS} clients are required to estimate their spread, got {m}")
    if isinstance(own, np.ndarray):
        if not np.isfinite(own).all():
            at = int(np.argmin(np.isfinite(own)))
            raise JaxpflError(f"y must be finite, got {own[at]} for sample {at}")
        full_precision.check_digits(float(np.abs(own).max()), float(np.ptp(own)))
    refuse_dependent("x", columns, intercept=intercept)
    if isinstance(columns, np.ndarray) and isinstance(index, np.ndarray):
        _check_free(own, columns, index, m, intercept)
    means = None
    if population is not None:
        if inputs.is_frame(population):
            raise JaxpflError("population must be an array with one row per client in sorted order, got a data frame")
        means = jnp.asarray(covariates(population, m, "population", "clients"), jnp.result_type(float))
        if means.shape[1] != columns.shape[1]:
            raise JaxpflError(f"population must have {columns.shape[1]} columns, as many as x, got {means.shape[1]}")
    kind = jnp.result_type(float)
    y, x = jnp.asarray(own, kind), jnp.asarray(columns, kind)
    found = _solve(y, x, jnp.asarray(index), means, m=m, intercept=bool(intercept))
    return found._replace(labels=None if names is None else inputs.Labels(names))


def _check_free(y: Any, x: np.ndarray, index: np.ndarray, m: int, intercept: bool) -> None:
    """Check that both variances can be estimated from the samples."""
    sizes = np.bincount(index, minlength=m)
    if sizes.min() < 1:
        raise JaxpflError(f"client {int(np.argmin(sizes))} has no samples: leave it out")
    if sizes.max() < 2:
        raise JaxpflError("at least one client must have two samples, got one sample of every client: use ebnm")

    def about_means(of: np.ndarray) -> np.ndarray:
        return of - (np.bincount(index, of, m) / sizes)[index]

    within = np.stack([about_means(of) for of in x.T], axis=1)
    inner = int(np.linalg.matrix_rank(within))
    p = x.shape[1] + intercept
    if m + inner - p < LEAST_FREE:
        raise JaxpflError(
            f"x has too many columns that are constant within the {m} clients: leave out {LEAST_FREE - m - inner + p}"
        )
    if len(x) - m - inner < 1:
        raise JaxpflError(
            f"at least {m + inner + 1} samples are required for {m} clients and {inner} covariates, got {len(x)}"
        )
    if isinstance(y, np.ndarray):
        left = about_means(y)
        left -= within @ np.linalg.lstsq(within, left, rcond=None)[0]
        if np.abs(left).max() <= _NO_SCATTER * float(jnp.finfo(jnp.result_type(float)).eps) * np.abs(y).max():
            raise JaxpflError("y must vary about the regression within clients, got residuals of zero")


@partial(full_precision.jit, static_argnames=("m", "intercept"))
def _solve(y: Array, x: Array, client: Array, population: Array | None, *, m: int, intercept: bool) -> UnitMeans:
    N = len(y)
    if intercept:
        x = jnp.concatenate([jnp.ones((N, 1), x.dtype), x], axis=1)
        if population is not None:
            population = jnp.concatenate([jnp.ones((m, 1), x.dtype), population], axis=1)
    p = x.shape[1]
    Q, R, _ = triangle(x)
    start = Q.T @ y
    r = y - Q @ start

    def summed(of: Array) -> Array:
        return jax.ops.segment_sum(of, client, num_segments=m)

    n = summed(jnp.ones_like(y))
    r_mean, Q_mean = summed(r) / n, summed(Q) / n[:, None]
    unit = jnp.sqrt((r**2).mean())
    unit = jnp.where(unit > 0, unit, 1)
    r_mean, r_in, Q_in = r_mean / unit, (r - r_mean[client]) / unit, Q - Q_mean[client]
    inner, cross, square = Q_in.T @ Q_in, Q_in.T @ r_in, r_in @ r_in
    free = N - p

    def profile(ratio: Array) -> tuple[Array, Array, Array, Array]:
        """Return the Cholesky factor of the normal equations, the coefficients, squared residuals and log likelihood.

        ``ratio`` is sigma_v^2 / sigma_e^2. The log likelihood is maximized over sigma_e.
        """
        k = n / (1 + n * ratio)
        factor = jnp.linalg.cholesky(inner + (Q_mean * k[:, None]).T @ Q_mean)
        b = cho_solve((factor, True), cross + Q_mean.T @ (k * r_mean))
        left = r_mean - Q_mean @ b
        squares = square - 2 * b @ cross + b @ inner @ b + k @ left**2
        value = -free * jnp.log(squares / free) - jnp.log1p(n * ratio).sum()
        value -= 2 * jnp.log(jnp.diag(factor)).sum()
        return factor, b, squares, value / 2

    starts = jnp.linspace(*_RATIOS, _SCALES, dtype=y.dtype)[:, None]
    best, value = climb(lambda log: profile(jnp.exp(log[0]))[3] / N, starts)
    zero = jnp.zeros((), y.dtype)
    none = profile(zero)[3]
    some = value * N
    alike = none >= some - 16 * jnp.finfo(y.dtype).eps * (N + jnp.abs(some))
    ratio = jnp.where(alike, 0, jnp.exp(best[0]))
    factor, b, squares, value = profile(ratio)
    e2 = squares / free
    v2 = ratio * e2

    gamma = ratio * n / (1 + ratio * n)
    back = solve_triangular(R, jnp.eye(p, dtype=y.dtype))
    of_client = Q_mean if population is None else population @ back
    half = solve_triangular(factor, jnp.eye(p, dtype=y.dtype), lower=True)  # Phi = e2 half' half
    left = r_mean - Q_mean @ b
    g1 = gamma * e2 / n
    g2 = e2 * (((of_client - gamma[:, None] * Q_mean) @ half.T) ** 2).sum(axis=1)
    k = n / (1 + n * ratio)  # n_i e2 / alpha_i
    vv, ve = (k**2).sum() / (2 * e2**2), (k**2 / n).sum() / (2 * e2**2)
    ee = (N - m + (k**2 / n**2).sum()) / (2 * e2**2)
    determinant = vv * ee - ve**2
    h = (e2**2 * ee + 2 * e2 * v2 * ve + v2**2 * vv) / determinant
    g3 = h / (n**2 * (v2 + e2 / n) ** 3)
    mse = g1 + g2 + 2 * g3
    within = e2 * (1 / k - ((Q_mean @ half.T) ** 2).sum(axis=1))
    seen = within > 64 * p * jnp.finfo(y.dtype).eps * e2
    residual = jnp.where(seen, left / jnp.sqrt(jnp.where(seen, within, 1)), 0 * left)
    regression = of_client @ start + unit * (of_client @ b)
    likelihood_ratio = jnp.where(alike, 0, jnp.maximum(2 * (value - none), 0))
    scale = unit**2
    return UnitMeans(
        n, summed(y) / n, regression, regression + unit * gamma * left, scale * mse, scale * g1, scale * g2,
        scale * g3, 1 - gamma, unit * gamma * left, residual, back @ (start + unit * b),
        scale * e2 * (back @ half.T) @ (back @ half.T).T, scale * v2, scale * e2,
        value - free * (1 + math.log(2 * math.pi) + 2 * jnp.log(unit)) / 2, likelihood_ratio,
        jnp.where(ratio > 0, ndtr(-jnp.sqrt(likelihood_ratio)), 1 + 0 * ratio),
    )  # fmt: skip

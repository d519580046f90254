r"""Normal means with a regression on covariates: the area model of Fay and Herriot, fitted by ML or REML.

Client i has an estimate :math:`x_i \sim N(\theta_i, s_i^2)`, and :math:`\theta_i \sim N(z_i^\top \beta, A)`. Let
:math:`V_i = A + s_i^2`, :math:`B_i = s_i^2 / V_i` and :math:`C = \sum_i z_i z_i^\top / V_i`, and let beta be estimated
by generalized least squares. The empirical best linear unbiased predictor is :math:`\hat\theta_i = x_i - B_i (x_i -
z_i^\top \hat\beta)`. To the order 1/m its mean squared error is :math:`g_1 + g_2 + g_3`,

.. math:: g_{1i} = A B_i, \quad g_{2i} = B_i^2\, z_i^\top C^{-1} z_i, \quad
   g_{3i} = \frac{B_i^2}{V_i} \frac{2}{\sum_j V_j^{-2}},

where g_1 is due to theta_i itself, g_2 to the estimated beta, and g_3 to the estimated A. On average, g_1 computed at
the fitted A is too small by g_3. For ML, g_1 is too small by a further :math:`B_i^2\, \mathrm{tr}(C^{-1} \sum_j z_j
z_j^\top V_j^{-2}) / \sum_j V_j^{-2}`, which is the bias of A times the derivative of g_1 with respect to A.

The fitted A maximizes the likelihood, which may have several maxima. The search therefore finds the best value on a
grid, and then a root of the derivative near this value. With p coefficients, each step of the search needs sums over
clients of p^2 products, so a client can send a message of fixed size in each step. One message of fixed size is not
enough, because the sums depend on the current A.

One kind of interval is ``mean`` plus and minus a normal quantile times the root of the mean squared error. These
intervals have the nominal coverage to the order 1/m if A is well above zero. If A is small compared to the squared
standard errors, the maximum-likelihood value of A is often zero. The term g_1 is then zero too, and the intervals cover
theta_i too rarely. The default intervals therefore integrate over a flat prior of A on :math:`(0, \infty)` and a flat
prior of beta on :math:`R^p`. Given A, the posterior of theta_i is normal with mean :math:`x_i - B_i (x_i - z_i^\top
\hat\beta)` and variance :math:`g_{1i} + g_{2i}`. The posterior density of A is the restricted likelihood, which is
integrable for m - p >= 3. The interval's endpoints are quantiles of the mixture over A. The mixture is computed by
Gauss-Legendre quadrature in :math:`\log(A + d)`, where d is the geometric mean of the squared standard errors. The
quadrature covers the range in which the density exceeds exp(-16) times its maximum.

References: Fay and Herriot 1979, "Estimates of income for small places"; Prasad and Rao 1990, "The estimation of the
mean squared error of small-area estimators"; Datta and Lahiri 2000, "A unified measure of uncertainty of estimated best
linear unbiased predictors in small area estimation problems"; Morris 1983, "Parametric empirical Bayes inference:
theory and applications"; Morris and Tang 2011, "Estimating random effects via adjustment for density maximization",
for the flat prior on A and its coverage.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any, Literal, NamedTuple, TypeAlias, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax.scipy.linalg import cho_solve, solve_triangular
from jax.scipy.special import erfc, gammaincc, ndtri

from jaxpfl.core import full_precision
from jaxpfl.core.search import bisect
from jaxpfl.core.types import Array, Scalar
from jaxpfl.estimators.empirical_bayes import inputs
from jaxpfl.estimators.empirical_bayes.normal_means import blockwise, checked
from jaxpfl.support.errors import JaxpflError, unknown_name

Likelihood: TypeAlias = Literal["reml", "ml"]
By: TypeAlias = Literal["integrated", "mse"]
"""Kind of interval: integrated over A and beta, or from the mean squared error."""

LEAST_FREE = 3
"""Smallest number of clients minus number of coefficients for which the likelihood of A can be integrated."""

_SCALES = 32  # grid points of A; the best one is refined
_NARROWEST = 1e-3  # smallest positive spread on the grid, relative to the smallest standard error
_NODES, _WEIGHTS = np.polynomial.legendre.leggauss(48)
_SCANNED, _SCANS = 32, 2  # grid points of each scan for the range of A, and number of scans
_DROP = 16.0  # difference between the maximum of the log density and its value at the ends of the range
_REACH = 9.0  # standard deviations beyond which a normal has no mass in double precision


class AreaMeans(NamedTuple):
    """Predictions of m clients' means from the clients' estimates and a regression on p columns (the intercept first).

    Attributes:
      x, s: estimates and their standard errors, [m] each.
      basis: orthonormal columns that span the covariates, [m, p].
      beta: coefficients, [p].
      beta_covariance: covariance of the coefficients, for the fitted A, [p, p].
      variance: variance A of the clients' means around the regression, []. If A is zero, all predictions are values of
        the regression.
      mean: empirical best linear unbiased predictors, [m].
      regression: values z beta of the regression at the clients' covariates, [m].
      mse: estimated mean squared errors of ``mean``, [m]; positive even if A is zero.
      g1, g2, g3: terms of the mean squared error at the fitted A, [m] each; ``mse`` is g1 + g2 + 2 g3 for REML.
      shrinkage: fraction B of the distance from the estimate to the regression by which ``mean`` is moved, [m].
      residual: standardized residuals of x about the regression, [m]; N(0, 1) if the model holds, and zero for a client
        that alone determines a coefficient.
      risks: each client's term of ``risk``, [m]; ``risk`` is the mean of these terms.
      log_likelihood: log likelihood, []. For REML this is the restricted likelihood of the residuals in an orthonormal
        basis, which can be compared only between fits with the same covariates.
      statistic: Cochran's Q about the regression, []; chi-square with m - p degrees of freedom if A is zero.
      p_value: probability of a Q at least as large if A is zero, [].
      labels: the clients' labels, if the data came in a data frame.
    """

    x: Array
    s: Array
    basis: Array
    beta: Array
    beta_covariance: Array
    variance: Array
    mean: Array
    regression: Array
    mse: Array
    g1: Array
    g2: Array
    g3: Array
    shrinkage: Array
    residual: Array
    risks: Array
    log_likelihood: Array
    statistic: Array
    p_value: Array
    labels: inputs.Labels | None = None

    def to_frame(self, level: float | None = None) -> Any:
        """Return a pandas frame with a row per client; with ``level``, also interval endpoints ``low`` and ``high``."""
        return inputs.frame(self, len(self.x), level, leave=("basis",))

    @property
    def risk(self) -> Array:
        """Stein's unbiased risk estimate for ``mean``, [], which treats A as known."""
        return self.risks.mean()

    def interval(self, level: Scalar = 0.95, by: By = "integrated") -> tuple[Array, Array]:
        """Lower and upper interval endpoints for each client's theta, each [m].

        Args:
          level: coverage probability.
          by: kind of interval. "integrated" integrates over beta and A under flat priors, for either choice of ``fit``.
            "mse" is ``mean`` plus and minus the normal quantile times the root of ``mse``; these intervals cover theta
            too rarely if A is small compared to s^2.

        Raises:
          JaxpflError: if ``by`` is unknown, or the level is out of range.
        """
        if by not in get_args(By):
            raise unknown_name("by", by, get_args(By))
        if by == "mse":
            return about(self.mean, self.mse, level)
        inputs.level_within(level)
        m, p = self.basis.shape
        unit, y, D = _rescaled(self.x, self.s, self.basis)[:3]
        low, high = _integrated(self.basis, y, D, level, m - p)
        back = self.x - unit * y
        return back + unit * low, back + unit * high


def fay_herriot(x: Any, s: Any, z: Any, *, fit: Likelihood = "reml", intercept: bool = True) -> AreaMeans:
    """Estimate the regression coefficients and the variance A of the clients' means around the regression.

    The result contains a prediction of every client's mean.

    This function works under ``jax.jit``, and under ``jax.vmap`` over problems; ``fit`` and ``intercept`` are static.

    Args:
      x: the clients' estimates, [m]: an array, a list, or a column of a data frame.
      s: positive standard errors, [m], or one for all clients.
      z: the covariates, [m], [m, k], or columns of a data frame.
      fit: likelihood of A: "reml" (restricted), or "ml". With p coefficients (including the intercept), m clients and
        equal s, the ML estimate of A is on average too small by a fraction of p / m.
      intercept: whether to prepend a column of ones to the covariates. If so, they must not already contain such a
        column.

    Raises:
      JaxpflError: as in `ebnm` for x and s; if covariates are not finite numbers or are linearly dependent; if the
        data-frame indexes of x, s and z name different clients; or if there are not at least three more clients than
        coefficients. Within a JAX transformation, values are not checked.

    Examples:
      >>> rng = np.random.default_rng(0)
      >>> z, s = rng.normal(size=(200, 2)), rng.uniform(0.5, 1.5, 200)
      >>> theta = 1 + z @ np.array([2.0, -1.0]) + 0.5 * rng.normal(size=200)
      >>> found = fay_herriot(theta + s * rng.normal(size=200), s, z)
      >>> bool(((found.mean - theta) ** 2).mean() < 0.4)  # about 1.1 for each client alone
      True
    """
    if fit not in get_args(Likelihood):
        raise unknown_name("fit", fit, get_args(Likelihood))
    x, s, z = inputs.aligned(x=x, s=s, z=z)
    own, errors = checked(x, s, one=True)
    columns = regressors("z", z, len(own), LEAST_FREE, intercept=intercept)
    found = _solve(own, errors, jnp.asarray(columns, own.dtype), fit=fit, intercept=bool(intercept))
    return found._replace(labels=inputs.labels_of(x, s, z))


def regressors(name: str, z: Any, m: int, least: int, *, intercept: bool) -> Any:
    """Check and return the clients' covariates [m, k]. Traced covariates are not checked for linear independence.

    Raises:
      JaxpflError: as in `covariates`; if there are not at least ``least`` more clients than coefficients; or if columns
        are linearly dependent.
    """
    columns = covariates(z, m, name)
    p = columns.shape[1] + intercept
    if m < p + least:
        raise JaxpflError(f"{p} coefficients require at least {p + least} clients, got {m}")
    refuse_dependent(name, columns, intercept=intercept)
    return columns


def refuse_dependent(name: str, columns: Any, *, intercept: bool) -> None:
    """Check that no column is a linear combination of the intercept and earlier columns. Traced values are not checked.

    Raises:
      JaxpflError: if there is such a column; the message gives its index.
    """
    at = dependent(columns, intercept=intercept) if isinstance(columns, np.ndarray) else None
    if at is not None:
        what = " and the intercept" * intercept
        raise JaxpflError(f"{name}'s column {at} is a linear combination of the columns before it{what}: leave it out")


def about(mean: Array, mse: Array, level: Scalar) -> tuple[Array, Array]:
    """Endpoints [m] of the intervals: ``mean`` plus and minus a normal quantile times the root of ``mse``.

    Raises:
      JaxpflError: if the level is out of range.
    """
    inputs.level_within(level)
    reach = ndtri((1 + level) / 2) * jnp.sqrt(mse)
    return mean - reach, mean + reach


def dependent(z: np.ndarray, *, intercept: bool = True) -> int | None:
    """Index of the first column of z [m, k] that depends linearly on earlier columns and the intercept, or None."""
    ones = np.ones((len(z), int(intercept)))
    kind = jnp.result_type(float)  # columns must be linearly independent in the dtype of the fit
    bad = ~(triangle(np.hstack([ones, z]).astype(kind), np)[2] > float(jnp.finfo(kind).eps) ** 0.75)
    return int(np.argmax(bad)) - int(intercept) if bad.any() else None


@partial(full_precision.jit, static_argnames=("fit", "intercept"))
def _solve(x: Array, s: Array, z: Array, *, fit: Likelihood, intercept: bool) -> AreaMeans:
    if intercept:
        z = jnp.concatenate([jnp.ones((len(x), 1), x.dtype), z], axis=1)
    m, p = z.shape
    Q, R, _ = triangle(z)
    unit, y, D, start = _rescaled(x, s, Q)
    own = x / unit
    restricted = fit == "reml"
    A, likelihood = _likeliest(Q, y, D, restricted=restricted)

    w, factor, b, r = _least_squares(A, Q, y, D)
    B = D * w
    half = solve_triangular(factor, Q.T, lower=True)
    spread = (half**2).sum(axis=0)  # z' C^-1 z
    squares = (w**2).sum()
    g1, g2, g3 = A * B, B**2 * spread, B**2 * w * 2 / squares
    mse = g1 + g2 + 2 * g3 + (0 if restricted else B**2 * _trace(factor, Q, w) / squares)
    within = 1 / w - spread  # variance of the residual
    # If the residual variance is of rounding size, the client alone determines a coefficient.
    seen = within > 4 * p * jnp.finfo(x.dtype).eps / w
    residual = jnp.where(seen, r / jnp.sqrt(jnp.where(seen, within, 1)), 0 * r)
    # B (1 - spread w) is 1 minus the derivative of the prediction with respect to x.
    risks = (B * r) ** 2 + D * (1 - 2 * B * (1 - spread * w))
    statistic = (_least_squares(jnp.zeros_like(A), Q, y, D).residual ** 2 / D).sum()
    back = solve_triangular(R, jnp.eye(p, dtype=x.dtype))
    root = back @ solve_triangular(factor, jnp.eye(p, dtype=x.dtype), lower=True).T
    free = m - p * restricted
    square = unit**2
    return AreaMeans(
        x, s, Q, unit * (back @ (start + b)), square * (root @ root.T), square * A, unit * (own - B * r),
        unit * (own - r),
        square * mse, square * g1, square * g2, square * g3, B, residual, square * risks,
        likelihood - free * (math.log(2 * math.pi) / 2 + jnp.log(unit)), statistic,
        gammaincc((m - p) / 2, statistic / 2),
    )  # fmt: skip


class _Fitted(NamedTuple):
    """Weights 1 / V [m], lower Cholesky factor of C [p, p], coefficients [p] and residuals [m], for one value of A."""

    weight: Array
    factor: Array
    coefficients: Array
    residual: Array


def _least_squares(A: Array, Q: Array, y: Array, D: Array) -> _Fitted:
    """Generalized least squares of y on the columns Q [m, p] for one value of A and squared standard errors D [m]."""
    w = 1 / (A + D)
    factor = jnp.linalg.cholesky((Q * w[:, None]).T @ Q)
    b = cho_solve((factor, True), Q.T @ (w * y))
    return _Fitted(w, factor, b, y - Q @ b)


def _log_likelihood(A: Array, Q: Array, y: Array, D: Array, *, restricted: bool) -> Array:
    """Log likelihood of the variance A of the clients' means, up to a constant, []."""
    w, factor, _, r = _least_squares(A, Q, y, D)
    return (jnp.log(w).sum() - w @ r**2) / 2 - jnp.log(jnp.diag(factor)).sum() * restricted


def _likeliest(Q: Array, y: Array, D: Array, *, restricted: bool) -> tuple[Array, Array]:
    """Return the A of maximum likelihood, found by a grid and a root of the derivative, and its log likelihood."""
    kind = y.dtype
    value = partial(_log_likelihood, Q=Q, y=y, D=D, restricted=restricted)

    def rises(log_sd: Array) -> Array:
        w, factor, _, r = _least_squares(jnp.exp(2 * log_sd), Q, y, D)
        return ((w * r) ** 2).sum() + _trace(factor, Q, w) * restricted > w.sum()

    low, high = jnp.log(_NARROWEST * jnp.sqrt(D.min())), jnp.log(jnp.abs(y).max() + jnp.sqrt(D.max()))
    step = (high - low) / (_SCALES - 1)
    grid = low + step * jnp.arange(_SCALES, dtype=kind)
    about = grid[jnp.argmax(jax.lax.map(lambda log_sd: value(jnp.exp(2 * log_sd)), grid))]
    best = jnp.exp(2 * bisect(rises, about - step, about + step))
    none, some = value(jnp.zeros((), kind)), value(best)
    # A spread that increases the likelihood only by a rounding error counts as zero.
    alike = none >= some - 16 * jnp.finfo(kind).eps * (len(y) + jnp.abs(some))
    return jnp.where(alike, 0, best), jnp.where(alike, none, some)


def _trace(factor: Array, Q: Array, w: Array) -> Array:
    """Trace of C^-1 sum_j z_j z_j' / V_j^2, []."""
    return (solve_triangular(factor, Q.T * w, lower=True) ** 2).sum()


@partial(full_precision.jit, static_argnames="free")
def _integrated(Q: Array, y: Array, D: Array, level: Scalar, free: int) -> tuple[Array, Array]:
    """Endpoints [m] of the equal-tailed intervals for theta.

    Args:
      Q: orthonormal columns that span the covariates, [m, p].
      y: the estimates, [m]. A linear combination of the columns may have been subtracted.
      D: squared standard errors, [m], of the order of one.
      level: coverage probability.
      free: number of clients minus number of coefficients, m - p, at least 3.
    """
    kind = y.dtype
    typical = jnp.exp(jnp.log(D).mean())

    def log_density(v: Array) -> Array:
        return _log_likelihood(typical * jnp.expm1(v), Q, y, D, restricted=True) + v

    low = jnp.zeros((), kind)
    high = jnp.log1p(y @ y / typical) + 2 * _DROP / (free - 2)  # beyond y'y, the slope is at most -(free - 2) / 2
    for _ in range(_SCANS):
        grid = low + (high - low) * jnp.linspace(0, 1, _SCANNED, dtype=kind)
        density = jax.lax.map(log_density, grid)
        inside = density > density.max() - _DROP
        first, last = jnp.argmax(inside), _SCANNED - 1 - jnp.argmax(inside[::-1])
        low, high = grid[jnp.maximum(first - 1, 0)], grid[jnp.minimum(last + 1, _SCANNED - 1)]

    v = low + (high - low) * (1 + jnp.asarray(_NODES, kind)) / 2
    A = typical * jnp.expm1(v)
    share = jax.nn.softmax(jax.lax.map(log_density, v) + jnp.log(jnp.asarray(_WEIGHTS, kind)))
    of_nodes = jax.lax.map(lambda A: _least_squares(A, Q, y, D)[1:3], A)

    def ends(client: Array) -> tuple[Array, Array]:
        own, at, error = Q[client], y[client], D[client]

        def conditional(A: Array, factor: Array, b: Array) -> tuple[Array, Array]:
            B = error / (A + error)
            spread = (solve_triangular(factor, own.T, lower=True) ** 2).sum(axis=0)
            return at - B * (at - own @ b), jnp.sqrt(A * B + B**2 * spread)

        mean, sd = jax.vmap(conditional)(A, *of_nodes)  # [nodes, clients]

        def quantile(p: Scalar) -> Array:
            def below(t: Array) -> Array:
                return share @ erfc((mean - t) / (sd * 2**0.5)) / 2 < p

            return bisect(below, (mean - _REACH * sd).min(axis=0), (mean + _REACH * sd).max(axis=0))

        return quantile((1 - level) / 2), quantile((1 + level) / 2)

    return blockwise(ends, jnp.arange(len(y)))


def _rescaled(x: Array, s: Array, Q: Array) -> tuple[Array, Array, Array, Array]:
    """Divide estimates x and standard errors s by a unit, which is a power of two, and fit x on the columns Q.

    The result is the unit, the residuals of the least-squares fit, the rescaled s^2, and the fit's coefficients.
    """
    unit = jnp.exp2(jnp.round(jnp.log2(s).mean()))  # scaling by a power of two makes no rounding errors
    start = Q.T @ (x / unit)
    return unit, x / unit - Q @ start, (s / unit) ** 2, start


def triangle(z: Any, xp: Any = jnp) -> tuple[Any, Any, Any]:
    """Compute the QR decomposition of z [m, p], and the fraction of each column's length that is orthogonal to earlier
    columns, [p].

    ``xp`` is the array module: jax.numpy or NumPy.
    """
    most = xp.abs(z).max(axis=0)
    z = z / xp.where(most > 0, most, 1)  # keeps the squares within the range of floats
    length = xp.sqrt((z**2).sum(axis=0))
    Q, R = xp.linalg.qr(z / xp.where(length > 0, length, 1))
    return Q, R * length * most, xp.abs(xp.diag(R))


def covariates(z: Any, m: int, name: str = "z", rows: str = "clients") -> Any:
    """Check and return covariates [m, k], in double precision unless they are traced.

    Args:
      z: covariates, [m] or [m, k].
      m: number of rows.
      name: name of the argument, for messages.
      rows: name for the rows in messages, in the plural.

    Raises:
      JaxpflError: if the covariates are not numbers, not finite, or have a different number of rows.
    """
    z = inputs.numbers(name, z, f"with a row for each of the {rows}")
    if z.ndim not in (1, 2) or len(z) != m:
        raise JaxpflError(f"{name} must have a row for each of the {m} {rows}, got shape {z.shape}")
    columns = z.reshape(m, -1) if z.ndim == 1 else z
    if isinstance(columns, np.ndarray) and not np.isfinite(columns).all():
        row, column = np.argwhere(~np.isfinite(columns))[0]
        of = f"{rows.removesuffix('s')} {row} in column {column}"
        raise JaxpflError(f"{name} must be finite, got {columns[row, column]} for {of}")
    return columns

r"""Normal means about a regression on covariates: the area model of Fay and Herriot, by ML or REML.

Client i has an estimate :math:`x_i \sim N(\theta_i, s_i^2)`, and :math:`\theta_i \sim N(z_i^\top \beta, A)`. With
:math:`V_i = A + s_i^2`, :math:`B_i = s_i^2 / V_i`, :math:`C = \sum_i z_i z_i^\top / V_i` and beta by generalised least
squares, the empirical best linear unbiased predictor is :math:`\hat\theta_i = x_i - B_i (x_i - z_i^\top \hat\beta)`. To
the order 1/m its mean squared error is :math:`g_1 + g_2 + g_3`,

.. math:: g_{1i} = A B_i, \quad g_{2i} = B_i^2\, z_i^\top C^{-1} z_i, \quad
   g_{3i} = \frac{B_i^2}{V_i} \frac{2}{\sum_j V_j^{-2}},

of theta_i itself, of beta, and of A. At the fitted A the first is too small by g_3, for REML; for ML also by
:math:`B_i^2\, \mathrm{tr}(C^{-1} \sum_j z_j z_j^\top V_j^{-2}) / \sum_j V_j^{-2}`, the bias of A by the slope of g_1.

Either likelihood is of one parameter and is climbed from a grid of starts, as it may have several maxima; a step needs
the sums over clients of p^2 products, so that fixed-size messages suffice for each, but none for the whole fit.

References: Fay and Herriot 1979, "Estimates of income for small places"; Prasad and Rao 1990, "The estimation of the
mean squared error of small-area estimators"; Datta and Lahiri 2000, "A unified measure of uncertainty of estimated best
linear unbiased predictors in small area estimation problems", for ML and REML.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any, Literal, NamedTuple, TypeAlias, get_args

import jax.numpy as jnp
import numpy as np
from jax.scipy.linalg import solve_triangular
from jax.scipy.special import gammaincc, ndtri

from jaxpfl.core import full_precision
from jaxpfl.core.types import Array, Scalar
from jaxpfl.estimators import inputs
from jaxpfl.estimators.frames import Labels, frame, labels_of
from jaxpfl.estimators.normal_means.area_fit import Likelihood, least_squares, likeliest, trace
from jaxpfl.estimators.normal_means.area_interval import integrated
from jaxpfl.estimators.normal_means.fit import checked
from jaxpfl.support.errors import JaxpflError, unknown_name

By: TypeAlias = Literal["integrated", "mse"]
"""Intervals that integrate over the spread, and those by the mean squared error."""

LEAST_FREE = 3
"""Clients beyond the number of coefficients, with which the likelihood of A can be integrated."""


class AreaMeans(NamedTuple):
    """Predictions of m clients' means about their regression on p columns, the intercept first.

    Attributes:
      x, s: the estimates and their standard errors, [m] each.
      basis: orthonormal columns that span the covariates, [m, p].
      beta: coefficients, [p].
      beta_covariance: of the coefficients, for the fitted A, [p, p].
      variance: A, []; zero where no spread is likelier than any, and then all predictions are on the regression.
      mean: empirical best linear unbiased predictors, [m].
      regression: z beta, [m].
      mse: estimated mean squared errors of ``mean``, [m]; above zero also if A is.
      g1, g2, g3: the terms of the error at the fitted A, [m] each; ``mse`` is g1 + g2 + 2 g3 for REML.
      shrinkage: B, the share of its distance to the regression that an estimate gives up, [m].
      residual: standardised distances of x to the regression, [m]; N(0, 1) if the model holds, and zero for a client
        that alone determines a coefficient.
      risks: the terms of ``risk``, [m].
      log_likelihood: [], the restricted one for REML: of residuals in an orthonormal basis, to be compared between fits
        with the same covariates only.
      statistic: Cochran's Q about the regression, []; chi-square with m - p degrees of freedom if A is zero.
      p_value: probability of a Q at least as large, [].
      labels: of the clients, where they came in a frame.
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
    labels: Labels | None = None

    def to_frame(self, level: float | None = None) -> Any:
        """A pandas frame of what is known of each client; with the ends of the intervals where a level is given."""
        return frame(self, len(self.x), level, leave=("basis",))

    @property
    def risk(self) -> Array:
        """Stein's unbiased estimate of the mean squared error of ``mean``, [], without the cost of fitting A."""
        return self.risks.mean()

    def interval(self, level: Scalar = 0.95, by: By = "integrated") -> tuple[Array, Array]:
        """Ends of intervals of every client's theta, [m] each.

        Args:
          level: probability inside.
          by: "integrated" integrates over beta and A under flat priors (see `area_interval`), whatever ``fit`` was;
            "mse" is ``mean`` plus and minus the normal quantile times the root of ``mse``, which covers too little
            where A is small beside s^2.

        Raises:
          JaxpflError: for an unknown ``by``.
        """
        if by not in get_args(By):
            raise unknown_name("by", by, get_args(By))
        if by == "mse":
            return about(self.mean, self.mse, level)
        inputs.level(level)
        m, p = self.basis.shape
        unit, y, D = _rescaled(self.x, self.s, self.basis)[:3]
        low, high = integrated(self.basis, y, D, level, m - p)
        back = self.x - unit * y
        return back + unit * low, back + unit * high


def fay_herriot(x: Any, s: Any, z: Any, *, fit: Likelihood = "reml", intercept: bool = True) -> AreaMeans:
    """Fit the regression and the spread about it, and predict every client's mean.

    Jits, and vmaps over problems; ``fit`` and ``intercept`` are static.

    Args:
      x: the clients' estimates, [m]: an array, a list, or a column of a frame.
      s: their standard errors, [m], or one for all; above zero.
      z: the covariates, [m], [m, k], or columns of a frame.
      fit: of A: "reml" (restricted maximum likelihood), or "ml", which is too small on average, by the share p / m if
        all s are equal.
      intercept: whether a column of ones is put before the covariates.

    Raises:
      JaxpflError: as `ebnm` for x and s; for covariates that are no numbers, not finite, of other clients, or linearly
        dependent; and for fewer than three clients more than coefficients. Under a transformation, where values are not
        known, such values make all results NaN.

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
    columns = covariates(z, len(own))
    p = columns.shape[1] + intercept
    if len(own) < p + LEAST_FREE:
        raise JaxpflError(f"{p} coefficients need at least {p + LEAST_FREE} clients, got {len(own)}")
    if isinstance(columns, np.ndarray):
        at = dependent(columns, intercept=intercept)
        if at is not None:
            what = " and the intercept" * intercept
            raise JaxpflError(f"z's column {at} is a linear combination of the columns before it{what}: leave it out")
    found = solved(own, errors, jnp.asarray(columns, own.dtype), fit=fit, intercept=bool(intercept))
    return found._replace(labels=labels_of(x, s, z))


def about(mean: Array, mse: Array, level: Scalar) -> tuple[Array, Array]:
    """Ends of normal intervals of some mean squared errors about their means, [m] each."""
    inputs.level(level)
    reach = ndtri((1 + level) / 2) * jnp.sqrt(mse)
    return mean - reach, mean + reach


def dependent(z: np.ndarray, *, intercept: bool = True) -> int | None:
    """Index of the first column [m, k] that those before it, and the intercept, determine; None without one."""
    ones = np.ones((len(z), int(intercept)))
    kind = jnp.result_type(float)  # in which the fit has to tell the columns apart
    bad = ~(triangle(np.hstack([ones, z]).astype(kind), np)[2] > _least(kind))
    return int(np.argmax(bad)) - int(intercept) if bad.any() else None


@partial(full_precision.jit, static_argnames=("fit", "intercept"))
def solved(x: Array, s: Array, z: Array, *, fit: Likelihood, intercept: bool) -> AreaMeans:
    """The fit of `fay_herriot` to estimates, errors [m] and covariates [m, k] that have been checked."""
    if intercept:
        z = jnp.concatenate([jnp.ones((len(x), 1), x.dtype), z], axis=1)
    m, p = z.shape
    good = jnp.isfinite(x).all() & (jnp.isfinite(s) & (s > 0)).all() & jnp.isfinite(z).all()
    Q, R, left = triangle(jnp.where(good, z, 1))
    good &= (left > _least(x.dtype)).all()
    unit, y, D, start = _rescaled(jnp.where(good, x, jnp.nan), jnp.where(good, s, jnp.nan), Q)
    own = jnp.where(good, x / unit, jnp.nan)
    A, likelihood = likeliest(Q, y, D, fit)

    w, factor, b, r = least_squares(A, Q, y, D)
    B = D * w
    half = solve_triangular(factor, Q.T, lower=True)
    spread = (half**2).sum(axis=0)  # z' C^-1 z
    squares = (w**2).sum()
    g1, g2, g3 = A * B, B**2 * spread, B**2 * w * 2 / squares
    mse = g1 + g2 + 2 * g3 + (B**2 * trace(factor, Q, w) / squares if fit == "ml" else 0)
    within = 1 / w - spread  # of the residual
    seen = within > 4 * p * jnp.finfo(x.dtype).eps / w
    residual = jnp.where(seen, r / jnp.sqrt(jnp.where(seen, within, 1)), 0 * r)
    # As B (1 - spread w) is what the prediction does not follow of a small change of x.
    risks = (B * r) ** 2 + D * (1 - 2 * B * (1 - spread * w))
    statistic = (least_squares(jnp.zeros_like(A), Q, y, D).residual ** 2 / D).sum()
    back = solve_triangular(R, jnp.eye(p, dtype=x.dtype))
    root = back @ solve_triangular(factor, jnp.eye(p, dtype=x.dtype), lower=True).T
    free = m - p * (fit == "reml")
    square = unit**2
    return AreaMeans(
        x, s, Q, unit * (back @ (start + b)), square * (root @ root.T), square * A, unit * (own - B * r),
        unit * (own - r),
        square * mse, square * g1, square * g2, square * g3, B, residual, square * risks,
        likelihood - free * (math.log(2 * math.pi) / 2 + jnp.log(unit)), statistic,
        gammaincc((m - p) / 2, statistic / 2),
    )  # fmt: skip


def _rescaled(x: Array, s: Array, Q: Array) -> tuple[Array, Array, Array, Array]:
    """A unit; the estimates less their ordinary least squares fit, and squared errors in it; the fit's coefficients."""
    unit = jnp.exp2(jnp.round(jnp.log2(s).mean()))  # scaling by a power of two makes no rounding errors
    start = Q.T @ (x / unit)
    return unit, x / unit - Q @ start, (s / unit) ** 2, start


def triangle(z: Any, xp: Any = jnp) -> tuple[Any, Any, Any]:
    """QR of the columns, and of each the share of its length that those before it do not explain, [p].

    ``xp`` is jax.numpy, or NumPy on the host.
    """
    most = xp.abs(z).max(axis=0)
    z = z / xp.where(most > 0, most, 1)  # whose squares are within the range of floats
    length = xp.sqrt((z**2).sum(axis=0))
    Q, R = xp.linalg.qr(z / xp.where(length > 0, length, 1))
    return Q, R * length * most, xp.abs(xp.diag(R))


def _least(kind: Any) -> float:
    return float(jnp.finfo(kind).eps) ** 0.75


def covariates(z: Any, m: int, name: str = "z", rows: str = "clients") -> Any:
    """Covariates [m, k] in double precision where their values are known; ``name`` and ``rows`` are for messages.

    Raises:
      JaxpflError: for what is no numbers, not finite, or of other rows.
    """
    z = inputs.numbers(name, z, f"a row for each of the {rows}")
    if z.ndim not in (1, 2) or len(z) != m:
        raise JaxpflError(f"{name} must have a row for each of the {m} {rows}, got shape {z.shape}")
    columns = z.reshape(m, -1) if z.ndim == 1 else z
    if isinstance(columns, np.ndarray) and not np.isfinite(columns).all():
        row, column = np.argwhere(~np.isfinite(columns))[0]
        of = f"{rows.removesuffix('s')} {row} in column {column}"
        raise JaxpflError(f"{name} must be finite, got {columns[row, column]} for {of}")
    return columns

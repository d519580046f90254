r"""Normal means of clients in groups, such as pupils in schools. The spreads within and between groups are fitted by
REML.

Client i in group g has an estimate :math:`x_i \sim N(\theta_i, s_i^2)`, and :math:`\theta_i \sim N(\mu_g, A)`,
:math:`\mu_g \sim N(\mu, B)`. Let :math:`w_i = 1 / (A + s_i^2)` and :math:`W_k = \sum_{i \in g} w_i^k`. Let :math:`\bar
x_g` be the mean of the group's estimates with weights w_i. Given these estimates, mu_g has the variance :math:`q_g = B
/ (1 + B W_1)`. The best linear unbiased predictors are

.. math:: \hat\mu_g = \hat\mu + q_g W_1 (\bar x_g - \hat\mu), \qquad
   \hat\theta_i = x_i - b_i (x_i - \hat\mu_g), \quad b_i = s_i^2 w_i,

where :math:`\hat\mu` is estimated by generalized least squares. The variance of :math:`\hat\mu` is :math:`C^{-1}`,
where :math:`C = \sum_g W_1 / (1 + B W_1)`. The mean squared error of :math:`\hat\theta_i` is estimated by :math:`g_1 +
g_2 + 2 g_3`. Here g_1 is the error at known A, B and mu, g_2 is due to the estimation of mu, and g_3 is due to the
estimation of A and B:

.. math:: g_1 = A b_i + b_i^2 q_g, \quad g_2 = \frac{b_i^2}{C (1 + B W_1)^2}, \quad
   g_3 = \mathrm{tr}\{\mathrm{Cov}(\partial \hat\theta_i / \partial (A, B))\, I^{-1}\},

where I is the Fisher information of A and B. g_3 is counted twice because g_1 at the fitted A and B is too small by g_3
on average. The mean squared error of :math:`\hat\mu_g` has the same form, with b_i = 1 and without the term A b_i.

The restricted likelihood is maximized by Newton steps from the best point of a grid of A and B. The result is compared
with fits that have A = 0, B = 0, or both, and the fit with the largest likelihood is kept. Each step needs a few new
sums over the clients of each group. No fixed set of sums is enough for the whole fit.

References: Henderson 1975, "Best linear unbiased estimation and prediction under a selection model"; Prasad and Rao
1990, "The estimation of the mean squared error of small-area estimators"; Datta and Lahiri 2000, "A unified measure of
uncertainty of estimated best linear unbiased predictors in small area estimation problems"; Self and Liang 1987,
"Asymptotic properties of maximum likelihood estimators and likelihood ratio tests under nonstandard conditions".
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.scipy.special import gammaincc, ndtr

from jaxpfl.core import full_precision
from jaxpfl.core.search import climb
from jaxpfl.core.types import Array, Scalar
from jaxpfl.estimators.empirical_bayes import inputs
from jaxpfl.estimators.empirical_bayes.area import about
from jaxpfl.estimators.empirical_bayes.normal_means import checked
from jaxpfl.support.errors import JaxpflError

LEAST_GROUPS = 3
"""Smallest number of groups from which the spread between groups is fitted."""
_SCALES = 12  # grid points along A and along B


class GroupMeans(NamedTuple):
    """Predictions of m clients' means in G groups, and of the groups' means.

    Attributes:
      x, s: estimates and their standard errors, [m] each.
      group: index of each client's group, [m].
      overall, overall_stderr: mean mu [] of the groups' means, and the standard error [] of mu if A and B are known.
      within: variance A of clients about their group's mean, [].
      between: variance B of the groups' means, [].
      mean: predictors of theta_i, [m].
      mse: estimated mean squared errors of ``mean``, [m]; positive even if A and B are zero.
      g1, g2, g3: terms of ``mse``, [m] each; ``mse`` is g1 + g2 + 2 g3.
      shrinkage: the fraction b by which ``mean`` moves from the estimate toward the group's mean, [m].
      residual: standardized differences between x and its prediction from all other clients, [m]; N(0, 1) if the model
        holds.
      risks: each client's term of ``risk``, [m]; ``risk`` is the mean of these terms.
      group_mean, group_mse: predictors of mu_g and their estimated mean squared errors, [G].
      group_shrinkage: 1 / (1 + B W_1), the fraction by which ``group_mean`` moves from the weighted mean toward mu,
        [G].
      group_residual: standardized differences between the groups' weighted means and mu, [G]; N(0, 1) if the model
        holds.
      log_likelihood: restricted log likelihood, []: the log likelihood of m - 1 orthonormal contrasts of x.
      statistic: Cochran's Q about the groups' own means, []; chi-square with m - G degrees of freedom if A is zero.
      p_value: probability of a Q at least as large if A is zero, [].
      ratio: likelihood-ratio statistic, []: twice the amount by which the log likelihood exceeds its maximum with B =
        0.
      group_p_value: probability of a ratio at least as large if B is zero, []. This is half the tail probability of a
        chi-square with one degree of freedom, an approximation for many groups. The p-value is 1 if B = 0 maximizes the
        likelihood.
      labels: the clients' labels, if the data came in a data frame.
    """

    x: Array
    s: Array
    group: Array
    overall: Array
    overall_stderr: Array
    within: Array
    between: Array
    mean: Array
    mse: Array
    g1: Array
    g2: Array
    g3: Array
    shrinkage: Array
    residual: Array
    risks: Array
    group_mean: Array
    group_mse: Array
    group_shrinkage: Array
    group_residual: Array
    log_likelihood: Array
    statistic: Array
    p_value: Array
    ratio: Array
    group_p_value: Array
    labels: inputs.Labels | None = None

    def to_frame(self, level: float | None = None) -> Any:
        """Return a pandas frame with a row per client; with ``level``, also interval endpoints ``low`` and ``high``."""
        leave = tuple(name for name in self._fields if name.startswith("group_"))
        return inputs.frame(self, len(self.x), level, leave=leave)

    @property
    def risk(self) -> Array:
        """Stein's unbiased risk estimate for ``mean``, [], which treats A and B as known."""
        return self.risks.mean()

    def interval(self, level: Scalar = 0.95) -> tuple[Array, Array]:
        """Interval endpoints, [m] each: ``mean`` minus and plus the normal quantile times the root of ``mse``."""
        return about(self.mean, self.mse, level)

    def group_interval(self, level: Scalar = 0.95) -> tuple[Array, Array]:
        """Interval endpoints [G] for the groups' means, as in `interval`; intervals are too narrow for few groups."""
        return about(self.group_mean, self.group_mse, level)


def ebnm_groups(x: Any, s: Any, group: Any, *, groups: int | None = None) -> GroupMeans:
    """Fit the spreads within and between groups, and predict every client's and every group's mean.

    This function works under ``jax.jit``, and under ``jax.vmap`` over problems; ``groups`` is static. Fitting a million
    clients in 31,000 groups takes seconds.

    Args:
      x: the clients' estimates, [m]: an array, a list, or a column of a data frame.
      s: positive standard errors, [m], or one for all clients.
      group: group of each client, [m]: numbers or names. The sorted distinct values are the groups. If ``groups`` is
        given, the values are numbers in 0 ... groups - 1.
      groups: number of groups G; required within a JAX transformation, where the values of ``group`` are not known. A
        group without clients is predicted like a new group, by mu.

    Raises:
      JaxpflError: if x or s are invalid (as in `ebnm`); if ``group`` has a different length, or values that are neither
        names nor numbers in this range; if there are fewer than three groups; or if no group has two clients. In the
        last case A and B cannot be distinguished. Within a JAX transformation, values are not checked.

    Examples:
      >>> rng = np.random.default_rng(0)
      >>> group = np.repeat(np.arange(100), 8)
      >>> theta = rng.normal(size=100)[group] + 0.5 * rng.normal(size=800)
      >>> found = ebnm_groups(theta + rng.normal(size=800), 1.0, group)
      >>> bool(((found.mean - theta) ** 2).mean() < 0.3)  # 1 for each client alone, about 0.55 without the groups
      True
    """
    x, s, group = inputs.aligned(x=x, s=s, group=group)
    own, errors = checked(x, s, one=False)
    index, names = inputs.places("group", group, groups, len(own), "clients")
    number = len(names) if groups is None else int(groups)
    if number < LEAST_GROUPS:
        raise JaxpflError(f"at least {LEAST_GROUPS} groups are required to estimate their spread, got {number}")
    if isinstance(index, np.ndarray) and (np.bincount(index) < 2).all():
        raise JaxpflError(
            "at least one group must have two clients, got one client in every group: use ebnm, without groups"
        )
    found = _solve(own, errors, jnp.asarray(index), groups=number)
    return found._replace(labels=inputs.labels_of(x, s, group))


class _Sums(NamedTuple):
    """Parts of the restricted log likelihood that do not depend on B.

    Attributes:
      w: weights w_i, [m].
      total: sums W_1 of the weights in each of G groups, [G].
      center: weighted means of the groups, [G].
      rest: sum of the terms of twice the log likelihood that do not depend on B, [].
    """

    w: Array
    total: Array
    center: Array
    rest: Array


@partial(full_precision.jit, static_argnames="groups")
def _solve(x: Array, s: Array, group: Array, *, groups: int) -> GroupMeans:
    m = len(x)
    unit = jnp.exp2(jnp.round(jnp.log2(s).mean()))  # scaling by a power of two makes no rounding errors
    origin = jnp.median(x)
    y, D = (x - origin) / unit, (s / unit) ** 2
    A, B, value, least = _likeliest(y, D, group, groups)

    at = _sums(A, y, D, group, groups)
    w, W, center = at.w, at.total, at.center
    W2, W3 = _grouped(w**2, group, groups), _grouped(w**3, group, groups)
    F = 1 + B * W
    q, precision = B / F, W / F
    C = precision.sum()
    mu = (precision @ center) / C
    group_mean = mu + q * W * (center - mu)
    information = jnp.stack([(W2 - 2 * q * W3 + (q * W2) ** 2).sum(), (W2 / F**2).sum(), (precision**2).sum()]) / 2

    # Errors due to the estimated A and B: g_3 of the groups' means, and then g_3 of the clients' means.
    slopes = jnp.stack([q**2 * (W3 - q * W2**2), -q * W2 / F**2, W / F**3])
    group_g3 = _traced(slopes, information)
    b = D * w
    own_q, own_W2, own_F, own_square = (of[group] for of in (q, W2, F, slopes[0]))
    g1, g2 = A * b + b**2 * own_q, b**2 / (C * own_F**2)
    of_A = w - own_q * w**2 - 2 * own_q * (w**2 - own_q * w * own_W2) + own_square
    g3 = _traced(b**2 * jnp.stack([of_A, (w - own_q * own_W2) / own_F**2, slopes[2][group]]), information)
    mse, group_mse = g1 + g2 + 2 * g3, q + 1 / (C * F**2) + 2 * group_g3

    r = y - group_mean[group]
    variance = w - own_q * w**2 - (w / own_F) ** 2 / C
    alone = 1 / jnp.where(precision > 0, precision, jnp.inf) - 1 / C
    # Derivative of the group's predictor with respect to x.
    follows = w * (own_q + 1 / (C * own_F**2))
    risks = (b * r) ** 2 + D * (1 - 2 * b * (1 - follows))
    zero = jnp.zeros_like(A)
    apart = (y - _sums(zero, y, D, group, groups).center[group]) ** 2 / D
    degrees = m - (_grouped(jnp.ones_like(y), group, groups) > 0).sum()
    ratio = jnp.maximum(2 * (value - least), 0) * (B > 0)
    square = unit**2
    basis = math.log(m) / 2  # correction for contrasts in an orthonormal basis
    return GroupMeans(
        x, s, group, unit * mu + origin, unit / jnp.sqrt(C), square * A, square * B, unit * (y - b * r) + origin,
        square * mse, square * g1, square * g2, square * g3, b, w * r / jnp.sqrt(variance), square * risks,
        unit * group_mean + origin, square * group_mse, 1 / F,
        jnp.where(alone > 0, (center - mu) / jnp.sqrt(jnp.where(alone > 0, alone, 1)), 0 * mu),
        value + basis - (m - 1) * (math.log(2 * math.pi) / 2 + jnp.log(unit)), apart.sum(),
        gammaincc(degrees / 2, apart.sum() / 2), ratio, jnp.where(B > 0, ndtr(-jnp.sqrt(ratio)), 1 + 0 * ratio),
    )  # fmt: skip


def _likeliest(y: Array, D: Array, group: Array, groups: int) -> tuple[Array, Array, Array, Array]:
    """Return the A and B that maximize the log likelihood, this maximum, and the maximum with B = 0.

    Both maxima lack the same constant.
    """
    kind, m = y.dtype, len(y)

    def between(at: _Sums, B: Array) -> Array:
        F = 1 + B * at.total
        precision = at.total / F
        mu = (precision @ at.center) / precision.sum()
        value = at.rest - jnp.log(F).sum() - precision @ (at.center - mu) ** 2
        return (value - jnp.log(precision.sum())) / 2

    def value(A: Array, B: Array) -> Array:
        return between(_sums(A, y, D, group, groups), B)

    # Each value of A needs a pass over all clients; each value of B needs only a pass over the groups.
    low, high = jnp.log(jnp.sqrt(D.min()) / 16), jnp.log(jnp.abs(y).max() + jnp.sqrt(D.max()))
    grid = low + (high - low) * jnp.arange(_SCALES, dtype=kind) / (_SCALES - 1)
    variances = jnp.concatenate([jnp.zeros(1, kind), jnp.exp(2 * grid)])

    def row(A: Array) -> Array:
        at = _sums(A, y, D, group, groups)
        return jax.lax.map(lambda B: between(at, B), variances)

    values = jax.lax.map(row, variances)
    first, second = jnp.unravel_index(jnp.argmax(values[1:, 1:]), (_SCALES, _SCALES))
    starts = (
        jnp.stack([jnp.argmax(values[1:, 0]) + 1, 0 * first, first + 1]),
        jnp.stack([0 * first, jnp.argmax(values[0, 1:]) + 1, second + 1]),
    )

    def climbed(given: tuple[Array, Array]) -> tuple[Array, Array]:
        """Maximize the likelihood from the grid point with indices ``given``; return the best (A, B) and its log
        likelihood.

        If A or B is zero at the grid point, it stays zero.
        """
        start = jnp.stack([jnp.log(variances[i]) / 2 for i in given])
        free = jnp.isfinite(start)

        def spreads(at: Array) -> Array:
            return jnp.where(free, jnp.exp(2 * at), 0)

        at, best = climb(lambda at: value(*spreads(at)) / m, jnp.where(free, start, 0)[None])
        return spreads(at), best * m

    # lax.map compiles ``climbed`` once for both starts.
    fits, reached = jax.lax.map(climbed, starts)
    found = jnp.concatenate([values[:1, 0], reached])
    # A spread that increases the likelihood only by a rounding error counts as zero.
    enough = found >= found.max() - 16 * jnp.finfo(kind).eps * (m + jnp.abs(found.max()))
    best = jnp.argmax(enough)
    A, B = jnp.concatenate([jnp.zeros((1, 2), kind), fits])[best] + jnp.where(jnp.isnan(found[0]), jnp.nan, 0)
    return A, B, found[best], jnp.maximum(found[0], found[1])


def _sums(A: Array, y: Array, D: Array, group: Array, groups: int) -> _Sums:
    w = 1 / (A + D)
    total = _grouped(w, group, groups)
    center = _grouped(w * y, group, groups) / jnp.where(total > 0, total, 1)
    return _Sums(w, total, center, jnp.log(w).sum() - w @ (y - center[group]) ** 2)


def _grouped(of: Array, group: Array, groups: int) -> Array:
    return jax.ops.segment_sum(of, group, num_segments=groups)


def _traced(slopes: Array, information: Array) -> Array:
    """Traces [n] of S I^-1 for n matrices S and a matrix I, symmetric 2 x 2, as upper triangles [3, n] and [3]."""
    a, c, d = information
    return (d * slopes[0] - 2 * c * slopes[1] + a * slopes[2]) / (a * d - c**2)

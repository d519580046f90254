r"""Probabilities and rates about a regression on covariates: Beta-binomial and Poisson-Gamma by marginal likelihood.

Client i has :math:`Z_i` successes in :math:`n_i` trials, and :math:`p_i \sim \mathrm{Beta}` of mean :math:`\mu_i` and
n_0 pseudo-trials, :math:`\operatorname{logit} \mu_i = x_i^\top \beta`; or :math:`Z_i` events in an exposure of
:math:`e_i`, and a rate that is Gamma of mean :math:`\mu_i` and shape a, :math:`\log \mu_i = x_i^\top \beta`, which is
the negative binomial regression of variance :math:`\mu + \mu^2 / a`. Either posterior mean lies between the client's
own share or rate and its place on the regression,

.. math:: \mu_i + \frac{n_i}{n_0 + n_i} (Z_i / n_i - \mu_i), \qquad
   \mu_i + \frac{e_i}{a / \mu_i + e_i} (Z_i / e_i - \mu_i).

beta and n_0 or a are climbed to together, from the regression without spread. Where no spread is likelier than any, all
clients are on it. A step of the fit needs sums over clients of the likelihood's derivatives by all parameters; none of
a fixed size suffices for the whole fit.

References: Crowder 1978, "Beta-binomial anova for proportions"; Lawless 1987, "Negative binomial and mixed Poisson
regression"; Christiansen and Morris 1997, "Hierarchical Poisson regression modeling"; Self and Liang 1987.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.scipy.linalg import solve_triangular
from jax.scipy.special import ndtr

from jaxpfl.core import full_precision
from jaxpfl.core.types import Array, Key, Scalar
from jaxpfl.estimators import inputs, marginals
from jaxpfl.estimators.climb import climb
from jaxpfl.estimators.frames import Labels, labels_of
from jaxpfl.estimators.normal_means.area import covariates, dependent, triangle
from jaxpfl.estimators.rate_answers import Rates
from jaxpfl.estimators.rates import checked_events, checked_trials, posterior
from jaxpfl.support.errors import JaxpflError

_STARTS = (-1.0, 1.0, 3.0, 5.0, 8.0)
"""Logarithms of n_0 or a."""
FAR = 15.0
"""Distance on the scale of the link from the pooled rate at which coefficients count as divergent."""
LEAST_FREE = 2
"""Clients beyond the number of coefficients."""


class RegressedRates(NamedTuple):
    """Posteriors of m clients' probabilities or rates about their regression on p columns, the intercept first.

    The fitted regression and spread count as known.

    Attributes:
      rates: the posteriors; ``prior_mean`` and ``prior_size`` are of each client, [m].
      beta: coefficients, [p].
      beta_covariance: their part of the inverse of the observed information, [p, p].
      spread: n_0 of probabilities, the shape a of rates, []; infinite without spread.
      log_marginal: log likelihood of all counts, [].
      ratio: twice the log likelihood ratio to no spread about the regression, [].
      p_value: probability of a ratio at least as large without spread, [], for many clients half that of a chi-square
        with one degree of freedom; 1 where no spread is likelier than any.
      labels: of the clients, where they came in a frame.
    """

    rates: Rates
    beta: Array
    beta_covariance: Array
    spread: Array
    log_marginal: Array
    ratio: Array
    p_value: Array
    labels: Labels | None = None

    @property
    def mean(self) -> Array:
        """Posterior means, the personalised estimates, [m]."""
        return self.rates.mean

    def interval(self, level: Scalar = 0.95) -> tuple[Array, Array]:
        """Ends of the equal-tailed credible intervals, [m] each."""
        return self.rates.interval(level)

    def exceedance(self, threshold: Any = None) -> Array:
        """Posterior probability of more than a threshold, [m]; without spread 0 or 1, and 0 at the regression.

        Args:
          threshold: [] or [m], each client's own place on the regression unless given.

        Raises:
          JaxpflError: as that of `Rates`.
        """
        return self.rates._replace(labels=self.labels).exceedance(threshold)

    def sample(self, key: Key) -> Array:
        """One draw of every client's probability or rate from its posterior, [m], as for `normal_means.ranks`."""
        return self.rates.sample(key)

    def to_frame(self, level: float | None = None, *, threshold: Any = None, key: Key | None = None) -> Any:
        """A pandas frame of what is known of each client.

        Args:
          level, key: as those of `Rates.to_frame`.
          threshold: of the column ``exceedance``; each client's own place on the regression unless given.
        """
        return self.rates._replace(labels=self.labels).to_frame(level, threshold=threshold, key=key)


def ebbinomial_regression(successes: Any, trials: Any, x: Any, *, intercept: bool = True) -> RegressedRates:
    """Fit Beta priors about a logistic regression, and return every client's posterior.

    Jits, and vmaps over problems; ``intercept`` is static.

    Args:
      successes, trials: as those of `ebbinomial`, [m].
      x: the covariates, [m], [m, k], or columns of a frame.
      intercept: whether a column of ones is put before the covariates.

    Raises:
      JaxpflError: as `ebbinomial` for the counts; for covariates that are no numbers, not finite, of other clients, or
        linearly dependent; fewer than two clients more than coefficients; and covariates that tell all successes from
        all failures, so that no coefficients are the likeliest. Under a transformation, where values are not known,
        such values make all results NaN, or coefficients large.
    """
    successes, trials, x = inputs.aligned(successes=successes, trials=trials, x=x)
    found = _fit(*checked_trials(successes, trials), x, intercept, bounded=True)
    return found._replace(labels=labels_of(successes, trials, x))


def ebpoisson_regression(count: Any, exposure: Any, x: Any, *, intercept: bool = True) -> RegressedRates:
    """Fit Gamma priors about a log-linear regression, and return every client's posterior of its rate.

    Args:
      count, exposure: as those of `ebpoisson`, [m].
      x, intercept: as those of `ebbinomial_regression`.

    Raises:
      JaxpflError: as `ebpoisson` for the counts, else as `ebbinomial_regression`.
    """
    count, exposure, x = inputs.aligned(count=count, exposure=exposure, x=x)
    found = _fit(*checked_events(count, exposure), x, intercept, bounded=False)
    return found._replace(labels=labels_of(count, exposure, x))


def _fit(z: Any, n: Any, x: Any, intercept: bool, *, bounded: bool) -> RegressedRates:
    m = len(z)
    columns = covariates(x, m, "x")
    p = columns.shape[1] + intercept
    if m < p + LEAST_FREE:
        raise JaxpflError(f"{p} coefficients need at least {p + LEAST_FREE} clients, got {m}")
    if isinstance(columns, np.ndarray):
        at = dependent(columns, intercept=intercept)
        if at is not None:
            what = " and the intercept" * intercept
            raise JaxpflError(f"x's column {at} is a linear combination of the columns before it{what}: leave it out")
    kind = jnp.result_type(float)
    sizes = jnp.broadcast_to(jnp.asarray(n, kind), (m,))
    found, reach = solved(
        jnp.asarray(z, kind), sizes, jnp.asarray(columns, kind), intercept=bool(intercept), bounded=bounded
    )
    if not isinstance(reach, Tracer) and not reach < FAR:
        raise JaxpflError("x tells clients of no events (or of all) from the others: no coefficients are the likeliest")
    return found


@partial(full_precision.jit, static_argnames=("intercept", "bounded"))
def solved(z: Array, n: Array, x: Array, *, intercept: bool, bounded: bool) -> tuple[RegressedRates, Array]:
    """The fit to counts, sizes [m] and covariates [m, k] that have been checked.

    Beside it the greatest distance of a client's regression from the pooled rate on the scale of the link, [].
    """
    m, kind = len(z), z.dtype
    if intercept:
        x = jnp.concatenate([jnp.ones((m, 1), kind), x], axis=1)
    p = x.shape[1]
    good = jnp.isfinite(x).all() & jnp.isfinite(z).all() & jnp.isfinite(n).all() & (z >= 0).all() & (n > 0).all()
    good &= (z == jnp.round(z)).all()
    if bounded:
        good &= (z <= n).all() & (n == jnp.round(n)).all()
    Q, R, _ = triangle(jnp.where(good, x, 1))
    Q = Q * m**0.5  # rows of the order one, as a step of the climb is to be
    z = jnp.where(good, z, jnp.nan)
    share = z.sum() / n.sum()
    pooled = jnp.log(share) - (jnp.log1p(-share) if bounded else 0)

    def mu_of(at: Array) -> Array:
        return jax.nn.sigmoid(Q @ at) if bounded else jnp.exp(Q @ at)

    def alone(at: Array) -> Array:
        return (marginals.binomial if bounded else marginals.poisson)(z, n, mu_of(at)).mean()

    def together(at: Array) -> Array:
        mu, size = mu_of(at[:-1]), jnp.exp(at[-1])
        if bounded:
            return marginals.beta_binomial(z, n, mu, size).mean()
        return marginals.gamma_poisson(z, n, mu, size / mu).mean()

    start = Q.T @ jnp.full(m, pooled) / m
    none, value_none = climb(alone, start[None])
    starts = jnp.concatenate([jnp.tile(none, (len(_STARTS), 1)), jnp.array(_STARTS, kind)[:, None]], axis=1)
    best, value = climb(together, starts)
    alike = value_none >= value - 16 * jnp.finfo(kind).eps * (1 + jnp.abs(value))
    bad = jnp.where(jnp.isnan(value_none) | jnp.isnan(share), jnp.nan, 0)
    b = jnp.where(alike, none, best[:-1]) + bad
    spread = jnp.where(alike, jnp.inf, jnp.exp(best[-1])) + bad

    curved = jax.hessian(together)(jnp.where(alike, jnp.append(none, 0), best))
    of_both = jnp.linalg.inv(-m * curved)[:-1, :-1]
    of_none = jnp.linalg.inv(-m * jax.hessian(alone)(none))
    back = solve_triangular(R, jnp.eye(p, dtype=kind)) * m**0.5
    mu = mu_of(b)
    size = jnp.where(alike, jnp.inf, spread if bounded else spread / mu)
    ratio = jnp.where(alike, 0, jnp.maximum(2 * m * (value - value_none), 0)) + bad
    constant = marginals.log_saturated_binomial(z, n) if bounded else marginals.log_saturated_poisson(z)
    log_marginal = m * jnp.where(alike, value_none, value) + constant.sum() + bad
    rates = posterior(z, n, mu, jnp.broadcast_to(size, (m,)), log_marginal, bounded=bounded)
    covariance = back @ jnp.where(alike, of_none, of_both) @ back.T
    p_value = jnp.where(alike, 1, ndtr(-jnp.sqrt(ratio))) + bad
    found = RegressedRates(rates, back @ b, covariance, spread, log_marginal, ratio, p_value)
    return found, jnp.abs(Q @ b - pooled).max()

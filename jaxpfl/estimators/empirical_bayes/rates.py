r"""Empirical Bayes for probabilities and rates: priors fitted by marginal likelihood.

`ebbinomial`: client i has Z_i successes in n_i trials, and its probability p_i has a Beta prior with mean mu and n_0
pseudo-trials. `ebpoisson`: client i has Z_i events in an exposure of e_i, and its rate has a Gamma prior with mean mu
and pseudo-exposure e_0. The posterior mean is

.. math:: \mu + \frac{n_i}{n_0 + n_i} (Z_i / n_i - \mu).

For rates, e_0 and e_i replace n_0 and n_i. If the likelihood is largest for a prior without spread, n_0 is infinite,
and all clients have the pooled rate. The prior "npmle" allows any distribution: atoms on a grid with maximum-likelihood
weights (`grid`). The grid covers the range of the clients' own shares Z_i / n_i (or rates Z_i / e_i). Its points are
evenly spaced after the transformation arcsin(sqrt(share)) or sqrt(rate). The functions are pure, and work under
``jax.jit``, and under ``jax.vmap`` over problems. Each step of a fit needs new sums over clients: the likelihood's
derivatives with respect to two parameters. For clients of unequal sizes, no fixed set of sums is enough for the whole
fit of either family.

**With covariates**, there are two models. In the first, client i has :math:`Z_i` successes in :math:`n_i` trials, and
:math:`p_i \sim \mathrm{Beta}` with mean :math:`\mu_i` and n_0 pseudo-trials, where :math:`\operatorname{logit} \mu_i =
x_i^\top \beta`. In the second, client i has :math:`Z_i` events in an exposure of :math:`e_i`, and a Gamma rate with
mean :math:`\mu_i` and shape a, where :math:`\log \mu_i = x_i^\top \beta`. The second model is the negative binomial
regression with variance :math:`\mu + \mu^2 / a`. In both models the posterior mean is a weighted mean of the client's
own share or rate and the value that the regression predicts:

.. math:: \mu_i + \frac{n_i}{n_0 + n_i} (Z_i / n_i - \mu_i), \qquad
   \mu_i + \frac{e_i}{a / \mu_i + e_i} (Z_i / e_i - \mu_i).

The likelihood is maximized over beta and n_0 (or a) together. The first beta is fitted without spread, that is, with
infinite n_0 (or a). If the likelihood is largest without spread, every client's estimate is the value that the
regression predicts. Each step of the fit needs new sums over clients: the likelihood's derivatives with respect to all
parameters.

**Large counts.** Terms of :math:`\log \Gamma(a + n) - \log \Gamma(a)` are of the order n log n, but they nearly cancel,
and their sum is of the order one. The largest terms are therefore summed analytically. Consider z successes in n trials
under Beta(a, b) with a = mu s and b = (1 - mu) s, and let p' = (a + z) / (s + n) be the posterior mean. Subtract the
binomial log likelihood at z / n from the Beta-binomial log likelihood. The leading terms of the difference in
Stirling's formula are

.. math:: -n\, \mathrm{KL}(z/n \,\|\, p') - s\, \mathrm{KL}(\mu \,\|\, p')

where KL is the divergence of Bernoulli distributions. For a count z in an exposure e under Gamma(mu s, s), let
:math:`\lambda' = (\mu s + z) / (s + e)`. The leading terms are then :math:`-e\, \mathrm{KL}(z/e \| \lambda') - s\,
\mathrm{KL}(\mu \| \lambda')`, where KL is the divergence of Poisson distributions. If a factor (n, s or e) is large,
the two arguments of its divergence are close to each other. Their difference is therefore computed from a formula
without subtraction of nearly equal numbers. The remaining terms of Stirling's series are small.

References: Robbins 1956, "An empirical Bayes approach to statistics"; Skellam 1948, for the Beta-binomial; Clayton
and Kaldor 1987, "Empirical Bayes estimates of age-standardized relative risks", for Poisson and Gamma; Kiefer and
Wolfowitz 1956 and Koenker and Mizera 2014, for the atoms; Crowder 1978, "Beta-binomial anova for proportions";
Lawless 1987, "Negative binomial and mixed Poisson regression"; Christiansen and Morris 1997, "Hierarchical Poisson
regression modeling"; Self and Liang 1987.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any, Literal, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.scipy.linalg import solve_triangular
from jax.scipy.special import betainc, gammainc, gammaln, ndtr, xlogy

from jaxpfl.core import full_precision
from jaxpfl.core.search import bisect, climb
from jaxpfl.core.types import Array, Key, Scalar
from jaxpfl.estimators.empirical_bayes import grid, inputs
from jaxpfl.estimators.empirical_bayes.area import regressors, triangle
from jaxpfl.estimators.empirical_bayes.normal_means import blockwise
from jaxpfl.support.errors import JaxpflError, unknown_name

RatePrior: TypeAlias = Literal["conjugate", "npmle"]
_PLACES = 300  # number of atoms of the NPMLE
_STARTS = (-2.0, 0.0, 2.0, 4.0, 6.0, 9.0)  # starting values for the logarithm of the prior's size
_MOST_SAMPLES = 1e12  # largest accepted count or exposure


class Rates(NamedTuple):
    """Posteriors of m clients' probabilities or rates under a Beta or Gamma prior, which is treated as known.

    Attributes:
      events, size: successes and trials, or counts and exposure, [m] each.
      bounded: whether the parameters are probabilities (otherwise rates).
      prior_mean: prior mean mu, [].
      prior_size: pseudo-trials n_0 or pseudo-exposure e_0, []; infinite for a prior without spread.
      mean: posterior means, [m].
      sd: posterior standard deviations, [m].
      shrinkage: fraction n_0 / (n_0 + n_i) by which the posterior mean moves toward the prior mean, [m].
      log_marginal: log likelihood of all counts, []. If clients have weights, the weights are scaled to a mean of one.
      labels: labels of the clients, if the data came in a data frame.
    """

    events: Array
    size: Array
    bounded: bool | Array
    prior_mean: Array
    prior_size: Array
    mean: Array
    sd: Array
    shrinkage: Array
    log_marginal: Array
    labels: inputs.Labels | None = None

    def to_frame(self, level: float | None = None) -> Any:
        """Return a pandas frame with a row per client; with ``level``, also interval endpoints ``low`` and ``high``."""
        return inputs.frame(self, len(self.mean), level)

    @property
    def prior_sd(self) -> Array:
        """Standard deviation of the prior, []."""
        variance = self.prior_mean * (1 - self.prior_mean) / (1 + self.prior_size)
        return jnp.sqrt(jnp.where(self.bounded, variance, self.prior_mean / self.prior_size))

    def quantile(self, p: Scalar) -> Array:
        """Posterior quantile, [m]."""
        inputs.inside("p", p)
        first, rest, scale = self._parameters()

        def below(t: Array) -> Array:
            share = betainc(first, jnp.where(self.bounded, rest, 1), jnp.clip(t, 0, 1))
            return jnp.where(self.bounded, share, gammainc(first, t * scale)) < p

        most = jnp.where(self.bounded, 1, self.mean + 40 * self.sd + 40 / scale)
        found = bisect(below, jnp.zeros_like(self.mean), most)
        return jnp.where(jnp.isinf(self.prior_size), self.prior_mean, found)

    def interval(self, level: Scalar = 0.95) -> tuple[Array, Array]:
        """Lower and upper endpoints of the equal-tailed credible intervals, [m] each.

        The prior is treated as known, unlike in `learned_rates`.

        Raises:
          JaxpflError: if the level is out of range.
        """
        inputs.level_within(level)
        return self.quantile((1 - level) / 2), self.quantile((1 + level) / 2)

    def sample(self, key: Key) -> Array:
        """Draw every client's probability or rate from its posterior, [m]."""
        first, rest, scale = self._parameters()
        share_key, rate_key = jax.random.split(key)
        share = jax.random.beta(share_key, first, jnp.where(self.bounded, rest, 1))
        drawn = jnp.where(self.bounded, share, jax.random.gamma(rate_key, first) / scale)
        return jnp.where(jnp.isinf(self.prior_size), self.prior_mean, drawn)

    def _parameters(self) -> tuple[Array, Array, Array]:
        """Posterior parameters, [m] each: alpha and beta of the Beta prior, and the inverse scale of the Gamma prior.

        For a Gamma prior, the first parameter is the shape.
        """
        finite = jnp.where(jnp.isinf(self.prior_size), 1, self.prior_size)
        first = finite * self.prior_mean + self.events
        return first, finite * (1 - self.prior_mean) + self.size - self.events, finite + self.size


class AtomRates(NamedTuple):
    """Posteriors of m clients' probabilities or rates under a discrete prior on a grid. The prior is treated as known.

    Attributes:
      events, size: successes and trials, or counts and exposure, [m] each.
      atoms, weights: the K atoms of the prior in increasing order, and their weights, [K] each.
      shares: posterior probabilities of the atoms, [m, K].
      mean: posterior means, [m].
      sd: posterior standard deviations, [m].
      log_marginal: log likelihood of all counts, []. If clients have weights, the weights are scaled to a mean of one.
      slack: upper bound on the difference between the largest mean log likelihood of any weights on the grid and the
        mean log likelihood of the fitted weights, [].
      labels: labels of the clients, if the data came in a data frame.
    """

    events: Array
    size: Array
    atoms: Array
    weights: Array
    shares: Array
    mean: Array
    sd: Array
    log_marginal: Array
    slack: Array
    labels: inputs.Labels | None = None

    def to_frame(self, level: float | None = None) -> Any:
        """Return a pandas frame with a row per client; with ``level``, also interval endpoints ``low`` and ``high``."""
        return inputs.frame(self, len(self.mean), level, leave=("shares",))

    @property
    @full_precision.products
    def prior_mean(self) -> Array:
        """Mean of the prior, []."""
        return self.weights @ self.atoms

    @property
    @full_precision.products
    def prior_sd(self) -> Array:
        """Standard deviation of the prior, []."""
        return jnp.sqrt(self.weights @ (self.atoms - self.prior_mean) ** 2)

    def quantile(self, p: Scalar) -> Array:
        """Posterior quantile [m], which is one of the atoms."""
        inputs.inside("p", p)
        return self.atoms[(jnp.cumsum(self.shares, axis=1) < p).sum(axis=1).clip(max=len(self.atoms) - 1)]

    def interval(self, level: Scalar = 0.95) -> tuple[Array, Array]:
        """Lower and upper endpoints of the equal-tailed credible intervals, [m] each.

        Raises:
          JaxpflError: if the level is out of range.
        """
        inputs.level_within(level)
        return self.quantile((1 - level) / 2), self.quantile((1 + level) / 2)

    def sample(self, key: Key) -> Array:
        """Draw every client's probability or rate from its posterior, [m]."""
        return self.atoms[jax.random.categorical(key, jnp.log(self.shares))]


def ebbinomial(
    successes: Any, trials: Any, prior: RatePrior = "conjugate", *, weights: Any = None
) -> Rates | AtomRates:
    """Fit a prior to counts of successes, and return the posterior of every client's probability.

    Args:
      successes: counts of successes Z_i, integers, [m].
      trials: numbers of trials n_i, integers of at least one, [m], or one number for all.
      prior: "conjugate" for a Beta distribution, or "npmle" for a nonparametric prior.
      weights: weights of the clients in the fit, [m], at least 0 and in any unit, as in `ebnm`.

    Raises:
      JaxpflError: if ``successes`` or ``trials`` are not integers in these ranges; if there are fewer than two clients;
        if all trials are successes or all are failures, so that no prior maximizes the likelihood; if every client has
        a single trial, so that the spread cannot be estimated; if the prior is unknown; if weights are negative or not
        numbers; or if too few clients have a positive weight. Inside a JAX transformation, values are not checked.
    """
    return _fit(("successes", "trials"), successes, trials, prior, weights, bounded=True)


def ebpoisson(count: Any, exposure: Any, prior: RatePrior = "conjugate", *, weights: Any = None) -> Rates | AtomRates:
    """Fit a prior to event counts, and return the posterior of every client's rate.

    Args:
      count: event counts Z_i, integers, [m].
      exposure: positive exposures e_i, [m], or one number for all.
      prior: "conjugate" for a Gamma distribution, or "npmle" for a nonparametric prior.
      weights: weights of the clients, as in `ebbinomial`.

    Raises:
      JaxpflError: if counts are not nonnegative integers, or exposures are not positive; if there are fewer than two
        clients; if all counts are zero; or if the prior or weights are refused as in `ebbinomial`. Inside a JAX
        transformation, values are not checked.
    """
    return _fit(("count", "exposure"), count, exposure, prior, weights, bounded=False)


def _fit(
    names: tuple[str, str], events: Any, size: Any, prior: RatePrior, weights: Any, *, bounded: bool
) -> Rates | AtomRates:
    if prior not in ("conjugate", "npmle"):
        raise unknown_name("prior", prior, ("conjugate", "npmle"))
    events, size, weights = inputs.aligned(**{names[0]: events, names[1]: size, "weights": weights})
    z, n = checked_counts(events, size, names, bounded=bounded, weights=weights)
    kind = jnp.result_type(float)
    z, n = jnp.asarray(z, kind), jnp.broadcast_to(jnp.asarray(n, kind), z.shape)
    fit = _conjugate if prior == "conjugate" else _atoms
    found = fit(z, n, inputs.shares(weights, len(z), 2), bounded=bounded)
    return found._replace(labels=inputs.labels_of(events, size, weights))


@partial(full_precision.jit, static_argnames="bounded")
def _conjugate(z: Array, n: Array, w: Array, *, bounded: bool) -> Rates:
    """Fit a Beta or Gamma prior; the clients' weights w [m] must sum to one."""
    pooled = (w @ z) / (w @ n)
    # A Gamma prior's size is in units of the exposure with one expected event.
    unit = 1.0 if bounded else 1 / pooled
    link: Callable[[Array], Array] = jax.nn.sigmoid if bounded else jnp.exp
    start = jnp.log(pooled) - (jnp.log1p(-pooled) if bounded else 0)
    alone = w @ (_binomial if bounded else _poisson)(z, n, pooled)
    together = _beta_binomial if bounded else _gamma_poisson

    def value(at: Array) -> Array:
        return w @ together(z, n, link(at[0]), jnp.exp(at[1]) * unit)

    starts = jnp.stack(jnp.broadcast_arrays(start, jnp.array(_STARTS, start.dtype)), axis=1)
    best, some = climb(value, starts)
    alike = alone >= some - 16 * jnp.finfo(some.dtype).eps * (1 + jnp.abs(some))
    mean = jnp.where(alike, pooled, link(best[0]))
    size = jnp.where(alike, jnp.inf, jnp.exp(best[1]) * unit)
    saturated = w @ _log_saturated(z, n, bounded=bounded)
    return posterior(z, n, mean, size, len(z) * (jnp.where(alike, alone, some) + saturated), bounded=bounded)


@partial(full_precision.jit, static_argnames="bounded")
def _atoms(z: Array, n: Array, w: Array, *, bounded: bool) -> AtomRates:
    """Fit the weights of atoms on a grid by maximum likelihood; the clients' weights w [m] must sum to one."""
    scaled = jnp.arcsin(jnp.sqrt(z / n)) if bounded else jnp.sqrt(z / n)
    low, high = scaled.min(), scaled.max()
    places = low + (high - low) * jnp.arange(_PLACES, dtype=z.dtype) / (_PLACES - 1)
    places = (jnp.sin(places) if bounded else places) ** 2

    def log_density(z: Array, n: Array) -> Array:
        return (_binomial if bounded else _poisson)(z[:, None], n[:, None], places)

    weights, slack = grid.weights(log_density(z, n), w)

    def block(z: Array, n: Array) -> tuple[Array, ...]:
        logs = log_density(z, n) + jnp.log(weights)
        shares = jax.nn.softmax(logs, axis=1)
        mean = shares @ places
        sd = jnp.sqrt((shares * (places - mean[:, None]) ** 2).sum(axis=1))
        return shares, mean, sd, jax.nn.logsumexp(logs, axis=1)

    shares, mean, sd, value = blockwise(block, z, n)
    value = value + _log_saturated(z, n, bounded=bounded)
    return AtomRates(z, n, places, weights, shares, mean, sd, len(z) * (w @ value), slack)


def posterior(z: Array, n: Array, mu: Array, size: Array, log_marginal: Array, *, bounded: bool) -> Rates:
    """Posteriors of any clients under a Beta or Gamma prior with mean ``mu`` and pseudo-trials or exposure ``size``."""
    alike, total = jnp.isinf(size), size + n
    finite = jnp.where(alike, 1, size)
    shrinkage = jnp.where(alike, 1, finite / (finite + n))
    mean = jnp.where(alike, mu, (finite * mu + z) / (finite + n))
    sd = jnp.sqrt(mean * (1 - mean) / (total + 1) if bounded else mean / total)
    return Rates(z, n, jnp.array(bounded), mu, size, mean, sd, shrinkage, log_marginal)


def checked_counts(
    count: Any, size: Any, names: tuple[str, str], *, bounded: bool, weights: Any = None
) -> tuple[Any, Any]:
    """Check counts and sizes, and return them in double precision; traced values are not checked.

    If ``bounded``, sizes must be integers, and counts must not exceed sizes.

    Raises:
      JaxpflError: as in `ebbinomial` and `ebpoisson`.
    """
    count, size = inputs.aligned(**{names[0]: count, names[1]: size})
    z, n = (inputs.numbers(name, value) for name, value in zip(names, (count, size), strict=True))
    if z.ndim != 1 or n.ndim > 1 or (n.ndim and n.shape != z.shape):
        raise JaxpflError(
            f"{names[0]} and {names[1]} must have one number for each client, got shapes {z.shape} and {n.shape}"
        )
    if len(z) < 2:
        raise JaxpflError(f"at least 2 clients are required to estimate a prior, got {len(z)}")
    if isinstance(z, Tracer) or isinstance(n, Tracer):
        return z, n
    n = np.broadcast_to(n, z.shape)
    for name, values, whole in ((names[0], z, True), (names[1], n, bounded)):
        least = 0 if values is z else 1
        bad = ~np.isfinite(values) | (values > _MOST_SAMPLES)
        bad |= (values < least) | (values != np.round(values)) if whole else values <= 0
        if bad.any():
            at = int(np.argmax(bad))
            kind = f"whole numbers of at least {least}" if whole else "> 0 and finite"
            raise JaxpflError(f"{name} must be {kind}, got {values[at]} for client {at}")
    if bounded and (z > n).any():
        at = int(np.argmax(z > n))
        raise JaxpflError(f"{names[0]} must be at most {names[1]}, got {z[at]:g} of {n[at]:g} for client {at}")
    counted = np.ones(len(z), bool)
    if weights is not None and not isinstance(weights, Tracer):
        counted = np.asarray(inputs.shares(weights, len(z), 2)) > 0
    events, sizes = z[counted], n[counted]
    if events.sum() == 0 or (bounded and events.sum() == sizes.sum()):
        what = "all trials are successes" if events.sum() else f"all {'successes' if bounded else 'counts'} are zero"
        raise JaxpflError(f"{what}: no prior can be fitted")
    if bounded and sizes.max() == 1:
        raise JaxpflError(
            f"{names[1]} must be above 1 for at least one client: with one trial each, the spread cannot be estimated"
        )
    return z, n


_SPREADS = (-1.0, 1.0, 3.0, 5.0, 8.0)
"""Starting values for the logarithm of n_0 or a."""
_FAR = 15.0
"""Largest distance between a client's regression value and the pooled rate, on the link's scale; beyond it, the fit has
diverged.
"""
_LEAST_FREE = 2
"""Smallest allowed number of clients minus number of coefficients."""


class RegressedRates(NamedTuple):
    """Posteriors of m clients' probabilities or rates, with prior means from a regression on p columns.

    The intercept is the first column. The fitted regression and spread are treated as known.

    Attributes:
      rates: the posteriors; ``prior_mean`` [m] and ``prior_size`` [m] differ between clients.
      beta: coefficients, [p].
      beta_covariance: covariance of the coefficients, [p, p]: their block in the inverse of the observed information of
        all parameters.
      spread: concentration of the prior, []: the pseudo-trials n_0 for probabilities, or the shape a of the Gamma prior
        for rates; infinite if the fit has no spread about the regression.
      log_marginal: log likelihood of all counts, [].
      ratio: likelihood-ratio statistic, []: twice the amount by which ``log_marginal`` exceeds its maximum without
        spread.
      p_value: probability of a ratio at least as large if there is no spread, []. This is half the tail probability of
        a chi-square with one degree of freedom, an approximation for many clients. The p-value is 1 if the likelihood
        is largest without spread.
      labels: labels of the clients, if the data came in a data frame.
    """

    rates: Rates
    beta: Array
    beta_covariance: Array
    spread: Array
    log_marginal: Array
    ratio: Array
    p_value: Array
    labels: inputs.Labels | None = None

    @property
    def mean(self) -> Array:
        """Posterior means, the personalized estimates, [m]."""
        return self.rates.mean

    def interval(self, level: Scalar = 0.95) -> tuple[Array, Array]:
        """Lower and upper endpoints of the equal-tailed credible intervals, [m] each."""
        return self.rates.interval(level)

    def to_frame(self, level: float | None = None) -> Any:
        """Return a pandas frame with a row per client; with ``level``, also interval endpoints ``low`` and ``high``."""
        return self.rates._replace(labels=self.labels).to_frame(level)


def ebbinomial_regression(successes: Any, trials: Any, x: Any, *, intercept: bool = True) -> RegressedRates:
    """Fit Beta priors whose means follow a logistic regression, and return the posterior of every client's probability.

    This function works under ``jax.jit``, and under ``jax.vmap`` over problems; ``intercept`` is static.

    Args:
      successes, trials: counts as in `ebbinomial`, [m].
      x: the covariates, [m], [m, k], or columns of a data frame.
      intercept: whether to prepend a column of ones to the covariates, which must then not already contain such a
        column.

    Raises:
      JaxpflError: if the counts are invalid (as in `ebbinomial`); if covariates are not finite numbers or are linearly
        dependent; if the data-frame indexes of counts and covariates name different clients; if the number of clients
        is less than the number of coefficients plus two; or if covariates separate all successes from all failures, so
        that no coefficients maximize the likelihood. Inside a JAX transformation, values are not checked.
    """
    return _fit_about(("successes", "trials"), successes, trials, x, intercept, bounded=True)


def ebpoisson_regression(count: Any, exposure: Any, x: Any, *, intercept: bool = True) -> RegressedRates:
    """Fit Gamma priors whose means follow a log-linear regression, and return the posterior of every client's rate.

    Args:
      count, exposure: counts and exposures as in `ebpoisson`, [m].
      x, intercept: arguments as in `ebbinomial_regression`.

    Raises:
      JaxpflError: as in `ebpoisson` for the counts, otherwise as in `ebbinomial_regression`.
    """
    return _fit_about(("count", "exposure"), count, exposure, x, intercept, bounded=False)


def _fit_about(
    names: tuple[str, str], events: Any, size: Any, x: Any, intercept: bool, *, bounded: bool
) -> RegressedRates:
    events, size, x = inputs.aligned(**{names[0]: events, names[1]: size, "x": x})
    z, n = checked_counts(events, size, names, bounded=bounded)
    m, kind = len(z), jnp.result_type(float)
    columns = jnp.asarray(regressors("x", x, m, _LEAST_FREE, intercept=intercept), kind)
    sizes = jnp.broadcast_to(jnp.asarray(n, kind), (m,))
    found, reach = _solve_about(jnp.asarray(z, kind), sizes, columns, intercept=bool(intercept), bounded=bounded)
    if not isinstance(reach, Tracer) and not reach < _FAR:
        raise JaxpflError(
            "x separates the clients without events (or with an event in every trial) from the others, so the "
            "likelihood has no maximum: leave out covariates"
        )
    return found._replace(labels=inputs.labels_of(events, size, x))


@partial(full_precision.jit, static_argnames=("intercept", "bounded"))
def _solve_about(z: Array, n: Array, x: Array, *, intercept: bool, bounded: bool) -> tuple[RegressedRates, Array]:
    """Fit the model to counts and sizes [m] and covariates [m, k], which have been checked.

    Also return the largest distance, on the link's scale, between a client's regression value and the pooled rate, [].
    """
    m, kind = len(z), z.dtype
    if intercept:
        x = jnp.concatenate([jnp.ones((m, 1), kind), x], axis=1)
    p = x.shape[1]
    Q, R, _ = triangle(x)
    Q = Q * m**0.5  # scaled to entries of the order of one, for which the step size of `climb` is chosen
    share = z.sum() / n.sum()
    pooled = jnp.log(share) - (jnp.log1p(-share) if bounded else 0)

    def mu_of(at: Array) -> Array:
        return jax.nn.sigmoid(Q @ at) if bounded else jnp.exp(Q @ at)

    def alone(at: Array) -> Array:
        return (_binomial if bounded else _poisson)(z, n, mu_of(at)).mean()

    def together(at: Array) -> Array:
        mu, size = mu_of(at[:-1]), jnp.exp(at[-1])
        if bounded:
            return _beta_binomial(z, n, mu, size).mean()
        return _gamma_poisson(z, n, mu, size / mu).mean()

    start = Q.T @ jnp.full(m, pooled) / m
    none, value_none = climb(alone, start[None])
    starts = jnp.concatenate([jnp.tile(none, (len(_SPREADS), 1)), jnp.array(_SPREADS, kind)[:, None]], axis=1)
    best, value = climb(together, starts)
    alike = value_none >= value - 16 * jnp.finfo(kind).eps * (1 + jnp.abs(value))
    b = jnp.where(alike, none, best[:-1])
    spread = jnp.where(alike, jnp.inf, jnp.exp(best[-1]))

    curved = jax.hessian(together)(jnp.where(alike, jnp.append(none, 0), best))
    of_both = jnp.linalg.inv(-m * curved)[:-1, :-1]
    of_none = jnp.linalg.inv(-m * jax.hessian(alone)(none))
    back = solve_triangular(R, jnp.eye(p, dtype=kind)) * m**0.5
    mu = mu_of(b)
    size = jnp.where(alike, jnp.inf, spread if bounded else spread / mu)
    ratio = jnp.where(alike, 0, jnp.maximum(2 * m * (value - value_none), 0))
    constant = _log_saturated(z, n, bounded=bounded).sum()
    log_marginal = m * jnp.where(alike, value_none, value) + constant
    rates = posterior(z, n, mu, jnp.broadcast_to(size, (m,)), log_marginal, bounded=bounded)
    covariance = back @ jnp.where(alike, of_none, of_both) @ back.T
    p_value = jnp.where(alike, 1, ndtr(-jnp.sqrt(ratio)))
    found = RegressedRates(rates, back @ b, covariance, spread, log_marginal, ratio, p_value)
    return found, jnp.abs(Q @ b - pooled).max()


_SHIFT = 8  # shift of the argument, by the recurrence, that makes Stirling's series accurate
_LARGE = 16.0


def _beta_binomial(z: Array, n: Array, mu: Array, size: Array) -> Array:
    """Log probability of z successes in n trials if p ~ Beta(mu size, (1 - mu) size), minus its value for p = z / n.

    Arguments are broadcast.
    """
    z, n, mu, size = jnp.broadcast_arrays(z, n, mu, size)
    a, b = mu * size, (1 - mu) * size
    whole = size + 2 * _SHIFT
    first, second = (a + _SHIFT) / whole, (b + _SHIFT) / whole
    total = whole + n
    p, q = (a + _SHIFT + z) / total, (b + _SHIFT + (n - z)) / total
    off = jnp.where(z < n / 2, z / n - first, second - (n - z) / n)
    left, right = whole / total * off, n / total * off  # z / n minus p, and p minus the prior's mean
    of_data = n * (_gap(z / n, p, left) + _gap((n - z) / n, q, -left))
    of_prior = whole * (_gap(first, p, -right) + _gap(second, q, right))
    return -of_data - of_prior + _ends(a, z) + _ends(b, n - z) - _ends(size, n, 2 * _SHIFT)


def _gamma_poisson(z: Array, e: Array, mu: Array, size: Array) -> Array:
    """Log probability of z events in an exposure e if rate ~ Gamma(mu size, size), minus its value for rate = z / e.

    Arguments are broadcast.
    """
    z, e, mu, size = jnp.broadcast_arrays(z, e, mu, size)
    a = mu * size
    more = _SHIFT / mu
    whole = size + more  # the size at which the shape a + _SHIFT still has the mean mu
    off = z / e - mu
    left, right = whole / (whole + e) * off, e / (whole + e) * off
    rate = (a + _SHIFT + z) / (whole + e)
    main = -e * _gap(z / e, rate, left) - whole * _gap(mu, rate, -right)
    shifted = (a + _SHIFT) * jnp.log1p(e / whole) - a * jnp.log1p(e / size) + z * jnp.log1p(more / (size + e))
    return main + shifted + _ends(a, z)


def _log_saturated(z: Array, n: Array, *, bounded: bool) -> Array:
    """Log probability of z at its maximum-likelihood parameter: binomial with p = z / n, or Poisson with mean z."""
    return _over(n) - _over(z) - _over(n - z) if bounded else -_over(z)


def _binomial(z: Array, n: Array, p: Array) -> Array:
    """Log probability of z successes in n trials, each with success probability p, minus its value for p = z / n.

    Arguments are broadcast.
    """
    z, n, p = jnp.broadcast_arrays(z, n, p)
    off = z / n - p
    return -n * (_gap(z / n, p, off) + _gap((n - z) / n, 1 - p, -off))


def _poisson(z: Array, e: Array, rate: Array) -> Array:
    """Log probability of z events in an exposure e at this rate, minus its value for the rate z / e.

    Arguments are broadcast.
    """
    z, e, rate = jnp.broadcast_arrays(z, e, rate)
    return -e * _gap(z / e, rate, z / e - rate)


def _gap(p: Array, q: Array, off: Array) -> Array:
    """p log(p / q) - p + q, which is q if p is zero; ``off`` is p - q in full precision."""
    some = p > 0
    below = jnp.where(q > 0, q, 1)
    u = jnp.where(some, off / below, 0)
    u = jnp.maximum(u, -1 + jnp.finfo(u.dtype).epsneg)
    found = below * ((1 + u) * jnp.log1p(u) - u)
    return jnp.where(some, jnp.where(q > 0, found, jnp.inf), q)


def _ends(a: Array, n: Array, shift: int = _SHIFT) -> Array:
    """log(Gamma(a + n) / Gamma(a)) without Stirling's leading terms, up to a term that depends only on n."""
    y = a + shift
    return _stirling(y + n) - _stirling(y) - jnp.log1p(n / y) / 2 - sum(jnp.log1p(n / (a + k)) for k in range(shift))


def _over(n: Array) -> Array:
    """log n! - n log n + n, which is nonnegative."""
    large = n > _LARGE
    far = jnp.where(large, n, _LARGE)
    few = jnp.where(large, 0, n)
    return jnp.where(large, _stirling(far) + jnp.log(2 * math.pi * far) / 2, gammaln(few + 1) - xlogy(few, few) + few)


def _stirling(y: Array) -> Array:
    """Stirling's series of log Gamma(y) without its leading terms, for y of at least `_SHIFT`."""
    r = 1 / y  # powers of y would overflow in single precision, and their derivatives would be NaN
    return r / 12 - r**3 / 360 + r**5 / 1260 - r**7 / 1680

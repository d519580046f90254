r"""Empirical Bayes for probabilities and rates: conjugate priors, fitted by marginal likelihood.

`ebbinomial`: client i has Z_i successes in n_i trials, and p_i ~ Beta of mean mu and n_0 pseudo-trials. `ebpoisson`: it
has Z_i events in an exposure of e_i, and its rate is Gamma of mean mu and pseudo-exposure e_0. Either posterior mean is

.. math:: \mu + \frac{n_i}{n_0 + n_i} (Z_i / n_i - \mu).

Where no spread is likelier than any, n_0 is infinite and all clients have the pooled rate. Pure: both jit, and vmap
over problems. Neither family has a message of fixed size that suffices for unequal sizes; a step of the fit needs sums
over clients of the likelihood's derivatives by two parameters.

References: Skellam 1948, for the Beta-binomial; Clayton and Kaldor 1987, "Empirical Bayes estimates of
age-standardized relative risks", for Poisson and Gamma.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.scipy.special import betainc, gammainc

from jaxpfl.errors import JaxpflError, shown
from jaxpfl.estimators.climb import climb
from jaxpfl.estimators.intervals import bisect
from jaxpfl.types import Array, Scalar

_SHIFT = 8
_STARTS = (-2.0, 0.0, 2.0, 4.0, 6.0, 9.0)
_MOST_SAMPLES = 1e12


class Rates(NamedTuple):
    """Posteriors of m clients' probabilities or rates. The prior counts as known.

    Attributes:
      events, size: successes and trials, or counts and exposure, [m] each.
      bounded: whether they are probabilities.
      prior_mean: mu, [].
      prior_size: n_0 or e_0, []; infinite without spread.
      mean: posterior means, [m].
      sd: posterior standard deviations, [m].
      shrinkage: n_0 / (n_0 + n_i), [m].
      log_marginal: log likelihood of all counts, [].
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

    def quantile(self, p: Scalar) -> Array:
        """Posterior quantile, [m]."""
        finite = jnp.where(jnp.isinf(self.prior_size), 1, self.prior_size)
        first = finite * self.prior_mean + self.events
        rest = finite * (1 - self.prior_mean) + self.size - self.events
        scale = finite + self.size

        def below(t: Array) -> Array:
            share = betainc(first, jnp.where(self.bounded, rest, 1), jnp.clip(t, 0, 1))
            return jnp.where(self.bounded, share, gammainc(first, t * scale)) < p

        most = jnp.where(self.bounded, 1, self.mean + 40 * self.sd + 40 / scale)
        found = bisect(below, jnp.zeros_like(self.mean), most)
        return jnp.where(jnp.isinf(self.prior_size), self.prior_mean, found)

    def interval(self, level: Scalar = 0.95) -> tuple[Array, Array]:
        """Ends of the equal-tailed credible intervals, [m] each; `learned_bernoulli` reckons with a learned prior."""
        return self.quantile((1 - level) / 2), self.quantile((1 + level) / 2)


def ebbinomial(successes: Any, trials: Any) -> Rates:
    """Fit a Beta prior to successes among trials, and return every client's posterior.

    Args:
      successes: Z_i, whole numbers, [m].
      trials: n_i, whole numbers of at least one, [m], or one for all.

    Raises:
      JaxpflError: for numbers that are no such counts, fewer than two clients, all successes zero, or all trials
        successes: of these no prior has the greatest likelihood. Under a transformation, where values are not known,
        there are no such checks.
    """
    z, n = _checked(successes, trials, ("successes", "trials"), whole=True)
    if isinstance(z, np.ndarray) and isinstance(n, np.ndarray):
        if (z > n).any():
            at = int(np.argmax(z > n))
            raise JaxpflError(f"successes must be at most trials, got {z[at]:g} of {n[at]:g} for client {at}")
        if not 0 < z.sum() < n.sum():
            what = "all successes are zero" if z.sum() == 0 else "all trials are successes"
            raise JaxpflError(f"{what}: no prior can be fitted")
    return _binomial(*_floats(z, n))


def ebpoisson(count: Any, exposure: Any) -> Rates:
    """Fit a Gamma prior to numbers of events, and return every client's posterior of its rate.

    Args:
      count: Z_i, whole numbers, [m].
      exposure: e_i, above zero, [m], or one for all.

    Raises:
      JaxpflError: as `ebbinomial`; all counts zero.
    """
    z, e = _checked(count, exposure, ("count", "exposure"), whole=False)
    if isinstance(z, np.ndarray) and z.sum() == 0:
        raise JaxpflError("all counts are zero: no prior can be fitted")
    return _poisson(*_floats(z, e))


@jax.jit
def _binomial(z: Array, n: Array) -> Rates:
    share = z.sum() / n.sum()
    ways = _log_rise(jnp.ones_like(n), n) - _log_rise(jnp.ones_like(z), z) - _log_rise(jnp.ones_like(n), n - z)

    def fit(mu: Array, size: Array) -> Array:
        return _log_rise(size * mu, z) + _log_rise(size * (1 - mu), n - z) - _log_rise(size, n)

    start = jnp.log(share) - jnp.log1p(-share)
    none = z * jnp.log(share) + (n - z) * jnp.log1p(-share)
    mu, size, value = _fitted(fit, jax.nn.sigmoid, start, share, none)
    w = jnp.where(jnp.isinf(size), 0, n / (size + n))
    mean = mu + w * (z / n - mu)
    sd = jnp.sqrt(mean * (1 - mean) / (size + n + 1))
    return Rates(z, n, jnp.array(True), mu, size, mean, sd, 1 - w, value + ways.sum())


@jax.jit
def _poisson(z: Array, e: Array) -> Rates:
    share = z.sum() / e.sum()

    def fit(mu: Array, size: Array) -> Array:
        # In units of the exposure, of which mu * size is the prior's shape.
        shape = mu * size
        return _log_rise(shape, z) - shape * jnp.log1p(e / size) - z * jnp.log(size + e)

    none = z * jnp.log(share) - share * e
    unit = 1 / share
    mu, size, value = _fitted(lambda mu, size: fit(mu, size * unit), jnp.exp, jnp.log(share), share, none)
    size = size * unit
    w = jnp.where(jnp.isinf(size), 0, e / (size + e))
    mean = mu + w * (z / e - mu)
    sd = jnp.sqrt(mean / (size + e))
    constant = (z * jnp.log(e) - _log_rise(jnp.ones_like(z), z)).sum()
    return Rates(z, e, jnp.array(False), mu, size, mean, sd, 1 - w, value + constant)


def _fitted(
    fit: Callable[[Array, Array], Array], link: Callable[[Array], Array], start: Array, share: Array, none: Array
) -> tuple[Array, Array, Array]:
    """The likeliest mean and size, or the pooled one without spread, and the log likelihood.

    Args:
      fit: (mean, size) -> log likelihood of every client.
      link: of the first parameter.
      start: its value for the pooled mean.
      share: the pooled mean.
      none: log likelihood of every client without spread.
    """
    starts = jnp.stack(jnp.broadcast_arrays(start, jnp.array(_STARTS, start.dtype)), axis=1)
    best, value = climb(lambda at: fit(link(at[0]), jnp.exp(at[1])).mean(), starts)
    rounding = 16 * jnp.finfo(value.dtype).eps * (1 + jnp.abs(value))
    alike = none.mean() >= value - rounding
    mean, size = jnp.where(alike, share, link(best[0])), jnp.where(alike, jnp.inf, jnp.exp(best[1]))
    return mean, size, jnp.where(alike, none.mean(), value) * len(none)


def _log_rise(a: Array, n: Array) -> Array:
    """Logarithm of Gamma(a + n) / Gamma(a), without cancellation for large a, and of elementary functions.

    Stirling's series after eight steps of the recurrence: derivatives of JAX's gammaln take XLA long to compile.
    """
    y = a + _SHIFT

    def correction(y: Array) -> Array:
        return 1 / (12 * y) - 1 / (360 * y**3) + 1 / (1260 * y**5) - 1 / (1680 * y**7)

    far = (y + n - 0.5) * jnp.log1p(n / y) + n * (jnp.log(y) - 1) + correction(y + n) - correction(y)
    return far - sum(jnp.log1p(n / (a + k)) for k in range(_SHIFT))


def _checked(count: Any, size: Any, names: tuple[str, str], *, whole: bool) -> tuple[Any, Any]:
    arrays = []
    for name, value in zip(names, (count, size), strict=True):
        if isinstance(value, Tracer):
            arrays.append(value)
            continue
        try:
            arrays.append(np.asarray(value, np.float64))
        except (TypeError, ValueError):
            raise JaxpflError(f"{name} must be numbers, one for each client, got {shown(value)}") from None
    z, n = arrays
    if z.ndim != 1 or n.ndim > 1 or (n.ndim and n.shape != z.shape):
        raise JaxpflError(
            f"{names[0]} and {names[1]} must be one number for each client, got shapes {z.shape} and {n.shape}"
        )
    if len(z) < 2:
        raise JaxpflError(f"needs at least 2 clients, got {len(z)}")
    for name, of, counted in ((names[0], z, True), (names[1], n, whole)):
        if isinstance(of, Tracer):
            continue
        flat, least = np.ravel(of), 0 if of is z else 1
        bad = ~np.isfinite(flat) | (flat > _MOST_SAMPLES)
        bad |= (flat < least) | (flat != np.round(flat)) if counted else flat <= 0
        if bad.any():
            at = int(np.argmax(bad))
            kind = f"whole numbers of at least {least}" if counted else "> 0 and finite"
            raise JaxpflError(f"{name} must be {kind}, got {flat[at]} for client {at}")
    if not isinstance(n, Tracer) and not isinstance(z, Tracer):
        n = np.broadcast_to(n, z.shape)
    return z, n


def _floats(z: Any, n: Any) -> tuple[Array, Array]:
    kind = jnp.result_type(float)
    return jnp.asarray(z, kind), jnp.broadcast_to(jnp.asarray(n, kind), z.shape)

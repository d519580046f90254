r"""Empirical Bayes for probabilities and rates: conjugate priors, fitted by marginal likelihood.

`ebbinomial`: client i has Z_i successes in n_i trials, and p_i ~ Beta of mean mu and n_0 pseudo-trials. `ebpoisson`: it
has Z_i events in an exposure of e_i, and its rate is Gamma of mean mu and pseudo-exposure e_0. Either posterior mean is

.. math:: \mu + \frac{n_i}{n_0 + n_i} (Z_i / n_i - \mu).

Where no spread is likelier than any, n_0 is infinite and all clients have the pooled rate. Pure: both jit, and vmap
over problems. Mixtures as priors are in `rate_mixtures` and `poisson_mixtures`. Neither family has a message of fixed
size that suffices for unequal sizes; a step of the fit needs sums over clients of the likelihood's derivatives by two
parameters.

References: Skellam 1948, for the Beta-binomial; Clayton and Kaldor 1987, "Empirical Bayes estimates of
age-standardized relative risks", for Poisson and Gamma.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple, get_args, overload

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.scipy.special import betainc, gammainc

from jaxpfl import checks
from jaxpfl.errors import JaxpflError, shown, unknown_name
from jaxpfl.estimators import poisson_mixtures
from jaxpfl.estimators.climb import climb
from jaxpfl.estimators.intervals import bisect
from jaxpfl.estimators.poisson_mixtures import PoissonPrior
from jaxpfl.estimators.rate_mixtures import COMPONENTS, RateMixture, RatePrior, fit_mixture
from jaxpfl.estimators.rising import log_rise
from jaxpfl.types import Array, Scalar

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


@overload
def ebbinomial(
    successes: Any, trials: Any, prior: Literal["beta"] = "beta", *, components: int | None = None
) -> Rates: ...
@overload
def ebbinomial(
    successes: Any, trials: Any, prior: Literal["beta-mixture", "npmle"], *, components: int | None = None
) -> RateMixture: ...
def ebbinomial(
    successes: Any, trials: Any, prior: RatePrior = "beta", *, components: int | None = None
) -> Rates | RateMixture:
    """Fit a prior to successes among trials, and return every client's posterior.

    Args:
      successes: Z_i, whole numbers, [m].
      trials: n_i, whole numbers of at least one, [m], or one for all.
      prior: "beta"; "beta-mixture", of several Beta distributions; or "npmle", any distribution (see `rate_mixtures`).
      components: K of a mixture, 2 unless given, or points of the NPMLE's grid, 300 unless given; static.

    Raises:
      JaxpflError: for numbers that are no such counts, fewer than two clients, all successes zero, or all trials
        successes: of these no prior has the greatest likelihood; for an unknown prior, and components of a single Beta
        or out of range. Under a transformation, where values are not known, there are no checks of these.
    """
    number = _components(prior, get_args(RatePrior), COMPONENTS, components)
    z, n = checked_trials(successes, trials)
    if number is None:
        return _binomial(*_floats(z, n))
    return fit_mixture(*_floats(z, n), prior=prior, components=number)


def _components(prior: str, known: tuple[str, ...], usual: Mapping[str, int], components: int | None) -> int | None:
    """Number of components of a prior, ``usual`` unless given; None for one that has none."""
    if prior not in known:
        raise unknown_name("prior", prior, known)
    if prior not in usual:
        if components is not None:
            raise JaxpflError(f"prior {prior} has no components, got {components}")
        return None
    count = usual[prior] if components is None else components
    checks.count("components", count)
    if prior == "npmle" and count < 2:
        raise JaxpflError(f"components must be at least 2 for npmle, got {components}")
    return int(count)


def checked_trials(successes: Any, trials: Any) -> tuple[Any, Any]:
    """Successes and trials as NumPy arrays in double precision, where they are known.

    Raises:
      JaxpflError: as `ebbinomial`.
    """
    z, n = _checked(successes, trials, ("successes", "trials"), whole=True)
    if isinstance(z, np.ndarray) and isinstance(n, np.ndarray):
        if (z > n).any():
            at = int(np.argmax(z > n))
            raise JaxpflError(f"successes must be at most trials, got {z[at]:g} of {n[at]:g} for client {at}")
        if not 0 < z.sum() < n.sum():
            what = "all successes are zero" if z.sum() == 0 else "all trials are successes"
            raise JaxpflError(f"{what}: no prior can be fitted")
    return z, n


@overload
def ebpoisson(
    count: Any, exposure: Any, prior: Literal["gamma"] = "gamma", *, components: int | None = None
) -> Rates: ...
@overload
def ebpoisson(
    count: Any, exposure: Any, prior: Literal["gamma-mixture", "npmle"], *, components: int | None = None
) -> RateMixture: ...
def ebpoisson(
    count: Any, exposure: Any, prior: PoissonPrior = "gamma", *, components: int | None = None
) -> Rates | RateMixture:
    """Fit a prior to numbers of events, and return every client's posterior of its rate.

    Args:
      count: Z_i, whole numbers, [m].
      exposure: e_i, above zero, [m], or one for all.
      prior: "gamma"; "gamma-mixture", of several Gamma distributions; or "npmle", any distribution (see
        `poisson_mixtures`).
      components: as those of `ebbinomial`.

    Raises:
      JaxpflError: as `ebbinomial`; all counts zero.
    """
    number = _components(prior, get_args(PoissonPrior), poisson_mixtures.COMPONENTS, components)
    z, e = _checked(count, exposure, ("count", "exposure"), whole=False)
    if isinstance(z, np.ndarray) and z.sum() == 0:
        raise JaxpflError("all counts are zero: no prior can be fitted")
    if number is None:
        return _poisson(*_floats(z, e))
    return poisson_mixtures.fit_mixture(*_floats(z, e), prior=prior, components=number)


@jax.jit
def _binomial(z: Array, n: Array) -> Rates:
    share = z.sum() / n.sum()
    ways = log_rise(jnp.ones_like(n), n) - log_rise(jnp.ones_like(z), z) - log_rise(jnp.ones_like(n), n - z)

    def fit(mu: Array, size: Array) -> Array:
        return log_rise(size * mu, z) + log_rise(size * (1 - mu), n - z) - log_rise(size, n)

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
        return log_rise(shape, z) - shape * jnp.log1p(e / size) - z * jnp.log(size + e)

    none = z * jnp.log(share) - share * e
    unit = 1 / share
    mu, size, value = _fitted(lambda mu, size: fit(mu, size * unit), jnp.exp, jnp.log(share), share, none)
    size = size * unit
    w = jnp.where(jnp.isinf(size), 0, e / (size + e))
    mean = mu + w * (z / e - mu)
    sd = jnp.sqrt(mean / (size + e))
    constant = (z * jnp.log(e) - log_rise(jnp.ones_like(z), z)).sum()
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

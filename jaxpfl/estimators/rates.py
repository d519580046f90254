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
from functools import partial
from typing import Any, Literal, get_args, overload

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from jaxpfl.core import checks, full_precision
from jaxpfl.core.types import Array
from jaxpfl.estimators import inputs, marginals, poisson_mixtures
from jaxpfl.estimators.climb import climb
from jaxpfl.estimators.frames import labels_of
from jaxpfl.estimators.poisson_mixtures import PoissonPrior
from jaxpfl.estimators.rate_answers import RateMixture, Rates
from jaxpfl.estimators.rate_mixtures import COMPONENTS, RatePrior, fit_mixture
from jaxpfl.support.errors import JaxpflError, unknown_name

_STARTS = (-2.0, 0.0, 2.0, 4.0, 6.0, 9.0)
_MOST_SAMPLES = 1e12


@overload
def ebbinomial(
    successes: Any, trials: Any, prior: Literal["beta"] = "beta", *, components: int | None = None, weights: Any = None
) -> Rates: ...
@overload
def ebbinomial(
    successes: Any,
    trials: Any,
    prior: Literal["beta-mixture", "npmle"],
    *,
    components: int | None = None,
    weights: Any = None,
) -> RateMixture: ...
def ebbinomial(
    successes: Any, trials: Any, prior: RatePrior = "beta", *, components: int | None = None, weights: Any = None
) -> Rates | RateMixture:
    """Fit a prior to successes among trials, and return every client's posterior.

    Args:
      successes: Z_i, whole numbers, [m].
      trials: n_i, whole numbers of at least one, [m], or one for all.
      prior: "beta"; "beta-mixture", of several Beta distributions; or "npmle", any distribution (see `rate_mixtures`).
      components: K of a mixture, 2 unless given, or points of the NPMLE's grid, 300 unless given; static.
      weights: of the clients in the fit of a Beta prior, [m], at least 0 and in any unit, as those of `ebnm`.

    Raises:
      JaxpflError: for numbers that are no such counts, fewer than two clients, all successes zero, or all trials
        successes: of these no prior has the greatest likelihood; a single trial of every client, which tells nothing of
        the spread; for an unknown prior, components of a single Beta or out of range, and weights that are no such
        numbers, leave too few clients, or are of a mixture. Under a transformation, where values are not known, such
        counts and weights make all results NaN, as do counts beyond 8388 of a mixture in single precision.
    """
    number = checked_components(prior, get_args(RatePrior), COMPONENTS, components)
    _refuse_weights(prior, number, weights)
    successes, trials, weights = inputs.aligned(successes=successes, trials=trials, weights=weights)
    z, n = checked_trials(successes, trials, weights)
    labels = labels_of(successes, trials, weights)
    if number is None:
        found = fit_beta(*_floats(z, n), inputs.shares(weights, len(z), 2))
    else:
        found = _mixed(partial(fit_mixture, prior=prior, components=number), z, n, whole=True)
    return found._replace(labels=labels)


def _refuse_weights(prior: str, components: int | None, weights: Any) -> None:
    if weights is not None and components is not None:
        raise JaxpflError(f"weights are of a prior of one component, got prior {prior}")


def checked_components(
    prior: str, known: tuple[str, ...], usual: Mapping[str, int], components: int | None
) -> int | None:
    """Number of components of a prior, ``usual`` unless given; None for one that has none.

    Raises:
      JaxpflError: for an unknown prior, and components of one that has none, or fewer than it needs.
    """
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


def checked_trials(successes: Any, trials: Any, weights: Any = None) -> tuple[Any, Any]:
    """Successes and trials as NumPy arrays in double precision, where they are known.

    Raises:
      JaxpflError: as `ebbinomial`.
    """
    successes, trials = inputs.aligned(successes=successes, trials=trials)
    z, n = checked_counts(successes, trials, ("successes", "trials"), whole=True)
    if isinstance(z, np.ndarray) and isinstance(n, np.ndarray):
        own, size = _counted(weights, z, n)
        if not 0 < own.sum() < size.sum():
            what = "all successes are zero" if own.sum() == 0 else "all trials are successes"
            raise JaxpflError(f"{what}: no prior can be fitted")
        if size.max() == 1:
            raise JaxpflError("trials must be above 1 for some client: of one trial each no spread can be learned")
    return z, n


def _counted(weights: Any, *given: np.ndarray) -> tuple[np.ndarray, ...]:
    """Counts of the clients that count in the fit, as far as their weights are known."""
    if weights is None or isinstance(weights, Tracer):
        return given
    counts = np.asarray(inputs.shares(weights, len(given[0]), 2)) > 0
    return tuple(of[counts] for of in given)


@overload
def ebpoisson(
    count: Any, exposure: Any, prior: Literal["gamma"] = "gamma", *, components: int | None = None, weights: Any = None
) -> Rates: ...
@overload
def ebpoisson(
    count: Any,
    exposure: Any,
    prior: Literal["gamma-mixture", "npmle"],
    *,
    components: int | None = None,
    weights: Any = None,
) -> RateMixture: ...
def ebpoisson(
    count: Any, exposure: Any, prior: PoissonPrior = "gamma", *, components: int | None = None, weights: Any = None
) -> Rates | RateMixture:
    """Fit a prior to numbers of events, and return every client's posterior of its rate.

    Args:
      count: Z_i, whole numbers, [m].
      exposure: e_i, above zero, [m], or one for all.
      prior: "gamma"; "gamma-mixture", of several Gamma distributions; or "npmle", any distribution (see
        `poisson_mixtures`).
      components, weights: as those of `ebbinomial`.

    Raises:
      JaxpflError: as `ebbinomial`; all counts zero.
    """
    number = checked_components(prior, get_args(PoissonPrior), poisson_mixtures.COMPONENTS, components)
    _refuse_weights(prior, number, weights)
    count, exposure, weights = inputs.aligned(count=count, exposure=exposure, weights=weights)
    z, e = checked_events(count, exposure, weights)
    labels = labels_of(count, exposure, weights)
    if number is None:
        found = fit_gamma(*_floats(z, e), inputs.shares(weights, len(z), 2))
    else:
        found = _mixed(partial(poisson_mixtures.fit_mixture, prior=prior, components=number), z, e, whole=False)
    return found._replace(labels=labels)


def checked_events(count: Any, exposure: Any, weights: Any = None) -> tuple[Any, Any]:
    """Counts and exposures as NumPy arrays in double precision, where they are known.

    Raises:
      JaxpflError: as `ebpoisson`.
    """
    count, exposure = inputs.aligned(count=count, exposure=exposure)
    z, e = checked_counts(count, exposure, ("count", "exposure"), whole=False)
    if isinstance(z, np.ndarray) and _counted(weights, z)[0].sum() == 0:
        raise JaxpflError("all counts are zero: no prior can be fitted")
    return z, e


@full_precision.jit
def fit_beta(z: Array, n: Array, w: Array) -> Rates:
    """Fit a Beta prior to successes and trials that have been checked; w [m] of the clients sums to one."""
    z = _valid(z, n, w, whole=True)
    share = (w @ z) / (w @ n)
    start = jnp.log(share) - jnp.log1p(-share)
    at = partial(marginals.beta_binomial, z, n)
    mu, size, value = _fitted(at, jax.nn.sigmoid, start, share, marginals.binomial(z, n, share), w)
    value += w @ marginals.log_saturated_binomial(z, n)
    return posterior(z, n, mu, size, len(z) * value, bounded=True)


@full_precision.jit
def fit_gamma(z: Array, e: Array, w: Array) -> Rates:
    """Fit a Gamma prior to counts and exposures that have been checked; w [m] of the clients sums to one."""
    z = _valid(z, e, w, whole=False)
    share = (w @ z) / (w @ e)
    unit = 1 / share  # sizes in exposures of one event
    at = lambda mu, size: marginals.gamma_poisson(z, e, mu, size * unit)  # noqa: E731
    mu, size, value = _fitted(at, jnp.exp, jnp.log(share), share, marginals.poisson(z, e, share), w)
    value += w @ marginals.log_saturated_poisson(z)
    return posterior(z, e, mu, size * unit, len(z) * value, bounded=False)


def posterior(z: Array, n: Array, mu: Array, size: Array, log_marginal: Array, *, bounded: bool) -> Rates:
    """Posteriors under a Beta or a Gamma prior of mean mu and of some size, for clients new to it as well, [m] each."""
    alike, total = jnp.isinf(size), size + n
    finite = jnp.where(alike, 1, size)
    shrinkage = jnp.where(alike, 1, finite / (finite + n))
    mean = jnp.where(alike, mu, (finite * mu + z) / (finite + n))
    sd = jnp.sqrt(mean * (1 - mean) / (total + 1) if bounded else mean / total)
    return Rates(z, n, jnp.array(bounded), mu, size, mean, sd, shrinkage, log_marginal)


def _valid(z: Array, n: Array, w: Array, *, whole: bool) -> Array:
    """The counts, or NaN for all where something is refused: under a transformation no error can say so."""
    counts = jnp.isfinite(z) & (z >= 0) & (z == jnp.round(z)) & (z <= _MOST_SAMPLES)
    sizes = jnp.isfinite(n) & (n > 0) & (n <= _MOST_SAMPLES)
    good = (counts & sizes & jnp.isfinite(w) & (w >= 0)).all() & ((w @ z) > 0)
    if whole:
        good &= ((n == jnp.round(n)) & (z <= n)).all() & ((w * (n - 1)).max() > 0) & ((w @ z) < (w @ n))
    return jnp.where(good, z, jnp.nan)


def _fitted(
    fit: Callable[[Array, Array], Array], link: Callable[[Array], Array], start: Array, share: Array, none: Array,
    w: Array,
) -> tuple[Array, Array, Array]:  # fmt: skip
    """The likeliest mean and size, or the pooled one without spread, and the mean log likelihood of a client.

    Args:
      fit: (mean, size) -> log likelihood of every client.
      link: of the first parameter.
      start: its value for the pooled mean.
      share: the pooled mean.
      none: log likelihood of every client without spread.
      w: weights of the clients, which sum to one.
    """
    starts = jnp.stack(jnp.broadcast_arrays(start, jnp.array(_STARTS, start.dtype)), axis=1)
    best, value = climb(lambda at: w @ fit(link(at[0]), jnp.exp(at[1])), starts)
    rounding = 16 * jnp.finfo(value.dtype).eps * (1 + jnp.abs(value))
    alike = w @ none >= value - rounding
    mean, size = jnp.where(alike, share, link(best[0])), jnp.where(alike, jnp.inf, jnp.exp(best[1]))
    bad = jnp.where(jnp.isnan(share), jnp.nan, 0)
    return mean + bad, size + bad, jnp.where(alike, w @ none, value) + bad


def checked_counts(count: Any, size: Any, names: tuple[str, str], *, whole: bool, least: int = 2) -> tuple[Any, Any]:
    """Counts and sizes in double precision, where they are known; ``whole`` for sizes that are counts too.

    Raises:
      JaxpflError.
    """
    z, n = (inputs.numbers(name, value) for name, value in zip(names, (count, size), strict=True))
    if z.ndim != 1 or n.ndim > 1 or (n.ndim and n.shape != z.shape):
        raise JaxpflError(
            f"{names[0]} and {names[1]} must be one number for each client, got shapes {z.shape} and {n.shape}"
        )
    if len(z) < least:
        raise JaxpflError(f"needs at least {least} client{'s' * (least > 1)}, got {len(z)}")
    for name, of, counted in ((names[0], z, True), (names[1], n, whole)):
        if isinstance(of, Tracer):
            continue
        flat, lowest = np.ravel(of), 0 if of is z else 1
        bad = ~np.isfinite(flat) | (flat > _MOST_SAMPLES)
        bad |= (flat < lowest) | (flat != np.round(flat)) if counted else flat <= 0
        if bad.any():
            at = int(np.argmax(bad))
            kind = f"whole numbers of at least {lowest}" if counted else "> 0 and finite"
            raise JaxpflError(f"{name} must be {kind}, got {flat[at]} for client {at}")
    if not isinstance(n, Tracer) and not isinstance(z, Tracer):
        n = np.broadcast_to(n, z.shape)
        if whole and (z > n).any():
            at = int(np.argmax(z > n))
            raise JaxpflError(f"{names[0]} must be at most {names[1]}, got {z[at]:g} of {n[at]:g} for client {at}")
    return z, n


def _floats(z: Any, n: Any) -> tuple[Array, Array]:
    kind = jnp.result_type(float)
    return jnp.asarray(z, kind), jnp.broadcast_to(jnp.asarray(n, kind), z.shape)


def _mixed(fit: Callable[[Array, Array], RateMixture], z: Any, n: Any, *, whole: bool) -> RateMixture:
    """Fit a mixture: in double precision where values are known, as terms of n log n leave few digits in single."""
    if isinstance(z, Tracer) or isinstance(n, Tracer):
        counts, sizes = _floats(z, n)
        few = jnp.maximum(counts.max(), sizes.max() if whole else 0) <= inputs.most_counted()
        counts = _valid(counts, sizes, jnp.ones_like(counts), whole=whole)
        return fit(jnp.where(few, counts, jnp.nan), sizes)
    return inputs.in_double(fit, z, n)

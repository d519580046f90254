r"""Priors of probabilities and rates from private counts of cells.

A client thins its counts to a public size, which leaves the likelihood exact: of its n_i trials it draws n_0 without
replacement, so that its successes among them are Beta-binomial of n_0 trials under a Beta prior; of its Z_i events in
an exposure of e_i it keeps each with probability e_0 / e_i, which leaves a Poisson count in an exposure of e_0. What is
left, one of n_0 + 1 or of a bounded number of values, is a cell of the kind of `normal_means.private`, counted
centrally or locally with its guarantees; several sizes are public, of which a client takes the greatest that it has.
Clients below all of them send a cell of their own, and tell nothing of the prior. Counts as released are replaced by
the nearest that a mixture of probabilities or rates can have; a prior is fitted to these as to clients, and each client
computes its own posterior from its whole counts, which sends nothing more.

Taken for public: the sizes, and the greatest count; in the local form also who took part.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from jaxpfl.core import checks
from jaxpfl.core.types import Array, Key
from jaxpfl.estimators import inputs, marginals, poisson_mixtures, rate_mixtures
from jaxpfl.estimators.frames import labels_of
from jaxpfl.estimators.normal_means.private import Released, central, local, nearest, nonnegative, warn_of_noise
from jaxpfl.estimators.poisson_mixtures import PoissonPrior
from jaxpfl.estimators.rate_answers import RateMixture, Rates
from jaxpfl.estimators.rate_mixtures import RatePrior
from jaxpfl.estimators.rates import (
    checked_components,
    checked_events,
    checked_trials,
    ebbinomial,
    ebpoisson,
    posterior,
)
from jaxpfl.privacy.claim import check_delta
from jaxpfl.support.errors import JaxpflError, shown, warn

_PLACES = 200
"""Probabilities or rates, of which mixtures are fitted to the noisy counts."""
_MOST_CELLS = 100_000
_MOST_TRIALS = 999_999_999  # of NumPy's hypergeometric distribution


class _Cells(NamedTuple):
    """Cells of all sizes, one after the other: counts and sizes, [cells] each, and each size's first cell, [sizes]."""

    counts: np.ndarray
    sizes: np.ndarray
    first: np.ndarray


def private_ebbinomial(
    key: Key,
    successes: Any,
    trials: Any,
    sizes: Sequence[int],
    *,
    epsilon: float,
    delta: float | None = None,
    prior: RatePrior = "beta",
    components: int | None = None,
) -> Rates | RateMixture:
    """Fit the prior to private counts of thinned successes, and return every client's posterior under it.

    It runs on the host. The prior is private as `normal_means.private.central` says where a delta is given, else as
    `local` says; ``log_marginal`` and all that is put together of several clients' answers is not.

    Args:
      key: of the thinning and the noise.
      successes, trials: as those of `ebbinomial`.
      sizes: public numbers of trials of at least two, to which clients thin theirs, chosen without a look at the data.
      epsilon: of the release, or of a client's message.
      delta: of the central release; None for the local one.
      prior, components: as those of `ebbinomial`.

    Raises:
      JaxpflError: as `ebbinomial`, `central` and `local`; for sizes that are no such numbers, repeat, or make more than
        100,000 cells; for a client of 1e9 trials or more; and under a transformation.
    """
    number = checked_components(prior, get_args(RatePrior), rate_mixtures.COMPONENTS, components)
    successes, trials = inputs.aligned(successes=successes, trials=trials)
    z, n = _known(*checked_trials(successes, trials))
    if n.max() > _MOST_TRIALS:
        at = int(np.argmax(n > _MOST_TRIALS))
        raise JaxpflError(f"trials must be at most {_MOST_TRIALS} to be thinned, got {n[at]:.0f} for client {at}")
    for size in _listed("sizes", sizes):
        checks.count("sizes", size)
    public = _public(sizes, least=2)
    cells = _cells(public, public)
    of_thin, of_noise = jax.random.split(key)
    of = _taken(n, public, "trials")
    rng, some = _host(of_thin), of >= 0
    own = np.zeros(len(z))
    own[some] = rng.hypergeometric(z[some].astype(int), (n - z)[some].astype(int), public[of[some]].astype(int))
    released = _released(of_noise, _placed(own, of, cells), cells, epsilon, delta)
    p = jnp.asarray(np.sin(np.pi / 2 * (np.arange(_PLACES) + 0.5) / _PLACES) ** 2, released.counts.dtype)
    kind = p.dtype
    counts, of_size = jnp.asarray(cells.counts, kind), jnp.asarray(cells.sizes, kind)
    logs = marginals.binomial(counts[:, None], of_size[:, None], p)
    logs += marginals.log_saturated_binomial(counts, of_size)[:, None]
    w = _weights(released, cells, jnp.exp(logs), 1 / (of_size + 1))
    kept, size, share = (np.asarray(a) for a in (counts, of_size, w))
    if number is None:
        fit = ebbinomial(kept, size, weights=share)
        found = posterior(*_own(z, n), fit.prior_mean, fit.prior_size, jnp.nan + fit.prior_mean, bounded=True)
        return found._replace(labels=labels_of(successes, trials))
    fit_of = rate_mixtures.fit_atoms if prior == "npmle" else rate_mixtures.fit_betas
    return _mixture(fit_of(counts, of_size, w, components=number), *_own(z, n), labels_of(successes, trials))


def private_ebpoisson(
    key: Key,
    count: Any,
    exposure: Any,
    exposures: Sequence[float],
    most: int,
    *,
    epsilon: float,
    delta: float | None = None,
    prior: PoissonPrior = "gamma",
    components: int | None = None,
) -> Rates | RateMixture:
    """Fit the prior to private counts of thinned events, and return every client's posterior of its rate.

    Args:
      key: of the thinning and the noise.
      count, exposure: as those of `ebpoisson`.
      exposures: public ones, to which clients thin their events, chosen without a look at the data.
      most: the greatest thinned count; greater ones count as it, which makes great rates too small.
      epsilon, delta: as those of `private_ebbinomial`.
      prior, components: as those of `ebpoisson`.

    Raises:
      JaxpflError: as `ebpoisson`, and else as `private_ebbinomial`.
    """
    number = checked_components(prior, get_args(PoissonPrior), poisson_mixtures.COMPONENTS, components)
    count, exposure = inputs.aligned(count=count, exposure=exposure)
    z, e = _known(*checked_events(count, exposure))
    checks.count("most", most)
    for each in _listed("exposures", exposures):
        checks.positive("exposures", each)
    public = _public(exposures, least=0)
    cells = _cells(np.full(len(public), float(most)), public)
    of_thin, of_noise = jax.random.split(key)
    of = _taken(e, public, "exposure")
    some = of >= 0
    own = np.zeros(len(z))
    own[some] = _host(of_thin).binomial(z[some].astype(int), public[of[some]] / e[some])
    beyond = int((own > most).sum())
    if beyond:
        warn(f"counts of {beyond} of {len(own)} clients, thinned, lie beyond {most} and were clipped")
    released = _released(of_noise, _placed(np.minimum(own, most), of, cells), cells, epsilon, delta)
    kind = released.counts.dtype
    counts, of_size = jnp.asarray(cells.counts, kind), jnp.asarray(cells.sizes, kind)
    top = most / float(public.min())
    rates = jnp.asarray(top * ((np.arange(_PLACES) + 0.5) / _PLACES) ** 2, kind)
    logs = marginals.poisson(counts[:, None], of_size[:, None], rates)
    logs += marginals.log_saturated_poisson(counts)[:, None]
    chances = jnp.exp(logs)
    # The last cell of a size holds all greater counts.
    last = counts == most
    rest = 1 - jax.ops.segment_sum(jnp.where(last[:, None], 0, chances), _strata(cells), len(public))
    chances = jnp.where(last[:, None], jnp.maximum(rest, 0)[_strata(cells)], chances)
    w = _weights(released, cells, chances, jnp.full(len(counts), 1 / (most + 1), kind))
    if number is None:
        fit = ebpoisson(np.asarray(counts), np.asarray(of_size), weights=np.asarray(w))
        found = posterior(*_own(z, e), fit.prior_mean, fit.prior_size, jnp.nan + fit.prior_mean, bounded=False)
        return found._replace(labels=labels_of(count, exposure))
    fit_of = poisson_mixtures.fit_places if prior == "npmle" else poisson_mixtures.fit_gammas
    return _mixture(fit_of(counts, of_size, w, components=number), *_own(z, e), labels_of(count, exposure))


def _mixture(fitted: Any, z: Array, n: Array, labels: Any) -> RateMixture:
    zero = jnp.zeros((), z.dtype)
    pair = isinstance(fitted, tuple) and not hasattr(fitted, "_fields")
    prior, slack = fitted if pair else (fitted, zero)
    return rate_mixtures.posterior(prior, z, n, slack)._replace(labels=labels)


def _own(z: np.ndarray, n: np.ndarray) -> tuple[Array, Array]:
    kind = jnp.result_type(float)
    return jnp.asarray(z, kind), jnp.asarray(n, kind)


def _known(z: Any, n: Any) -> tuple[np.ndarray, np.ndarray]:
    if isinstance(z, Tracer) or isinstance(n, Tracer):
        raise JaxpflError("private counts are thinned on the host: call this outside jit and vmap")
    return z, n


def _listed(name: str, given: Any) -> list[Any]:
    if inputs.numbers(name, given, "a list of public ones").ndim != 1:
        raise JaxpflError(f"{name} must be a list of public numbers, got {shown(given)}")
    return list(given)


def _public(sizes: Sequence[float], least: int) -> np.ndarray:
    found = np.unique(np.asarray(sizes, float))
    if not len(sizes) or len(found) < len(sizes) or found[0] < least:
        at_least = f" of at least {least}" if least else ""
        raise JaxpflError(f"sizes must be different public numbers{at_least}, got {list(sizes)}")
    return found


def _cells(most: np.ndarray, sizes: np.ndarray) -> _Cells:
    """Cells of counts from 0 to the greatest of each size, [sizes].

    Raises:
      JaxpflError: for too many.
    """
    number = (most + 1).sum()
    if number > _MOST_CELLS:
        raise JaxpflError(f"sizes and greatest counts must make at most {_MOST_CELLS} cells, got {number:.0f}")
    counts = [np.arange(of + 1.0) for of in most]
    lengths = [len(of) for of in counts]
    first = np.cumsum([0, *lengths[:-1]])
    return _Cells(np.concatenate(counts), np.repeat(sizes, lengths), first)


def _strata(cells: _Cells) -> np.ndarray:
    """Place of each cell's size among all, [cells]."""
    return np.searchsorted(np.unique(cells.sizes), cells.sizes)


def _taken(n: np.ndarray, public: np.ndarray, name: str) -> np.ndarray:
    """Place of the greatest public size that each client has, [m]; -1 for none."""
    of = np.searchsorted(public, n, side="right") - 1
    few = int((of < 0).sum())
    if few:
        warn(f"{name} of {few} of {len(n)} clients are below {public[0]:g}: they tell nothing of the prior")
    return of


def _placed(own: np.ndarray, of: np.ndarray, cells: _Cells) -> Array:
    """Cell of each client, [m]; the one after the last for those below all sizes."""
    return jnp.asarray(np.where(of < 0, len(cells.counts), cells.first[of] + own).astype(np.int32))


def _released(key: Key, at: Array, cells: _Cells, epsilon: float, delta: float | None) -> Released:
    """Noisy counts of all cells but that of clients below all sizes."""
    number = len(cells.counts) + 1
    if delta is None:
        found = local(key, at, number, epsilon=epsilon)
    else:
        check_delta(delta, len(at))
        found = central(key, at, number, epsilon=epsilon, delta=delta)
    found = found._replace(counts=found.counts[:-1])
    warn_of_noise(found)
    return found


def _weights(released: Released, cells: _Cells, chances: Array, even: Array) -> Array:
    """Shares of the cells, from counts that a mixture can have, or as if all counts were as likely, [cells].

    Args:
      released: the noisy counts.
      cells: their counts and sizes.
      chances: of every cell under every probability or rate, given its size, [cells, places].
      even: chances of every cell, given its size, where the noise hides the counts, [cells].
    """
    strata = _strata(cells)
    noisy = jax.ops.segment_sum(released.counts, strata, len(cells.first))
    sizes = nonnegative(noisy, jnp.maximum(noisy.sum(), 1))[strata]
    counts = nearest(released, sizes[:, None] * chances, (sizes + 1) * even)
    counts = jnp.maximum(counts, 0)
    return counts / counts.sum()


def _host(key: Key) -> np.random.Generator:
    return np.random.default_rng(np.asarray(jax.random.bits(key, (4,), jnp.uint32)))

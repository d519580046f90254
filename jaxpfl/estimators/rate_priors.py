"""The choice of a prior of counts, by the log probability of clients that were held out.

`normal_means.best` and `normal_means.leads` read the scores; `normal_means.compare` has those of estimates with
standard errors, and their risks: these are without.

Reference: Laird 1978, "Nonparametric maximum likelihood estimation of a mixing distribution", for why the likelihood of
all clients cannot choose: that of the NPMLE is the greatest whatever the population.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, get_args

import jax.numpy as jnp

from jaxpfl.core.types import Array
from jaxpfl.estimators import poisson_mixtures, rate_mixtures
from jaxpfl.estimators.normal_means.compare import FOLDS, check_priors
from jaxpfl.estimators.poisson_mixtures import PoissonPrior
from jaxpfl.estimators.rate_answers import Mixture, Rates
from jaxpfl.estimators.rate_folds import CountScores, scores, split
from jaxpfl.estimators.rate_mixtures import RatePrior
from jaxpfl.estimators.rates import checked_events, checked_trials, fit_beta, fit_gamma

BINOMIAL: tuple[RatePrior, ...] = get_args(RatePrior)
POISSON: tuple[PoissonPrior, ...] = get_args(PoissonPrior)


def compare_binomial_priors(
    successes: Any, trials: Any, priors: Sequence[RatePrior] = BINOMIAL, *, folds: int = FOLDS
) -> dict[RatePrior, CountScores]:
    """Score priors of probabilities on the same clients and folds.

    Each is fitted once for each fold, and once to all, with as many components as `ebbinomial` takes unless told. Runs
    on the host. Clients whose order has a period should be shuffled first.

    Args:
      successes, trials: as those of `ebbinomial`.
      priors: the families.
      folds: their number, from 2 to that of the clients.

    Raises:
      JaxpflError: as `ebbinomial`, also for the clients that are left without a fold; no prior, one twice, folds out of
        range; and under a transformation.
    """
    check_priors(priors, BINOMIAL)
    of = split("compare_binomial_priors", checked_trials, successes, trials, folds)
    return {prior: scores(of, partial(_fit_binomial, prior)) for prior in priors}


def compare_poisson_priors(
    count: Any, exposure: Any, priors: Sequence[PoissonPrior] = POISSON, *, folds: int = FOLDS
) -> dict[PoissonPrior, CountScores]:
    """Score priors of rates on the same clients and folds, as `compare_binomial_priors` does those of probabilities.

    Args:
      count, exposure: as those of `ebpoisson`.
      priors, folds: as those of `compare_binomial_priors`.

    Raises:
      JaxpflError: as `ebpoisson`, and else as `compare_binomial_priors`.
    """
    check_priors(priors, POISSON)
    of = split("compare_poisson_priors", checked_events, count, exposure, folds)
    return {prior: scores(of, partial(_fit_poisson, prior)) for prior in priors}


def _fit_binomial(prior: RatePrior, z: Array, n: Array, w: Array) -> Mixture:
    if prior == "beta":
        return _single(fit_beta(z, n, w), rate_mixtures.Betas, rate_mixtures.Atoms)
    components = rate_mixtures.COMPONENTS[prior]
    if prior == "npmle":
        return rate_mixtures.fit_atoms(z, n, w, components=components)[0]
    return rate_mixtures.fit_betas(z, n, w, components=components)


def _fit_poisson(prior: PoissonPrior, z: Array, e: Array, w: Array) -> Mixture:
    if prior == "gamma":
        return _single(fit_gamma(z, e, w), poisson_mixtures.Gammas, poisson_mixtures.Places)
    components = poisson_mixtures.COMPONENTS[prior]
    if prior == "npmle":
        return poisson_mixtures.fit_places(z, e, w, components=components)[0]
    return poisson_mixtures.fit_gammas(z, e, w, components=components)


def _single(fit: Rates, spread: Any, alike: Any) -> Mixture:
    """A single distribution as a mixture of one, an atom where the clients are all alike."""
    one = jnp.ones(1, fit.prior_mean.dtype)
    mean = fit.prior_mean[None]
    return alike(one, mean) if bool(jnp.isinf(fit.prior_size)) else spread(one, mean, fit.prior_size[None])

"""Fits of the counts of a file's clients: successes of trials, and events in exposures, about covariates or not."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import jax
import numpy as np

from jaxpfl.estimators import (
    compare_binomial_priors,
    compare_poisson_priors,
    differences,
    learned_bernoulli,
    learned_poisson,
    learned_rates,
    rate_draws,
    rate_scores,
)
from jaxpfl.estimators.normal_means import best
from jaxpfl.estimators.normal_means.compare import FOLDS
from jaxpfl.estimators.poisson_mixtures import Gammas
from jaxpfl.estimators.rate_answers import Rates, check_threshold
from jaxpfl.estimators.rate_mixtures import Betas
from jaxpfl.estimators.rate_regression import ebbinomial_regression, ebpoisson_regression
from jaxpfl.estimators.rates import ebbinomial, ebpoisson
from jaxpfl.studies.own_data import private_fits
from jaxpfl.studies.own_data.normal_means_fits import (
    MOST_REFITTED,
    Fitted,
    arrays,
    coefficients,
    compared,
    ranked,
    refuse_dependent,
    refuse_drawn,
    weighting,
)
from jaxpfl.studies.own_data.summary_csv import Kind, Summaries
from jaxpfl.support.errors import JaxpflError

MIXTURES: Mapping[Kind, tuple[str, ...]] = {
    "successes": ("beta-mixture", "npmle"),
    "count": ("gamma-mixture", "npmle"),
}
"""Priors of successes and of counts beside a single Beta or Gamma distribution."""


def of_counts(data: Summaries, seed: int, options: Any) -> Fitted:
    """Fit successes of trials, or counts, by the prior that is asked for, or by the best on held-out clients.

    Raises:
      JaxpflError: as `of_rates`, `of_mixture`, `of_rates_about`, and the comparison of priors; for a bad threshold.
    """
    if options.threshold is not None:
        check_threshold(options.threshold, bounded=data.kind == "successes")
    if options.covariates:
        return of_rates_about(data, seed, options)
    if options.prior in MIXTURES[data.kind]:
        if data.weights is not None:
            raise JaxpflError(f"--weights requires a prior of one component, got --prior {options.prior}")
        return of_mixture(data, seed, options, options.prior)
    if options.prior != "best":
        return of_rates(data, seed, options)
    refuse_drawn(options, "priors of successes and counts")
    compare = compare_binomial_priors if data.kind == "successes" else compare_poisson_priors
    scores: Any = compare(data.first, data.second, folds=min(FOLDS, len(data.first)))
    prior = best(scores)
    found = of_mixture(data, seed, options, prior) if prior in MIXTURES[data.kind] else of_rates(data, seed, options)
    return found._replace(facts=found.facts | {"compared": compared(scores)})


def of_rates(data: Summaries, seed: int, options: Any) -> Fitted:
    """Fit a Beta prior to successes of trials, or a Gamma prior to counts.

    Raises:
      JaxpflError: as `ebbinomial` and `ebpoisson`; for intervals by drawn clients.
    """
    z, n, level = data.first, data.second, options.level
    refuse_drawn(options, "a Beta or Gamma prior, whose mean and size are integrated over")
    private: dict[str, Any] = {}
    if options.epsilon is not None:
        fit, private = private_fits.of_counts(data.kind, z, n, seed, None, options)
    else:
        fit: Rates = (ebbinomial if data.kind == "successes" else ebpoisson)(z, n, weights=data.weights)
    low, high, sd = (np.asarray(of) for of in (*fit.interval(level), fit.sd))
    sample, exceedance = fit.sample, fit.exceedance
    how = "plug-in"
    if (
        options.intervals != how
        and not private
        and data.weights is None
        and (data.kind == "successes" or len(z) <= MOST_REFITTED)
    ):
        how = "integrated"
        learned = learned_bernoulli if data.kind == "successes" else learned_poisson
        of = learned.population(z, n)
        low, high, sd = learned.believed(z, n, level, of)
        sample, exceedance = learned_rates.sampler(of, z, n), partial(learned_rates.exceedance, of, z, n)
    mean, size = float(fit.prior_mean), float(fit.prior_size)
    spread = mean * (1 - mean) / (1 + size) if data.kind == "successes" else mean / size
    threshold = mean if options.threshold is None else options.threshold
    facts = {
        "prior": "beta" if data.kind == "successes" else "gamma",
        "intervals": how,
        "estimated": {"mean": mean, "sigma_theta": spread**0.5},
        "threshold": threshold,
        "prior_size": size if np.isfinite(size) else None,
        **(private or {"log_marginal": float(fit.log_marginal)}),
        "clients_differ": _differ(data, seed),
        **weighting(data, options),
    }
    own = np.asarray(fit.mean)
    columns = {
        "local": z / n, "personalized": own, "personalized_stderr": sd, "low": np.minimum(low, own),
        "high": np.maximum(high, own), "shrinkage": fit.shrinkage, "exceedance": exceedance(threshold),
        **ranked(sample, len(z), seed, level),
    }  # fmt: skip
    scores = rate_scores.scores(fit)
    return Fitted(facts, arrays(columns if scores is None else columns | {"score": scores}), scores)


def of_rates_about(data: Summaries, seed: int, options: Any) -> Fitted:
    """Fit successes of trials, or counts, about a regression on covariates.

    Raises:
      JaxpflError: as `ebbinomial_regression` and `ebpoisson_regression`, the covariates by their names.
    """
    refuse_dependent(data)
    shares = data.kind == "successes"
    fit = (ebbinomial_regression if shares else ebpoisson_regression)(data.first, data.second, data.covariates)
    low, high = (np.asarray(end) for end in fit.interval(options.level))
    rates, own = fit.rates, np.asarray(fit.mean)
    mu, spread = np.asarray(rates.prior_mean), float(fit.spread)
    variance = mu * (1 - mu) / (1 + spread) if shares else mu**2 / spread
    facts = {
        "prior": "beta" if shares else "gamma",
        "estimated": {"mean": float(mu.mean()), "sigma_theta": float(variance.mean()) ** 0.5},
        "spread": {"pseudo_trials" if shares else "shape": spread if np.isfinite(spread) else None},
        "coefficients": coefficients(("intercept", *data.covariate_names), fit.beta, fit.beta_covariance),
        "log_marginal": float(fit.log_marginal),
        "clients_differ": {
            "name": "likelihood ratio to the regression",
            "statistic": float(fit.ratio),
            "p_value": float(fit.p_value),
        },
        "threshold": options.threshold,
    }
    columns = {
        "local": data.first / data.second, "personalized": own, "personalized_stderr": rates.sd,
        "low": np.minimum(low, own), "high": np.maximum(high, own), "regression": mu, "shrinkage": rates.shrinkage,
        "exceedance": fit.exceedance(options.threshold), **ranked(fit.sample, len(own), seed, options.level),
    }  # fmt: skip
    scores = rate_scores.scores(rates)
    return Fitted(facts, arrays(columns if scores is None else columns | {"score": scores}), scores)


def of_mixture(data: Summaries, seed: int, options: Any, prior: Any) -> Fitted:
    """Fit a mixture to successes of trials, or to counts.

    Raises:
      JaxpflError: as `ebbinomial` and `ebpoisson`; for intervals by drawn clients.
    """
    refuse_drawn(options, f"the prior {prior} of successes and counts, which counts as known")
    z, n = data.first, data.second
    shares = data.kind == "successes"
    private: dict[str, Any] = {}
    if options.epsilon is not None:
        fit, private = private_fits.of_counts(data.kind, z, n, seed, prior, options)
    else:
        fit = (ebbinomial if shares else ebpoisson)(z, n, prior=prior, components=options.components)
    low, high = (np.asarray(end) for end in fit.interval(options.level))
    own, of = np.asarray(fit.mean), jax.tree.map(np.asarray, fit.prior)
    mean = float(of.weights @ of.means)
    variance = of.weights @ (of.means - mean) ** 2
    facts: dict[str, Any] = {"prior": prior, "intervals": "plug-in"}
    columns = {
        "local": z / n, "personalized": own, "personalized_stderr": fit.sd, "low": np.minimum(low, own),
        "high": np.maximum(high, own), "exceedance": fit.exceedance(options.threshold),
        **ranked(rate_draws.sampler(fit), len(z), seed, options.level),
    }  # fmt: skip
    if isinstance(of, Betas | Gammas):
        within = of.means * (1 - of.means) / (1 + of.sizes) if shares else of.means / of.sizes
        variance += of.weights @ within
        rows = zip(of.weights, of.means, of.sizes, strict=True)
        facts["components"] = [{"weight": float(a), "mean": float(b), "size": float(c)} for a, b, c in rows]
        columns |= {f"component_{k + 1}": share for k, share in enumerate(np.asarray(fit.membership()).T)}
    facts |= {
        "estimated": {"mean": mean, "sigma_theta": float(variance) ** 0.5},
        "threshold": mean if options.threshold is None else options.threshold,
        **(private or {"log_marginal": float(fit.log_marginal)}),
        "slack": float(fit.slack),
        "clients_differ": _differ(data, seed),
    }
    scores = rate_scores.scores(fit)
    return Fitted(facts, arrays(columns if scores is None else columns | {"score": scores}), scores)


def _differ(data: Summaries, seed: int) -> dict[str, Any]:
    """Pearson's chi-square test of equal probabilities or rates."""
    from scipy import special

    z, e = data.first, data.second
    if data.kind == "successes":
        return differences.of_shares(z, e, seed)._asdict()
    expected = e * z.sum() / e.sum()
    statistic = float(((z - expected) ** 2 / expected).sum())
    return {"name": "chi-square", "statistic": statistic, "p_value": float(special.chdtrc(len(z) - 1, statistic))}

"""Personalised estimation: pure functions of clients and server that jit and vmap over repetitions and settings.

`base.Estimator` defines an estimator and `base.estimate` runs one. Each model has one file: `gaussian`, `bernoulli`
and `mixture`, with their private forms, and `regression` and `regression_mixture`, which are functions of all
clients' data; `random_coefficients` and `common_representation` are regressions by sums that clients send. `ebnm`,
`fay_herriot`, `ebnm_groups`, `ebbinomial`, `ebpoisson` and `ebmultinomial` take one summary of each client: estimates
with their standard errors (and covariates, or groups), successes, or counts; `unit_level` takes samples with
covariates.
"""

from jaxpfl.estimators import (
    base,
    bernoulli,
    beta_binomial,
    client_variances,
    clustering,
    common_representation,
    differences,
    gaussian,
    gaussian_closed_form,
    gaussian_columns,
    intervals,
    learned_bernoulli,
    learned_gaussian,
    learned_poisson,
    learned_rates,
    marginals,
    mixture,
    multinomial,
    normal_means,
    pictures,
    private_rates,
    random_coefficients,
    rate_answers,
    rate_components,
    rate_draws,
    rate_folds,
    rate_mixtures,
    rate_priors,
    rate_regression,
    rate_scores,
    rates,
    regression,
    regression_mixture,
    release,
)
from jaxpfl.estimators.base import Estimated, Estimator, Samples, estimate, every, stack
from jaxpfl.estimators.multinomial import ebmultinomial
from jaxpfl.estimators.normal_means import compare_priors, ebnm, ebnm_groups, fay_herriot, unit_level
from jaxpfl.estimators.rate_components import compare_components
from jaxpfl.estimators.rate_priors import compare_binomial_priors, compare_poisson_priors
from jaxpfl.estimators.rate_regression import ebbinomial_regression, ebpoisson_regression
from jaxpfl.estimators.rates import ebbinomial, ebpoisson

__all__ = [
    "Estimated",
    "Estimator",
    "Samples",
    "base",
    "bernoulli",
    "beta_binomial",
    "client_variances",
    "clustering",
    "common_representation",
    "compare_binomial_priors",
    "compare_components",
    "compare_poisson_priors",
    "compare_priors",
    "differences",
    "ebbinomial",
    "ebbinomial_regression",
    "ebmultinomial",
    "ebnm",
    "ebnm_groups",
    "ebpoisson",
    "ebpoisson_regression",
    "estimate",
    "every",
    "fay_herriot",
    "gaussian",
    "gaussian_closed_form",
    "gaussian_columns",
    "intervals",
    "learned_bernoulli",
    "learned_gaussian",
    "learned_poisson",
    "learned_rates",
    "marginals",
    "mixture",
    "multinomial",
    "normal_means",
    "pictures",
    "private_rates",
    "random_coefficients",
    "rate_answers",
    "rate_components",
    "rate_draws",
    "rate_folds",
    "rate_mixtures",
    "rate_priors",
    "rate_regression",
    "rate_scores",
    "rates",
    "regression",
    "regression_mixture",
    "release",
    "stack",
    "unit_level",
]

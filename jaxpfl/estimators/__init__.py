"""Personalised estimation: pure functions of clients and server that jit and vmap over repetitions and settings.

`base.Estimator` defines an estimator and `base.estimate` runs one. Each model has one file: `gaussian`, `bernoulli`
and `mixture`, with their private forms, and `regression` and `regression_mixture`, which are functions of all
clients' data. `empirical_bayes` is an annex for summaries of clients: estimates with standard errors, counts, groups,
covariates.
"""

from jaxpfl.estimators import (
    base,
    bernoulli,
    beta_binomial,
    clustering,
    empirical_bayes,
    gaussian,
    gaussian_closed_form,
    gaussian_columns,
    mixture,
    regression,
    regression_mixture,
    release,
)
from jaxpfl.estimators.base import Estimated, Estimator, Samples, estimate, every, stack

__all__ = [
    "Estimated",
    "Estimator",
    "Samples",
    "base",
    "bernoulli",
    "beta_binomial",
    "clustering",
    "empirical_bayes",
    "estimate",
    "every",
    "gaussian",
    "gaussian_closed_form",
    "gaussian_columns",
    "mixture",
    "regression",
    "regression_mixture",
    "release",
    "stack",
]

"""Personalised estimation: pure functions for clients and server that work under ``jax.jit`` and ``jax.vmap``.

`base.Estimator` defines an estimator and `base.estimate` runs one. Each model has one file. `gaussian`, `bernoulli` and
`mixture` also have private forms; `regression` and `regression_mixture` are functions of all clients' data at once.
`empirical_bayes` estimates from one summary per client (an estimate with its standard error, or counts), with groups
and covariates.
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

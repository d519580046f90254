"""Personalized estimation: pure functions for clients and server that work under ``jax.jit`` and ``jax.vmap``.

`base.Estimator` is the interface of an estimator, and `base.estimate` runs an estimator. Each statistical model has one
module. `gaussian`, `bernoulli` and `mixture` also have private estimators. Most methods in `empirical_bayes` need only
one summary per client (an estimate with its standard error, counts, or the products of its regression data). Some of
them support groups or covariates.
"""

from jaxpfl.estimators import (
    base,
    bernoulli,
    clustering,
    empirical_bayes,
    gaussian,
    gaussian_closed_form,
    gaussian_columns,
    mixture,
    release,
)
from jaxpfl.estimators.base import Estimated, Estimator, Samples, estimate, every, stack

__all__ = [
    "Estimated",
    "Estimator",
    "Samples",
    "base",
    "bernoulli",
    "clustering",
    "empirical_bayes",
    "estimate",
    "every",
    "gaussian",
    "gaussian_closed_form",
    "gaussian_columns",
    "mixture",
    "release",
    "stack",
]

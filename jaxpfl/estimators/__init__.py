"""Personalised estimation: pure functions of clients and of a server, that jit and vmap over repetitions and settings.

`base.Estimator` is what an estimator is, and `base.estimate` runs one. One file a model: `gaussian`, `bernoulli`,
`mixture` (with their private forms and exact errors in files beside), and `regression`, `regression_mixture` and
`logistic_regression`, which are functions of all clients' data.
"""

from jaxpfl.estimators import (
    base,
    bernoulli,
    bernoulli_closed_form,
    bernoulli_private,
    beta_binomial,
    clustering,
    gaussian,
    gaussian_closed_form,
    gaussian_private,
    intervals,
    logistic_regression,
    mixture,
    private_clustering,
    radius,
    regression,
    regression_mixture,
    release,
    when_to_collaborate,
)
from jaxpfl.estimators.base import Estimated, Estimator, Samples, estimate, every, stack

__all__ = [
    "Estimated",
    "Estimator",
    "Samples",
    "base",
    "bernoulli",
    "bernoulli_closed_form",
    "bernoulli_private",
    "beta_binomial",
    "clustering",
    "estimate",
    "every",
    "gaussian",
    "gaussian_closed_form",
    "gaussian_private",
    "intervals",
    "logistic_regression",
    "mixture",
    "private_clustering",
    "radius",
    "regression",
    "regression_mixture",
    "release",
    "stack",
    "when_to_collaborate",
]

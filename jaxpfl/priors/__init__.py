"""Priors: population distributions of personal models, with their penalties and estimators of their parameters."""

from jaxpfl.priors import discrete, distillation, gaussian, gaussian_mixture, laplace
from jaxpfl.priors.base import Examples, Prior, Rates

__all__ = ["Examples", "Prior", "Rates", "discrete", "distillation", "gaussian", "gaussian_mixture", "laplace"]

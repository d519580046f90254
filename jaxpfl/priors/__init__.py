"""Priors: population distributions of personal models, each a penalty and the estimation of its parameters."""

from jaxpfl.priors import distillation as distillation

__all__ = ["distillation"]

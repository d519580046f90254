"""Differential privacy: mechanisms, what they cost over a run, and what an audit can say of them."""

from jaxpfl.privacy import local

__all__ = ["local"]

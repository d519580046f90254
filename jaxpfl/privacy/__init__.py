"""Differential privacy: mechanisms within the round."""

from jaxpfl.privacy.mechanism import Mechanism, PrivateHyper, privatize

__all__ = ["Mechanism", "PrivateHyper", "privatize"]

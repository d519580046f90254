"""Differential privacy: mechanisms, what they cost over a run, and what an audit can say of them."""

from jaxpfl.privacy import audit, local
from jaxpfl.privacy.accounting import Accountant, PrivacyPlan
from jaxpfl.privacy.calibration import calibrate
from jaxpfl.privacy.capacity import poisson_cap
from jaxpfl.privacy.descriptions import CentralNoise, DistributedNoise, FixedSize, Full, PerStepNoise, Poisson
from jaxpfl.privacy.events import Relation
from jaxpfl.privacy.refusals import Refusal
from jaxpfl.privacy.statement import Statement

__all__ = [
    "Accountant",
    "CentralNoise",
    "DistributedNoise",
    "FixedSize",
    "Full",
    "PerStepNoise",
    "Poisson",
    "PrivacyPlan",
    "Refusal",
    "Relation",
    "Statement",
    "audit",
    "calibrate",
    "local",
    "poisson_cap",
]

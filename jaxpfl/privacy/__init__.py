"""Differential privacy: mechanisms, accounting for a run, and audits."""

from jaxpfl.privacy import audit
from jaxpfl.privacy import local_dp as local
from jaxpfl.privacy.accounting import Accountant, PrivacyPlan, Relation, accountant_named, calibrate
from jaxpfl.privacy.claim import calibrated, plan_of, sampling_of
from jaxpfl.privacy.descriptions import (
    CentralNoise,
    Cyclic,
    DistributedNoise,
    FixedSize,
    Full,
    PerStepNoise,
    Poisson,
    poisson_cap,
)
from jaxpfl.privacy.mechanism import Mechanism, NoiseSettings, StepNoise
from jaxpfl.privacy.noise import Draw, record
from jaxpfl.privacy.privacy_config import PrivacyConfig
from jaxpfl.privacy.private_sum import PrivateHyper, privatize
from jaxpfl.privacy.silos import SiloMechanism
from jaxpfl.privacy.statement import Statement

__all__ = [
    "Accountant",
    "CentralNoise",
    "Cyclic",
    "DistributedNoise",
    "Draw",
    "FixedSize",
    "Full",
    "Mechanism",
    "NoiseSettings",
    "PerStepNoise",
    "Poisson",
    "PrivacyConfig",
    "PrivacyPlan",
    "PrivateHyper",
    "Relation",
    "SiloMechanism",
    "Statement",
    "StepNoise",
    "accountant_named",
    "audit",
    "calibrate",
    "calibrated",
    "local",
    "plan_of",
    "poisson_cap",
    "privatize",
    "record",
    "sampling_of",
]

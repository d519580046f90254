"""Robust aggregation of uploads, and attacks by clients."""

from jaxpfl.uploads.robust.aggregation import AGGREGATORS, MEAN, Aggregator, resolve, robust
from jaxpfl.uploads.robust.attacks import ATTACKS, Attack, attack_of, attacked, drawn, poisoned

__all__ = [
    "AGGREGATORS",
    "ATTACKS",
    "MEAN",
    "Aggregator",
    "Attack",
    "attack_of",
    "attacked",
    "drawn",
    "poisoned",
    "resolve",
    "robust",
]

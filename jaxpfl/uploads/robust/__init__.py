"""Robust aggregation of uploads, and clients that attack it."""

from jaxpfl.uploads.robust.aggregators import AGGREGATORS, MEAN, Aggregator, resolve
from jaxpfl.uploads.robust.attacks import ATTACKS, Attack, attack_of, attacked, drawn, poisoned
from jaxpfl.uploads.robust.robust_server import robust

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

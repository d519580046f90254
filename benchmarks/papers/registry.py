"""Experiments by name, in the order of the papers."""

from __future__ import annotations

from collections.abc import Mapping

from jaxpfl.support.errors import unknown_name

from . import (
    adaped_estimation,
    adaped_learning,
    adaped_privacy,
    everyone,
    histograms,
    network,
    others,
    persfl,
    shortened,
)
from .declared import Experiment


def _named() -> dict[str, Experiment]:
    parts = (
        adaped_learning,
        adaped_privacy,
        adaped_estimation,
        persfl,
        everyone,
        histograms,
        network,
        others,
        shortened,
    )
    return {one.name: one for part in parts for one in part.EXPERIMENTS}


EXPERIMENTS: Mapping[str, Experiment] = _named()


def get(name: str) -> Experiment:
    """Return the experiment with this name.

    Raises:
      JaxpflError: if the name is unknown; the message suggests the nearest known name.
    """
    if name not in EXPERIMENTS:
        raise unknown_name("table or figure", name, EXPERIMENTS)
    return EXPERIMENTS[name]

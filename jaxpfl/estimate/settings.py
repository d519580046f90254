"""Checks of what a study is asked for, and what its private messages are calibrated to."""

from __future__ import annotations

import math
from typing import Literal, TypeAlias

from jaxpfl.errors import JaxpflError

Mechanism: TypeAlias = Literal["analytic", "printed", "one-bit"]
"""Of local privacy: the analytic Gaussian mechanism, the paper's calibration of it, or one bit (one dimension)."""


def at_least(name: str, value: float, least: float) -> None:
    """Raises `JaxpflError` unless the value is finite and at least ``least``."""
    if not (math.isfinite(value) and value >= least):
        raise JaxpflError(f"{name} must be at least {least:g} and finite, got {value}")


def above_zero(name: str, value: float) -> None:
    """Raises `JaxpflError` unless the value is finite and above zero."""
    if not (math.isfinite(value) and value > 0):
        raise JaxpflError(f"{name} must be > 0 and finite, got {value}")


def privacy(epsilon: float | None, delta: float) -> None:
    """Raises `JaxpflError` for an eps that is not above zero or a delta outside (0, 1)."""
    if epsilon is not None:
        above_zero("epsilon", epsilon)
    if not 0 < delta < 1:
        raise JaxpflError(f"delta must be > 0 and < 1, got {delta}")

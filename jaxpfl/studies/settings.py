"""What studies share of their settings: mechanisms, and checks of numbers."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import fields
from typing import Any, Literal, TypeAlias

import jax.numpy as jnp

from jaxpfl import checks
from jaxpfl.errors import JaxpflError
from jaxpfl.types import Array

NOT_PRIVATE = "needs epsilon, without which nothing is private"
"""What is said of a setting of privacy alone."""

Mechanism: TypeAlias = Literal["analytic", "printed", "one-bit", "discrete"]
"""Of local privacy: the analytic Gaussian mechanism; in one dimension also the paper's calibration of it, one bit, and
the discrete Gaussian on a quantiser's levels."""


def at_least(name: str, value: float, least: float) -> None:
    """Refuses what is not finite and at least ``least``.

    Raises:
      JaxpflError.
    """
    if not (math.isfinite(value) and value >= least):
        raise JaxpflError(f"{name} must be at least {least:g} and finite, got {value}")


def refuse_given(settings: Any, names: Iterable[str], why: str) -> None:
    """Refuses those of a dataclass's fields that differ from their defaults: what was asked for would be ignored.

    Raises:
      JaxpflError.
    """
    defaults = {field.name: field.default for field in fields(settings)}
    for name in names:
        value = getattr(settings, name)
        if value != defaults[name]:
            raise JaxpflError(f"{name} {why}, got {value}")


def check_privacy(epsilon: float | None, delta: float) -> None:
    """Refuses an eps (where one is given) that is not positive, and a delta outside (0, 1).

    Raises:
      JaxpflError.
    """
    if epsilon is not None:
        checks.positive("epsilon", epsilon)
    checks.probability("delta", delta)


def senders(clients: int, uploads: int | None) -> Array:
    """Which clients send, [m] bool: the first K, as all are drawn alike."""
    return jnp.arange(clients) < (clients if uploads is None else uploads)


def check_uploads(uploads: int | None, clients: int) -> None:
    """Refuses a number of uploading clients (where one is given) below 2 or above that of all.

    Raises:
      JaxpflError.
    """
    if uploads is not None and not 2 <= uploads <= clients:
        raise JaxpflError(f"uploads must be between 2 and the number of clients ({clients}), got {uploads}")

"""Common parts of studies' settings: mechanisms, and checks of numbers."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import fields
from typing import Any, Literal, TypeAlias

import jax.numpy as jnp

from jaxpfl.core import checks
from jaxpfl.core.types import Array
from jaxpfl.support.errors import JaxpflError

NOT_PRIVATE = "needs epsilon, without which nothing is private"
"""Reason for refusing a setting of privacy without epsilon."""

LocalMechanism: TypeAlias = Literal["analytic", "printed", "one-bit", "discrete"]
"""Local mechanism: the analytic Gaussian one; in one dimension also the paper's calibration of it, one bit, and the
discrete Gaussian on a quantiser's levels."""


def at_least(name: str, value: float, least: float) -> None:
    """Check that a number is finite and at least ``least``.

    Raises:
      JaxpflError.
    """
    if not (math.isfinite(value) and value >= least):
        raise JaxpflError(f"{name} must be at least {least:g} and finite, got {value}")


def refuse_given(settings: Any, names: Iterable[str], why: str) -> None:
    """Refuse fields of a dataclass that differ from their defaults, as they would be ignored.

    Raises:
      JaxpflError.
    """
    defaults = {field.name: field.default for field in fields(settings)}
    for name in names:
        value = getattr(settings, name)
        if value != defaults[name]:
            raise JaxpflError(f"{name} {why}, got {value}")


def check_privacy(epsilon: float | None, delta: float) -> None:
    """Check that eps, if given, is positive, and that delta is in (0, 1).

    Raises:
      JaxpflError.
    """
    if epsilon is not None:
        checks.positive("epsilon", epsilon)
    checks.probability("delta", delta)


def senders(clients: int, uploads: int | None) -> Array:
    """Mask of the clients that send, [m] bool: the first K, as all have the same distribution."""
    return jnp.arange(clients) < (clients if uploads is None else uploads)


def check_uploads(uploads: int | None, clients: int) -> None:
    """Check that the number of uploading clients, if given, is between 2 and that of all.

    Raises:
      JaxpflError.
    """
    if uploads is not None and not 2 <= uploads <= clients:
        raise JaxpflError(f"uploads must be between 2 and the number of clients ({clients}), got {uploads}")

"""Range checks for numeric settings. A failed check raises a one-line error, and NaN fails every check."""

from __future__ import annotations

import math

from jaxpfl.support.errors import JaxpflError


def positive(name: str, value: float) -> None:
    """Check that a number is positive and finite.

    Raises:
      JaxpflError: if the number is outside this range.
    """
    if not 0 < value < math.inf:
        raise JaxpflError(f"{name} must be > 0 and finite, got {value}")


def not_negative(name: str, value: float) -> None:
    """Check that a number is non-negative and finite.

    Raises:
      JaxpflError: if the number is outside this range.
    """
    if not 0 <= value < math.inf:
        raise JaxpflError(f"{name} must be >= 0 and finite, got {value}")


def rate(name: str, value: float) -> None:
    """Check that a number lies in (0, 1].

    Raises:
      JaxpflError: if the number is outside this range.
    """
    if not 0 < value <= 1:
        raise JaxpflError(f"{name} must be > 0 and <= 1, got {value}")


def probability(name: str, value: float) -> None:
    """Check that a number lies in (0, 1).

    Raises:
      JaxpflError: if the number is outside this range.
    """
    if not 0 < value < 1:
        raise JaxpflError(f"{name} must be > 0 and < 1, got {value}")


def count(name: str, value: int, most: int | None = None) -> None:
    """Check that a number is an integer of at least 1, and at most ``most`` if that is given.

    Raises:
      JaxpflError: if the number is outside this range.
    """
    if isinstance(value, bool) or not 1 <= value < math.inf or value != int(value):
        raise JaxpflError(f"{name} must be a whole number >= 1, got {value}")
    if most is not None and value > most:
        raise JaxpflError(f"{name} must be at most {most}, got {value}")


def seed(name: str, value: int) -> None:
    """Check that a seed is an integer from 0 to 2^32 - 1.

    By default JAX truncates a longer seed to 32 bits, so that two different seeds could give the same key.

    Raises:
      JaxpflError: if the number is outside this range.
    """
    if isinstance(value, bool) or not 0 <= value < 2**32 or value != int(value):
        raise JaxpflError(f"{name} must be a whole number from 0 to {2**32 - 1}, got {value}")

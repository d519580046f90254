"""Range checks of the numbers that a privacy claim rests on: one line each, and not a number is refused too."""

from __future__ import annotations

import math

from jaxpfl.errors import JaxpflError


def positive(name: str, value: float) -> None:
    """Refuses what is not positive and finite.

    Raises:
      JaxpflError.
    """
    if not 0 < value < math.inf:
        raise JaxpflError(f"{name} must be > 0 and finite, got {value}")


def not_negative(name: str, value: float) -> None:
    """Refuses what is negative or not finite.

    Raises:
      JaxpflError.
    """
    if not 0 <= value < math.inf:
        raise JaxpflError(f"{name} must be >= 0 and finite, got {value}")


def rate(name: str, value: float) -> None:
    """Refuses what is not above 0 and at most 1.

    Raises:
      JaxpflError.
    """
    if not 0 < value <= 1:
        raise JaxpflError(f"{name} must be > 0 and <= 1, got {value}")


def probability(name: str, value: float) -> None:
    """Refuses what is not strictly between 0 and 1.

    Raises:
      JaxpflError.
    """
    if not 0 < value < 1:
        raise JaxpflError(f"{name} must be > 0 and < 1, got {value}")


def count(name: str, value: int, most: int | None = None) -> None:
    """Refuses what is not a whole number of at least 1, and at most ``most`` where given.

    Raises:
      JaxpflError.
    """
    if isinstance(value, bool) or not float(value).is_integer() or value < 1:
        raise JaxpflError(f"{name} must be a whole number of at least 1, got {value}")
    if most is not None and value > most:
        raise JaxpflError(f"{name} must be at most {most}, got {value}")

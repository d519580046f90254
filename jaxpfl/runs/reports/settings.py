"""Settings of a run by their full names, such as ``privacy.delta``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Values of nested mappings, under names joined by dots behind a prefix.

    Examples:
      >>> flat({"plan": {"devices": 2}, "lr": 0.1})
      {'plan.devices': 2, 'lr': 0.1}
    """
    found: dict[str, Any] = {}
    for name, value in values.items():
        found |= flat(value, f"{prefix}{name}.") if isinstance(value, Mapping) else {f"{prefix}{name}": value}
    return found

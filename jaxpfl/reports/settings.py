"""Settings by their full names, such as ``privacy.delta``, and as the flags that give them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
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


def flags(settings: Mapping[str, Any]) -> Iterator[str]:
    """Flags of a study's command that give its settings; those that are off, empty or None are left out.

    Examples:
      >>> list(flags({"sigma_x": 0.5, "sizes": [5, 10], "printed": True, "epsilon": None}))
      ['--sigma-x', '0.5', '--sizes', '5', '10', '--printed']
    """
    for name, value in settings.items():
        flag = f"--{name.replace('_', '-')}"
        if isinstance(value, bool):
            yield from [flag] if value else []
        elif value is not None and value != []:
            yield from (flag, *map(str, value if isinstance(value, list) else [value]))

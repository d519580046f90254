"""How much memory a compiled program needs, and how much is free: asked before the program runs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import jax

from jaxpfl.types import Device

_USABLE = 0.9  # of what is free: allocators round up, and others live on the machine


def needed(compiled: jax.stages.Compiled, devices: Sequence[Device]) -> int:
    """Bytes that a run of the program takes beyond its arguments: on the host for CPU devices, else on each device."""
    stats = compiled.memory_analysis()
    if stats is None:  # a backend that does not say
        return 0
    own = stats.temp_size_in_bytes + stats.output_size_in_bytes - stats.alias_size_in_bytes
    return own * (len(devices) if devices[0].platform == "cpu" else 1)


def free(devices: Sequence[Device]) -> int | None:
    """Bytes that a program may take: of the host for CPU devices, else of the fullest device; None where unknown."""
    if devices[0].platform == "cpu":
        known = [amount for amount in (_host_free(), _container_free()) if amount is not None]
    else:
        stats = [device.memory_stats() for device in devices]
        known = [s["bytes_limit"] - s["bytes_in_use"] for s in stats if s and "bytes_limit" in s]
    return int(_USABLE * min(known)) if known else None


def readable(amount: float) -> str:
    """Bytes for people: 1536 -> 1.5 KiB."""
    for unit in ("B", "KiB", "MiB"):
        if abs(amount) < 1024:
            return f"{amount:.3g} {unit}"
        amount /= 1024
    return f"{amount:.3g} GiB"


def _host_free() -> int | None:
    path = Path("/proc/meminfo")
    if not path.exists():
        return None
    lines = dict(line.split(":", 1) for line in path.read_text().splitlines())
    return 1024 * int(lines["MemAvailable"].split()[0]) if "MemAvailable" in lines else None


def _container_free() -> int | None:
    """What a container's limit (cgroup v2, then v1) leaves."""
    root = Path("/sys/fs/cgroup")
    for limit, used in (
        (root / "memory.max", root / "memory.current"),
        (root / "memory/memory.limit_in_bytes", root / "memory/memory.usage_in_bytes"),
    ):
        try:
            return int(limit.read_text()) - int(used.read_text())
        except (OSError, ValueError):  # no such file, or "max"
            continue
    return None

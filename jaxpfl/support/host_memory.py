"""Free memory of the host, checked before a large allocation: the kernel kills without a message."""

from __future__ import annotations

import resource
from pathlib import Path

from jaxpfl.support.errors import OutOfMemoryError

USABLE = 0.9  # of the free memory: allocators round up, and other processes share the machine

_SMALL = 2**20
"""Bytes below which no check is made: it reads four files."""


def free() -> int | None:
    """Bytes available under the machine's, the container's and the process's limits; None if unknown."""
    known = [amount for amount in (_machine(), _container(), _process()) if amount is not None]
    return int(USABLE * max(0, min(known))) if known else None


def check(need: int, what: str, advice: str) -> None:
    """Refuse an allocation that would not fit.

    Args:
      need: bytes.
      what: the beginning of the message, which names what needs them.
      advice: the end of the message.

    Raises:
      OutOfMemoryError: if more is needed than is free.
    """
    left = free() if need > _SMALL else None
    if left is not None and need > left:
        raise OutOfMemoryError(f"{what} {readable(need)} of memory, {readable(left)} are free: {advice}")


def readable(amount: float) -> str:
    """Bytes in a readable unit: 1536 -> 1.5 KiB."""
    for unit in ("B", "KiB", "MiB"):
        if abs(amount) < 1024:
            return f"{amount:.3g} {unit}"
        amount /= 1024
    return f"{amount:.3g} GiB"


def _machine() -> int | None:
    path = Path("/proc/meminfo")
    if not path.exists():
        return None
    lines = dict(line.split(":", 1) for line in path.read_text().splitlines())
    return 1024 * int(lines["MemAvailable"].split()[0]) if "MemAvailable" in lines else None


def _container() -> int | None:
    """Bytes left by a container's limit (cgroup v2, then v1)."""
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


def _process() -> int | None:
    """Bytes left by ``ulimit -v`` (address space, mapped files too) and ``ulimit -d`` (memory alone)."""
    try:
        pages = [int(count) for count in Path("/proc/self/statm").read_text().split()]
    except (OSError, ValueError):
        return None
    limits = [(resource.RLIMIT_AS, pages[0]), (resource.RLIMIT_DATA, pages[5])]
    left = [(resource.getrlimit(kind)[0], used * resource.getpagesize()) for kind, used in limits]
    return min((limit - used for limit, used in left if limit != resource.RLIM_INFINITY), default=None)

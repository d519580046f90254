"""Memory that a compiled program needs, and free memory of devices, checked before the program runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from weakref import WeakKeyDictionary

import jax

from jaxpfl.core.types import Device
from jaxpfl.support import distributed, host_memory, processes
from jaxpfl.support.errors import OutOfMemoryError
from jaxpfl.support.host_memory import readable as readable

_program_bytes: WeakKeyDictionary[jax.stages.Compiled, int] = WeakKeyDictionary()
"""Bytes of each program: asking XLA takes milliseconds, a good part of a second run of a small one."""


def needed(compiled: jax.stages.Compiled, devices: Sequence[Device]) -> int:
    """Bytes that a run of the program takes beyond its arguments: on the host for CPU devices, else on each device."""
    if (own := _program_bytes.get(compiled)) is None:
        stats = compiled.memory_analysis()
        if stats is None:  # a backend without statistics
            return 0
        own = stats.temp_size_in_bytes + stats.output_size_in_bytes - stats.alias_size_in_bytes
        _program_bytes[compiled] = own
    return own * (len(devices) // processes.count() if devices[0].platform == "cpu" else 1)


def free(devices: Sequence[Device]) -> int | None:
    """Bytes available to a program: of the host for CPU devices, else of the fullest device; None if unknown.

    Of several processes it is the least, the same in all of them: what is made of it must not differ.
    """
    if devices[0].platform == "cpu":
        own = host_memory.free()
        if own is not None and processes.several():
            own //= distributed.on_this_host()
    else:
        here = [device for device in devices if device.process_index == jax.process_index()]
        stats = [device.memory_stats() for device in here]
        left = [s["bytes_limit"] - s["bytes_in_use"] for s in stats if s and "bytes_limit" in s]
        own = int(host_memory.USABLE * min(left)) if left else None
    known = [amount for amount in processes.exchange(own) if amount is not None]
    return min(known, default=None)


def check(need: int, devices: Sequence[Device], what: str, advice: Callable[[], str]) -> None:
    """Refuse what would not fit on the devices.

    Args:
      need: bytes, on the host for CPU devices, else on each device.
      devices: devices that need the memory.
      what: the beginning of the message.
      advice: the end of the message, made only where it is needed.

    Raises:
      OutOfMemoryError: with the memory needed and free.
    """
    left = free(devices)
    if left is not None and need > left:
        raise OutOfMemoryError(f"{what} need {readable(need)} of memory, {readable(left)} are free: {advice()}")

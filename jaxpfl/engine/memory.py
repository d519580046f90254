"""Memory that a compiled program needs, and the devices' free memory. The two are compared before a program runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from weakref import WeakKeyDictionary

import jax

from jaxpfl.core.types import Device
from jaxpfl.support import distributed, host_memory, processes
from jaxpfl.support.errors import OutOfMemoryError
from jaxpfl.support.host_memory import readable as readable

_program_bytes: WeakKeyDictionary[jax.stages.Compiled, int] = WeakKeyDictionary()
"""Bytes that each program needs. They are stored because XLA takes milliseconds to compute them, which would slow down
a second run of a small program."""


def needed(compiled: jax.stages.Compiled, devices: Sequence[Device]) -> int:
    """Bytes that a program needs besides its arguments: on the host for CPU devices, otherwise on each device."""
    if (own := _program_bytes.get(compiled)) is None:
        stats = compiled.memory_analysis()
        if stats is None:  # a backend without statistics
            return 0
        own = stats.temp_size_in_bytes + stats.output_size_in_bytes - stats.alias_size_in_bytes
        _program_bytes[compiled] = own
    return own * (len(devices) // processes.count() if devices[0].platform == "cpu" else 1)


def free(devices: Sequence[Device]) -> int | None:
    """Free bytes on the host for CPU devices, otherwise on the device with the smallest free memory; None if unknown.

    With several processes, the result is the minimum over all of them. It must be the same in all processes, because
    the choice of a program depends on it.
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
    """Check that the devices have enough free memory.

    Args:
      need: bytes needed on the host for CPU devices, otherwise on each device.
      devices: devices that need the memory.
      what: beginning of the error message.
      advice: function that returns the end of the error message; called only if there is an error.

    Raises:
      OutOfMemoryError: if they do not have enough; the message gives the memory needed and the free memory.
    """
    left = free(devices)
    if left is not None and need > left:
        raise OutOfMemoryError(f"{what} need {readable(need)} of memory, but only {readable(left)} is free: {advice()}")

"""CPU cores as devices, over which clients are sharded as over accelerators."""

from __future__ import annotations

import os

import jax

_PATIENCE = {
    "xla_cpu_collective_call_warn_stuck_timeout_seconds": 600,
    "xla_cpu_collective_call_terminate_timeout_seconds": 24 * 3600,
}


def use_cpu_cores(count: int | None = None) -> bool:
    """Create one CPU device per core; to be called before any computation.

    Clients in turn on every device are faster than XLA's threads within one small product. XLA kills a process in which
    one device waits a minute for another, as may happen on a busy machine or with clients of unequal sizes: the limit
    is set to a day, unless ``XLA_FLAGS`` sets it.

    Args:
      count: number of devices; the number of the process's cores unless given.

    Returns:
      True if they were created; if JAX is already running, nothing changes.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        jax.config.update("jax_num_cpu_devices", count or cores)
    except RuntimeError:
        return False
    flags = os.environ.get("XLA_FLAGS", "")  # read when the first device is made
    given = [f"--{name}={seconds}" for name, seconds in _PATIENCE.items() if name not in flags]
    os.environ["XLA_FLAGS"] = " ".join([*filter(None, [flags]), *given])
    return True

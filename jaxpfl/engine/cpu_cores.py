"""CPU cores as devices, over which clients are spread as over accelerators."""

from __future__ import annotations

import os

import jax

_PATIENCE = {
    "xla_cpu_collective_call_warn_stuck_timeout_seconds": 600,
    "xla_cpu_collective_call_terminate_timeout_seconds": 24 * 3600,
}


def use_cpu_cores(count: int | None = None) -> bool:
    """Makes CPU devices, one for each core; to be called before anything is computed.

    Clients in turn on every device beat XLA's threads inside one small product. XLA ends a process in which one device
    waits a minute for another, as it may on a busy machine or where clients are of unequal sizes: these wait a day,
    unless ``XLA_FLAGS`` says otherwise.

    Args:
      count: how many; as many as the process has cores unless given.

    Returns:
      Whether it was done: nothing changes where jax runs already.
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

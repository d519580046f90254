"""Placement of data and states on the devices, and the check that they fit."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

from jaxpfl import trees
from jaxpfl.engine import device_memory as memory
from jaxpfl.engine.cohort import AXIS, Spread
from jaxpfl.engine.state import RunState
from jaxpfl.errors import OutOfMemoryError
from jaxpfl.types import Device, Federation


class Placement(NamedTuple):
    """Devices of a simulation, and the layout of its arrays on them.

    Attributes:
      devices: used by the simulation.
      rows: m', the rows of a state: m rounded up to a multiple of the devices.
      everywhere: layout of replicated arrays.
      state: layout of a state [S, ...], as a `RunState` of layouts.
      spread: distribution of clients over the devices; None on one device.
    """

    devices: tuple[Device, ...]
    rows: int
    everywhere: jax.sharding.Sharding
    state: Any
    spread: Spread | None = None


def place(num_clients: int, devices: int, even: bool) -> Placement:
    """Placement of m clients on the first ``devices`` devices."""
    used = tuple(jax.devices()[:devices])
    rows = -(-num_clients // devices) * devices
    if devices == 1:
        here = SingleDeviceSharding(used[0])
        return Placement(used, rows, here, RunState._make([here] * len(RunState._fields)))
    mesh = Mesh(np.array(used), (AXIS,), axis_types=(AxisType.Auto,))
    everywhere, runs = NamedSharding(mesh, P()), NamedSharding(mesh, P(None, AXIS))
    layout = RunState._make([everywhere, runs, runs, everywhere, everywhere, everywhere])
    return Placement(used, rows, everywhere, layout, Spread(mesh, _shares_memory(used[0]), even))


def put(federation: Federation, placement: Placement) -> Federation:
    """Put the data on all devices, or each client's on its own, padded with empty clients to equal shares.

    Raises:
      OutOfMemoryError: if the data do not fit in memory.
    """
    spread = placement.spread
    if spread is None or spread.shared_data:
        leaves = jax.tree.leaves(federation)
        if all(isinstance(leaf, jax.Array) and leaf.sharding == placement.everywhere for leaf in leaves):
            return federation
    _check_memory(federation, placement)
    if spread is None:
        return jax.device_put(federation, placement.everywhere)
    if spread.shared_data:
        # CPU devices share the host's memory: put on one, its buffers serve the others without a copy.
        first = jax.device_put(federation, placement.devices[0])
        return jax.device_put(jax.tree.map(np.asarray, first), placement.everywhere)
    missing = -federation.num_clients % len(placement.devices)
    padded = jax.tree.map(lambda a: np.pad(a, [(0, missing)] + [(0, 0)] * (a.ndim - 1)), federation)
    return jax.device_put(padded, NamedSharding(spread.mesh, P(AXIS)))


def check_states(shapes: RunState, placement: Placement, runs: int) -> None:
    """Refuse states of more runs than memory holds, before anything is made of their seeds.

    Args:
      shapes: of the states of all runs.
      placement: their devices.
      runs: S, named in the message.

    Raises:
      OutOfMemoryError: with the memory needed and free.
    """
    devices = placement.devices
    # Each device holds its share of the clients' states, and the whole of the server's.
    of_clients, of_server = trees.num_bytes((shapes.clients, shapes.counts)), trees.num_bytes(shapes.server)
    if _shares_memory(devices[0]):
        of_server *= len(devices)
    else:
        of_clients //= len(devices)
    need, free = of_clients + of_server, memory.free(devices)
    if free is not None and need > free:
        raise OutOfMemoryError(
            f"the states need {memory.readable(need)} of memory, {memory.readable(free)} are free: use fewer "
            f"clients, fewer seeds at once ({runs} now) or a smaller model"
        )


def _shares_memory(device: Device) -> bool:
    """True if all devices of this kind share one memory."""
    return device.platform == "cpu"


def _check_memory(federation: Federation, placement: Placement) -> None:
    """Check the memory before arrays of the host are copied."""
    need = sum(leaf.nbytes for leaf in jax.tree.leaves(federation) if isinstance(leaf, np.ndarray))
    if placement.spread is not None and not placement.spread.shared_data:
        need //= len(placement.devices)
    free = memory.free(placement.devices)
    if free is not None and need > free:
        sizes = np.asarray(federation.train.mask).sum(axis=1)
        largest = int(sizes.argmax())
        raise OutOfMemoryError(
            f"the data need {memory.readable(need)} of memory, {memory.readable(free)} are free: all "
            f"{federation.num_clients} clients are as long as the largest, client "
            f"{int(np.asarray(federation.client_ids)[largest])} with {sizes[largest]} training examples: take fewer of "
            "its examples, or fewer clients"
        )

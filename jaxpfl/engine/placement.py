"""Where data and states lie on several devices."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

from jaxpfl.engine import device_memory as memory
from jaxpfl.engine.cohort import AXIS, Spread
from jaxpfl.engine.state import RunState
from jaxpfl.errors import JaxpflError
from jaxpfl.types import Device, Federation


class Placement(NamedTuple):
    """The devices of a simulation and what lies where.

    Attributes:
      devices: those that take part.
      rows: m', the rows of a state: m rounded up to a multiple of the devices.
      everywhere: the layout of what every device holds.
      state: the layout of a state [S, ...], as a `RunState` of layouts.
      spread: how clients are spread over the devices; None on one device.
    """

    devices: tuple[Device, ...]
    rows: int
    everywhere: jax.sharding.Sharding
    state: Any
    spread: Spread | None = None


def place(num_clients: int, devices: int, even: bool) -> Placement:
    """The placement of m clients on the first ``devices`` devices."""
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
    """The data on all devices, or each client's on its own, filled up with clients that have none to equal shares.

    Raises:
      JaxpflError: for data that do not fit into memory.
    """
    spread = placement.spread
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


def _shares_memory(device: Device) -> bool:
    """Whether all devices of this kind read one memory."""
    return device.platform == "cpu"


def _check_memory(federation: Federation, placement: Placement) -> None:
    """Asks before arrays of the host are copied."""
    need = sum(leaf.nbytes for leaf in jax.tree.leaves(federation) if isinstance(leaf, np.ndarray))
    if placement.spread is not None and not placement.spread.shared_data:
        need //= len(placement.devices)
    free = memory.free(placement.devices)
    if free is not None and need > free:
        sizes = np.asarray(federation.train.mask).sum(axis=1)
        largest = int(sizes.argmax())
        raise JaxpflError(
            f"the data need {memory.readable(need)} of memory, {memory.readable(free)} are free: all "
            f"{federation.num_clients} clients are as long as the largest, client "
            f"{int(np.asarray(federation.client_ids)[largest])} with {sizes[largest]} training examples: take fewer of "
            "its examples, or fewer clients"
        )

"""Placement of data and states on devices, checks for enough memory, and the use of CPU cores as devices."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

from jaxpfl.core import trees
from jaxpfl.core.types import MOST_EXAMPLES, ClientData, Device, Federation
from jaxpfl.engine.cohort import AXIS, MODEL, Group, ModelAxis, Spread
from jaxpfl.engine.state import RunState
from jaxpfl.support import distributed, host_memory, processes
from jaxpfl.support.errors import JaxpflError, OutOfMemoryError
from jaxpfl.support.host_memory import readable


class Placement(NamedTuple):
    """Devices of a simulation, and the layout of its arrays on them.

    Attributes:
      devices: devices that the simulation uses.
      rows: number m' of rows in a state: m, rounded up to a multiple of the number of devices that share the clients.
      everywhere: sharding of replicated arrays.
      state: shardings of the arrays of a state [S, ...], as a `RunState`; they ignore the model axis.
      spread: distribution of clients over the devices; None if one device has all clients, or if all devices share each
        client's arrays.
      model: mesh axis over which one client's arrays are sharded; None if each device stores whole arrays.
    """

    devices: tuple[Device, ...]
    rows: int
    everywhere: jax.sharding.Sharding
    state: Any
    spread: Spread | None = None
    model: ModelAxis | None = None

    def layout(self, state: RunState) -> RunState:
        """Sharding of every array in a state [S, ...], which is given as arrays or shapes."""
        layout = jax.tree.broadcast(self.state, state)
        if self.model is None:
            return layout
        of_rows = (*self.state.clients.spec, None, None)[:2]
        clients = tuple(self.model.layout(own, *of_rows) for own in state.clients)
        flights = self.model.layout(state.in_flight, None, None)
        return layout._replace(server=self.model.layout(state.server, None), clients=clients, in_flight=flights)

    @property
    def parts(self) -> int:
        """Number of devices, or groups of devices, that share the clients."""
        return 1 if self.spread is None else self.spread.parts

    @property
    def own_data(self) -> bool:
        """True if each device, or group of devices, stores the data of its own clients only."""
        return self.spread is not None and not self.spread.shared_data


def place(num_clients: int, devices: int, even: bool, on: str | None = None, model_shards: int = 1) -> Placement:
    """Make the placement of m clients on the first devices of each process, with equally many devices in all processes.

    Args:
      num_clients: number m of clients.
      devices: number of devices, or groups of ``model_shards`` devices, that share the clients.
      even: whether the cohort is distributed evenly, as in `Spread`.
      on: platform for which a program is lowered, if it is not the platform of the present devices.
      model_shards: number of devices that share one client's arrays.
    """
    # Devices are ordered by process, so that each process stores consecutive clients.
    of_process: dict[int, list[Device]] = {}
    for device in jax.devices():
        of_process.setdefault(device.process_index, []).append(device)
    share = devices * model_shards // processes.count()
    used = tuple(device for number in sorted(of_process) for device in of_process[number][:share])
    rows = -(-num_clients // devices) * devices
    if len(used) == 1:
        here = SingleDeviceSharding(used[0])
        return Placement(used, rows, here, RunState._make([here] * len(RunState._fields)))
    if model_shards == 1:
        mesh, model = Mesh(np.array(used), (AXIS,), axis_types=(AxisType.Auto,)), None
    else:
        of_clients = np.array(used).reshape(devices, model_shards)
        mesh = Mesh(of_clients, (AXIS, MODEL), axis_types=(AxisType.Auto,) * 2)
        model = ModelAxis(mesh)
    everywhere, runs = NamedSharding(mesh, P()), NamedSharding(mesh, P(None, AXIS))
    layout = RunState._make([everywhere, runs, runs, *[everywhere] * 4])
    shared_data = _shares_memory(on or used[0].platform) and not processes.several()
    spread = Spread(mesh, shared_data, even) if devices > 1 else None
    return Placement(used, rows, everywhere, layout, spread, model)


_compared: dict[tuple[int, ...], list[weakref.ref[Any]]] = {}
"""Federations whose checksums were already compared between processes; the key is the identities of all their
arrays."""


def agree_on(federation: Federation, *, for_good: bool = False) -> None:
    """Check that all processes of a run have the same data, by comparing a checksum of the data.

    Args:
      federation: data of all clients.
      for_good: whether the arrays never change, so that they need to be compared only once.

    Raises:
      AgreedError: if the data differ; the message gives the two checksums.
    """
    if not processes.several():
        return
    leaves = jax.tree.leaves(federation)
    known = _compared.get(tuple(map(id, leaves)), [])
    if not known or any(ref() is not leaf for ref, leaf in zip(known, leaves, strict=True)):
        processes.agree("the clients' data", trees.checksum(federation))
    if for_good:
        _compared[tuple(map(id, leaves))] = [weakref.ref(leaf) for leaf in leaves]


def balanced(groups: tuple[Group, ...], parts: Sequence[Federation], placement: Placement) -> tuple[Group, ...]:
    """Assign each group's clients to devices so that all devices store about equally many examples.

    If every device stores all data, the groups are returned unchanged.
    """
    if not placement.own_data:
        return groups

    def dealt(group: Group, part: Federation) -> Group:
        sizes = np.stack([np.asarray(split.size) for split in part.all_splits], axis=1)
        return group.dealt(sizes, placement.parts)

    return tuple(map(dealt, groups, parts))


def put(federation: Federation, placement: Placement, group: Group | None = None) -> Federation:
    """Copy all data to every device, or each client's data to the device that stores the client's state.

    In the second case, the arrays of examples are sharded, and all shards are as long as the largest shard.

    Args:
      federation: data on the host, or on devices with any placement.
      placement: placement of the result.
      group: the clients' group; needed if the group stores its clients in another order (`Group.order`).

    Raises:
      OutOfMemoryError: if the data do not fit in memory.
      JaxpflError: if a client's positions lie outside the arrays of examples.
    """
    for data in federation.all_splits:
        data.check()
    spread = placement.spread
    if spread is None or spread.shared_data:
        leaves = jax.tree.leaves(federation)
        if all(isinstance(leaf, jax.Array) and leaf.sharding == placement.everywhere for leaf in leaves):
            return federation
    _check_data(federation, placement)
    if spread is None and (len(placement.devices) == 1 or not _shares_memory(placement.devices[0].platform)):
        return jax.device_put(federation, placement.everywhere)
    if spread is None or spread.shared_data:
        # CPU devices share the host's memory, so the buffers of the first device serve the others without a copy.
        first = jax.device_put(federation, placement.devices[0])
        return jax.device_put(jax.tree.map(np.asarray, first), placement.everywhere)
    places = np.arange(federation.num_clients) if group is None else group.order
    return _shard(federation, places, spread.parts, NamedSharding(spread.mesh, P(AXIS)))


def _shard(federation: Federation, places: np.ndarray, devices: int, layout: NamedSharding) -> Federation:
    """Give each device an equal number of client rows, and a shard of the examples with its own clients' examples.

    Rows without a client have no examples. Each process makes only the shards of its own devices, and reads only the
    examples of the clients on these devices.

    Args:
      federation: data on the host.
      places: row of each client, [m].
      devices: number of devices that share the clients.
      layout: sharding of the first axis over the devices, for arrays of client rows and for the examples.

    Raises:
      JaxpflError: if the shards of a split have too many examples in total for int32 positions.
    """
    rows = -(-federation.num_clients // devices) * devices
    share = rows // devices

    def per_row(of_client: np.ndarray) -> np.ndarray:
        found = np.zeros(rows, of_client.dtype)
        found[places] = of_client
        return found

    def shard(split: ClientData) -> ClientData:
        first, sizes = (per_row(np.asarray(a)).reshape(devices, share) for a in (split.start, split.size))
        totals = sizes.sum(axis=1, dtype=np.int64)
        part = max(int(totals.max()), 1)
        if part * devices > MOST_EXAMPLES:
            raise JaxpflError(
                f"devices x examples per device must be at most {MOST_EXAMPLES}, got {devices} x {part}: use fewer "
                "devices"
            )

        def spread(leaf: Any) -> jax.Array:
            on_host = np.asarray(leaf)

            def device_part(place: tuple[slice, ...] | None) -> np.ndarray:
                assert place is not None
                device = (place[0].start or 0) // part
                made = np.zeros((part, *leaf.shape[1:]), leaf.dtype)
                host_memory.copy_runs(on_host, first[device], sizes[device], made)
                return made

            return jax.make_array_from_callback((part * devices, *leaf.shape[1:]), layout, device_part)

        # A client without examples starts at the first example of its device's shard, so that its start is valid.
        start = np.where(sizes > 0, sizes.cumsum(axis=1) - sizes, 0) + np.arange(devices)[:, None] * part
        return replace(
            split,
            examples=jax.tree.map(spread, split.examples),
            start=processes.put(start.reshape(-1).astype(np.int32), layout),
            size=processes.put(sizes.reshape(-1), layout),
        )

    ids = processes.put(per_row(np.asarray(federation.client_ids)), layout)
    train, validation, test = map(shard, federation.all_splits)
    return Federation(ids, train, validation, test)


def put_states(state: RunState, placement: Placement) -> RunState:
    """Put a state on its devices. A state that is already on these devices is not copied."""
    if not processes.several():
        return jax.device_put(state, placement.state if placement.model is None else placement.layout(state))
    return jax.tree.map(processes.put, state, placement.layout(state))


def check_states(shapes: RunState, placement: Placement, runs: int) -> None:
    """Check that the states of all runs fit in memory, before any state is made.

    Args:
      shapes: shapes of all runs' states.
      placement: placement of the states.
      runs: number S of runs, for the error message.

    Raises:
      OutOfMemoryError: if the states do not fit; the message gives the memory needed and the free memory.
    """
    devices, layout = placement.devices, placement.layout(shapes)
    # Each device stores its share of the clients' states and the whole server state, or, with a model axis, a shard.
    held, laid = ((state.clients, state.counts, state.server, state.in_flight) for state in (shapes, layout))
    parts = jax.tree.map(lambda a, s: jax.ShapeDtypeStruct(s.shard_shape(a.shape), a.dtype), held, laid)
    here = len(devices) // processes.count() if _shares_memory(devices[0].platform) else 1
    advice = f"use fewer clients, fewer seeds at once ({runs} now) or a smaller model"
    check_memory(here * trees.num_bytes(parts), devices, "the states", lambda: advice)


def _shares_memory(platform: str) -> bool:
    """True if all devices of a platform share one memory."""
    return platform == "cpu"


def _check_data(federation: Federation, placement: Placement) -> None:
    """Check that the data fit in memory, before arrays on the host are copied."""
    need = sum(leaf.nbytes for leaf in jax.tree.leaves(federation) if isinstance(leaf, np.ndarray))
    if placement.own_data:  # only the examples that belong to clients are copied, not the whole store
        splits = federation.all_splits
        own = [(int(np.sum(s.size, dtype=np.int64)), len(s.examples.y), trees.num_bytes(s.examples)) for s in splits]
        need = sum(count * held // max(stored, 1) for count, stored, held in own)
        need //= processes.count() if _shares_memory(placement.devices[0].platform) else placement.parts

    def advice() -> str:
        sizes = np.asarray(federation.train.size)
        largest = int(sizes.argmax())
        return (
            f"use fewer examples or fewer clients ({federation.num_clients} have {sizes.sum(dtype=np.int64)} training "
            f"examples, client {int(np.asarray(federation.client_ids)[largest])} {sizes[largest]} of them)"
        )

    check_memory(need, placement.devices, "the data", advice)


_SMALL = 2**24
"""Requests for fewer bytes are not compared with the free memory, because determining it means reading four files."""

_program_bytes: WeakKeyDictionary[jax.stages.Compiled, int] = WeakKeyDictionary()
"""Bytes that each program needs. They are stored because XLA takes milliseconds to compute them, and this time would
slow down a second run of a small program."""


def program_bytes(program: jax.stages.Compiled, devices: Sequence[Device]) -> int:
    """Bytes that a program needs besides its arguments: on the host for CPU devices, otherwise on each device."""
    if (own := _program_bytes.get(program)) is None:
        stats = program.memory_analysis()
        if stats is None:  # a backend without statistics
            return 0
        own = stats.temp_size_in_bytes + stats.output_size_in_bytes - stats.alias_size_in_bytes
        _program_bytes[program] = own
    return own * (len(devices) // processes.count() if devices[0].platform == "cpu" else 1)


def free_bytes(devices: Sequence[Device]) -> int | None:
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


def too_little(need: int, devices: Sequence[Device]) -> int | None:
    """Free bytes if they are fewer than ``need``; None if they suffice. All processes of a run must call this."""
    left = free_bytes(devices) if need > _SMALL or processes.several() else None
    return left if left is not None and need > left else None


def check_memory(need: int, devices: Sequence[Device], what: str, advice: Callable[[], str]) -> None:
    """Check that the devices have enough free memory.

    Args:
      need: bytes needed on the host for CPU devices, otherwise on each device.
      devices: devices that need the memory.
      what: beginning of the error message.
      advice: function that returns the end of the error message; called only if there is an error.

    Raises:
      OutOfMemoryError: if the free memory is not enough; the message gives the free memory and the memory needed.
    """
    if (left := too_little(need, devices)) is not None:
        raise OutOfMemoryError(f"{what} need {readable(need)} of memory, but only {readable(left)} is free: {advice()}")


_PATIENCE = {
    "xla_cpu_collective_call_warn_stuck_timeout_seconds": 600,
    "xla_cpu_collective_call_terminate_timeout_seconds": 24 * 3600,
}


def use_cpu_cores(count: int | None = None) -> bool:
    """Make JAX create one CPU device for each core; to be called before any computation.

    With several devices, each device trains its clients one after the other. This is faster than one device whose
    threads share every small matrix product. By default, XLA ends a process in which one device waits a minute for
    another. Such a wait may occur on a busy machine or with clients of unequal sizes. This function raises the limit to
    a day, unless ``XLA_FLAGS`` sets the limit.

    Args:
      count: number of devices; by default, the number of cores that the process may use.

    Returns:
      True if JAX will create the devices at its first use; False, without any change, if JAX is already initialized.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        jax.config.update("jax_num_cpu_devices", count or cores)
    except RuntimeError:
        return False
    flags = os.environ.get("XLA_FLAGS", "")  # XLA reads this variable when the first device is created
    given = [f"--{name}={seconds}" for name, seconds in _PATIENCE.items() if name not in flags]
    os.environ["XLA_FLAGS"] = " ".join([*filter(None, [flags]), *given])
    return True

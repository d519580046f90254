"""XLA operations of a trace by own time, which excludes that of nested events."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from jax.profiler import ProfileData


class Operation(NamedTuple):
    """One XLA operation of a trace.

    Attributes:
      name: as in the compiled program, ``dot.30``; the trace's viewers show it under this name.
      kind: by name: products, copies, exchange (between devices, including waits), loops (without their bodies), or
        arithmetic for all others.
      calls: number of executions, on any device.
      seconds: own time, summed over threads or streams.
    """

    name: str
    kind: str
    calls: int
    seconds: float


class Event(NamedTuple):
    """An event of a thread or stream; times in nanoseconds, ``operation`` None if it is no XLA operation."""

    start: float
    duration: float
    operation: str | None


def read(trace: Any) -> tuple[list[Operation], int]:
    """Operations of a `ProfileData` by own time, longest first, and its number of events."""
    planes = list(trace.planes)
    # On an accelerator the host's threads only launch what the device's streams then run.
    devices = [plane for plane in planes if plane.name.startswith("/device:")]
    own: defaultdict[str, float] = defaultdict(float)
    calls: defaultdict[str, int] = defaultdict(int)
    count = 0
    for plane in planes:
        on_device, known = plane in devices, {}
        for line in plane.lines:
            events = [
                Event(event.start_ns, event.duration_ns, _operation(event, line.name, on_device, known))
                for event in line.events
            ]
            count += len(events)
            if on_device or not devices:
                add_own_times(events, own, calls)
    found = [Operation(name, kind_of(name), calls[name], nanoseconds / 1e9) for name, nanoseconds in own.items()]
    return sorted(found, key=lambda operation: -operation.seconds), count


def read_file(path: Path) -> tuple[list[Operation], int]:
    """Operations and number of events of an ``.xplane.pb`` file, as in `read`."""
    return read(ProfileData.from_file(str(path)))


def add_own_times(events: Iterable[Event], own: dict[str, float], calls: dict[str, int]) -> None:
    """Add the own times and the counts of one thread's operations.

    Events that are no operations (the executor, waits for other devices) count for the enclosing operation.
    """
    open_events: list[tuple[float, str | None]] = []  # (end, operation that its time counts for), innermost last
    for start, duration, operation in sorted(events, key=lambda event: (event.start, -event.duration)):
        while open_events and open_events[-1][0] <= start:
            open_events.pop()
        end, around = open_events[-1] if open_events else (start, None)
        payer = operation or around
        if around is not None:
            own[around] -= min(start + duration, end) - start
        if payer is not None:
            own[payer] += duration
        if operation is not None:
            calls[operation] += 1
        open_events.append((start + duration, payer))


_PRODUCTS = {"dot", "convolution", "conv", "gemm", "matmul", "cublas", "cudnn", "ynn", "onednn"}
_COPIES = {
    *("copy", "bitcast", "transpose", "reshape", "slice", "dynamic-slice", "dynamic-update-slice", "concatenate"),
    *("pad", "reverse", "gather", "scatter", "broadcast", "memcpy", "memset", "tuple", "get-tuple-element", "convert"),
}
_LOOPS = {"while", "call", "conditional"}
_EXCHANGE = re.compile(r"all[-_](reduce|gather|to[-_]all)|reduce[-_]scatter|collective|psum|ppermute")


def kind_of(name: str) -> str:
    """Kind of an operation by its name; a fusion is named by the operations that it ends in."""
    name = name.lower()
    if _EXCHANGE.search(name):
        return "exchange"
    words = {word for word in re.split(r"[._]", name) if not word.isdigit()} - {"fusion", "wrapped", "loop", "input"}
    if words & _PRODUCTS:
        return "products"
    if words and words <= _COPIES:
        return "copies"
    return "loops" if words & _LOOPS else "arithmetic"


def _operation(event: Any, line: str, on_device: bool, known: dict[str, str | None]) -> str | None:
    """The operation that an event ran; ``known`` caches it, as reading the values of every event is slow."""
    name: str = event.name
    if line == "XLA Ops":  # TPU: the events of this line are the operations
        return name
    if name in known:
        return known[name]
    operation = next((str(value) for key, value in event.stats if key == "hlo_op"), None)
    # A GPU names its events by kernel, and one kernel serves many operations.
    if not on_device or operation == name:
        known[name] = operation
    return operation

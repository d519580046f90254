"""Execution plans: choices of speed and memory that never change results (beyond the order of additions)."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import jax

from jaxpfl.errors import JaxpflError
from jaxpfl.settings import COUNT, LARGEST, WHOLE, Kind, check, documents_itself, setting

_CACHE_BYTES = 256 * 1024  # parameters of a block of clients that stay in a CPU core's cache
_LARGEST_BLOCK = 128  # beyond it a CPU gains nothing from more clients in one operation
_MOST_DEALT = 64  # clients per device up to which an uneven cohort costs more than moving states (see benchmarks)
_MOST_DEVICES = sys.maxsize  # that ``auto`` takes


def _is_count(value: Any) -> bool:
    if isinstance(value, str):
        return value.isdecimal() and 0 < len(value.lstrip("0")) < len(str(LARGEST))
    return WHOLE.holds(value) and 0 < value <= LARGEST


def _choice(*names: str, count: bool = False) -> Kind:
    """One of the names or, where it says so, a count, as a number or as text."""
    *others, last = *names, *(["a positive number"] if count else [])

    def holds(value: Any) -> bool:
        return (isinstance(value, str) and value in names) or (count and _is_count(value))

    return Kind(f"{', '.join(others)} or {last}", holds)


@documents_itself
@dataclass(frozen=True)
class ExecutionPlan:
    """Choices of speed and memory.

    Raises:
      JaxpflError: for a value that a setting does not take.
    """

    devices: str | int = setting(
        "auto",
        "Devices that share the clients; auto takes all, at most one for each client of the cohort.",
        kind=_choice("auto", count=True),
        unit="devices",
    )
    clients: str | int = setting(
        "auto",
        "Clients at once on a device: map runs one after the other (the working set stays in the cache), vmap the "
        "whole cohort at once, a number that many; auto chooses by backend and model size.",
        kind=_choice("auto", "map", "vmap", count=True),
        unit="clients",
    )
    runs: Literal["auto", "map", "vmap"] = setting(
        "auto",
        "The same for the axis of seeds and settings: map, vmap or auto.",
        kind=_choice("auto", "map", "vmap"),
    )
    rounds_per_call: int = setting(
        100, "Most rounds of one compiled call, after which it returns to Python.", range=COUNT, unit="rounds"
    )
    donate: bool = setting(True, "Reuse the state's buffers for the next state; without it both are held.")
    client_bucket: str | int = setting(
        "none",
        "Rows of the clients' stack, those beyond the last client empty, so that runs of other client counts share "
        "compiled programs: none for a row for each client, a number, or auto, which takes less than a quarter more.",
        kind=_choice("none", "auto", count=True),
        unit="rows",
    )

    def __post_init__(self) -> None:
        check(self, prefix="plan.")


def bucket_of(count: int) -> int:
    """The least of 1, 2, 3, 4 and (5, 6, 7, 8) 2^k that is at least a count, and so less than a quarter more.

    >>> [bucket_of(m) for m in (0, 3, 9, 17, 90, 900, 1000)]
    [0, 3, 10, 20, 96, 1024, 1024]
    """
    step = 2 ** max((count - 1).bit_length() - 3, 0)
    return -(-count // step) * step


def stack_rows(plan: ExecutionPlan, num_clients: int) -> int:
    """Rows of the stack of m clients that the plan asks for.

    Raises:
      JaxpflError: for fewer than m.
    """
    if plan.client_bucket == "none":
        return num_clients
    rows = bucket_of(num_clients) if plan.client_bucket == "auto" else int(plan.client_bucket)
    if rows < num_clients:
        raise JaxpflError(f"plan.client_bucket must be at least the number of clients, {num_clients}, got {rows}")
    return rows


class Resolved(NamedTuple):
    """A plan with every choice made.

    Attributes:
      block: clients that a device runs in one vectorised operation.
      devices: how many devices share the clients.
      even: whether the cohort is distributed evenly; else clients work on the device that holds their state.
      vmap_runs: whether seeds and settings are one vectorised axis; else they run in turn.
      reasons: one sentence per choice.
      rows: of the clients' stack; None where the plan asks for no bucket.
    """

    block: int
    devices: int
    even: bool
    vmap_runs: bool
    reasons: tuple[str, ...]
    rows: int | None = None


def resolve(plan: ExecutionPlan, *, cohort: int, num_clients: int, model_bytes: int) -> Resolved:
    """Resolve the automatic choices.

    A CPU is fastest with a working set in cache: one client at a time, or as many small models as fit. An
    accelerator is fastest with the whole cohort.

    Args:
      cohort: slots in a cohort.
      num_clients: m.
      model_bytes: bytes of one client's model.

    Raises:
      JaxpflError: for more devices than there are, or more than the cohort's slots, and as `stack_rows`.
    """
    stack_rows(plan, num_clients)
    backend = jax.default_backend()
    available = len(jax.devices())
    if plan.devices == "auto":
        devices = min(available, cohort, _MOST_DEVICES)
        why_devices = f"{available} {backend} device(s), {cohort} clients in a round"
    else:
        devices = int(plan.devices)
        if devices > min(available, cohort):
            limit = f"the {available} present" if available <= cohort else f"the {cohort} clients of a round"
            raise JaxpflError(f"plan.devices must be at most {limit}, got {devices}")
        why_devices = "as given"
    even = devices > 1 and backend == "cpu" and cohort < num_clients and cohort <= _MOST_DEALT * devices
    slots = -(-cohort // devices)
    fitting = max(1, min(_CACHE_BYTES // max(model_bytes, 1), _LARGEST_BLOCK, slots))
    if plan.clients == "auto":
        block = fitting if backend == "cpu" else slots
        size = f"a model of {model_bytes / 1024:.4g} KiB"
        if backend != "cpu":
            why_block = f"{backend} is fastest with the whole cohort in one operation"
        elif block == 1:
            why_block = f"{size}: one client at a time keeps a CPU core's working set in its cache"
        else:
            why_block = f"{size}: {block} models fill a vector operation and stay in a CPU core's cache"
    else:
        block = {"map": 1, "vmap": slots}.get(str(plan.clients)) or min(int(plan.clients), slots)
        why_block = "as given"
    vmap_runs = plan.runs == "vmap" or (plan.runs == "auto" and (backend != "cpu" or fitting > 1))
    if devices == 1:
        why_even = "there is one device"
    elif even:
        why_even = "a small cohort falls unevenly on the devices where its clients live; dealing it out costs less"
    elif cohort == num_clients:
        why_even = "everybody takes part, so every device has its share already"
    elif backend == "cpu":
        why_even = "a large cohort falls about evenly on the devices where its clients live; only sums cross"
    else:
        why_even = "data stay on the device that holds them; only sums cross"
    if plan.runs != "auto":
        why_runs = "as given"
    elif vmap_runs:
        why_runs = "small operations gain from more of them at once" if backend == "cpu" else f"{backend} has room"
    else:
        why_runs = "one model fills a CPU core's cache already"
    return Resolved(block, devices, even, vmap_runs, (why_devices, why_block, why_even, why_runs))


def explain(resolved: Resolved) -> list[tuple[str, str, str]]:
    """The choices as rows (subject, choice, reason)."""
    clients = "one after the other" if resolved.block == 1 else f"{resolved.block} at a time"
    choices = (
        ("devices", str(resolved.devices)),
        ("clients on a device", clients),
        ("cohort", "dealt evenly to the devices" if resolved.even else "each client on the device of its state"),
        ("seeds and settings", "one vectorised axis" if resolved.vmap_runs else "in turn"),
    )
    if resolved.rows is not None:
        choices = (*choices, ("rows of clients", str(resolved.rows)))
    return [(what, choice, why) for (what, choice), why in zip(choices, resolved.reasons, strict=True)]

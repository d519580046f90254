"""Execution plans: choices of speed and memory that never change results (beyond the order of additions).

The precision of products is the exception, and stands here because it is a choice of the hardware's units: what is
computed is the same, and how far the numbers drift is in ``docs/records/performance.md``. Its default changes nothing.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import jax

from jaxpfl.core import full_precision
from jaxpfl.core.settings import COUNT, LARGEST, WHOLE, Kind, check, documents_itself, setting
from jaxpfl.models.rewriting import Form
from jaxpfl.support import processes
from jaxpfl.support.errors import JaxpflError
from jaxpfl.support.host_memory import readable

_CACHE_BYTES = 256 * 1024  # parameters of a block of clients that stay in a CPU core's cache
_LARGEST_BLOCK = 128  # beyond it a CPU gains nothing from more clients in one operation
_MOST_DEALT = 64  # clients per device up to which an uneven cohort costs more than moving states (see benchmarks)
_MOST_DEVICES = sys.maxsize  # that ``auto`` takes


def _choice(*names: str, count: bool = False) -> Kind:
    """One of the names or, where it says so, a count, as a number or as text."""
    *others, last = *names, *(["a positive number"] if count else [])

    def holds(value: Any) -> bool:
        if isinstance(value, str):
            digits = len(value.lstrip("0")) if value.isdecimal() else 0
            return value in names or (count and 0 < digits < len(str(LARGEST)))
        return count and WHOLE.holds(value) and 0 < value <= LARGEST

    return Kind(f"{', '.join(others)} or {last}", holds)


@documents_itself
@dataclass(frozen=True)
class ExecutionPlan:
    """Choices of speed and memory.

    Raises:
      JaxpflError: for a value that a setting does not take.
    """

    devices: str | int = setting("auto", kind=_choice("auto", count=True), unit="devices")
    """Devices that share the clients; auto takes all, at most one for each client of the cohort."""
    clients: str | int = setting("auto", kind=_choice("auto", "map", "vmap", count=True), unit="clients")
    """Clients at once on a device: map runs one after the other (the working set stays in the cache), vmap the whole
    cohort at once, a number that many; auto chooses by backend and model size."""
    runs: Literal["auto", "map", "vmap"] = setting("auto", kind=_choice("auto", "map", "vmap"))
    """The same for the axis of seeds and settings: map, vmap or auto."""
    rounds_per_call: int = setting(100, range=COUNT, unit="rounds")
    """Most rounds of one compiled call, after which it returns to Python."""
    donate: bool = setting(True)
    """Reuse the state's buffers for the next state; without it both are held."""
    convolutions: Literal["auto", "products", "plain"] = setting("auto", kind=_choice("auto", "products", "plain"))
    """Convolutions and pools of a user's own model: as products of patches with each client's kernel, plain as the
    model has them, or auto, which is products but for single clients on an accelerator."""
    precision: Literal["float32", "tf32", "bfloat16"] = setting("float32", kind=_choice("float32", "tf32", "bfloat16"))
    """Precision of products: float32, tf32 (operands rounded to 10 bits on devices that have it, float32 on others),
    or bfloat16 (the model computes in it; parameters, sums, losses and privacy stay float32). The only choice here
    that changes results by more than the order of additions."""

    clients_in: str = setting("auto", kind=_choice("auto", "device", "host", "disk"))
    """Where the clients' data and states live: device; host, its memory, from which a cohort's rows travel while the
    round before computes; disk, the same with states in memory-mapped files; auto takes the first of these that has
    room for them."""

    folder: str | None = setting(None, unless_given="the system's folder unless given, for at most 1 GiB")
    """Folder for the temporary files of clients' states on disk, which have no names and vanish with the process; a
    run that is stored keeps states in its own folder instead."""

    model_shards: int = setting(1, range=COUNT, unit="devices")
    """Devices that hold one client's model and states together, each a part of every array; the other factor of
    plan.devices shares the clients. For models larger than a device."""

    def __post_init__(self) -> None:
        check(self, prefix="plan.")
        if self.folder is not None and self.clients_in in ("device", "host"):
            raise JaxpflError(f"plan.folder = {self.folder} requires plan.clients_in = disk, got {self.clients_in}")


class Resolved(NamedTuple):
    """A plan with every choice made.

    Attributes:
      block: clients that a device runs in one vectorised operation.
      devices: how many devices share the clients.
      even: whether the cohort is distributed evenly; else clients work on the device that holds their state.
      vmap_runs: whether seeds and settings are one vectorised axis; else they run in turn.
      reasons: one sentence per choice.
      form: form of the convolutions and pools in the user's own model; None if it has none to choose for.
      home: where the clients live; None for the devices.
      matmul: precision of products as JAX calls it; None for JAX's own setting, and on a CPU, where it is float32.
      lowered: the requested precision, and what it does here, if it is not float32.
      model_shards: how many devices hold one client's model together; each of `devices` stands for so many.
      share_bytes: bytes of one client's model on each device.
    """

    block: int
    devices: int
    even: bool
    vmap_runs: bool
    reasons: tuple[str, ...]
    form: Form | None = None
    home: str | None = None
    matmul: str | None = None
    lowered: tuple[str, str] | None = None
    model_shards: int = 1
    share_bytes: int = 0

    @property
    def all_devices(self) -> int:
        """Devices in all."""
        return self.devices * self.model_shards


def resolve(
    plan: ExecutionPlan,
    *,
    cohort: int,
    num_clients: int,
    model_bytes: int,
    share_bytes: int | None = None,
    layers: bool = False,
    platform: str | None = None,
) -> Resolved:
    """Resolve the automatic choices.

    A CPU is fastest with a working set in cache: one client at a time, or as many small models as fit. An
    accelerator is fastest with the whole cohort.

    Args:
      cohort: slots in a cohort.
      num_clients: m.
      model_bytes: bytes of one client's model.
      share_bytes: those on each device, if not all.
      layers: whether the model has convolutions or pools whose form is to be chosen.
      platform: the platform that the program is for ("cpu", "cuda", "tpu"), with as many devices as are here; the
        one that is here unless given.

    Raises:
      JaxpflError: for more devices than there are, or more than the cohort's slots, a number that the model's shards
        do not divide.
    """
    backend = platform or jax.default_backend()
    shards, each = plan.model_shards, processes.count()
    available = _groups_of(plan, shards)
    share_bytes = model_bytes if share_bytes is None else share_bytes
    if plan.devices == "auto":
        devices = available if each > 1 else min(available, cohort, _MOST_DEVICES)
        why_devices = f"{available * shards} {backend} device(s), {cohort} clients in a round"
    else:
        devices = int(plan.devices) // shards
        if devices % each:
            raise JaxpflError(f"plan.devices must be a multiple of the {each} processes, got {devices}")
        if devices > (available if each > 1 else min(available, cohort)):
            present = available <= cohort or each > 1
            limit = f"the {len(jax.devices())} present" if present else f"the {cohort} clients of a round"
            limit = f"{limit} times plan.model_shards = {shards}" if shards > 1 and not present else limit
            raise JaxpflError(f"plan.devices must be at most {limit}, got {devices * shards}")
        why_devices = "as given"
    dealt = cohort < num_clients and cohort <= _MOST_DEALT * devices
    even = dealt and devices > 1 and backend == "cpu" and each == shards == 1
    slots = -(-cohort // devices)
    fitting = max(1, min(_CACHE_BYTES // max(share_bytes, 1), _LARGEST_BLOCK, slots))
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
        why_even = "there is one device, or one group of them"
    elif even:
        why_even = "a small cohort falls unevenly on the devices where its clients live; dealing it out costs less"
    else:
        why_even = "clients work where their states and data are; only sums cross"
    if plan.runs != "auto":
        why_runs = "as given"
    elif vmap_runs:
        why_runs = "small operations gain from more of them at once" if backend == "cpu" else f"{backend} has room"
    else:
        why_runs = "one model fills a CPU core's cache already"
    reasons = (why_devices, why_block, why_even, why_runs)
    form = None
    if layers:
        form, why_form = _form_of(plan, backend, block)
        reasons = (*reasons, why_form)
    matmul, lowered = _precision_of(plan, backend)
    return Resolved(block, devices, even, vmap_runs, reasons, form=form, matmul=matmul, lowered=lowered)._replace(
        model_shards=shards, share_bytes=share_bytes
    )


def _groups_of(plan: ExecutionPlan, shards: int) -> int:
    """Count the groups of ``shards`` devices; each group holds one client.

    Raises:
      JaxpflError: for too few devices, for ``plan.devices`` that is not a multiple, and for several processes with
        shards > 1.
    """
    present = len(jax.devices())
    if shards > 1 and processes.several():
        raise JaxpflError(
            f"plan.model_shards = {shards} supports one process only: with several, each device holds "
            "its clients' whole models"
        )
    if shards > present:
        raise JaxpflError(f"plan.model_shards must be at most the {present} devices present, got {shards}")
    if plan.devices != "auto" and int(plan.devices) % shards:
        raise JaxpflError(f"plan.devices must be a multiple of plan.model_shards = {shards}, got {plan.devices}")
    return present // shards


def _precision_of(plan: ExecutionPlan, backend: str) -> tuple[str | None, tuple[str, str] | None]:
    """`Resolved.matmul` and `Resolved.lowered`."""
    if plan.precision == "float32":
        # JAX's own default is less on an accelerator: tf32 on recent GPUs, bfloat16 on TPUs.
        return None if backend == "cpu" or full_precision.users_own() else "float32", None
    if plan.precision == "bfloat16":
        return None if backend == "cpu" else "float32", ("bfloat16", "the model's; parameters stay float32")
    if backend == "cpu":
        return None, ("float32", "a CPU has no tf32")
    return "tensorfloat32", ("tf32", "operands of products are rounded to 10 bits")


def _form_of(plan: ExecutionPlan, backend: str, block: int) -> tuple[Form, str]:
    """Form of the convolutions of the user's own model, and the reason."""
    if plan.convolutions != "auto":
        return plan.convolutions, "as given"
    if backend == "cpu":
        return "products", "a product of patches is faster on a CPU, and does not become a grouped convolution"
    if block == 1:
        return "plain", f"{backend} has fast convolutions for one client at a time"
    return "products", "kernels of several clients would make a grouped convolution, slow in its backward pass"


PLATFORMS = ("cpu", "cuda", "rocm", "tpu")
"""Platforms for which programs can be lowered."""


def explain(resolved: Resolved) -> list[tuple[str, str, str]]:
    """The choices as rows (subject, choice, reason)."""
    clients = "one after the other" if resolved.block == 1 else f"{resolved.block} at a time"
    choices = (
        ("devices", str(resolved.all_devices)),
        ("clients on a device", clients),
        ("cohort", "dealt evenly to the devices" if resolved.even else "each client on the device of its state"),
        ("seeds and settings", "one vectorised axis" if resolved.vmap_runs else "in turn"),
    )
    if resolved.form is not None:
        form = "as products" if resolved.form == "products" else "plain"
        choices = (*choices, ("the model's convolutions", form))
    if resolved.home is not None:
        choices = (*choices, ("clients live", resolved.home))
    rows = [(what, choice, why) for (what, choice), why in zip(choices, resolved.reasons, strict=True)]
    if resolved.model_shards > 1:
        part = f"{readable(resolved.share_bytes)} of it on each; arrays are cut along their largest divisible dimension"
        rows.append(("a client's model", f"in parts on {resolved.model_shards} devices", part))
    return rows if resolved.lowered is None else [*rows, ("precision of products", *resolved.lowered)]

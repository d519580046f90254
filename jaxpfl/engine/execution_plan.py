"""Execution plans: choices that affect speed and memory, and change results at most by the order of additions.

The precision of matrix products is an exception. The precision is nevertheless part of the plan, because it selects the
hardware's arithmetic units and not a different computation. Its default is full precision;
``docs/records/performance.md`` reports the rounding errors of the other choices.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

import jax

from jaxpfl.algorithms.parts import linear_kernel
from jaxpfl.core import full_precision
from jaxpfl.core.settings import COUNT, LARGEST, WHOLE, Kind, check, documents_itself, setting
from jaxpfl.models.convolution import Form
from jaxpfl.support import processes
from jaxpfl.support.errors import JaxpflError
from jaxpfl.support.host_memory import readable

_CACHE_BYTES = 256 * 1024  # largest size of a block's parameters that fits in a CPU core's cache
_LARGEST_BLOCK = 128  # a CPU gains nothing from more clients in one operation
_MOST_DEALT = 64  # up to this number of clients per device, moving states costs less than an uneven cohort (measured)
_MOST_DEVICES = sys.maxsize  # largest number of devices that ``auto`` uses
_GPUS = "gpu", "cuda", "rocm"
_QUICK = MappingProxyType({"xla_gpu_enable_triton_gemm": False})  # XLA neither builds nor times Triton's products
# ``auto`` chooses quick if the number of client steps times the model's bytes is at most this number. On an H200, quick
# saves 20 s of compilation, but a step of the papers' CNN (174 KiB) takes 0.2 us (FedAvg) to 0.45 us (AdaPeD) longer.
# The saving is used up after 1e8 steps of FedAvg or 4e7 steps of AdaPeD.
_QUICK_WORK = 8e12
_LAUNCHES = 16 * 2**20  # bytes of a block's parameters up to which a GPU waits for launches, not for memory


def _choice(*names: str, count: bool = False) -> Kind:
    """Kind of a setting whose value is one of the names.

    If ``count`` is true, the value may also be a positive integer, as a number or as text.
    """
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
    """Choices that affect the speed and the memory of a run.

    Raises:
      JaxpflError: if a setting has a value that is not allowed.
    """

    devices: str | int = setting("auto", kind=_choice("auto", count=True), unit="devices")
    """Number of devices that share the clients. auto uses all devices, but in a single process at most one device for
    each client of a cohort."""
    clients: str | int = setting("auto", kind=_choice("auto", "map", "vmap", count=True), unit="clients")
    """Clients that a device trains in one vectorized operation: map trains one client after the other (the working set
    stays in the cache), vmap trains the whole cohort at once, and a number trains that many clients at once. auto
    chooses by backend and model size."""
    runs: Literal["auto", "map", "vmap"] = setting("auto", kind=_choice("auto", "map", "vmap"))
    """Execution of several seeds and settings: map trains one after the other, vmap trains all in one vectorized
    operation, and auto chooses."""
    rounds_per_call: int = setting(100, range=COUNT, unit="rounds")
    """Largest number of rounds in one compiled call, before it returns to Python."""
    donate: bool = setting(True)
    """Reuse a state's buffers for the next state. Without reuse (--plan.no-donate), memory holds both states."""
    convolutions: Literal["auto", "products", "kernel", "plain"] = setting(
        "auto", kind=_choice("auto", "products", "kernel", "plain")
    )
    """Form of convolutions and pools: products computes them as matrix products of patches with each client's kernel;
    kernel computes them in GPU kernels, which do not write the patches to memory (in your own model only 2 x 2 max
    pools of relu of a convolution); plain keeps the operations of your own model. auto chooses plain for your own model
    if an accelerator trains one client at a time, and products otherwise. A CPU interprets the kernels, for tests."""
    precision: Literal["float32", "tf32", "bfloat16"] = setting("float32", kind=_choice("float32", "tf32", "bfloat16"))
    """Precision of matrix products: float32; tf32 (operands are rounded to 10 bits on devices that support this, and
    stay float32 on others); or bfloat16 (the model computes in bfloat16, while parameters, sums, losses and privacy
    stay float32). Only this setting changes results by more than the order of additions."""

    tuning: Literal["auto", "quick", "full"] = setting("auto", kind=_choice("auto", "quick", "full"))
    """Search for fast matrix products when a GPU's programs are compiled: quick leaves out Triton's products, so that
    compiling is faster and rounds are a few percent slower; full is XLA's own search. auto chooses quick for runs with
    little predicted work. Other devices ignore this setting. A resumed run keeps its choice."""

    linear: Literal["auto", "kernel", "plain"] = setting("auto", kind=_choice("auto", "kernel", "plain"))
    """Form of plain SGD on the registered model linear: kernel runs all local steps of a client in one GPU kernel,
    which reads the client's data once; plain runs step by step. auto chooses the kernel for several clients at a time
    on a GPU that is present, and the plain form if the kernel does not compile there. On a CPU, auto runs the steps of
    several clients in one loop if there are up to four outputs. A CPU interprets the kernel, for tests. The plain form
    is used for training that the chosen form does not support."""

    clients_in: str = setting("auto", kind=_choice("auto", "device", "host", "disk"))
    """Storage of the clients' data and states: device; host (memory from which a cohort's data and states are copied to
    the device while the previous round computes); or disk (like host, but with the states in memory-mapped files). auto
    uses the first of these that has enough room."""

    folder: str | None = setting(None, unless_given="the system's temporary folder, for at most 1 GiB")
    """Folder for temporary files with the clients' states (clients_in = disk). These files have no names and vanish
    with the process. A run with a run folder stores the states there instead."""

    model_shards: int = setting(1, range=COUNT, unit="devices")
    """Number of devices that share one client's model and states, for models larger than one device. Each array is
    sharded over these devices. The clients are distributed over plan.devices / plan.model_shards groups of devices."""

    def __post_init__(self) -> None:
        check(self, prefix="plan.")
        if self.folder is not None and self.clients_in in ("device", "host"):
            raise JaxpflError(f"plan.folder = {self.folder} requires plan.clients_in = disk, got {self.clients_in}")


class Resolved(NamedTuple):
    """A plan with every choice made.

    Attributes:
      block: number of clients that a device runs in one vectorized operation.
      devices: number of devices, or groups of ``model_shards`` devices, that share the clients.
      even: whether the cohort is distributed evenly; otherwise clients run on the device that stores their state.
      vmap_runs: whether seeds and settings are one vectorized axis; otherwise they run one after the other.
      reasons: one sentence for each choice.
      form: form of convolutions and pools; None for products, in a registered model or one without such layers.
      home: storage of the clients, in words; None if clients are stored on the devices.
      matmul: JAX's name for the precision of matrix products; None to keep JAX's setting, which is float32 on a CPU.
      lowered: precision of matrix products and a remark about it, as text; None if the plan requests float32.
      model_shards: number of devices that share one client's model.
      share_bytes: bytes of one client's model on each device.
      tuning: kind of search for fast matrix products, and the reason for this choice; None if there is nothing to
        choose, as on a CPU, or if the length of the run is unknown.
      linear: form of a linear model's local SGD, and the reason; None for other models.
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
    tuning: tuple[str, str] | None = None
    linear: tuple[linear_kernel.Form, str] | None = None

    @property
    def compiler_options(self) -> dict[str, Any]:
        """Options of `jax.jit` that tune the compiler; empty for XLA's own choices."""
        quick = self.tuning is not None and self.tuning[0] == "quick"
        return {"compiler_options": dict(_QUICK)} if quick else {}

    @property
    def one_vector(self) -> bool:
        """True if plain SGD stores a client's parameters as one vector, to launch fewer kernels in small GPU runs."""
        small = self.block * self.share_bytes <= _LAUNCHES
        return small and self.model_shards == 1 and bool(self.compiler_options)

    @property
    def all_devices(self) -> int:
        """Total number of devices."""
        return self.devices * self.model_shards


def resolve(
    plan: ExecutionPlan,
    *,
    cohort: int,
    num_clients: int,
    model_bytes: int,
    share_bytes: int | None = None,
    layers: bool = False,
    linear: bool = False,
    platform: str | None = None,
    client_steps: float | None = None,
) -> Resolved:
    """Resolve the automatic choices of a plan.

    A CPU is fastest if it trains only as many clients at a time as fit in its cache (at least one). An accelerator is
    fastest if it trains the whole cohort at once.

    Args:
      plan: plan as the user gave it.
      cohort: largest number of clients in a cohort.
      num_clients: number m of clients.
      model_bytes: bytes of one client's model.
      share_bytes: bytes of one client's model on each device, if several devices share the model; ``model_bytes`` by
        default.
      layers: whether the model has convolutions or pools whose form can be chosen.
      linear: whether the model is linear, so that the form of its local SGD can be chosen.
      platform: platform of the program ("cpu", "cuda", "tpu"), assumed to have as many devices as this machine; by
        default, JAX's default backend.
      client_steps: predicted number of local steps of all clients in all rounds and runs; None if it is unknown.

    Raises:
      JaxpflError: if the plan requests more devices than are present or than the cohort has slots, if the number of
        devices is not a multiple of ``plan.model_shards`` or of the number of processes, or if there are several
        processes and ``plan.model_shards`` > 1.
    """
    backend = platform or jax.default_backend()
    shards, each = plan.model_shards, processes.count()
    available = len(jax.devices()) if shards == 1 else _groups_of(plan, shards)
    share_bytes = model_bytes if share_bytes is None else share_bytes
    if plan.devices == "auto":
        devices = available if each > 1 else min(available, cohort, _MOST_DEVICES)
        why_devices = f"{available * shards} {backend} device(s), {cohort} clients in a round"
    else:
        devices = int(plan.devices) // shards
        if devices % each:
            raise JaxpflError(f"plan.devices must be a multiple of {each} (the number of processes), got {devices}")
        if devices > (available if each > 1 else min(available, cohort)):
            present = available <= cohort or each > 1
            limit = f"{len(jax.devices())} (the devices present)" if present else f"{cohort} (the clients of a round)"
            limit = f"{limit}, times plan.model_shards = {shards}" if shards > 1 and not present else limit
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
        why_even = "a small cohort is unevenly spread over the devices that store its clients; moving states costs less"
    else:
        why_even = "clients run on the device that stores their states and data; only sums are communicated"
    if plan.runs != "auto":
        why_runs = "as given"
    elif vmap_runs:
        why_runs = "small operations are faster together" if backend == "cpu" else f"{backend} can run them together"
    else:
        why_runs = "one model already fills a CPU core's cache"
    reasons = (why_devices, why_block, why_even, why_runs)
    form = None
    if layers or plan.convolutions == "kernel":
        form, why_form = _form_of(plan, backend, block)
        reasons = (*reasons, why_form)
    matmul, lowered = _precision_of(plan, backend)
    return Resolved(block, devices, even, vmap_runs, reasons, form=form, matmul=matmul, lowered=lowered)._replace(
        model_shards=shards,
        share_bytes=share_bytes,
        tuning=tuning_of(plan, backend, model_bytes, client_steps),
        linear=_linear_of(plan, backend, block) if linear else None,
    )


def _groups_of(plan: ExecutionPlan, shards: int) -> int:
    """Number of groups with ``shards`` devices each. The devices in a group share each client's model.

    Raises:
      JaxpflError: if there are fewer than ``shards`` devices, if ``plan.devices`` is not a multiple of ``shards``, or
        if there are several processes and ``shards`` > 1.
    """
    present = len(jax.devices())
    if processes.several():
        raise JaxpflError(
            f"plan.model_shards = {shards} supports one process only: if there are several processes, "
            "set plan.model_shards = 1"
        )
    if shards > present:
        raise JaxpflError(f"plan.model_shards must be at most {present} (the devices present), got {shards}")
    if plan.devices != "auto" and int(plan.devices) % shards:
        raise JaxpflError(f"plan.devices must be a multiple of plan.model_shards = {shards}, got {plan.devices}")
    return present // shards


def _precision_of(plan: ExecutionPlan, backend: str) -> tuple[str | None, tuple[str, str] | None]:
    """Values of `Resolved.matmul` and `Resolved.lowered`."""
    if plan.precision == "float32":
        # JAX's own default is a lower precision on an accelerator: tf32 on recent GPUs, bfloat16 on TPUs.
        return None if backend == "cpu" or full_precision.users_own() else "float32", None
    if plan.precision == "bfloat16":
        return None if backend == "cpu" else "float32", ("bfloat16", "in the model; parameters stay float32")
    if backend == "cpu":
        return None, ("float32", "a CPU has no tf32")
    return "tensorfloat32", ("tf32", "operands of products are rounded to 10 bits")


def tuning_of(
    plan: ExecutionPlan, backend: str, model_bytes: int, client_steps: float | None
) -> tuple[str, str] | None:
    """Value of `Resolved.tuning`; see `resolve` for the arguments."""
    if backend not in _GPUS:
        return None if plan.tuning == "auto" else ("XLA's own", f"a {backend} has no other")
    if plan.tuning != "auto":
        return plan.tuning, "as given"
    if client_steps is None:
        return None
    work = f"{client_steps:.3g} steps of a model of {model_bytes / 1024:.4g} KiB"
    if client_steps * model_bytes <= _QUICK_WORK:
        return "quick", f"{work}: less time is lost in slower products than saved in compiling"
    return "full", f"{work}: faster products save more time than their search takes"


def _linear_of(plan: ExecutionPlan, backend: str, block: int) -> tuple[linear_kernel.Form, str]:
    """Value of `Resolved.linear`."""
    gpu = backend in _GPUS
    if plan.model_shards > 1:
        return "plain", "several devices share a client's model"
    if plan.linear == "plain":
        return "plain", "as given"
    if plan.linear == "kernel":
        return ("kernel", "as given") if gpu else ("interpreted", f"as given; a {backend} has no such kernels")
    if gpu and not _runs_triton():
        return "plain", "the kernel requires an NVIDIA GPU on this machine, Ampere or newer"
    if gpu and block > 1:
        return "kernel", "the clients' data are read once, and steps launch no operations"
    if backend == "cpu" and block > 1:
        return "loop", "the loop has fewer small sums, which are slow on a CPU"
    return "plain", "for one client at a time" if block == 1 else f"a {backend} has no such kernels"


def _runs_triton() -> bool:
    """True if the GPU has compute capability 8.0 or more; for older GPUs, JAX 0.11 cannot compile Triton kernels."""
    major = str(getattr(jax.devices()[0], "compute_capability", "")).partition(".")[0]
    return major.isdecimal() and int(major) >= 8


def _form_of(plan: ExecutionPlan, backend: str, block: int) -> tuple[Form, str]:
    """Form of convolutions, and the reason."""
    if plan.convolutions == "kernel":
        if plan.model_shards > 1:
            return "products", "several devices share a client's model"
        if backend not in _GPUS:
            return "interpreted", f"as given; a {backend} has no such kernels"
    if plan.convolutions != "auto":
        return plan.convolutions, "as given"
    if backend == "cpu":
        return "products", "a product of patches is faster on a CPU, and does not become a grouped convolution"
    if block == 1:
        return "plain", f"{backend} has fast convolutions for one client at a time"
    return "products", "kernels of several clients would make a grouped convolution, slow in its backward pass"


PLATFORMS = ("cpu", "cuda", "rocm", "tpu")
"""Platforms for which a program can be lowered."""


_FORMS = {"products": "as products", "kernel": "in kernels", "interpreted": "in interpreted kernels", "plain": "plain"}
_LINEAR = {"kernel": "one kernel", "interpreted": "one interpreted kernel", "loop": "one loop", "plain": "step by step"}


def explain(resolved: Resolved) -> list[tuple[str, str, str]]:
    """Choices of a resolved plan as table rows (subject, choice, reason)."""
    clients = "one after the other" if resolved.block == 1 else f"{resolved.block} at a time"
    choices = (
        ("devices", str(resolved.all_devices)),
        ("clients on a device", clients),
        ("cohort", "distributed evenly" if resolved.even else "each client on the device that stores its state"),
        ("seeds and settings", "one vectorized axis" if resolved.vmap_runs else "one after the other"),
    )
    if resolved.form is not None:
        choices = (*choices, ("the model's convolutions", _FORMS[resolved.form]))
    if resolved.home is not None:
        choices = (*choices, ("clients' storage", resolved.home))
    rows = [(what, choice, why) for (what, choice), why in zip(choices, resolved.reasons, strict=True)]
    if resolved.model_shards > 1:
        part = f"{readable(resolved.share_bytes)} of it on each; each array is sharded along one dimension"
        rows.append(("a client's model", f"in parts on {resolved.model_shards} devices", part))
    if resolved.linear is not None:
        form, why = resolved.linear
        rows.append(("SGD of the linear model", _LINEAR[form], why))
    if resolved.tuning is not None:
        rows.append(("tuning of products", *resolved.tuning))
    return rows if resolved.lowered is None else [*rows, ("precision of products", *resolved.lowered)]

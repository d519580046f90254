"""How a round is executed. A plan changes speed and memory, never what is computed (beyond the order of additions)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

import jax

from jaxpfl.errors import JaxpflError

_CACHE_BYTES = 256 * 1024  # parameters of a block of clients that stay in a CPU core's cache
_LARGEST_BLOCK = 128  # beyond it a CPU gains nothing from more clients in one operation


@dataclass(frozen=True)
class ExecutionPlan:
    """Choices of speed and memory.

    Attributes:
      devices: how many devices share the clients, m / D each; ``auto`` takes the most that divide m.
      clients: ``map`` runs one client after the other (working set stays in cache), ``vmap`` the whole cohort at once,
        a number that many at once; ``auto`` chooses by backend and model size.
      runs: the same for the axis of seeds and settings: ``map``, ``vmap`` or ``auto``.
      rounds_per_call: rounds that one compiled call may run before it returns to Python.
      donate: reuse the state's buffers for the next state; without it both are held.
    """

    devices: str | int = "auto"
    clients: str | int = "auto"
    runs: Literal["auto", "map", "vmap"] = "auto"
    rounds_per_call: int = 100
    donate: bool = True

    def __post_init__(self) -> None:
        text = str(self.clients)
        numeric = text.isdecimal() and int(text) > 0
        if text not in ("auto", "map", "vmap") and not numeric:
            raise JaxpflError(f"plan.clients must be auto, map, vmap or a positive number, got {self.clients!r}")
        if str(self.devices) != "auto" and not (str(self.devices).isdecimal() and int(self.devices) > 0):
            raise JaxpflError(f"plan.devices must be auto or a positive number, got {self.devices!r}")
        if self.runs not in ("auto", "map", "vmap"):
            raise JaxpflError(f"plan.runs must be auto, map or vmap, got {self.runs!r}")
        if self.rounds_per_call < 1:
            raise JaxpflError(f"plan.rounds_per_call must be at least 1, got {self.rounds_per_call}")


class Resolved(NamedTuple):
    """A plan with every choice made: clients in one block, whether runs are vmapped, and devices."""

    block: int
    vmap_runs: bool
    devices: int


def resolve(plan: ExecutionPlan, *, cohort: int, num_clients: int, model_bytes: int) -> Resolved:
    """Makes the automatic choices.

    A CPU wants a working set that stays in cache: one client at a time, or as many small models as fit. An
    accelerator wants the whole cohort.

    Args:
      cohort: slots in a cohort.
      num_clients: m.
      model_bytes: bytes of one client's model.
    """
    on_cpu = jax.default_backend() == "cpu"
    available = len(jax.devices())
    if plan.devices == "auto":
        devices = max(d for d in range(1, available + 1) if num_clients % d == 0)
    else:
        devices = int(plan.devices)
        if devices > available or num_clients % devices:
            raise JaxpflError(
                f"plan.devices must divide the {num_clients} clients and be at most {available}, got {devices}"
            )
    cohort = min(cohort, num_clients // devices)  # slots on one device
    fitting = max(1, min(_CACHE_BYTES // max(model_bytes, 1), _LARGEST_BLOCK, cohort))
    if plan.clients == "auto":
        block = fitting if on_cpu else cohort
    else:
        block = {"map": 1, "vmap": cohort}.get(str(plan.clients)) or min(int(plan.clients), cohort)
    vmap_runs = plan.runs == "vmap" or (plan.runs == "auto" and (not on_cpu or fitting > 1))
    return Resolved(block, vmap_runs, devices)

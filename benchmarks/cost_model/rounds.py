"""Cost of a round: a client's operations and bytes, and the seconds of the whole cohort on this machine's CPU."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxpfl.engine.exchange import ClientMemory, client_memory, client_round
from jaxpfl.engine.execution_plan import Resolved
from jaxpfl.engine.simulation import Simulation

from .count import Work, work_of
from .machine import Core, this_core


class Cost(NamedTuple):
    """Cost of a round.

    Attributes:
      works: work of one client's round, for each group of clients.
      up, down: bytes that a client uploads and receives, uncompressed.
      together: number of clients in one vectorized operation, over all runs that share its axis.
      turns: number of such operations that a device runs one after the other, for each group.
      seconds: time of a round of all runs on this machine, without drawing the cohort, the server's update and
        evaluation. None for sharded models, and on backends other than the CPU, for which no constants are measured.
    """

    works: tuple[Work, ...]
    up: int
    down: int
    together: int
    turns: tuple[int, ...]
    seconds: float | None

    @property
    def flops(self) -> float:
        """Number of floating-point operations in a client's round, for the most expensive group."""
        return max(work.flops for work in self.works)


def cost(simulation: Simulation, runs: int = 1) -> Cost:
    """Return the cost of a round of several runs of a simulation, without running it."""
    up, down = simulation.bytes_per_client()
    cohorts = [min(simulation.participation.capacity, group.size) for group in simulation._groups]
    return cost_of(works_of(simulation), cohorts, simulation.execution, runs, up=up, down=down)


def works_of(simulation: Simulation) -> tuple[Work, ...]:
    """Return the work of one client's round in each group, with all local steps.

    A pass over all of a client's examples is assumed to take as many chunks as in the mean client of the group.
    """
    algorithm, participation = simulation.algorithm, simulation.participation
    state, hp = simulation.shapes_of_one_run()

    def of(group: int) -> Work:
        def round(memory: ClientMemory, server: Any, hp: Any, federation: Any) -> Any:
            return client_round(algorithm, participation, group, memory, server, hp, federation)[:2]

        memory = jax.eval_shape(lambda state: client_memory(state, group), state)
        federation = simulation.federations[group]
        train = federation.train
        chunks = float(np.ceil(np.asarray(train.size) / max(train.chunk, 1)).mean())
        return work_of(round, memory, state.server, hp, federation, trips=chunks)

    return tuple(map(of, range(len(algorithm.clients))))


def cost_of(
    works: tuple[Work, ...],
    cohorts: Sequence[int],
    execution: Resolved,
    runs: int = 1,
    *,
    up: int = 0,
    down: int = 0,
    core: Core | None = None,
) -> Cost:
    """Return the cost of a round.

    Args:
      works: work of one client's round, for each group.
      cohorts: number of clients of each group in a round.
      execution: resolved execution plan.
      runs: number of runs S (seeds and settings).
      up, down: bytes that a client uploads and receives.
      core: speed of a core; measured by default, on a CPU.
    """
    together = execution.block * (runs if execution.vmap_runs else 1)
    in_turn = 1 if execution.vmap_runs else runs
    of_device = [math.ceil(cohort / execution.devices) for cohort in cohorts]
    turns = tuple(in_turn * math.ceil(clients / execution.block) for clients in of_device)
    if core is None and jax.default_backend() == "cpu" and execution.model_shards == 1:
        core = this_core()
    seconds = None
    if core is not None and execution.model_shards == 1:  # the communication between shards of a model is not modeled
        seconds = sum(n * core.seconds(work, together, execution.devices) for n, work in zip(turns, works, strict=True))
    return Cost(works, up, down, together, turns, seconds)

"""Compiled programs of a simulation, each made at its first call, its memory checked before it runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax

from jaxpfl.engine import compiled
from jaxpfl.engine import device_memory as memory
from jaxpfl.engine.evaluate import make_adapt, make_clusters, make_evaluate, make_personal
from jaxpfl.engine.execution_plan import ExecutionPlan, Resolved
from jaxpfl.engine.groups import Group
from jaxpfl.engine.placement import Placement
from jaxpfl.engine.round import Clients, RoundPlan, make_round, make_rounds
from jaxpfl.engine.runs import over_runs
from jaxpfl.engine.state import RunState, init_state
from jaxpfl.errors import OutOfMemoryError
from jaxpfl.models import Task
from jaxpfl.participation import Availability, Participation
from jaxpfl.protocol import Algorithm, Reduction, any_data, by_turns
from jaxpfl.types import PyTree

Name = Literal["start", "advance", "test", "validation", "personal", "clusters", "unseen"]

_USED: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "start": (("init",), ("init", "broadcast")),
    "advance": (("update", "idle", "gradients"), ("broadcast", "update")),
    "test": (("personalize", "predict"), ("broadcast", "predict_global")),
    "validation": (("personalize", "predict"), ("broadcast", "predict_global")),
    "personal": (("personalize",), ("broadcast",)),
    "clusters": (("cluster",), ("broadcast",)),
    "unseen": (("init", "update", "personalize", "predict", "gradients"), ("broadcast", "welcome", "predict_global")),
}
"""Functions of clients and server that each program uses."""


class Setting(NamedTuple):
    """Inputs of the programs, all static.

    Attributes:
      algorithm: the method.
      task: the model with its metrics.
      participation: the sampling of cohorts.
      availability: the kinds of failures; the rates of each run are arguments of the program.
      plan: the plan as given.
      scoring: the plan of programs that run over all clients.
      placement: the devices of states and data.
      groups: the groups of the clients that are trained.
      unseen: those of clients that are not, if any.
    """

    algorithm: Algorithm
    task: Task
    participation: Participation
    availability: Availability
    plan: ExecutionPlan
    scoring: Resolved
    placement: Placement
    groups: tuple[Group, ...]
    unseen: tuple[Group, ...] = ()


class Programs:
    """The programs of one setting.

    Attributes:
      execution: the resolved plan of a round; fewer clients at once if more did not fit.
      made: the programs in use, by name and number of runs.
    """

    def __init__(self, setting: Setting, execution: Resolved):
        self.execution = execution
        self.made: dict[tuple[Name, int], jax.stages.Compiled] = {}
        self._of = setting

    def start(self, runs: int, arguments: tuple[Any, ...]) -> jax.stages.Compiled:
        """Program that makes the first states of ``(keys [S], hp [S], clients)``.

        If its random draws would not fit beside the states, it draws for fewer clients at a time.

        Raises:
          OutOfMemoryError: if not even one client at a time fits.
        """
        if ("start", runs) in self.made:
            return self.made["start", runs]
        # The first state is dozens of random draws that run once: optimising that code costs seconds and saves nothing.
        unoptimised = {"xla_backend_optimization_level": 0} if jax.default_backend() == "cpu" else None
        placement = self._of.placement
        block, devices = None, placement.devices
        while True:
            program = compiled.compiled(
                self.beginning(block), arguments, out_shardings=placement.state, compiler_options=unoptimised
            )
            need, free = memory.needed(program, devices), memory.free(devices)
            if free is None or need <= free:
                break
            if block == 1:
                raise OutOfMemoryError(
                    f"the first states need {memory.readable(need)} of memory, one client at a time, "
                    f"{memory.readable(free)} are free: use fewer clients, fewer seeds at once or a smaller model"
                )
            block = max(1, (block or placement.rows) // 8)
        self.made["start", runs] = program
        return program

    def beginning(self, block: int | None = None) -> Callable[..., RunState]:
        """``(keys [S] of runs and of noise, hp [S], clients) -> states before round 0``.

        Args:
          block: the number of clients at a time; all if None.
        """
        of, algorithm = self._of, _part(self._of.algorithm, "start")
        participation, groups, rows = of.participation, of.groups, of.placement.rows

        def init(keys: tuple[jax.Array, jax.Array | None], hp: PyTree, clients: Clients) -> RunState:
            return init_state(algorithm, participation, groups, keys, hp, *clients, rows, block)

        return over_runs(init, vectorised=self.execution.vmap_runs)

    def of(self, name: Name, runs: int, arguments: tuple[Any, ...]) -> jax.stages.Compiled:
        """Program of ``advance``, or of a scoring, for S runs and arguments of these shapes.

        A program that would not fit into memory is compiled again with fewer clients at once.

        Raises:
          OutOfMemoryError: if that is not allowed, or does not help.
        """
        if (name, runs) in self.made:
            return self.made[name, runs]
        block = self.execution.block if name == "advance" else self._of.scoring.block
        devices = self._of.placement.devices
        while True:
            program = compiled.compiled(self.function(name, block), arguments, **self.options(name))
            need, free = memory.needed(program, devices), memory.free(devices)
            if free is None or need <= free:
                break
            short = f"{memory.readable(need)} of memory beside data and states, {memory.readable(free)} are free"
            if block == 1 or self._of.plan.clients != "auto":
                raise OutOfMemoryError(
                    f"with {block} client(s) at once, {name} needs {short}: use fewer of them (plan.clients), fewer "
                    "runs at once (plan.runs = map) or a smaller model"
                )
            fewer = max(1, min(block // 2, block * free // need))
            if name == "advance":
                first, _, *others = self.execution.reasons
                reasons = (first, f"{block} at once would need {short}", *others)
                self.execution = self.execution._replace(block=fewer, reasons=reasons)
            block = fewer
        self.made[name, runs] = program
        return program

    def digest(self, name: Name, arguments: tuple[Any, ...]) -> str | None:
        """Name of the program of ``advance``, or of a scoring, by its content (`compiled.digest`)."""
        block = self.execution.block if name == "advance" else self._of.scoring.block
        return compiled.digest(self.function(name, block), arguments, **self.options(name))

    def options(self, name: Name) -> dict[str, Any]:
        """Options of `compiled.compiled` for a program other than ``start``."""
        if name != "advance":
            return {}
        placement = self._of.placement
        return {
            "donate_argnums": (0,) if self._of.plan.donate else (),
            "out_shardings": (placement.state, placement.everywhere),
        }

    def function(self, name: Name, block: int) -> Callable[..., Any]:
        """Function that a program other than ``start`` is compiled from."""
        of, algorithm = self._of, _part(self._of.algorithm, name)
        plan = RoundPlan(of.participation, of.groups, block, of.placement.spread)
        if name == "advance":
            plan = plan._replace(availability=of.availability)
            rounds = make_rounds(make_round(algorithm, plan), of.plan.rounds_per_call)
            return over_runs(rounds, vectorised=self.execution.vmap_runs, in_place=True)
        if name == "personal":
            one = make_personal(algorithm, plan)
        elif name == "clusters":
            one = make_clusters(algorithm, plan)
        elif name == "unseen":
            one = make_adapt(algorithm, of.task, plan._replace(groups=of.unseen), split="test")
        else:
            assert name in ("test", "validation")
            one = make_evaluate(algorithm, of.task, plan, split=name)
        return over_runs(one, vectorised=self.execution.vmap_runs)


def _part(algorithm: Algorithm, name: Name) -> Algorithm:
    """Part of an algorithm that a program uses; methods that share it share the program."""
    of_client, of_server = _USED[name]

    def part(functions: Any, used: tuple[str, ...]) -> Any:
        others = {field: _unused for field in functions._fields if field not in used}
        return functions._replace(**others)

    clients = tuple(part(client, of_client) for client in algorithm.clients)
    if name == "advance":
        clients = tuple(c._replace(gradients=c.gradients and c.gradients._replace(personalize=0)) for c in clients)
    algorithm = algorithm._replace(
        clients=clients, server=part(algorithm.server, of_server), check_data=any_data, clusters=None, noise=None
    )
    if name == "advance":
        return algorithm
    rest = {"idle_cap": 0, "group_of": by_turns, "reduction": Reduction.SUM, "counts_bits": False}
    return algorithm._replace(**rest, local_steps=0)


def _unused(*given: Any) -> Any:
    raise AssertionError("not of this program")

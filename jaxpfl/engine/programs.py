"""Compiled programs of a simulation. A program is compiled on its first call, and its memory use is then checked."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any, Literal, NamedTuple

import jax

from jaxpfl.algorithms.parts import linear_kernel, local_work
from jaxpfl.core import trees
from jaxpfl.core.participation import Availability, Participation
from jaxpfl.core.protocol import Algorithm, Client, Reduction, Server, any_data, round_robin
from jaxpfl.engine import compiled
from jaxpfl.engine.cohort import Group
from jaxpfl.engine.evaluate import adapt_all, cluster_all, personalize_all, score_all
from jaxpfl.engine.execution_plan import ExecutionPlan, Resolved
from jaxpfl.engine.placement import Placement, program_bytes, too_little
from jaxpfl.engine.round import RoundPlan, several_rounds
from jaxpfl.engine.state import init_state, over_runs
from jaxpfl.models import Task, rewriting
from jaxpfl.models.rewriting import Form
from jaxpfl.support import processes
from jaxpfl.support.errors import OutOfMemoryError, is_exhausted
from jaxpfl.support.host_memory import readable

Name = Literal["start", "advance", "scores", "personal", "clusters", "unseen"]

_USED: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "start": (("init",), ("init", "broadcast")),
    "advance": (("update", "idle", "gradients"), ("broadcast", "update")),
    "scores": (("personalize", "predict"), ("broadcast", "predict_global")),
    "personal": (("personalize",), ("broadcast",)),
    "clusters": (("cluster",), ("broadcast",)),
    "unseen": (("init", "update", "personalize", "predict", "gradients"), ("broadcast", "welcome", "predict_global")),
}
"""For each program, the functions of `Client` and of `Server` that the program calls."""


_UNOPTIMIZED = {"compiler_options": {"xla_backend_optimization_level": 0}}
"""Options of ``start`` on a CPU. The program makes dozens of random draws and runs once, so optimizing it would cost
seconds and save nothing."""


class Setting(NamedTuple):
    """Static inputs of the programs.

    Attributes:
      algorithm: the method.
      task: model, loss and metrics.
      participation: sampling of the cohorts.
      availability: kinds of failures (dropout, stragglers); the failure rates are arguments of the programs.
      plan: execution plan, as the user gave it.
      scoring: resolved plan of the programs that run over all clients.
      placement: placement of states and data on the devices.
      groups: groups of the trained clients.
      unseen: groups of the unseen clients, if any.
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
    """The compiled programs of a simulation with one `Setting`.

    Attributes:
      execution: resolved plan of a round, with a smaller block of clients if the first choice did not fit in memory.
      made: compiled programs, by name and number of runs.
    """

    def __init__(self, setting: Setting, execution: Resolved):
        self.execution = execution
        self.made: dict[tuple[Name, int], jax.stages.Compiled] = {}
        self._of = setting
        self._without_kernel = False  # true once the kernel of linear models has failed to compile

    def get(self, name: Name, runs: int, arguments: tuple[Any, ...]) -> jax.stages.Compiled:
        """Compiled program for S runs and arguments of these shapes.

        If the program does not fit in memory, it is compiled again with a smaller block of clients, unless
        ``plan.clients`` fixes the block. If the plan automatically chose the kernel of linear models, and the kernel
        does not compile, the plain form replaces it.

        Raises:
          OutOfMemoryError: if the program does not fit, even with the smallest block.
        """
        if (name, runs) in self.made:
            return self.made[name, runs]
        devices, block = self._of.placement.devices, self._plan_of(name).block
        least = 1 if name == "start" or self._of.plan.clients == "auto" else block
        one_gpu = [device.platform for device in devices] == ["gpu"]
        while True:
            options = self.execution.compiler_options | self.options(name, arguments)
            try:
                with _draws_as_calls() if name == "start" and one_gpu else nullcontext():
                    program = compiled.compiled(self.function(name, block), arguments, **options)
            except Exception as error:
                if self._linear(name) != "kernel" or self._of.plan.linear != "auto" or is_exhausted(error):
                    raise
                self._without_kernel = True
                why = f"the kernel does not compile: {str(error).partition(chr(10))[0]}"
                self.execution = self.execution._replace(linear=("plain", why))
                continue
            need = program_bytes(program, devices)
            if (free := too_little(need, devices)) is None:
                break
            short = f"{readable(need)} of memory beside data and states, but only {readable(free)} is free"
            if block <= least:
                smaller = "a smaller plan.clients, " if block > 1 else ""
                raise OutOfMemoryError(
                    f"with {block} client(s) at once, the program {name!r} needs {short}: use {smaller}"
                    "fewer runs at once (plan.runs = map), fewer clients or a smaller model"
                )
            fewer = max(1, min(block // 2, block * free // need))
            if name == "advance":
                first, _, *others = self.execution.reasons
                reasons = (first, f"{block} at once would need {short}", *others)
                self.execution = self.execution._replace(block=fewer, reasons=reasons)
            block = fewer
        self.made[name, runs] = program
        return program

    def digest(self, name: Name, arguments: tuple[Any, ...]) -> str:
        """Digest of a program (`compiled.digest`)."""
        block = self._plan_of(name).block
        options = self.execution.compiler_options | self.options(name, arguments)
        return compiled.digest(self.function(name, block), arguments, **options)

    def options(self, name: Name, arguments: tuple[Any, ...]) -> dict[str, Any]:
        """Options of `compiled.compiled` for a program."""
        placement = self._of.placement
        if name == "start":
            layout = placement.state
            if placement.model is not None:
                layout = placement.layout(compiled.shapes(self.function(name, placement.rows), *arguments))
            return {"out_shardings": layout} | (_UNOPTIMIZED if jax.default_backend() == "cpu" else {})
        if name != "advance":  # with several processes, each must be able to read the whole result
            return {"out_shardings": placement.everywhere} if processes.several() else {}
        return {
            "donate_argnums": (0,) if self._of.plan.donate else (),
            "out_shardings": (
                placement.state if placement.model is None else placement.layout(arguments[0]),
                placement.everywhere,
            ),
        }

    def function(self, name: Name, block: int) -> Callable[..., Any]:
        """Function from which a program is compiled; ``block`` is the number of clients in one vectorized operation.

        The program ``start`` makes the initial states, ``(keys, hp, clients) -> states``. Here ``keys`` is a pair: the
        run keys [S], and the noise keys [S] or None if the runs have no noise.
        """
        of, algorithm = self._of, part_used(self._of.algorithm, name)
        plan = RoundPlan(of.participation, of.groups, block, of.placement.spread, model=of.placement.model)
        if name == "start":
            rows = of.placement.rows
            at_once = block if block < rows else None
            one = partial(init_state, algorithm, of.participation, of.groups, rows, at_once, of.placement.model)
        elif name == "advance":
            one = partial(
                several_rounds, algorithm, plan._replace(availability=of.availability), of.plan.rounds_per_call
            )
        elif name == "personal":
            one = partial(personalize_all, algorithm, plan)
        elif name == "clusters":
            one = partial(cluster_all, algorithm, plan)
        elif name == "unseen":
            one = partial(adapt_all, algorithm, of.task, plan._replace(groups=of.unseen))
        else:
            assert name == "scores"
            one = partial(score_all, algorithm, of.task, plan)
        chosen = self._plan_of(name)
        runs = partial(over_runs, one, vectorised=self.execution.vmap_runs, in_place=name == "advance")
        more = {"apart": of.placement.model is not None, "linear": self._linear(name), "one_vector": chosen.one_vector}
        return traced_as(runs, chosen.form, chosen.matmul, **more)

    def _plan_of(self, name: Name) -> Resolved:
        """Resolved plan of a program. For ``start``, one block contains all clients."""
        if name == "start":
            return self.execution._replace(block=self._of.placement.rows, form=None, linear=None)
        return self.execution if name == "advance" else self._of.scoring

    def _linear(self, name: Name) -> linear_kernel.Form | None:
        """Form of a linear model's local SGD in a program; None for other models."""
        chosen = self._plan_of(name).linear
        if chosen is None:
            return None
        return "plain" if self._without_kernel else chosen[0]


def traced_as(
    function: Callable[..., Any],
    form: Form | None,
    matmul: str | None,
    *,
    apart: bool = False,
    linear: linear_kernel.Form | None = None,
    one_vector: bool = False,
) -> Callable[..., Any]:
    """Wrap a function so that it is traced with a given form of convolutions and precision of matrix products.

    Args:
      function: function of arrays.
      form: form of the convolutions in the user's own model (`Resolved.form`).
      matmul: precision of matrix products (`Resolved.matmul`).
      apart: whether leaves are sharded over several devices, in which case they are never concatenated.
      linear: form of a linear model's local SGD (`Resolved.linear`).
      one_vector: whether plain SGD stores a client's parameters as one vector (`Resolved.one_vector`).

    Returns:
      The wrapped function, or the function itself if no option is given.
    """
    if form is matmul is linear is None and not (apart or one_vector):
        return function

    def traced(*given: Any) -> Any:
        with ExitStack() as stack:
            if form is not None:
                stack.enter_context(rewriting.form(form))
            if matmul is not None:
                stack.enter_context(jax.default_matmul_precision(matmul))
            if linear is not None:
                stack.enter_context(linear_kernel.form(linear))
            if one_vector:
                stack.enter_context(local_work.one_vector(True))
            if apart:
                stack.enter_context(trees.leaves_apart(True))
            return function(*given)

    return traced


_CALLS = "jax_threefry_gpu_kernel_lowering"
_calls_lock = threading.Lock()


@contextmanager
def _draws_as_calls() -> Iterator[None]:
    """Within the ``with`` block, compile each random draw on a GPU as a call of a kernel that JAX contains.

    Otherwise every draw becomes a kernel of its own with hundreds of operations: initial states of the papers' CNN then
    take five times as long to compile. The drawn numbers are the same. XLA cannot distribute such a call over devices.
    """
    config: Any = jax.config
    with _calls_lock:
        before = getattr(config, _CALLS, True)  # a later JAX may lack the setting
        if not before:
            config.update(_CALLS, True)
        try:
            yield
        finally:
            if not before:
                config.update(_CALLS, False)


def part_used(algorithm: Algorithm, name: Name) -> Algorithm:
    """The algorithm with only the functions that a program uses, so that methods with equal functions share the
    program.
    """
    of_client, of_server = _USED[name]
    others = dict.fromkeys(set(Client._fields) - set(of_client), _unused)
    clients = tuple(client._replace(**others) for client in algorithm.clients)
    server = algorithm.server._replace(**dict.fromkeys(set(Server._fields) - set(of_server), _unused))
    if name == "advance":
        clients = tuple(c._replace(gradients=c.gradients and c.gradients._replace(personalize=0)) for c in clients)
    algorithm = algorithm._replace(clients=clients, server=server, check_data=any_data, clusters=None, noise=None)
    if name == "advance":
        return algorithm
    rest = {"idle_cap": 0, "group_of": round_robin, "reduction": Reduction.SUM, "counts_bits": False}
    own_steps = algorithm.own_steps if name == "unseen" else None
    return algorithm._replace(**rest, local_steps=0, own_steps=own_steps)


def _unused(*given: Any) -> Any:
    raise AssertionError("bug in jaxpfl: a program called a function that _USED does not list for it")

"""The compiled programs of one experiment: start, advance by some rounds, score. Runs are one axis."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Literal

import jax
import jax.export
import jax.numpy as jnp
import numpy as np

from jaxpfl import trees
from jaxpfl.engine import memory
from jaxpfl.engine.evaluate import Scores, make_evaluate
from jaxpfl.engine.placement import place, put
from jaxpfl.engine.plan import ExecutionPlan, Resolved, resolve
from jaxpfl.engine.round import RunState, init_state, make_round, make_rounds, server_context
from jaxpfl.errors import JaxpflError
from jaxpfl.models import Task
from jaxpfl.participation import Participation
from jaxpfl.protocol import ALL_STEPS, Algorithm, ClientContext
from jaxpfl.types import Array, Federation, Metrics, PyTree

_ProgramName = Literal["advance", "test", "validation"]


class Simulation:
    """A federation, an algorithm and a way to take part, compiled.

    All state is an argument and a result; the object holds only programs and the (constant) data, so any state may be
    advanced at any time. Every state and score has a leading axis of runs, [S]. On several devices a state may hold
    rows beyond the last client (see `RunState`); `trim` cuts them off.

    Example::

        simulation = Simulation(algorithm, task, federation, participation.of(50, 5), hp)
        state = simulation.init(seeds=[0, 1, 2])
        state, history = simulation.advance(state, rounds=100)
        accuracy = simulation.evaluate(state)["after"]["accuracy"]  # [3 runs, 50 clients]
    """

    def __init__(
        self,
        algorithm: Algorithm,
        task: Task,
        federation: Federation,
        participation: Participation,
        hp: PyTree,
        *,
        plan: ExecutionPlan | None = None,
    ):
        """Places the data and prepares the programs; each is compiled at its first call.

        Args:
          algorithm: the method, built for the same task.
          task: model, loss and metrics.
          federation: the stacked data of m clients.
          participation: how cohorts are drawn, for the same m.
          hp: hyper-parameters; leaves [] for all runs, or [S], one value for each run.
          plan: how to execute; the automatic choice by default.
        """
        if participation.num_clients != federation.num_clients:
            raise JaxpflError(
                f"participation is for {participation.num_clients} clients, the data have {federation.num_clients}"
            )
        self.algorithm, self.participation = algorithm, participation
        self.plan = plan or ExecutionPlan()
        self.hp = jax.tree.map(jnp.asarray, hp)

        shapes = jax.eval_shape(task.init, jax.random.key(0))
        self._model_bytes, num_clients = trees.num_bytes(shapes), federation.num_clients
        self.execution = self._resolve(self.plan, participation.capacity)
        self.placement = place(num_clients, self.execution.devices, self.execution.even)
        self.federation: Federation = put(federation, self.placement)
        # Scoring runs over everyone, and spreads them over the same devices.
        self._scoring = self._resolve(replace(self.plan, devices=self.execution.devices), num_clients)
        self._task = task
        self._programs: dict[tuple[_ProgramName, int], jax.stages.Compiled] = {}

        def init(key: jax.Array, hp: PyTree, federation: Federation) -> RunState:
            return init_state(algorithm, participation, key, hp, federation, self.placement.rows)

        # The first state is dozens of random draws that run once: optimising that code costs seconds and saves nothing.
        unoptimised = {"xla_backend_optimization_level": 0} if jax.default_backend() == "cpu" else None
        self._first = self._over_runs(init)
        self._init = jax.jit(self._first, out_shardings=self.placement.state, compiler_options=unoptimised)

    def init(self, seeds: Sequence[int]) -> RunState:
        """The state before round 0 of one run for each seed.

        Raises:
          JaxpflError: for no seed, a seed outside 32 bits, and states that do not fit into memory.
        """
        if not len(seeds):
            raise JaxpflError("at least one seed is needed")
        for seed in seeds:  # beyond 32 bits the key would be that of another seed
            if not 0 <= seed < 2**32:
                raise JaxpflError(f"a seed must be between 0 and 2**32 - 1, got {seed}")
        need, free = trees.num_bytes(self._state_shapes(len(seeds)).clients), memory.free(self.placement.devices)
        if self.placement.devices[0].platform != "cpu":
            need //= len(self.placement.devices)
        if free is not None and need > free:
            raise JaxpflError(
                f"the clients' states need {memory.readable(need)} of memory, {memory.readable(free)} are free: "
                f"use fewer clients, fewer seeds at once ({len(seeds)} now) or a smaller model"
            )
        keys = jnp.stack([jax.random.key(seed) for seed in seeds])
        return self._init(keys, self._hp_rows(len(seeds)), self.federation)

    def advance(self, state: RunState, rounds: int) -> tuple[RunState, dict[str, np.ndarray]]:
        """Runs some rounds; the given state is used up (its buffers are donated, unless the plan says not to).

        Returns:
          The new state, and the history of the metrics, each [S, rounds].

        Raises:
          JaxpflError: where a round does not fit into memory, even with the smallest block of clients that the plan
            allows; asked before anything runs.
        """
        state = jax.device_put(state, self.placement.state)  # one of the caller's own making may lie elsewhere
        history: list[Metrics] = []
        lengths: list[int] = []
        while rounds > 0:
            length = min(rounds, self.plan.rounds_per_call)
            runs = state.round.shape[0]
            program = self._program("advance", runs)
            state, metrics = program(state, self._hp_rows(runs), self.federation, jnp.int32(length))
            history.append(metrics)
            lengths.append(length)
            rounds -= length
        names = history[0] if history else {}
        return state, {
            name: np.concatenate([np.asarray(h[name])[:, :n] for h, n in zip(history, lengths, strict=True)], axis=1)
            for name in names
        }

    def evaluate(self, state: RunState, split: Literal["test", "validation"] = "test") -> Scores:
        """Scores every client in every run: which model -> metric -> [S, m]."""
        runs = state.round.shape[0]
        state = jax.device_put(state, self.placement.state)
        return self._program(split, runs)(state, self._hp_rows(runs), self.federation)

    def trim(self, state: RunState) -> RunState:
        """The state with exactly m rows of clients: what to look at, or to keep for a run on other devices."""
        return self._resize(state, self.participation.num_clients)

    def adopt(self, state: RunState) -> RunState:
        """A trimmed state, of host or device arrays, placed as this simulation's programs want it."""
        return jax.device_put(self._resize(state, self.placement.rows), self.placement.state)

    def _resize(self, state: RunState, rows: int) -> RunState:
        def resize(a: Array) -> Array:
            if a.shape[1] == rows:
                return a
            return jnp.pad(a[:, :rows], [(0, 0), (0, max(rows - a.shape[1], 0))] + [(0, 0)] * (a.ndim - 2))

        by_client = ("clients", "participations", "diverged")
        return state._replace(**{name: jax.tree.map(resize, getattr(state, name)) for name in by_client})

    def export(self, *platforms: str, seeds: int = 1) -> jax.export.Exported:
        """The program of one `advance` call, lowered for platforms ("cpu", "cuda", "tpu") that need not be here."""
        program = jax.export.export(self._jitted("advance", self.execution.block), platforms=platforms)
        return program(*self._arguments("advance", seeds))

    def memory(self, runs: int = 1) -> dict[str, int]:
        """Bytes of the data, of the clients' states, and of what a round takes beside them (compiles the round)."""
        working = memory.needed(self._program("advance", runs), self.placement.devices)
        states = trees.num_bytes(self._state_shapes(runs).clients)
        return {"data": trees.num_bytes(self.federation), "states": states, "working": working}

    def bytes_per_client(self) -> tuple[int, int]:
        """Bytes that one client uploads and receives in one round (parameters as they are, weights left out)."""
        state = self._state_shapes(1)
        one = jax.eval_shape(lambda s: jax.tree.map(lambda a: a[0], s), state)
        hp = jax.tree.map(lambda a: a.reshape(-1)[0], self.hp)

        def exchange(state: RunState, hp: PyTree, federation: Federation) -> tuple[PyTree, PyTree]:
            return _exchange(self.algorithm, self.participation, state, hp, federation)

        up, down = jax.eval_shape(exchange, one, hp, self.federation)
        return trees.num_bytes(up), trees.num_bytes(down)

    def _state_shapes(self, runs: int) -> RunState:
        keys = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), runs))
        return jax.eval_shape(self._first, keys, self._hp_rows(runs), self.federation)

    def _resolve(self, plan: ExecutionPlan, cohort: int) -> Resolved:
        clients = self.participation.num_clients
        return resolve(plan, cohort=cohort, num_clients=clients, model_bytes=self._model_bytes)

    def _program(self, name: _ProgramName, runs: int) -> jax.stages.Compiled:
        """The compiled program of ``advance``, or of the scoring of a split, for S runs.

        Where it would not fit into memory, it is compiled again with fewer clients at once.
        """
        if (name, runs) in self._programs:
            return self._programs[name, runs]
        block = self.execution.block if name == "advance" else self._scoring.block
        devices = self.placement.devices
        while True:
            program = self._jitted(name, block).lower(*self._arguments(name, runs)).compile()
            need, free = memory.needed(program, devices), memory.free(devices)
            if free is None or need <= free:
                break
            short = f"{memory.readable(need)} of memory beside data and states, {memory.readable(free)} are free"
            if block == 1 or self.plan.clients != "auto":
                raise JaxpflError(
                    f"with {block} client(s) at once, {name} needs {short}: use fewer of them (plan.clients), fewer "
                    "runs at once (plan.runs = map) or a smaller model"
                )
            fewer = max(1, min(block // 2, block * free // need))
            why = f"{block} at once would need {short}"
            if name == "advance":
                _, _, *others = self.execution.reasons
                reasons = (self.execution.reasons[0], why, *others)
                self.execution = self.execution._replace(block=fewer, reasons=reasons)
            block = fewer
        self._programs[name, runs] = program
        return program

    def _jitted(self, name: _ProgramName, block: int) -> Any:
        algorithm, participation, spread = self.algorithm, self.participation, self.placement.spread
        if name != "advance":
            one = make_evaluate(algorithm, self._task, participation, block=block, split=name, spread=spread)
            return jax.jit(self._over_runs(one))
        one_round = make_round(algorithm, participation, block=block, spread=spread)
        return jax.jit(
            self._over_runs(make_rounds(one_round, self.plan.rounds_per_call), in_place=True),
            donate_argnums=(0,) if self.plan.donate else (),
            out_shardings=(self.placement.state, self.placement.everywhere),
        )

    def _arguments(self, name: _ProgramName, runs: int) -> tuple[Any, ...]:
        """What the program is called with; states as shapes."""
        shapes = self._state_shapes(runs)
        layout = jax.tree.broadcast(self.placement.state, shapes)
        state = jax.tree.map(lambda a, s: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=s), shapes, layout)
        shared = (state, self._hp_rows(runs), self.federation)
        return (*shared, jnp.int32(1)) if name == "advance" else shared

    def _hp_rows(self, runs: int) -> PyTree:
        def rows(path: tuple, a: jax.Array) -> jax.Array:
            if a.ndim and a.shape[0] != runs:
                name = jax.tree_util.keystr(path, simple=True)
                raise JaxpflError(f"{name} has {a.shape[0]} values for {runs} runs: give one seed for each value")
            return jnp.broadcast_to(a, (runs,))

        return jax.tree.map_with_path(rows, self.hp)

    def _over_runs(self, one: Callable[..., Any], *, in_place: bool = False) -> Callable[..., Any]:
        """``one(per run, hp, shared...)`` for a leading axis of runs on its first two arguments.

        Args:
          one: the program of one run.
          in_place: ``one`` returns (its next first argument, anything): runs in turn then write into one buffer.
        """

        def runs(first: PyTree, hp: PyTree, *shared: PyTree) -> PyTree:
            count = jax.tree.leaves(first)[0].shape[0]
            if count == 1:  # without a batch axis the client's products stay plain ones
                squeezed = jax.tree.map(lambda a: a[0], (first, hp))
                return jax.tree.map(lambda a: a[None], one(*squeezed, *shared))
            if self.execution.vmap_runs:
                return jax.vmap(lambda first, hp: one(first, hp, *shared))(first, hp)
            if not in_place:
                return jax.lax.map(lambda both: one(*both, *shared), (first, hp))

            def body(states: PyTree, run: tuple[Array, PyTree]) -> tuple[PyTree, PyTree]:
                i, hp = run
                new, result = one(jax.tree.map(lambda a: a[i], states), hp, *shared)
                return jax.tree.map(lambda a, v: a.at[i].set(v), states, new), result

            return jax.lax.scan(body, first, (jnp.arange(count), hp))

        return runs


def _exchange(
    algorithm: Algorithm,
    participation: Participation,
    state: RunState,
    hp: PyTree,
    federation: Federation,
) -> tuple[PyTree, PyTree]:
    """One client's upload total, and the message, of one round; for their shapes."""
    key = jax.random.key(0)
    zero = jnp.int32(0)
    message = algorithm.server.broadcast(key, hp, server_context(participation, zero), state.server)
    first = jax.tree.map(lambda a: a[0], (state.clients, federation.splits))
    ctx = ClientContext(zero, zero, zero, ALL_STEPS, key)
    _, upload, _ = algorithm.client.update(key, hp, ctx, message, *first)
    return upload.total, message

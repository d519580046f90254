"""The compiled programs of one experiment: start, advance by some rounds, score. Runs are one axis."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxpfl import trees
from jaxpfl.engine.cohort import AXIS
from jaxpfl.engine.evaluate import Scores, make_evaluate
from jaxpfl.engine.plan import ExecutionPlan, resolve
from jaxpfl.engine.round import RunState, init_state, make_round, make_rounds, server_context
from jaxpfl.errors import JaxpflError
from jaxpfl.models import Task
from jaxpfl.participation import Participation
from jaxpfl.protocol import ALL_STEPS, Algorithm, ClientContext
from jaxpfl.types import Array, Federation, Metrics, PyTree


class Simulation:
    """A federation, an algorithm and a way to take part, compiled.

    All state is an argument and a result; the object holds only programs and the (constant) data, so any state may be
    advanced at any time. Every state and score has a leading axis of runs, [S].

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
        model_bytes, num_clients = trees.num_bytes(shapes), federation.num_clients
        self.execution = resolve(
            self.plan, cohort=participation.capacity, num_clients=num_clients, model_bytes=model_bytes
        )
        mesh, everywhere, by_client, self._state_layout = self._layout()
        self.federation: Federation = jax.device_put(federation, by_client)
        one_round = make_round(algorithm, participation, block=self.execution.block, mesh=mesh)
        rounds = make_rounds(one_round, self.plan.rounds_per_call)

        def init(key: jax.Array, hp: PyTree, federation: Federation) -> RunState:
            return init_state(algorithm, participation, key, hp, federation)

        def evaluation(split: Literal["test", "validation"]) -> Callable[..., Any]:
            block = resolve(self.plan, cohort=num_clients, num_clients=num_clients, model_bytes=model_bytes).block
            one = make_evaluate(algorithm, task, participation, block=block, split=split, mesh=mesh)
            return jax.jit(self._over_runs(one))

        # The first state is dozens of random draws that run once: optimising that code costs seconds and saves nothing.
        unoptimised = {"xla_backend_optimization_level": 0} if jax.default_backend() == "cpu" else None
        self._first = self._over_runs(init)
        self._init = jax.jit(self._first, out_shardings=self._state_layout, compiler_options=unoptimised)
        self._advance = jax.jit(
            self._over_runs(rounds, in_place=True),
            donate_argnums=(0,) if self.plan.donate else (),
            out_shardings=None if mesh is None else (self._state_layout, everywhere),
        )
        self._evaluate = {"test": evaluation("test"), "validation": evaluation("validation")}

    def init(self, seeds: Sequence[int]) -> RunState:
        """The state before round 0 of one run for each seed."""
        if not len(seeds):
            raise JaxpflError("at least one seed is needed")
        for seed in seeds:  # beyond 32 bits the key would be that of another seed
            if not 0 <= seed < 2**32:
                raise JaxpflError(f"a seed must be between 0 and 2**32 - 1, got {seed}")
        keys = jnp.stack([jax.random.key(seed) for seed in seeds])
        return self._init(keys, self._hp_rows(len(seeds)), self.federation)

    def advance(self, state: RunState, rounds: int) -> tuple[RunState, dict[str, np.ndarray]]:
        """Runs some rounds; the given state is used up (its buffers are donated, unless the plan says not to).

        Returns:
          The new state, and the history of the metrics, each [S, rounds].
        """
        if self._state_layout is not None:  # a state of the caller's own making may lie elsewhere
            state = jax.device_put(state, self._state_layout)
        history: list[Metrics] = []
        lengths: list[int] = []
        while rounds > 0:
            length = min(rounds, self.plan.rounds_per_call)
            hp = self._hp_rows(state.round.shape[0])
            state, metrics = self._advance(state, hp, self.federation, jnp.int32(length))
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
        return self._evaluate[split](state, self._hp_rows(state.round.shape[0]), self.federation)

    def export(self, *platforms: str, seeds: int = 1) -> jax.export.Exported:
        """The program of one `advance` call, lowered for platforms ("cpu", "cuda", "tpu") that need not be here."""
        state = self._state_shapes(seeds)
        if self._state_layout is not None:
            layout = jax.tree.broadcast(self._state_layout, state)
            state = jax.tree.map(lambda a, s: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=s), state, layout)
        program = jax.export.export(self._advance, platforms=platforms)
        return program(state, self._hp_rows(seeds), self.federation, jnp.int32(1))

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

    def _layout(self) -> tuple[Mesh | None, Any, Any, Any]:
        """The mesh, and where things lie: everywhere, spread by client, a state [S, ...]; all None on one device."""
        if self.execution.devices == 1:
            return None, None, None, None
        devices = np.array(jax.devices()[: self.execution.devices])
        mesh = Mesh(devices, (AXIS,), axis_types=(AxisType.Auto,))
        everywhere, by_client, runs = (NamedSharding(mesh, spec) for spec in (P(), P(AXIS), P(None, AXIS)))
        return mesh, everywhere, by_client, RunState._make([everywhere, runs, runs, runs, everywhere, everywhere])

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

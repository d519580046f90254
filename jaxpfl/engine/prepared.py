"""Data, plan and programs of one experiment on their devices; nothing of it runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal, NoReturn

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr

from jaxpfl.core import trees
from jaxpfl.core.participation import RELIABLE, Availability, Participation, full
from jaxpfl.core.protocol import Algorithm
from jaxpfl.core.types import Federation, PyTree
from jaxpfl.engine import compiled, exchange, in_flight, model_axis, noise_keys
from jaxpfl.engine import device_memory as memory
from jaxpfl.engine.client_bucket import Bucket, bucket_for
from jaxpfl.engine.execution_plan import ExecutionPlan, Resolved, resolve, target_plan
from jaxpfl.engine.groups import Group, make_groups, split
from jaxpfl.engine.placement import Placement, agree_on, balanced, check_states, place, put, put_as
from jaxpfl.engine.programs import Name, Programs, Setting
from jaxpfl.engine.round import Clients, RunValues
from jaxpfl.engine.runs import number, rows_of
from jaxpfl.engine.scored import Scored, of_pooled
from jaxpfl.engine.state import RunState
from jaxpfl.models import Task
from jaxpfl.models.base import Half
from jaxpfl.models.rewriting import Exchanged
from jaxpfl.support import processes
from jaxpfl.support.errors import JaxpflError


class Prepared:
    """A federation, an algorithm and a participation scheme on their devices, each program compiled when it is needed.

    Attributes:
      federations: the data on their devices, for each group of the algorithm's clients; pooled, those of its one.
      participation: the sampling of cohorts; pooled, of its one client.
    """

    def __init__(
        self,
        algorithm: Algorithm,
        task: Task,
        federation: Federation,
        participation: Participation,
        hp: PyTree,
        *,
        availability: Availability = RELIABLE,
        plan: ExecutionPlan | None = None,
        unseen: Federation | None = None,
        adapt_rounds: int = 10,
        bucket: Bucket | None = None,
    ):
        """Place the data and prepare the programs; each is compiled at its first call.

        Args:
          algorithm: the method, built for the same task.
          task: model, loss and metrics.
          federation: the stacked data of m clients.
          participation: the sampling of cohorts, for the same m; without effect on a pooled method, as availability.
          hp: hyper-parameters; leaves [] for all runs, or [S], one value for each run.
          availability: dropout and stragglers, their rates for all runs or one for each; none by default.
          plan: the execution plan; chosen automatically by default.
          unseen: clients that are never trained, for `evaluate_unseen`, with other ids.
          adapt_rounds: the number of rounds in which such a client adapts before it is scored.
          bucket: the clients' stack as `bucket_for` has it for this plan; made here unless given.

        Raises:
          JaxpflError: for a participation of another m, an id of two clients, data that the method refuses, unseen
            clients with ids of trained ones, a method that cannot serve them (its server sends individual messages),
            groups without a client, and as `in_flight.at_work`.
        """
        if participation.num_clients != federation.num_clients:
            raise JaxpflError(
                f"participation is for {participation.num_clients} clients, the data have {federation.num_clients}"
            )
        ids, times = np.unique(np.asarray(federation.client_ids), return_counts=True)
        if (times > 1).any():
            raise JaxpflError(
                f"client ids must be distinct, as random streams follow them: {ids[times > 1][0]} is twice"
            )
        agree_on(federation)
        algorithm.check_data(federation)
        if algorithm.in_flight is not None:
            in_flight.at_work(algorithm, participation)
        algorithm = noise_keys.of_task(algorithm, task)
        self.plan = plan or ExecutionPlan()
        trained, of_rounds = federation, self.plan
        if algorithm.pooled:
            trained, participation, availability = federation.pooled(), full(1), RELIABLE
            of_rounds = replace(self.plan, devices=processes.count() * self.plan.model_shards)
        self.algorithm, self.participation = algorithm, participation
        self.hp = jax.tree.map(number, hp)

        shapes = compiled.shapes(task.init, jax.random.key(0))
        self._model_bytes = self._share_bytes = trees.num_bytes(shapes)
        if self.plan.model_shards > 1:
            self._share_bytes = model_axis.bytes_of_part(shapes, self.plan.model_shards)
        apply = task.model.apply
        if self.plan.precision == "bfloat16" and not isinstance(apply, Half):
            raise JaxpflError("plan.precision = bfloat16 needs a model in it: jaxpfl.models.in_bfloat16(task)")
        self._layers = isinstance(apply.plain if isinstance(apply, Half) else apply, Exchanged)
        self._bucket = bucket or bucket_for(self.plan, algorithm, participation, self.hp)
        execution = self._resolve(of_rounds, self._bucket.participation.capacity)
        on = execution.devices, execution.even
        self.placement = place(self._bucket.rows, *on, model_shards=execution.model_shards)
        stack = self._bucket.padded(trained)
        self._groups = make_groups(algorithm, np.asarray(stack.client_ids), execution.devices)
        self._sizes = [trained.num_clients] if self._bucket.pads else [group.size for group in self._groups]
        parts = split(stack, self._groups, views=self.placement.own_data)
        if not self._bucket.pads:
            self._groups = balanced(self._groups, parts, self.placement)
        self.federations = self._place_data(parts)
        own_data, ids = self.placement.own_data, np.asarray(stack.client_ids)
        self._ids = processes.put(ids, self.placement.everywhere) if own_data else None
        self._rates = availability.rates
        if algorithm.pooled:
            scoring = self._resolve(self.plan, federation.num_clients)
            self._scored = of_pooled(algorithm, federation, scoring)
        else:  # Scoring runs over everyone, and spreads them over the same devices.
            scoring = self._resolve(replace(self.plan, devices=execution.all_devices), self._bucket.rows)
            self._scored = Scored(self.federations, self._groups, self.placement)

        self._unseen: tuple[Federation, ...] | None = None
        unseen_groups = () if unseen is None else self._welcome(unseen, federation, adapt_rounds)
        setting = Setting(
            algorithm,
            task,
            self._bucket.participation,
            availability.without_rates,
            self.plan,
            scoring,
            self.placement,
            self._groups,
            unseen_groups,
        )
        self._setting, self._programs = setting, Programs(setting, execution)
        self._scoring = self._programs
        if algorithm.pooled:
            of_all = setting._replace(placement=self._scored.placement, groups=self._scored.groups)
            self._scoring = Programs(of_all, scoring)
        self._shapes: RunState | None = None
        self._noise = noise_keys.Ours(algorithm.noise)
        self._noise_names = noise_keys.names_of(algorithm.noise, federation, participation, availability)

    @property
    def execution(self) -> Resolved:
        """Resolved plan; fewer clients at once if more did not fit into memory."""
        return self._programs.execution

    def __reduce__(self) -> NoReturn:
        """Refuse to be pickled, as part of a `Fit` too.

        Raises:
          JaxpflError: the ways to keep results.
        """
        raise JaxpflError(
            "compiled programs cannot be pickled, nor a Fit that holds them: pickle state, history and scores, keep "
            "simulation.personal_models(state) as arrays, or train with jaxpfl run, and jaxpfl export"
        )

    def check_room(self, runs: int) -> None:
        """Refuse states of so many runs for which there is no room where they live.

        Raises:
          OutOfMemoryError.
        """
        check_states(self._state_shapes(runs), self.placement, runs)

    def compile(self, seeds: Sequence[int], *scores: Literal["test", "validation", "unseen"]) -> None:
        """Compile the programs of `init` and `advance`, and those that score, before they are called.

        Raises:
          JaxpflError: as those.
        """
        self.check_room(len(seeds))
        keys = jax.vmap(jax.random.key)(np.array(seeds, np.uint32))
        given = (keys, None if self.algorithm.noise is None else keys), self._hp_rows(len(seeds)), self._inputs()
        self._programs.start(len(seeds), given)
        self._program("advance", len(seeds))
        for name in scores:
            self._program(name, len(seeds))

    def shared_data(self) -> Federation | None:
        """The placed data as one federation, to be handed to other simulations; None if they lie in parts, in a bucket,
        or pooled."""
        whole = len(self.federations) == 1 and not self.placement.own_data
        return self.federations[0] if whole and not self._bucket.pads and not self.algorithm.pooled else None

    def export(self, *platforms: str, seeds: int = 1) -> jax.export.Exported:
        """The program of one `advance` call, lowered for platforms ("cpu", "cuda", "tpu") that need not be here.

        Clients at once, the form of convolutions and, for one platform, the devices of data and clients are those that
        the plan chooses there, on as many devices as here.

        Raises:
          JaxpflError: for an unknown platform, and for several that take different plans.
        """
        programs, given = self._on(platforms, seeds)
        return programs.export(platforms, given)

    def program(self, platform: str) -> ClosedJaxpr:
        """The operations of one `advance` call of one run, as JAX's own program, under the plan of a platform."""
        programs, given = self._on((platform,), 1)
        return jax.make_jaxpr(programs.function("advance", programs.execution.block))(*given)

    def memory(self, runs: int = 1) -> dict[str, int]:
        """Bytes of the data, of the clients' states, and of what a round takes beside them (compiles the round)."""
        working = memory.needed(self._program("advance", runs), self.placement.devices)
        states = trees.num_bytes(self._state_shapes(runs).clients)
        data = (self.federations, self._scored.federations) if self.algorithm.pooled else self.federations
        return {"data": trees.num_bytes(data), "states": states, "working": working}

    def digest(self, runs: int = 1) -> str:
        """Name of the training program of so many runs by its content: simulations with the same share the program."""
        return self._programs.digest("advance", self._arguments("advance", runs))

    def bytes_per_client(self) -> tuple[int, int]:
        """Bytes that one client uploads and receives in one round (parameters as they are, weights left out)."""
        return exchange.bytes_per_client(
            self.algorithm, self.participation, *self.shapes_of_one_run(), self.federations[0]
        )

    def remembers(self) -> bool:
        """True if clients' uploads depend on their state from earlier rounds (`exchange.remembers`)."""
        return exchange.remembers(self.algorithm, self.participation, *self.shapes_of_one_run(), self.federations)

    def _place_data(self, parts: Sequence[Federation]) -> tuple[Federation, ...]:
        """The data of each group, where its programs want them."""
        return tuple(put(part, self.placement, group) for part, group in zip(parts, self._groups, strict=True))

    def _welcome(self, unseen: Federation, federation: Federation, adapt_rounds: int) -> tuple[Group, ...]:
        """Place the unseen clients' data, in the groups that are returned."""
        both = np.intersect1d(np.asarray(unseen.client_ids), np.asarray(federation.client_ids))
        if len(both):
            raise JaxpflError(f"client {both[0]} cannot be unseen: it is trained")
        check_rounds("adapt_rounds", adapt_rounds)
        agree_on(unseen)
        self.algorithm.check_data(unseen)
        self._adapt_rounds = adapt_rounds
        ids = np.asarray(unseen.client_ids)
        placement = self._scored.placement
        groups = make_groups(self.algorithm, ids, placement.parts, may_be_empty=True)
        parts = split(unseen, groups, views=placement.own_data)
        groups = balanced(groups, parts, placement)
        self._unseen = tuple(put(part, placement, group) for part, group in zip(parts, groups, strict=True))
        return groups

    def _on(self, platforms: tuple[str, ...], seeds: int) -> tuple[Programs, tuple[Any, ...]]:
        """The programs under the plan of platforms, and the arguments of `advance` (states as shapes)."""
        execution = target_plan({platform: self._plan_on(platform) for platform in platforms})
        placement = self.placement
        if len(set(platforms)) == 1:
            given = self._bucket.rows, execution.devices, execution.even
            placement = place(*given, on=platforms[0], model_shards=execution.model_shards)
        federations = tuple(put_as(part, self.placement, placement) for part in self.federations)
        state, values, _, rounds = self._arguments("advance", seeds)
        state, clients = _laid(state, placement), self._inputs(federations)
        if placement.own_data and self.placement.own_data:
            clients = clients._replace(ids=self._ids)
        return self._programs.under(execution, placement), (state, values, clients, rounds)

    def _plan_on(self, platform: str) -> Resolved:
        """The plan of a round as it is chosen on a platform."""
        if platform == self.placement.devices[0].platform or (platform, jax.default_backend()) == ("cuda", "gpu"):
            return self.execution
        plan = replace(self.plan, devices=self.execution.all_devices)
        return self._resolve(plan, self._bucket.participation.capacity, platform)

    def shapes_of_one_run(self) -> tuple[RunState, PyTree]:
        """State (as shapes) and hyper-parameters of one run."""
        one = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape[1:], a.dtype), self._state_shapes(1))
        return one, jax.tree.map(lambda a: a.reshape(-1)[0], self.hp)

    def _state_shapes(self, runs: int) -> RunState:
        if self._shapes is None:
            keys = jax.ShapeDtypeStruct((runs,), jax.random.key(0).dtype)
            noise = None if self.algorithm.noise is None else keys
            # As shapes: runs that are too many are refused before they take memory.
            hp = jax.tree.map(lambda a: jax.ShapeDtypeStruct((runs,), a.dtype), self.hp)
            given = (keys, noise), hp, self._inputs()
            self._shapes = compiled.shapes(self._programs.beginning(), *given)
        return jax.tree.map(lambda a: jax.ShapeDtypeStruct((runs, *a.shape[1:]), a.dtype), self._shapes)

    def _resolve(self, plan: ExecutionPlan, cohort: int, platform: str | None = None) -> Resolved:
        """The plan with every choice made, for a cohort of so many slots."""
        bucket = self._bucket
        sizes = {"model_bytes": self._model_bytes, "share_bytes": self._share_bytes}
        given = {"layers": self._layers, "platform": platform}
        resolved = resolve(plan, cohort=cohort, num_clients=bucket.rows, **sizes, **given)
        if not bucket.why:
            return resolved
        return resolved._replace(rows=bucket.rows, reasons=(*resolved.reasons, bucket.why))

    def _program(self, name: Name, runs: int) -> jax.stages.Compiled:
        """The compiled program of ``advance``, or of a way to score, for S runs."""
        programs = self._programs if name == "advance" else self._scoring
        return programs.made.get((name, runs)) or programs.of(name, runs, self._arguments(name, runs))

    def _arguments(self, name: Name, runs: int) -> tuple[Any, ...]:
        """Arguments of the program; states as shapes."""
        state = _laid(self._state_shapes(runs), self.placement if name == "advance" else self._scored.placement)
        if name == "advance":
            return state, self._values(runs), self._inputs(), jnp.int32(1)
        if name == "unseen":
            return state, self._hp_rows(runs), self._inputs(self._unseen), jnp.int32(1)
        return state, self._hp_rows(runs), self._inputs(self._scored.federations)

    def _inputs(self, federations: tuple[Federation, ...] | None = None) -> Clients:
        """The inputs that all runs share, for the trained clients unless others are given."""
        if federations is None:
            return Clients(self.federations, self._bucket.numbers, ids=self._ids)
        return Clients(federations, self._bucket.numbers)

    def _values(self, runs: int) -> RunValues:
        """The traced values of every run, leaves [S]."""
        return RunValues(self._hp_rows(runs), rows_of(self._rates, runs))

    def _hp_rows(self, runs: int) -> PyTree:
        return rows_of(self.hp, runs)


def _laid(shapes: RunState, placement: Placement) -> RunState:
    """Shapes of a state with its layout."""
    layout = placement.layout(shapes)
    return jax.tree.map(lambda a, s: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=s), shapes, layout)


def check_rounds(name: str, rounds: int) -> None:
    if rounds < 0:
        raise JaxpflError(f"{name} must be at least 0, got {rounds}")

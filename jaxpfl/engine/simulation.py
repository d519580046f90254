"""The compiled programs of one experiment: start, advance by some rounds, score. Runs are one axis."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal, NoReturn

import jax
import jax.export
import jax.numpy as jnp
import numpy as np

from jaxpfl import trees
from jaxpfl.engine import compiled, exchange, noise_stream
from jaxpfl.engine import device_memory as memory
from jaxpfl.engine.client_bucket import Bucket, bucket_for
from jaxpfl.engine.evaluate import Part, Scores
from jaxpfl.engine.execution_plan import ExecutionPlan, Resolved, resolve
from jaxpfl.engine.groups import Group, gather, make_groups, split
from jaxpfl.engine.placement import check_states, place, put
from jaxpfl.engine.programs import Name, Programs, Setting
from jaxpfl.engine.round import BITS, Clients, RunValues
from jaxpfl.engine.runs import check_distinct, number, rows_of
from jaxpfl.engine.state import GradientCounts, RunState, whole, with_rows
from jaxpfl.errors import JaxpflError
from jaxpfl.models import Task
from jaxpfl.participation import RELIABLE, Availability, Participation
from jaxpfl.protocol import Algorithm
from jaxpfl.types import Array, Federation, Metrics, PyTree


class Simulation:
    """A federation, an algorithm and a participation scheme, compiled.

    All state is an argument and a result; the object holds only programs and the (constant) data, so any state may be
    advanced at any time. Every state and score has a leading axis of runs, [S]. On several devices, or in a bucket, a
    state may hold rows beyond the last client (see `RunState`); `trim` cuts them off.

    Example::

        simulation = Simulation(algorithm, task, federation, participation.of(50, 5), hp)
        state = simulation.init(seeds=[0, 1, 2])
        state, history = simulation.advance(state, rounds=100)
        accuracy = simulation.evaluate(state)["after"]["accuracy"]  # [3 runs, 50 clients]

    Attributes:
      federations: the data on their devices, for each group of the algorithm's clients.
      rounds_run: the largest number of rounds of any state advanced here, an upper bound on the releases.
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
          participation: the sampling of cohorts, for the same m.
          hp: hyper-parameters; leaves [] for all runs, or [S], one value for each run.
          availability: dropout and stragglers, their rates for all runs or one for each; none by default.
          plan: the execution plan; chosen automatically by default.
          unseen: clients that are never trained, for `evaluate_unseen`, with other ids.
          adapt_rounds: the number of rounds in which such a client adapts before it is scored.
          bucket: the clients' stack as `bucket_for` has it for this plan; made here unless given.

        Raises:
          JaxpflError: for a participation of another m, data that the method refuses, unseen clients with ids of
            trained ones, a method that cannot serve them (its server sends individual messages), and groups without a
            client.
        """
        if participation.num_clients != federation.num_clients:
            raise JaxpflError(
                f"participation is for {participation.num_clients} clients, the data have {federation.num_clients}"
            )
        algorithm.check_data(federation)
        self.rounds_run = 0
        self.algorithm, self.participation = algorithm, participation
        self.plan = plan or ExecutionPlan()
        self.hp = jax.tree.map(number, hp)

        shapes = compiled.shapes(task.init, jax.random.key(0))
        self._model_bytes = trees.num_bytes(shapes)
        self._bucket = bucket or bucket_for(self.plan, algorithm, participation, self.hp)
        execution = self._resolve(self.plan, self._bucket.participation.capacity)
        self.placement = place(self._bucket.rows, execution.devices, execution.even)
        stack = self._bucket.padded(federation)
        self._groups = make_groups(algorithm, np.asarray(stack.client_ids), execution.devices)
        self._sizes = [federation.num_clients] if self._bucket.pads else [group.size for group in self._groups]
        self.federations = tuple(put(part, self.placement) for part in split(stack, self._groups))
        self._rates = availability.rates
        # Scoring runs over everyone, and spreads them over the same devices.
        scoring = self._resolve(replace(self.plan, devices=execution.devices), self._bucket.rows)

        self._unseen: tuple[Federation, ...] | None = None
        unseen_groups = () if unseen is None else self._welcome(unseen, federation, adapt_rounds, execution.devices)
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
        self._programs = Programs(setting, execution)
        self._shapes: RunState | None = None
        self._noise = noise_stream.Ours(algorithm.noise)
        self._noise_names = noise_stream.names_of(algorithm, task, federation, participation, availability)

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

    def init(self, seeds: Sequence[int]) -> RunState:
        """The state before round 0 of one run for each seed.

        Raises:
          JaxpflError: for no seed, a seed outside 32 bits, states that do not fit into memory, and a seed given
            twice with the same hyper-parameters (unless the runs are private: their noise then differs).
        """
        if not len(seeds):
            raise JaxpflError("at least one seed is needed")
        check_states(self._state_shapes(len(seeds)), self.placement, len(seeds))
        for seed in seeds:  # beyond 32 bits the key would be that of another seed
            if not 0 <= seed < 2**32:
                raise JaxpflError(f"a seed must be between 0 and 2**32 - 1, got {seed}")
        keys, values = jax.vmap(jax.random.key)(np.array(seeds, np.uint32)), self._values(len(seeds))
        rows = values.hp
        noise = noise_stream.keys(self.algorithm.noise, self._noise_names, seeds, rows)
        if noise is None:
            check_distinct(seeds, values)
        self._noise.add(noise)
        given = (keys, noise), rows, self._inputs()
        return self._programs.start(len(seeds), given)(*given)

    def advance(self, state: RunState, rounds: int) -> tuple[RunState, dict[str, np.ndarray]]:
        """Run some rounds; the buffers of the given state are donated, unless the plan says not to.

        A private run continues only in the simulation that started (or `adopt`ed) it, whose noise it uses and whose
        privacy claim counts its rounds. Non-private states of the same shapes may come from any simulation.

        Returns:
          The new state, and the history of the metrics, each [S, rounds]. With compressed uploads,
          ``upload_bits`` is their exact length in a round, over all clients (int64).

        Raises:
          JaxpflError: for a private run that another simulation started, and a round that does not fit into memory even
            with the smallest block of clients that the plan allows. Checked before anything runs.
        """
        self._noise.check(state.noise)
        state = jax.device_put(state, self.placement.state)  # a state of the caller's own may be on another device
        history: list[Metrics] = []
        lengths: list[int] = []
        while rounds > 0:
            length = min(rounds, self.plan.rounds_per_call)
            runs = state.round.shape[0]
            program = self._program("advance", runs)
            state, metrics = program(state, self._values(runs), self._inputs(), jnp.int32(length))
            history.append(metrics)
            lengths.append(length)
            rounds -= length
        self._noise.passed(state.noise)
        self.rounds_run = max(self.rounds_run, int(np.max(state.round)))
        names = history[0] if history else {}
        joined = {
            name: np.concatenate([np.asarray(h[name])[:, :n] for h, n in zip(history, lengths, strict=True)], axis=1)
            for name in names
        }
        if joined and self.algorithm.counts_bits:
            joined["upload_bits"] = whole(*(joined.pop(name) for name in BITS))
        return state, joined

    def evaluate(self, state: RunState, split: Part = "test") -> Scores:
        """Score every client in every run: model -> metric -> [S, m]."""
        return self._of_clients(self._read(split, state, self._inputs()))

    def evaluate_unseen(self, state: RunState, rounds: int | None = None) -> Scores:
        """Score the unseen clients on their test examples: model -> metric -> [S, u].

        ``before`` is such a client's model on arrival, ``after`` the one after its rounds of adaptation. If the method
        counts them, ``after`` has the ``gradients`` of these rounds, including those for the personalised model.

        Args:
          state: after any round.
          rounds: the number of rounds of adaptation, at least 0; ``adapt_rounds`` unless given.
        """
        if self._unseen is None:
            raise JaxpflError("this simulation was made without unseen clients")
        rounds = self._adapt_rounds if rounds is None else rounds
        _check_rounds("rounds", rounds)
        return self._read("unseen", state, self._inputs(self._unseen), jnp.int32(rounds))

    def gradients(self, state: RunState) -> GradientCounts | None:
        """Gradient evaluations of each client; None if the method does not count them (`protocol.Gradients`)."""
        if not self.algorithm.counts_gradients:
            return None
        training = np.asarray(self.trim(state).counts.gradients)
        each = [
            np.full(size, client.gradients.personalize if client.gradients else 0)
            for client, size in zip(self.algorithm.clients, self._sizes, strict=True)
        ]
        return GradientCounts(training, np.asarray(gather(each, self._groups)))

    def personal_models(self, state: RunState) -> PyTree:
        """Every client's personalised model after adaptation, as `Client.personalize` returns it: leaves [S, m, ...].

        With several groups of clients, one tree for each group, of its clients in the order of the stack.
        """
        models = self._of_clients(self._read("personal", state, self._inputs()))
        return models[0] if len(models) == 1 else models

    def clusters(self, state: RunState) -> np.ndarray | None:
        """The cluster of every client, [S, m], numbered from 0 in each run; None for a method that finds none.

        If clients choose among the server's models, a number that no client chose is missing.
        """
        if all(client.cluster is not None for client in self.algorithm.clients):
            return np.asarray(self._of_clients(self._read("clusters", state, self._inputs())))
        find = self.algorithm.clusters
        if find is None:
            return None
        server = jax.tree.map(np.asarray, state.server)
        return np.stack([find(jax.tree.map(lambda a, i=i: a[i], server)) for i in range(state.round.shape[0])])

    def _read(self, name: Name, state: RunState, clients: Clients, *more: Array) -> Any:
        runs = state.round.shape[0]
        state = jax.device_put(state, self.placement.state)
        return self._program(name, runs)(state, self._hp_rows(runs), clients, *more)

    def _inputs(self, federations: tuple[Federation, ...] | None = None) -> Clients:
        """The inputs that all runs share, for the trained clients unless others are given."""
        return Clients(self.federations if federations is None else federations, self._bucket.numbers)

    def _of_clients(self, results: PyTree) -> PyTree:
        """The results of clients alone, leaves [S, m, ...]."""
        if not self._bucket.pads:
            return results
        # On the host: on a device each number of clients would be a program.
        return jax.tree.map(lambda a: np.asarray(a)[:, : self.participation.num_clients], results)

    def trim(self, state: RunState) -> RunState:
        """The state with exactly m rows of clients, for inspection or for a run on other devices."""
        return self._resize(state, whole=False)

    def adopt(self, state: RunState) -> RunState:
        """A trimmed state, of host or device arrays, placed as this simulation's programs want it.

        A private state is assumed to be of a run of this simulation (a stored one, say), whatever the source of its
        noise; the caller is responsible for that.
        """
        self._noise.add(state.noise)
        return jax.device_put(self._resize(state, whole=True), self.placement.state)

    def _resize(self, state: RunState, *, whole: bool) -> RunState:
        """The state with all rows that the programs want, or with those of clients alone."""
        rows = [group.rows if whole else size for group, size in zip(self._groups, self._sizes, strict=True)]
        of_all = self.placement.rows if whole else self.participation.num_clients
        return with_rows(state, rows, of_all)

    def _welcome(
        self, unseen: Federation, federation: Federation, adapt_rounds: int, devices: int
    ) -> tuple[Group, ...]:
        """Place the unseen clients' data, in the groups that are returned."""
        both = np.intersect1d(np.asarray(unseen.client_ids), np.asarray(federation.client_ids))
        if len(both):
            raise JaxpflError(f"client {both[0]} cannot be unseen: it is trained")
        _check_rounds("adapt_rounds", adapt_rounds)
        self.algorithm.check_data(unseen)
        self._adapt_rounds = adapt_rounds
        ids = np.asarray(unseen.client_ids)
        groups = make_groups(self.algorithm, ids, devices, may_be_empty=True)
        self._unseen = tuple(put(part, self.placement) for part in split(unseen, groups))
        return groups

    def compile(self, seeds: Sequence[int], *scores: Literal["test", "validation", "unseen"]) -> None:
        """Compile the programs of `init` and `advance`, and those that score, before they are called.

        Raises:
          JaxpflError: as those.
        """
        check_states(self._state_shapes(len(seeds)), self.placement, len(seeds))
        keys = jax.vmap(jax.random.key)(np.array(seeds, np.uint32))
        given = (keys, None if self.algorithm.noise is None else keys), self._hp_rows(len(seeds)), self._inputs()
        self._programs.start(len(seeds), given)
        self._program("advance", len(seeds))
        for name in scores:
            self._program(name, len(seeds))

    def shared_data(self) -> Federation | None:
        """The placed data as one federation, to be handed to other simulations; None if they lie in parts, or in a
        bucket."""
        whole = len(self.federations) == 1 and (self.placement.spread is None or self.placement.spread.shared_data)
        return self.federations[0] if whole and not self._bucket.pads else None

    def export(self, *platforms: str, seeds: int = 1) -> jax.export.Exported:
        """The program of one `advance` call, lowered for platforms ("cpu", "cuda", "tpu") that need not be here."""
        function, options = self._programs.function("advance", self.execution.block), self._programs.options("advance")
        return jax.export.export(jax.jit(function, **options), platforms=platforms)(*self._arguments("advance", seeds))

    def memory(self, runs: int = 1) -> dict[str, int]:
        """Bytes of the data, of the clients' states, and of what a round takes beside them (compiles the round)."""
        working = memory.needed(self._program("advance", runs), self.placement.devices)
        states = trees.num_bytes(self._state_shapes(runs).clients)
        return {"data": trees.num_bytes(self.federations), "states": states, "working": working}

    def digest(self, runs: int = 1) -> str | None:
        """Name of the training program of so many runs by its content: simulations with the same share the program.

        None where the program's code cannot be read completely; it is then shared with no other simulation.
        """
        return self._programs.digest("advance", self._arguments("advance", runs))

    def bytes_per_client(self) -> tuple[int, int]:
        """Bytes that one client uploads and receives in one round (parameters as they are, weights left out)."""
        return exchange.bytes_per_client(self.algorithm, self.participation, *self._one_run(), self.federations[0])

    def remembers(self) -> bool:
        """True if clients' uploads depend on their state from earlier rounds (`exchange.remembers`)."""
        return exchange.remembers(self.algorithm, self.participation, *self._one_run(), self.federations)

    def _one_run(self) -> tuple[RunState, PyTree]:
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

    def _resolve(self, plan: ExecutionPlan, cohort: int) -> Resolved:
        """The plan with every choice made, for a cohort of so many slots."""
        bucket = self._bucket
        resolved = resolve(plan, cohort=cohort, num_clients=bucket.rows, model_bytes=self._model_bytes)
        if not bucket.why:
            return resolved
        return resolved._replace(rows=bucket.rows, reasons=(*resolved.reasons, bucket.why))

    def _program(self, name: Name, runs: int) -> jax.stages.Compiled:
        """The compiled program of ``advance``, or of a way to score, for S runs."""
        return self._programs.made.get((name, runs)) or self._programs.of(name, runs, self._arguments(name, runs))

    def _arguments(self, name: Name, runs: int) -> tuple[Any, ...]:
        """Arguments of the program; states as shapes."""
        shapes = self._state_shapes(runs)
        layout = jax.tree.broadcast(self.placement.state, shapes)
        state = jax.tree.map(lambda a, s: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=s), shapes, layout)
        if name == "advance":
            return state, self._values(runs), self._inputs(), jnp.int32(1)
        if name == "unseen":
            return state, self._hp_rows(runs), self._inputs(self._unseen), jnp.int32(1)
        return state, self._hp_rows(runs), self._inputs()

    def _values(self, runs: int) -> RunValues:
        """The traced values of every run, leaves [S]."""
        return RunValues(self._hp_rows(runs), rows_of(self._rates, runs))

    def _hp_rows(self, runs: int) -> PyTree:
        return rows_of(self.hp, runs)


def _check_rounds(name: str, rounds: int) -> None:
    if rounds < 0:
        raise JaxpflError(f"{name} must be at least 0, got {rounds}")

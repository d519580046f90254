"""Simulation of an experiment: places the data on devices, compiles the programs, and starts, trains and scores
runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, NamedTuple, NoReturn

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr

from jaxpfl.algorithms.parts import linear_kernel
from jaxpfl.core import trees
from jaxpfl.core.participation import RELIABLE, Availability, FailureRates, Participation, full
from jaxpfl.core.protocol import Algorithm, Client, LocalEpochs
from jaxpfl.core.types import Array, Federation, Metrics, PyTree
from jaxpfl.engine import exchange, in_flight, noise_keys, programs
from jaxpfl.engine.cohort import Group, bytes_of_part, gather, make_groups, split_federation
from jaxpfl.engine.evaluate import Part, Scores
from jaxpfl.engine.execution_plan import PLATFORMS, ExecutionPlan, Resolved, explain, resolve
from jaxpfl.engine.placement import (
    Placement,
    agree_on,
    balanced,
    check_states,
    place,
    program_bytes,
    put,
    put_states,
)
from jaxpfl.engine.programs import Name, Programs, Setting
from jaxpfl.engine.round import BITS, Clients, RunValues
from jaxpfl.engine.state import (
    Counts,
    GradientCounts,
    RunState,
    check_distinct,
    keyless,
    number,
    resize_rows,
    rows_of,
    whole,
)
from jaxpfl.models import Task, conv_kernel
from jaxpfl.models.base import Half
from jaxpfl.models.rewriting import Exchanged
from jaxpfl.support import processes
from jaxpfl.support.errors import JaxpflError, unknown_name


class Simulation:
    """Compiled programs that train and score an algorithm on a federation.

    `init` returns the first state, and `advance` returns a new state. `advance` reuses the memory of the state that it
    receives; the received state cannot be used again, unless ``plan.donate`` is false. Every state and every score has
    a leading axis of runs, [S]. On several devices, a state may have padding rows after the last client (see
    `RunState`); `trim` removes them.

    Example::

        simulation = Simulation(algorithm, task, federation, participation.of(50, 5), hp)
        state = simulation.init(seeds=[0, 1, 2])
        state, history = simulation.advance(state, rounds=100)
        accuracy = simulation.evaluate(state)["after"]["accuracy"]  # [3 runs, 50 clients]

    Attributes:
      federations: data on the devices, one federation for each group of the algorithm's clients. A pooled method has
        one client, with the examples of all clients.
      participation: sampling of the cohorts; full participation of the one client for a pooled method.
      rounds_run: largest number of finished rounds of any state that this simulation advanced. A privacy claim counts
        at least these rounds.
      attackers: true for each client that attacks, [m] bool; None without an attack.
    """

    rounds_run: int = 0
    attackers: np.ndarray | None = None

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
        client_steps: float | None = None,
    ):
        """Place the data on the devices. Each program is compiled at its first call.

        Args:
          algorithm: method, built for the same task.
          task: model, loss and metrics.
          federation: stacked data of m clients.
          participation: sampling of the cohorts from the same m clients. A pooled method ignores it.
          hp: hyper-parameters; a leaf is one value for all runs, [], or one value for each run, [S].
          availability: dropout and stragglers; each rate is one value for all runs, or one value for each run. By
            default, all clients are reliable. A pooled method ignores it.
          plan: execution plan; chosen automatically by default.
          unseen: clients for `evaluate_unseen`, which are never trained. Their ids must differ from the ids in
            ``federation``.
          adapt_rounds: number of rounds in which an unseen client adapts before it is scored.
          client_steps: predicted number of local steps of all clients in all rounds and runs, for ``plan.tuning``; None
            if it is unknown.

        Raises:
          JaxpflError: if the participation is for a different number of clients, if two clients have the same id, if
            the method does not accept the data, if an unseen client has the id of a trained client, if ``adapt_rounds``
            is negative, if a group has no client, or as in `in_flight.concurrency` and `execution_plan.resolve`.
          OutOfMemoryError: if the data do not fit in memory.
        """
        if participation.num_clients != federation.num_clients:
            raise JaxpflError(
                f"participation is for {participation.num_clients} clients, but the data have {federation.num_clients}"
            )
        ids, times = np.unique(np.asarray(federation.client_ids), return_counts=True)
        if (times > 1).any():
            raise JaxpflError(
                f"client ids must be distinct, because random numbers depend on them, got {ids[times > 1][0]} twice"
            )
        agree_on(federation)
        algorithm.check_data(federation)
        federation = federation._replace(client_names=None, preparation=None)  # one program serves clients of any names
        if algorithm.in_flight is not None:
            in_flight.concurrency(algorithm, participation)
        if algorithm.noise is not None:
            algorithm = noise_keys.add_task(algorithm, task)
        self.plan, self._client_steps = plan or ExecutionPlan(), client_steps
        trained, of_rounds = federation, self.plan
        if algorithm.pooled:
            trained, participation, availability = federation.pooled(), full(1), RELIABLE
            of_rounds = replace(self.plan, devices=processes.count() * self.plan.model_shards)
        self.algorithm, self.participation = algorithm, participation
        self.hp = jax.tree.map(number, hp)

        shapes = programs.shapes(task.init, jax.random.key(0))
        self._model_bytes = self._share_bytes = trees.num_bytes(shapes)
        if self.plan.model_shards > 1:
            self._share_bytes = bytes_of_part(shapes, self.plan.model_shards)
        apply = task.model.apply
        if self.plan.precision == "bfloat16" and not isinstance(apply, Half):
            raise JaxpflError("precision = bfloat16 requires a bfloat16 model: use jaxpfl.models.in_bfloat16(task)")
        self._layers = isinstance(apply.plain if isinstance(apply, Half) else apply, Exchanged)
        self._linear = linear_kernel.is_linear(task)
        execution = self._resolve(of_rounds, participation.capacity)
        on = execution.devices, execution.even
        self.placement = place(participation.num_clients, *on, model_shards=execution.model_shards)
        self._groups = make_groups(algorithm, np.asarray(trained.client_ids), execution.devices)
        parts = split_federation(trained, self._groups, views=self.placement.own_data)
        self._groups = balanced(self._groups, parts, self.placement)
        self.federations = self._place_data(parts)
        own_data, ids = self.placement.own_data, np.asarray(trained.client_ids)
        self._ids = processes.put(ids, self.placement.everywhere) if own_data else None
        self._inputs = Clients(self.federations, ids=self._ids)
        self._rates = availability.rates
        if algorithm.pooled:
            scoring = self._resolve(self.plan, federation.num_clients)
            self._scored = _pooled_scored(algorithm, federation, scoring)
        else:  # Scoring covers all clients, not a cohort, and uses the same devices.
            scoring = self._resolve(replace(self.plan, devices=execution.all_devices), participation.num_clients)
            self._scored = Scored(self.federations, self._groups, self.placement)

        self._unseen: tuple[Federation, ...] | None = None
        unseen_groups = () if unseen is None else self._welcome(unseen, federation, adapt_rounds)
        setting = Setting(
            algorithm,
            task,
            participation,
            availability.replace_rates(FailureRates()),  # a compiled program receives the rates as arguments
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
        self._noise = noise_keys.Ours(private=algorithm.noise is not None)
        if algorithm.noise is not None:
            self._noise_names = noise_keys.names_of(algorithm.noise, federation, participation, availability)

    def init(self, seeds: Sequence[int]) -> RunState:
        """State before round 0, with one run for each seed.

        Raises:
          JaxpflError: if there is no seed, if a seed does not fit in 32 bits, if the states do not fit in memory, or if
            two runs have the same seed and the same hyper-parameters. Private runs may agree in both, because their
            noise differs.
        """
        if len(seeds):
            self.check_room(len(seeds))
        given = self._run_keys(seeds), rows_of(self.hp, len(seeds)), self._inputs
        return self._programs.get("start", len(seeds), given)(*given)

    def _run_keys(self, seeds: Sequence[int]) -> tuple[Array, Array | None]:
        """Run keys and noise keys for these seeds, each [S].

        Raises:
          JaxpflError: if the seeds are not valid, as in `init`.
        """
        if not len(seeds):
            raise JaxpflError("at least one seed is required")
        for seed in seeds:  # beyond 32 bits the key would equal another seed's
            if not 0 <= seed < 2**32:
                raise JaxpflError(f"a seed must be between 0 and 2**32 - 1, got {seed}")
        keys, values = jax.vmap(jax.random.key)(np.array(seeds, np.uint32)), self._values(len(seeds))
        noise = None
        if self.algorithm.noise is not None:
            noise = noise_keys.keys(self.algorithm.noise, self._noise_names, seeds, values.hp)
            self._noise.add(noise)
        elif len(seeds) > 1:
            check_distinct(seeds, values)
        if processes.several():
            told = [np.asarray(leaf).tolist() for leaf in jax.tree.leaves(values)]
            processes.agree("the runs'", {"seeds": tuple(map(int, seeds)), "hyper-parameters": told})
        return keys, noise

    def advance(self, state: RunState, rounds: int) -> tuple[RunState, dict[str, np.ndarray]]:
        """Train for some rounds. The buffers of the given state are donated, unless ``plan.donate`` is false.

        Only the simulation that started or `adopt`ed a private run can continue the run, because the simulation's
        privacy claim counts the rounds. A state that is not private may come from any simulation with the same shapes.

        Returns:
          The new state, and the history of the metrics, each [S, rounds]. If uploads are compressed, the metric
          ``upload_bits`` is the exact number of bits that all clients upload in a round (int64).

        Raises:
          JaxpflError: if another simulation started the private run, or if a round does not fit in memory even with the
            smallest block of clients that the plan allows. Both conditions are checked before any round runs.
        """
        self._noise.check(state.noise)
        state = put_states(state, self.placement)
        history: list[Metrics] = []
        lengths: list[int] = []
        while rounds > 0:
            length = min(rounds, self.plan.rounds_per_call)
            runs = state.round.shape[0]
            program = self._program("advance", runs)
            state, metrics = program(state, self._values(runs), self._inputs, jnp.int32(length))
            history.append(metrics)
            lengths.append(length)
            rounds -= length
        self._noise.last = state.noise
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
        """One entry of `evaluate_splits`. To read several entries, call `evaluate_splits` once.

        Raises:
          JaxpflError: if there is no such entry.
        """
        scores = self.evaluate_splits(state)
        if split not in scores:
            remedy = "use validation_share in federate to have validation examples"
            raise JaxpflError(f"split must be one of {', '.join(scores)}, got {split!r}: {remedy}")
        return scores[split]

    def evaluate_splits(self, state: RunState) -> dict[Part, Scores]:
        """Score every client in every run on its test examples and, if there are any, on its validation examples.

        If some clients attack, they have NaN in these scores, and the entry ``attackers`` has their scores on test
        examples; honest clients have NaN in this entry.

        Returns:
          The scores as ``scores[split][model][metric]``, arrays [S, m].
        """
        scores = self._read("scores", state, Clients(self._scored.federations))
        if self.attackers is None:
            return scores
        apart = _without(~self.attackers, scores["test"])
        return _without(self.attackers, scores) | {"attackers": apart}

    def evaluate_unseen(self, state: RunState, rounds: int | None = None) -> Scores:
        """Score the u unseen clients on their test examples.

        ``before`` scores a client's model on arrival, and ``after`` scores the model after the rounds of adaptation. If
        the method counts gradients, ``after`` has the entry ``gradients``: the number of gradients that the client
        evaluated in these rounds and for its personalized model.

        Args:
          state: state after any round.
          rounds: number of rounds of adaptation, at least 0; by default, the constructor's ``adapt_rounds``.

        Returns:
          The scores as ``scores[model][metric]``, arrays [S, u].

        Raises:
          JaxpflError: if the simulation was made without unseen clients, if ``rounds`` is negative, or if the method's
            server sends each client its own message and has no ``welcome``.
        """
        if self._unseen is None:
            raise JaxpflError("this simulation was made without unseen clients")
        rounds = self._adapt_rounds if rounds is None else rounds
        check_rounds("rounds", rounds)
        return self._read("unseen", state, Clients(self._unseen), jnp.int32(rounds))

    def gradients(self, state: RunState) -> GradientCounts | None:
        """Gradient evaluations of each client; None if the method does not count them (`protocol.Gradients`)."""
        if not self.algorithm.counts_gradients:
            return None
        training = np.asarray(self.counts(state).gradients)
        each = [
            _personalizing(*given)
            for given in zip(self.algorithm.clients, self._scored.groups, self._scored.federations, strict=True)
        ]
        return GradientCounts(training, np.asarray(gather(each, self._groups)))

    def personal_models(self, state: RunState) -> PyTree:
        """Every client's personalized model after adaptation, as `Client.personalize` returns it: leaves [S, m, ...].

        If there are several groups of clients, the result is a tuple with one tree for each group. A group's clients
        keep their order in the federation.
        """
        models = self._read("personal", state, Clients(self._scored.federations))
        return models[0] if len(models) == 1 else models

    def clusters(self, state: RunState) -> np.ndarray | None:
        """Cluster of every client, [S, m], numbered from 0 in each run; None if the method does not find clusters.

        If each client chooses one of the server's models, its cluster is the number of this model; a model that no
        client chose leaves a gap in the numbers.
        """
        if all(client.cluster is not None for client in self.algorithm.clients):
            return np.asarray(self._read("clusters", state, Clients(self._scored.federations)))
        find = self.algorithm.clusters
        if find is None:
            return None
        server = jax.tree.map(np.asarray, state.server)
        return np.stack([find(jax.tree.map(lambda a, i=i: a[i], server)) for i in range(state.round.shape[0])])

    def _read(self, name: Name, state: RunState, clients: Clients, *more: Array) -> Any:
        runs = state.round.shape[0]
        state = put_states(state, self._scored.placement)
        return self._program(name, runs)(state, rows_of(self.hp, runs), clients, *more)

    def counts(self, state: RunState) -> Counts:
        """Counts of each client's work so far, [S, m], as NumPy arrays."""
        _, of_all = self._rows(whole=False)
        rows = of_all if isinstance(of_all, np.ndarray) else slice(of_all)
        return Counts(processes.fetch(state.counts.table)[:, rows])

    def trim(self, state: RunState) -> RunState:
        """The state with exactly m client rows, for inspection or for a run on other devices.

        If there are several processes, each of them gets the whole state in host memory; `gather` instead returns it in
        the first process only.
        """
        return self._resize(processes.fetch(state) if processes.several() else state, whole=False)

    def gather(self, state: RunState) -> RunState | None:
        """The trimmed state as NumPy arrays and key data, for storage; None in all processes except the first."""
        untyped = keyless(state)
        if not processes.several():
            return jax.tree.map(np.asarray, self._resize(untyped, whole=False))
        found = processes.fetch_to_first(untyped)
        return None if found is None else self._resize(found, whole=False)

    def scatter(self, state: RunState | None, runs: int) -> RunState:
        """Place a stored state on the devices of all processes; the inverse of `gather`.

        Args:
          state: result of `gather`; None in all processes except the first.
          runs: number S of runs.
        """
        shapes = self._state_shapes(runs)
        given = None if state is None else self._resize(state, whole=True)
        wanted, layout = jax.eval_shape(keyless, shapes), self.placement.layout(shapes)
        data = processes.deal(given, wanted, layout)
        key, noise = jax.tree.map(jax.random.wrap_key_data, (data.key, data.noise))
        placed = data._replace(key=key, noise=noise)
        self._noise.add(placed.noise)
        return placed

    def trimmed_shapes(self, runs: int) -> RunState:
        """Shapes of the state that `trim` returns for S runs."""
        return jax.eval_shape(lambda state: self._resize(state, whole=False), self._state_shapes(runs))

    def keep_clients_in(self, folder: Path, checkpoints: Sequence[int]) -> None:
        """Set the folder for clients' states on disk; to be called before `init`.

        Args:
          folder: folder that remains after the process has ended.
          checkpoints: rounds of the run's existing checkpoints.

        Raises:
          JaxpflError: if the run began with another ``plan.clients_in``.
        """
        if checkpoints and folder.is_dir():
            raise JaxpflError(
                f"the clients' states are on disk, in {folder}: continue the run with plan.clients_in = disk"
            )

    def checkpointed(self, state: RunState) -> RunState:
        """The part of a state that a checkpoint stores, from which `adopt` restores the state."""
        return self.trim(state)

    def prepare(self, round: int) -> None:
        """Flush clients' states that are stored on disk; to be called before the checkpoint of a round is written."""

    def commit(self, round: int) -> None:
        """Record that a round's checkpoint is complete, so that a restarted run continues from it."""

    def adopt(self, state: RunState) -> RunState:
        """Place a trimmed state, with host or device arrays, where this simulation's programs expect it.

        The caller must make sure that a private state belongs to a run of this simulation, for example a stored run.
        This is not checked.
        """
        self._noise.add(state.noise)
        return put_states(self._resize(state, whole=True), self.placement)

    def _resize(self, state: RunState, *, whole: bool) -> RunState:
        """Pad the state to the rows that the programs need (``whole``), or keep the clients' rows only."""
        return resize_rows(state, *self._rows(whole=whole))

    def _rows(self, *, whole: bool) -> tuple[list[int | np.ndarray], int | np.ndarray]:
        """Arguments ``rows`` and ``of_all`` of `resize_rows`."""
        rows = [group.resized(whole=whole) for group in self._groups]
        if len(rows) == 1:
            return rows, rows[0]
        return rows, self.placement.rows if whole else self.participation.num_clients

    @property
    def execution(self) -> Resolved:
        """Resolved plan, with a smaller block of clients if the first choice did not fit in memory."""
        return self._programs.execution

    def __reduce__(self) -> NoReturn:
        """Refuse to be pickled, also as a part of a `Fit`.

        Raises:
          JaxpflError: always; the message lists other ways to store results.
        """
        raise JaxpflError(
            "a Simulation or a Fit cannot be pickled, because it contains compiled programs: pickle the Fit's state, "
            "history and scores, or simulation.personal_models(state), or use jaxpfl run and jaxpfl export"
        )

    def check_room(self, runs: int) -> None:
        """Check that the clients' states of this many runs fit into memory.

        Raises:
          OutOfMemoryError: if they do not fit.
        """
        check_states(self._state_shapes(runs), self.placement, runs)

    def compile(self, seeds: Sequence[int], *scores: Literal["scores", "unseen"]) -> None:
        """Compile the programs of `init`, `advance` and the named scores before the first call.

        Raises:
          JaxpflError: as in these methods.
        """
        self.check_room(len(seeds))
        keys = jax.vmap(jax.random.key)(np.array(seeds, np.uint32))
        given = (keys, None if self.algorithm.noise is None else keys), rows_of(self.hp, len(seeds)), self._inputs
        self._programs.get("start", len(seeds), given)
        self._program("advance", len(seeds))
        for name in scores:
            self._program(name, len(seeds))

    def shared_data(self) -> Federation | None:
        """The placed data as one federation, for other simulations; None if the data are sharded, grouped or pooled."""
        whole = len(self.federations) == 1 and not self.placement.own_data
        return self.federations[0] if whole and not self.algorithm.pooled else None

    def export(self, platform: str, seeds: int = 1) -> jax.export.Exported:
        """The program of one `advance` call, lowered for a platform that need not be present.

        The plan's automatic choices (clients at once, form of the convolutions, placement) are made for that platform,
        with the number of devices that are present on this machine.

        Args:
          platform: "cpu", "cuda", "rocm" or "tpu".
          seeds: number of runs.

        Raises:
          JaxpflError: if the platform is unknown.
        """
        programs, given = self._on(platform, seeds)
        advance = programs.function("advance", programs.execution.block)
        function = jax.jit(advance, **programs.options("advance", given))
        # The calls of `linear_kernel` and `conv_kernel`.
        checks = [jax.export.DisabledSafetyCheck.custom_call("__gpu$xla.gpu.triton")]
        return jax.export.export(function, platforms=(platform,), disabled_checks=checks)(*given)

    def program(self, platform: str) -> ClosedJaxpr:
        """The jaxpr of one `advance` call for one run, with the plan's automatic choices for a platform."""
        programs, given = self._on(platform, 1)
        return jax.make_jaxpr(programs.function("advance", programs.execution.block))(*given)

    @property
    def explained(self) -> list[tuple[str, str, str]]:
        """Choices of the plan for a round (`execution_plan.explain`). Reading this may trace the round."""
        execution = self.execution
        linear, in_kernels = execution.linear or ("plain", ""), execution.form in conv_kernel.FORMS
        if linear[0] != "plain" or in_kernels:
            advance = self._programs.function("advance", execution.block)
            text = str(jax.make_jaxpr(advance)(*self._arguments("advance", 1)))
            if linear[0] != "plain" and not any(name in text for name in linear_kernel.CALLS):
                why = f"the {linear[0]} form does not support the method, optimizer, loss or sizes"
                execution = execution._replace(linear=("plain", why))
            if in_kernels and conv_kernel.CALL not in text:
                reasons = (*execution.reasons[:-1], "no layer of the model runs in such kernels")
                execution = execution._replace(form="products", reasons=reasons)
        return explain(execution)

    def memory(self, runs: int = 1) -> dict[str, int]:
        """Bytes for the data, the clients' states, and a round's working memory. This compiles the round's program."""
        working = program_bytes(self._program("advance", runs), self.placement.devices)
        states = trees.num_bytes(self._state_shapes(runs).clients)
        data = (self.federations, self._scored.federations) if self.algorithm.pooled else self.federations
        return {"data": trees.num_bytes(data), "states": states, "working": working}

    def digest(self, runs: int = 1) -> str:
        """Digest of the program that trains ``runs`` runs. Simulations with equal digests share the program."""
        return self._programs.digest("advance", self._arguments("advance", runs))

    def bytes_per_client(self) -> tuple[int, int]:
        """Bytes that one client uploads and receives in one round (`exchange.bytes_per_client`)."""
        return exchange.bytes_per_client(
            self.algorithm, self.participation, *self.shapes_of_one_run(), self.federations[0]
        )

    def remembers(self) -> bool:
        """True if clients' uploads depend on their state from earlier rounds (`exchange.remembers`)."""
        return exchange.remembers(self.algorithm, self.participation, *self.shapes_of_one_run(), self.federations)

    def _place_data(self, parts: Sequence[Federation]) -> tuple[Federation, ...]:
        """Data of each group, placed where the programs expect them."""
        return tuple(put(part, self.placement, group) for part, group in zip(parts, self._groups, strict=True))

    def _welcome(self, unseen: Federation, federation: Federation, adapt_rounds: int) -> tuple[Group, ...]:
        """Place the unseen clients' data; return the clients' groups."""
        both = np.intersect1d(np.asarray(unseen.client_ids), np.asarray(federation.client_ids))
        if len(both):
            raise JaxpflError(f"client {both[0]} is in both federation and unseen: unseen clients must not be trained")
        check_rounds("adapt_rounds", adapt_rounds)
        agree_on(unseen)
        self.algorithm.check_data(unseen)
        self._adapt_rounds = adapt_rounds
        ids = np.asarray(unseen.client_ids)
        placement = self._scored.placement
        groups = make_groups(self.algorithm, ids, placement.parts, may_be_empty=True)
        parts = split_federation(unseen._replace(client_names=None, preparation=None), groups, views=placement.own_data)
        groups = balanced(groups, parts, placement)
        self._unseen = tuple(put(part, placement, group) for part, group in zip(parts, groups, strict=True))
        return groups

    def _on(self, platform: str, seeds: int) -> tuple[Programs, tuple[Any, ...]]:
        """Programs for a platform, and the arguments of its program ``advance``, with shapes instead of states."""
        if platform not in PLATFORMS:
            raise unknown_name("platform", platform, PLATFORMS)
        execution = self._plan_on(platform)
        given = self.participation.num_clients, execution.devices, execution.even
        placement = place(*given, on=platform, model_shards=execution.model_shards)
        federations = self.federations
        if placement.own_data != self.placement.own_data:
            federations = tuple(put(jax.tree.map(np.asarray, part), placement) for part in federations)
        state, values, _, rounds = self._arguments("advance", seeds)
        state, clients = _laid(state, placement), Clients(federations)
        if placement.own_data and self.placement.own_data:
            clients = clients._replace(ids=self._ids)
        programs = Programs(self._setting._replace(placement=placement), execution)
        return programs, (state, values, clients, rounds)

    def _plan_on(self, platform: str) -> Resolved:
        """The plan of a round, resolved for a platform."""
        if platform == self.placement.devices[0].platform or (platform, jax.default_backend()) == ("cuda", "gpu"):
            return self.execution
        plan = replace(self.plan, devices=self.execution.all_devices)
        return self._resolve(plan, self.participation.capacity, platform)

    def shapes_of_one_run(self) -> tuple[RunState, PyTree]:
        """Shapes of one run's state, and hyper-parameters of one run."""
        one = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape[1:], a.dtype), self._state_shapes(1))
        return one, jax.tree.map(lambda a: a.reshape(-1)[0], self.hp)

    def _state_shapes(self, runs: int) -> RunState:
        if self._shapes is None:
            keys = jax.ShapeDtypeStruct((runs,), jax.random.key(0).dtype)
            noise = None if self.algorithm.noise is None else keys
            # Only shapes are computed, so that too many runs are refused before they take memory.
            hp = jax.tree.map(lambda a: jax.ShapeDtypeStruct((runs,), a.dtype), self.hp)
            given = (keys, noise), hp, self._inputs
            self._shapes = programs.shapes(self._programs.function("start", self.placement.rows), *given)
        return jax.tree.map(lambda a: jax.ShapeDtypeStruct((runs, *a.shape[1:]), a.dtype), self._shapes)

    def _resolve(self, plan: ExecutionPlan, cohort: int, platform: str | None = None) -> Resolved:
        """The plan with every choice made, for cohorts of at most this many clients."""
        sizes = {"model_bytes": self._model_bytes, "share_bytes": self._share_bytes}
        given = {"layers": self._layers, "platform": platform, "client_steps": self._client_steps}
        clients = self.participation.num_clients
        return resolve(plan, cohort=cohort, num_clients=clients, linear=self._linear, **sizes, **given)

    def _program(self, name: Name, runs: int) -> jax.stages.Compiled:
        """Compiled program of ``advance``, or of a scoring method, for S runs."""
        programs = self._programs if name == "advance" else self._scoring
        return programs.made.get((name, runs)) or programs.get(name, runs, self._arguments(name, runs))

    def _arguments(self, name: Name, runs: int) -> tuple[Any, ...]:
        """Arguments of a program, with the state as shapes."""
        state = _laid(self._state_shapes(runs), self.placement if name == "advance" else self._scored.placement)
        if name == "advance":
            return state, self._values(runs), self._inputs, jnp.int32(1)
        if name == "unseen":
            assert self._unseen is not None
            return state, rows_of(self.hp, runs), Clients(self._unseen), jnp.int32(1)
        return state, rows_of(self.hp, runs), Clients(self._scored.federations)

    def _values(self, runs: int) -> RunValues:
        """Traced values of all runs, leaves [S]."""
        return RunValues(rows_of(self.hp, runs), rows_of(self._rates, runs))


def _without(clients: np.ndarray, scores: PyTree) -> Any:
    """Scores [S, m] with NaN for some clients; flags [S, m] bool keep their values."""

    def masked(score: Array) -> np.ndarray:
        found = np.asarray(score)
        return found if found.dtype == bool else np.where(clients, np.nan, found).astype(found.dtype)

    return jax.tree.map(masked, scores)


def _personalizing(client: Client, group: Group, federation: Federation) -> np.ndarray:
    """Number of gradients that personalization evaluates, for each client in a group, [size]."""
    count = client.gradients.personalize if client.gradients else 0
    if isinstance(count, LocalEpochs):
        return count.on_host(np.asarray(group.members_of(processes.fetch(federation.train.size))))
    return np.full(group.size, count)


def _laid(shapes: RunState, placement: Placement) -> RunState:
    """Shapes of a state, with the sharding of each array."""
    layout = placement.layout(shapes)
    return jax.tree.map(lambda a, s: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=s), shapes, layout)


def check_rounds(name: str, rounds: int) -> None:
    if rounds < 0:
        raise JaxpflError(f"{name} must be at least 0, got {rounds}")


class Scored(NamedTuple):
    """Clients to be scored, with their data and placement.

    Attributes:
      federations: data of each group.
      groups: groups of clients with the same architecture, each with the rows of its members.
      placement: placement of the data, and of the states during scoring.
    """

    federations: tuple[Federation, ...]
    groups: tuple[Group, ...]
    placement: Placement


def _pooled_scored(algorithm: Algorithm, federation: Federation, scoring: Resolved) -> Scored:
    """The m scored clients of a pooled method. They have no training examples: the one trained client has all of them.

    The scored clients are distributed over the plan's devices, and each device has a copy of the trained client's
    state.
    """
    given = federation.num_clients, scoring.devices, scoring.even
    placement = place(*given, model_shards=scoring.model_shards)
    placement = placement._replace(state=RunState._make([placement.everywhere] * len(RunState._fields)))
    scored = federation._replace(train=federation.train.emptied())
    groups = balanced(make_groups(algorithm, np.asarray(federation.client_ids), scoring.devices), (scored,), placement)
    return Scored((put(scored, placement, groups[0]),), groups, placement)

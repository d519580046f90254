"""Runs of one experiment: start, advance by some rounds, score. Runs are one axis."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxpfl.core.protocol import Client, LocalEpochs
from jaxpfl.core.types import Array, Federation, Metrics, PyTree
from jaxpfl.engine import noise_keys
from jaxpfl.engine.evaluate import Part, Scores
from jaxpfl.engine.groups import Group, gather
from jaxpfl.engine.placement import put_states
from jaxpfl.engine.prepared import Prepared, check_rounds
from jaxpfl.engine.programs import Name
from jaxpfl.engine.round import BITS, Clients
from jaxpfl.engine.runs import check_distinct
from jaxpfl.engine.state import Counts, GradientCounts, RunState, keyless, whole, with_rows
from jaxpfl.support import processes
from jaxpfl.support.errors import JaxpflError


class Simulation(Prepared):
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
      attackers: the clients that attack, [m] bool; None where nobody does.
    """

    rounds_run: int = 0
    attackers: np.ndarray | None = None

    def init(self, seeds: Sequence[int]) -> RunState:
        """The state before round 0 of one run for each seed.

        Raises:
          JaxpflError: for no seed, a seed outside 32 bits, states that do not fit into memory, and a seed given
            twice with the same hyper-parameters (unless the runs are private: their noise then differs).
        """
        if len(seeds):
            self.check_room(len(seeds))
        given = self._run_keys(seeds), self._hp_rows(len(seeds)), self._inputs()
        return self._programs.start(len(seeds), given)(*given)

    def _run_keys(self, seeds: Sequence[int]) -> tuple[Array, Array | None]:
        """Keys [S] of the runs of these seeds, and of their noise.

        Raises:
          JaxpflError: as `init`.
        """
        if not len(seeds):
            raise JaxpflError("at least one seed is needed")
        for seed in seeds:  # beyond 32 bits the key would be that of another seed
            if not 0 <= seed < 2**32:
                raise JaxpflError(f"a seed must be between 0 and 2**32 - 1, got {seed}")
        keys, values = jax.vmap(jax.random.key)(np.array(seeds, np.uint32)), self._values(len(seeds))
        rows = values.hp
        noise = noise_keys.keys(self.algorithm.noise, self._noise_names, seeds, rows)
        if noise is None:
            check_distinct(seeds, values)
        self._noise.add(noise)
        if processes.several():
            told = [np.asarray(leaf).tolist() for leaf in jax.tree.leaves(values)]
            processes.agree("the runs'", {"seeds": tuple(map(int, seeds)), "hyper-parameters": told})
        return keys, noise

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
        state = put_states(state, self.placement)
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

    def evaluate(self, state: RunState, split: Part = "test", *, attackers: bool = False) -> Scores:
        """Score every client in every run: model -> metric -> [S, m].

        Where some clients attack, scores are of the honest ones, and NaN for the attackers.

        Args:
          state: after any round.
          split: the examples.
          attackers: score the attackers instead, with NaN for the honest clients.
        """
        scores = self._of_clients(self._read(split, state, self._inputs(self._scored.federations)))
        if self.attackers is None:
            return scores
        left_out = ~self.attackers if attackers else self.attackers

        def of_others(score: Array) -> Any:
            found = np.asarray(score)
            return found if found.dtype == bool else np.where(left_out, np.nan, found).astype(found.dtype)

        return jax.tree.map(of_others, scores)

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
        check_rounds("rounds", rounds)
        return self._read("unseen", state, self._inputs(self._unseen), jnp.int32(rounds))

    def gradients(self, state: RunState) -> GradientCounts | None:
        """Gradient evaluations of each client; None if the method does not count them (`protocol.Gradients`)."""
        if not self.algorithm.counts_gradients:
            return None
        training = np.asarray(self.counts(state).gradients)
        each = [
            _personalizing(*given)
            for given in zip(
                self.algorithm.clients, self._scored.groups, self._scored.federations, self._sizes, strict=True
            )
        ]
        return GradientCounts(training, np.asarray(gather(each, self._groups)))

    def personal_models(self, state: RunState) -> PyTree:
        """Every client's personalised model after adaptation, as `Client.personalize` returns it: leaves [S, m, ...].

        With several groups of clients, one tree for each group, of its clients in the order of the stack.
        """
        models = self._of_clients(self._read("personal", state, self._inputs(self._scored.federations)))
        return models[0] if len(models) == 1 else models

    def clusters(self, state: RunState) -> np.ndarray | None:
        """The cluster of every client, [S, m], numbered from 0 in each run; None for a method that finds none.

        If clients choose among the server's models, a number that no client chose is missing.
        """
        if all(client.cluster is not None for client in self.algorithm.clients):
            found = self._read("clusters", state, self._inputs(self._scored.federations))
            return np.asarray(self._of_clients(found))
        find = self.algorithm.clusters
        if find is None:
            return None
        server = jax.tree.map(np.asarray, state.server)
        return np.stack([find(jax.tree.map(lambda a, i=i: a[i], server)) for i in range(state.round.shape[0])])

    def _read(self, name: Name, state: RunState, clients: Clients, *more: Array) -> Any:
        runs = state.round.shape[0]
        state = put_states(state, self._scored.placement)
        return self._program(name, runs)(state, self._hp_rows(runs), clients, *more)

    def _of_clients(self, results: PyTree) -> PyTree:
        """The results of clients alone, leaves [S, m, ...]."""
        if not self._bucket.pads:
            return results
        # On the host: on a device each number of clients would be a program.
        return jax.tree.map(lambda a: np.asarray(a)[:, : self.participation.num_clients], results)

    def counts(self, state: RunState) -> Counts:
        """The work of the m clients so far, [S, m], on the host."""
        _, of_all = self._rows(whole=False)
        rows = of_all if isinstance(of_all, np.ndarray) else slice(of_all)
        return Counts(processes.fetch(state.counts.table)[:, rows])

    def trim(self, state: RunState) -> RunState:
        """The state with exactly m rows of clients, for inspection or for a run on other devices.

        Of several processes each then holds it all, on its host; `gather` leaves it with the first.
        """
        return self._resize(processes.fetch(state) if processes.several() else state, whole=False)

    def gather(self, state: RunState) -> RunState | None:
        """The trimmed state as NumPy arrays and key data, to be stored; None in all processes but the first."""
        untyped = keyless(state)
        if not processes.several():
            return jax.tree.map(np.asarray, self._resize(untyped, whole=False))
        found = processes.fetch_to_first(untyped)
        return None if found is None else self._resize(found, whole=False)

    def scatter(self, state: RunState | None, runs: int) -> RunState:
        """The state that `gather` left with the first process, placed; None in the others.

        Args:
          state: in the first process.
          runs: S.
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
        """Shapes of what `trim` returns for S runs."""
        return jax.eval_shape(lambda state: self._resize(state, whole=False), self._state_shapes(runs))

    def keep_clients_in(self, folder: Path, checkpoints: Sequence[int]) -> None:
        """Name the folder for clients that live on disk, before `init`.

        Args:
          folder: kept beyond the life of the process.
          checkpoints: rounds of the checkpoints of the run that there are.

        Raises:
          JaxpflError: if the clients of an earlier part of the run lived elsewhere.
        """
        if checkpoints and folder.is_dir():
            raise JaxpflError(
                f"the clients of the run live on disk, in {folder}: it goes on with plan.clients_in = disk"
            )

    def kept(self, state: RunState) -> RunState:
        """The part of a state that a checkpoint holds; `adopt` takes it back."""
        return self.trim(state)

    def prepare(self, round: int) -> None:
        """To be called before the checkpoint of a round is written, for what it does not hold."""

    def commit(self, round: int) -> None:
        """To be called once that checkpoint is whole."""

    def adopt(self, state: RunState) -> RunState:
        """A trimmed state, of host or device arrays, placed as this simulation's programs want it.

        A private state is assumed to be of a run of this simulation (a stored one, say), whatever the source of its
        noise; the caller is responsible for that.
        """
        self._noise.add(state.noise)
        return put_states(self._resize(state, whole=True), self.placement)

    def _resize(self, state: RunState, *, whole: bool) -> RunState:
        """The state with all rows that the programs want, or with those of clients alone."""
        return with_rows(state, *self._rows(whole=whole))

    def _rows(self, *, whole: bool) -> tuple[list[int | np.ndarray], int | np.ndarray]:
        """Rows of each group's stack, and of what is held for all clients (`with_rows`)."""
        given = zip(self._groups, self._sizes, strict=True)
        rows = [group.resized(size, whole=whole) for group, size in given]
        if len(rows) == 1:
            return rows, rows[0]
        return rows, self.placement.rows if whole else self.participation.num_clients


def _personalizing(client: Client, group: Group, federation: Federation, size: int) -> np.ndarray:
    """Gradients of the personalisation of each of a group's first ``size`` clients."""
    count = client.gradients.personalize if client.gradients else 0
    if isinstance(count, LocalEpochs):
        return count.on_host(np.asarray(group.members_of(processes.fetch(federation.train.size)))[:size])
    return np.full(size, count)

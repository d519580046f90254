"""Simulation that stores the clients' data and states in host memory or in files."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxpfl.core import trees
from jaxpfl.core.types import Array, Federation, PyTree
from jaxpfl.engine import programs
from jaxpfl.engine.execution_plan import ExecutionPlan, Resolved
from jaxpfl.engine.placement import check_states, program_bytes
from jaxpfl.engine.programs import Name
from jaxpfl.engine.round import BITS, Clients
from jaxpfl.engine.simulation import Simulation
from jaxpfl.engine.state import COLUMNS, Counts, RunState, rows_of, server_context, whole
from jaxpfl.engine.streamed import rows
from jaxpfl.engine.streamed.disk import Disk
from jaxpfl.engine.streamed.rounds import Blocks, Held, Rounds, Write, refusal
from jaxpfl.engine.streamed.rows import Courier
from jaxpfl.support import host_memory
from jaxpfl.support.errors import JaxpflError, warn
from jaxpfl.support.host_memory import readable

_ANNOUNCED = 2**26
"""Smallest size of states, in bytes, for which a warning names their folder before they are written to files."""
_UNNAMED = 2**30
"""Largest number of bytes that states may take in the system's folder for temporary files."""


class StreamedSimulation(Simulation):
    """A simulation whose clients' data and states are on the host; see `Simulation` for the methods.

    ``RunState.clients`` and ``RunState.counts`` are NumPy arrays [S, m, ...]; with storage on disk, the clients' states
    are memory-mapped. `advance` writes to these arrays in place; if ``plan.donate`` is false, it writes to copies. Runs
    are advanced one after the other. On one device, the results equal the results of a `Simulation` bit by bit if the
    `Simulation` also advances runs one after the other (``plan.runs="map"``, or a single run). Runs on a vectorized
    axis are rounded differently.
    """

    def __init__(self, *given: Any, where: str, **more: Any):
        """Prepare the programs; see `Simulation`.

        Args:
          given: positional arguments of `Simulation`.
          where: storage of the clients, "host" or "disk".
          more: keyword arguments of `Simulation`.

        Raises:
          JaxpflError: if a round of the method needs rows of clients outside the cohort; if there are several
            accelerators or model shards; if ``where`` is "disk" and ``plan.donate`` is false; or as in `Simulation`.
        """
        self._where = where
        if (shards := (more.get("plan") or ExecutionPlan()).model_shards) > 1:
            raise self._refused(f"plan.model_shards = {shards} requires clients on the devices")
        super().__init__(*given, **more)
        self._folder: Path | None = None
        self._disk: Disk | None = None
        self._now: tuple[Any, np.ndarray] | None = None  # counts that were last written, and their rounds
        self._check_served()
        (federation,) = self.federations
        self._pages = rows.Pages(federation)
        self._rounds = Rounds(self._setting, self.execution, federation, self._pages.were_read)
        self._blocks = Blocks(self._setting, self.execution, federation, self._state_shapes(1).clients[0])

    def _refused(self, why: str) -> JaxpflError:
        return JaxpflError(
            f"plan.clients_in = {self._where} is not possible, because {why}: use plan.clients_in = device"
        )

    def _check_served(self) -> None:
        if self.placement.own_data:
            number = len(self.placement.devices)
            raise self._refused(
                f"it supports one accelerator, but there are {number} (to use one, set plan.devices = 1)"
            )
        if self._where == "disk" and not self.plan.donate:
            raise self._refused("it writes files in place, which requires plan.donate = true")
        algorithm, participation = self.algorithm, self.participation
        state, hp = self.shapes_of_one_run()

        def sent(hp: PyTree, server: PyTree) -> PyTree:
            ctx = server_context(participation, jnp.int32(0))
            return algorithm.server.broadcast(jax.random.key(0), hp, ctx, server).per_client

        why = refusal(algorithm, participation, programs.shapes(sent, hp, state.server))
        if why:
            raise self._refused(f"it does not support the method, as {why}")

    def _place_data(self, parts: Sequence[Federation]) -> tuple[Federation, ...]:
        for part in parts:
            for split in part.all_splits:
                split.check()
        return tuple(jax.tree.map(np.asanyarray, part) for part in parts)

    def _resolve(self, plan: Any, cohort: int, platform: str | None = None) -> Resolved:
        resolved = super()._resolve(plan, cohort, platform)
        said = {"host": "in the host's memory", "disk": "in files"}[self._where]
        why = "as given" if self.plan.clients_in == self._where else "they do not fit where they would be faster"
        return resolved._replace(home=said, reasons=(*resolved.reasons, why))

    # --- states -----------------------------------------------------------------------------------

    def keep_clients_in(self, folder: Path, checkpoints: Sequence[int]) -> None:
        if self._where != "disk":
            super().keep_clients_in(folder, checkpoints)
        elif self.plan.folder is not None:
            raise JaxpflError(
                f"plan.folder = {self.plan.folder} applies to runs without a run folder: leave it out, as this run "
                f"keeps its clients' states in {folder}"
            )
        elif checkpoints and not folder.is_dir():
            raise JaxpflError(
                f"the clients' states of this run are not stored in {folder}: leave out plan.clients_in = disk"
            )
        else:
            self._folder = folder

    def check_room(self, runs: int) -> None:
        # The server states and the counts of all runs are in memory, even if the clients' states are on disk.
        check_states(self._state_shapes(runs)._replace(clients=()), self.placement, runs)
        if self._where == "host":
            need = trees.num_bytes(self._rows_of(runs))
            host_memory.check(need, "the clients' states need", "keep them in files (plan.clients_in = disk)")

    def _rows_of(self, runs: int) -> PyTree:
        """Shapes of the clients' states, leaves [S, m, ...]."""
        clients = self.participation.num_clients
        shapes = self._state_shapes(runs).clients[0]
        return jax.tree.map(lambda a: jax.ShapeDtypeStruct((runs, clients, *a.shape[2:]), a.dtype), shapes)

    def init(self, seeds: Sequence[int]) -> RunState:
        if len(seeds):
            self.check_room(len(seeds))
        keys = self._run_keys(seeds)
        tree, hp = self._new_rows(len(seeds), keys[0]), rows_of(self.hp, len(seeds))
        write = partial(rows.put, tree) if self._disk is None else self._disk.start
        is_old = self._disk is not None and not self._disk.is_new
        starts = []
        for run in range(len(seeds)):
            own = jax.tree.map(lambda a, run=run: a[run : run + 1], (keys, hp))
            for nth, (of, state) in enumerate(self._blocks.start(*own)):
                if nth == 0:
                    starts.append(state._replace(clients=(), counts=None))
                if is_old:  # the files have states already, and `adopt` returns to a checkpoint's round
                    break
                write(run, of, jax.tree.map(lambda a: a[0], state.clients[0]))
        if self._disk is not None and not is_old:
            self._disk.complete()
        first = jax.tree.map(lambda *parts: jnp.concatenate(parts), *starts)
        return self._written(first, (tree,), self._no_counts(len(seeds)))

    def _new_rows(self, runs: int, keys: Array) -> PyTree:
        """New arrays for the clients' states, in memory or in files."""
        shapes = self._rows_of(runs)
        if self._where == "host":
            return jax.tree.map(lambda a: np.empty(a.shape, a.dtype), shapes)
        need, place = trees.num_bytes(shapes), self._folder or self.plan.folder
        if place is None and need > _UNNAMED:
            raise JaxpflError(
                f"the clients' states need {readable(need)} on disk, but temporary files may take at most "
                f"{readable(_UNNAMED)}: set plan.folder"
            )
        folder = Path(place or tempfile.gettempdir())
        if need >= _ANNOUNCED:
            kind = "temporary files" if self._folder is None else "files"
            warn(f"the clients' states, {readable(need)}, are written to {kind} in {folder}")
        self._disk = Disk(folder, shapes, _names(keys), temporary=self._folder is None)
        return self._disk.tree

    def _no_counts(self, runs: int) -> Counts:
        table: Any = np.zeros((runs, self.participation.num_clients, COLUMNS), np.int32)
        return Counts(table)

    def _written(self, rest: RunState, clients: tuple[PyTree, ...], counts: Counts) -> RunState:
        """Return the state ``rest`` with these clients and counts, and record that they were written last."""
        self._now = (counts.table, np.array(rest.round, np.int64))
        return rest._replace(clients=clients, counts=counts)

    def trim(self, state: RunState) -> RunState:
        return state

    def counts(self, state: RunState) -> Counts:
        return jax.tree.map(np.array, state.counts)

    def checkpointed(self, state: RunState) -> RunState:
        return state if self._disk is None else state._replace(clients=())

    def prepare(self, round: int) -> None:
        if self._disk is not None:
            self._disk.prepare(round)

    def commit(self, round: int) -> None:
        if self._disk is not None:
            self._disk.commit(round)

    def adopt(self, state: RunState) -> RunState:
        """Take over a stored state, with its clients as NumPy arrays.

        If the clients' states are on disk, the files are first restored to the state's round.

        Raises:
          JaxpflError: if the files cannot be restored to that round.
        """
        self._noise.add(state.noise)
        clients, counts = jax.tree.map(_writable, (state.clients, state.counts))
        if self._disk is not None:
            self._disk.recover(int(np.max(state.round)))
            first, *_ = runs = self._on_disk(state)
            clients = (jax.tree.map(lambda a: a[first : first + len(runs)], self._disk.tree),)
        rest = state._replace(clients=(), counts=None)
        return self._written(jax.device_put(rest, self._rounds.placement.everywhere), clients, counts)

    def _check_current(self, state: RunState) -> None:
        """Check that a state's rows were not overwritten by later rounds.

        Raises:
          JaxpflError: if the rows were overwritten.
        """
        if self._now is None or state.counts.table is not self._now[0]:
            return
        if not np.array_equal(np.asarray(state.round), self._now[1]):
            raise JaxpflError(
                f"the state of round {int(np.max(state.round))} was advanced to round {int(self._now[1].max())}, and "
                "its clients' states were overwritten: continue with the state that advance returned"
            )

    def _taking(self, state: RunState) -> rows.Take:
        """Make a function that reads rows of a state."""
        if self._disk is None:
            return partial(rows.take, state.clients[0])
        disk, of_runs = self._disk, self._on_disk(state)
        return lambda run, of: disk.take(of_runs[run], of)

    def _writing(self, state: RunState) -> Write:
        """Make a function that writes rows of a state."""
        tree, table, disk = state.clients[0], state.counts.table, self._disk
        of_runs = [] if disk is None else self._on_disk(state)

        def write(run: int, of: np.ndarray, held: Held) -> None:
            if disk is None:
                rows.put(tree, run, of, held.clients)
            else:
                disk.put(of_runs[run], of, held.clients)
            table[run, of] = held.counts.table

        return write

    def _on_disk(self, state: RunState) -> list[int]:
        """Position of each run of a state among the runs whose states are on disk."""
        assert self._disk is not None
        return [self._disk.keys.index(name) for name in _names(state.key)]

    # --- rounds and scores ------------------------------------------------------------------------

    def advance(self, state: RunState, rounds: int) -> tuple[RunState, dict[str, np.ndarray]]:
        self._noise.check(state.noise)
        self._check_current(state)
        if rounds <= 0:
            return state, {}
        if not self.plan.donate:
            state = state._replace(**jax.tree.map(np.copy, {"clients": state.clients, "counts": state.counts}))
        values, take, write = self._values(state.round.shape[0]), self._taking(state), self._writing(state)
        ends, history = [], []
        with Courier() as courier:
            for run in range(state.round.shape[0]):
                own = jax.tree.map(lambda a, run=run: a[run : run + 1], values)
                own = jax.device_put(own, self._rounds.placement.everywhere)
                end, metrics = self._rounds.advance(run, state, own, rounds, courier, take, write)
                ends.append(end)
                history.append(metrics)
        new = jax.tree.map(lambda *parts: jnp.concatenate(parts), *ends)
        new = self._written(new, state.clients, state.counts)
        self._noise.last = new.noise
        self.rounds_run = max(self.rounds_run, int(np.max(new.round)))
        joined = {name: np.stack([metrics[name] for metrics in history]) for name in history[0]}
        if self.algorithm.counts_bits:
            joined["upload_bits"] = whole(*(joined.pop(name) for name in BITS))
        return new, joined

    def _read(self, name: Name, state: RunState, clients: Clients, *more: Array) -> Any:
        self._check_current(state)
        runs = state.round.shape[0]
        each = (state._replace(clients=(), counts=None), rows_of(self.hp, runs))
        results, take = [], self._taking(state)
        for run in range(runs):
            own = jax.tree.map(lambda a, run=run: a[run : run + 1], each)
            one, hp = jax.device_put(own, self._blocks.placement.everywhere)
            if name == "unseen":
                given = (one, hp, clients, *more)
                results.append(jax.tree.map(np.asarray, self._blocks.programs.get(name, 1, given)(*given)))
            else:
                results.append(self._blocks.read(name, run, one, state.counts, hp, take, self._pages.were_read))
        return jax.tree.map(lambda *a: np.concatenate(a), *results)

    # --- programs ---------------------------------------------------------------------------------

    def compile(self, seeds: Sequence[int], *scores: str) -> None:
        """Check the memory for the states. Each program is compiled only at its first call."""
        self.check_room(len(seeds))

    def shared_data(self) -> None:
        """None, because the data stay on the host."""

    def memory(self, runs: int = 1) -> dict[str, int]:
        """Bytes for the data and the clients' states on the host, and for a round on the devices."""
        empty = jax.tree.map(lambda a: np.broadcast_to(np.zeros((), a.dtype), a.shape), self._rows_of(1))
        counts = self._no_counts(1)
        keys = jax.vmap(jax.random.key)(np.zeros(1, np.uint32))
        keys = keys, None if self.algorithm.noise is None else keys
        own = jax.tree.map(lambda a: a[:1], rows_of(self.hp, 1))
        _, start = next(self._blocks.start(keys, own))
        given = self._rounds.example(start._replace(clients=(empty,), counts=counts), self._values(1))
        working = program_bytes(self._rounds.program(given), self.placement.devices) + trees.num_bytes(given[:3])
        states = trees.num_bytes(self._rows_of(runs))
        return {"data": trees.num_bytes(self.federations), "states": states, "working": working}


def _names(keys: Array) -> list[str]:
    """Hexadecimal digits of each run's key."""
    return [bytes(row).hex() for row in np.asarray(jax.random.key_data(keys))]


def _writable(leaf: Any) -> np.ndarray:
    array = np.asarray(leaf)
    return array if array.flags.writeable else array.copy()

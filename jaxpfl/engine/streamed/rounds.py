"""Rounds and scores for clients on the host: only the rows of one cohort or one block are on the devices.

While one round computes, the next cohort's rows are copied to the devices, and the previous cohort's rows are copied
back. A round is computed by `round.one_round` on a stack that has one row for each slot of the cohort, instead of a row
for each of the m clients. `one_round` gets the clients' own ids, and m as the number of clients. The random streams,
the masks and the order of sums are therefore the same as for a stack of all clients.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxpfl.core import trees
from jaxpfl.core.participation import Participation
from jaxpfl.core.protocol import Algorithm, Reduction
from jaxpfl.core.randomness import Purpose, stream
from jaxpfl.core.types import Array, ClientData, Federation, Key, Metrics, PyTree
from jaxpfl.engine.cohort import Group
from jaxpfl.engine.execution_plan import Resolved
from jaxpfl.engine.placement import place
from jaxpfl.engine.programs import Name, Programs, Setting, part_used, traced_as
from jaxpfl.engine.round import Clients, RoundPlan, RunValues, one_round
from jaxpfl.engine.state import Counts, RunState, over_runs
from jaxpfl.engine.streamed import rows
from jaxpfl.engine.streamed.rows import Courier


class Held(NamedTuple):
    """States and counts of some clients, leaves [rows, ...]."""

    clients: PyTree
    counts: Counts


class Drawn(NamedTuple):
    """A drawn cohort.

    Attributes:
      rows: row of the client in each of K slots, among the m clients, [K]; the number m marks an empty slot.
      left_out: number of clients for which there was no slot; None if the sampling never leaves clients out.
    """

    rows: Array
    left_out: Array | None


def refusal(algorithm: Algorithm, participation: Participation, per_client: PyTree) -> str:
    """Reason why the clients of an algorithm cannot be stored on the host; empty if they can.

    Args:
      algorithm: the method.
      participation: sampling of the cohorts.
      per_client: shapes of `Message.per_client`.
    """
    if algorithm.pooled:
        return "it trains a single client on all data"
    if len(algorithm.clients) > 1:
        return "its clients are in groups"
    if algorithm.in_flight is not None:
        return "its rounds are asynchronous"
    why = needs_all(algorithm, per_client)
    if why and participation.everyone:
        return f"{why}, and all clients take part in every round, so that all of them would be on the devices"
    if algorithm.idle_cap and not participation.everyone:
        return "its clients train outside the cohort too"
    return ""


def needs_all(algorithm: Algorithm, per_client: PyTree) -> str:
    """Reason why a method needs each client's row number in the whole federation; empty if it does not."""
    if algorithm.reduction is Reduction.STACK:
        return "its server uses individual uploads"
    return "its server sends each client its own message" if jax.tree.leaves(per_client) else ""


def stack_of(rows: int, devices: int) -> Group:
    """Make the group for a stack of ``rows`` clients, which is padded to a multiple of ``devices`` rows."""
    return Group(np.arange(rows), -(-rows // devices) * devices, rows, True)


def make_draw(participation: Participation) -> Callable[[Key, Array, Array], Drawn]:
    """Build the function ``(released key, round, client ids [m]) -> Drawn`` that draws the cohort of `one_round`."""

    def draw(released: Key, round: Array, ids: Array) -> Drawn:
        key = stream(released, Purpose.PARTICIPATION, round)
        left_out = participation.left_out
        return Drawn(participation.rows(released, round, ids), None if left_out is None else left_out(key, ids))

    return draw


def streamed_round(
    algorithm: Algorithm,
    plan: RoundPlan,
    run: tuple[RunState, Held],
    values: RunValues,
    clients: Clients,
    drawn: Drawn,
    source: Array,
) -> tuple[RunState, Metrics]:
    """Perform a round on a stack that contains only the cohort's rows.

    Args:
      algorithm: the method.
      plan: plan of a round that samples from all m clients. Its only group consists of the cohort's rows.
      run: state with the cohort's rows as they were read from the host, and the previous cohort's rows after its round.
        A client may be in both cohorts. Its row from the host is then outdated, because rows are read before the
        previous round's results are written back.
      values: hyper-parameters and rates.
      clients: data of the cohort's clients.
      drawn: the cohort, as rows of the stack.
      source: for each row from the host, the row of the same client in the previous cohort, which replaces it; a
        negative number if the client was not in that cohort, [rows] int32.
    """
    participation = plan.participation
    state, before = run

    def newest(stored: Array, new: Array) -> Array:
        is_new = (source >= 0).reshape(-1, *[1] * (stored.ndim - 1))
        return jnp.where(is_new, new[jnp.maximum(source, 0)], stored)

    rows, counts = jax.tree.map(newest, Held(state.clients[0], state.counts), before)
    given = participation._replace(
        sample=lambda key, ids: drawn.rows,
        turns=None,
        left_out=None if participation.left_out is None else lambda key, ids: drawn.left_out,
    )
    state = state._replace(clients=(rows,), counts=counts)
    return one_round(algorithm, plan._replace(participation=given), state, values, clients)


Write = Callable[[int, np.ndarray, Held], None]
"""Function ``(run, rows, held) -> None`` that writes rows back to the host; the leaves of ``held`` are [rows, ...]."""


class Staged(NamedTuple):
    """A cohort whose rows were copied to the devices for a round.

    Attributes:
      rows: for each row of the stack, the row of its client among all m clients, as a NumPy array; m if the row is
        empty.
      held: states and counts of the clients.
      clients: data of the clients.
      drawn: the cohort, as rows of the stack.
    """

    rows: np.ndarray
    held: Held
    clients: Clients
    drawn: Drawn


class Rounds:
    """Rounds of training for a federation that stays on the host.

    Attributes:
      placement: placement of the cohort's rows on the devices.
    """

    def __init__(
        self, setting: Setting, execution: Resolved, federation: Federation, was_read: Callable[[PyTree], None]
    ):
        """Prepare the draw of cohorts. The program of a round is compiled when it is first needed.

        Args:
          setting: static inputs of the programs, for all m clients.
          execution: resolved plan of a round.
          federation: data on the host.
          was_read: function that is called with the copies of examples, after these were read.
        """
        self._was_read = was_read
        self._participation = setting.participation
        slots, devices = self._participation.capacity, len(setting.placement.devices)
        self.placement = place(slots, devices, even=False)
        self._setting = setting._replace(placement=self.placement, groups=(stack_of(slots, devices),))
        self._execution, self._federation = execution, federation
        self._ids = jax.device_put(np.asarray(federation.client_ids), self.placement.devices[0])
        self._draw = jax.jit(make_draw(self._participation))
        self._bounds = [rows.most(split, slots) for split in federation.splits]
        self._programs: dict[tuple[int, ...], _Programs] = {}

    def advance(
        self, run: int, state: RunState, values: RunValues, rounds: int, courier: Courier, take: rows.Take, write: Write
    ) -> tuple[RunState, dict[str, np.ndarray]]:
        """Train one run for some rounds.

        The courier runs its tasks in this order: stage 0, stage 1, write 0, stage 2, write 1, ... When a round is
        staged, the results of all earlier rounds have therefore been written, except for the round just before. The
        rows of that round are taken from the devices; see `streamed_round`.

        Args:
          run: index of the run.
          state: state of all runs, with the clients on the host.
          values: traced values of this run, leaves [1].
          rounds: number of rounds, at least 1.
          courier: thread that copies rows.
          take: function that reads rows of the clients' states.
          write: function that writes rows of the clients' states.

        Returns:
          The run's state after these rounds, leaves [1], without clients; and the history of its metrics, [rounds].
        """
        one = state._replace(clients=(), counts=None)
        one = jax.device_put(jax.tree.map(lambda a: a[run : run + 1], one), self.placement.everywhere)
        first, released = int(one.round[0]), jax.device_put(one.released[0], self.placement.devices[0])

        def stage(t: int) -> Future[Staged]:
            return courier.submit(self.stage, run, state.counts, released, first + t, take)

        staged = [stage(t) for t in range(min(rounds, 2))]
        written: list[Future[None]] = []
        history: list[Metrics] = []
        before, before_rows = None, np.zeros(0, np.int32)
        for t in range(rounds):
            here = staged.pop(0).result()
            source = jax.device_put(_places(here.rows, before_rows), self.placement.everywhere)
            start = one._replace(clients=(here.held.clients,), counts=here.held.counts)
            given = ((start, before or here.held), values, here.clients, here.drawn, source)
            end, metrics = self.program(given)(*given)
            history.append(metrics)
            before, before_rows = Held(end.clients[0], end.counts), here.rows
            one = end._replace(clients=(), counts=None)
            written.append(courier.submit(self._write, run, before_rows, before, write))
            if t + 2 < rounds:
                staged.append(stage(t + 2))
            while written and written[0].done():
                written.pop(0).result()  # raises a disk error of the writing thread
        for task in written:
            task.result()
        return one, {name: np.array([np.asarray(metrics[name])[0] for metrics in history]) for name in history[0]}

    def stage(self, run: int, counts: Counts, released: Array, round: int, take: rows.Take) -> Staged:
        """Draw a round's cohort, and copy the clients' states, counts and data to the devices."""
        drawn = self._draw(released, np.int32(round), self._ids)
        clients, slots = self._participation.num_clients, self._participation.capacity
        of = np.full(self.placement.rows, clients, np.int32)
        of[:slots] = np.asarray(drawn.rows)
        held = Held(take(run, of), rows.take(counts, run, of))
        train, validation = (
            rows.packed(split, of, rows.length_for(split, of, bound))
            for split, bound in zip(self._federation.splits, self._bounds, strict=True)
        )
        unread = rows.packed(self._federation.test, np.full_like(of, clients), 1)
        ids = np.asarray(self._federation.client_ids)[np.minimum(of, clients - 1)]
        places: Any = np.where(of[:slots] < clients, np.arange(slots), slots).astype(np.int32)
        among: Any = of[:slots]
        self._was_read((train, validation))
        everywhere, layout = self.placement.everywhere, self.placement.state
        return Staged(
            of,
            jax.device_put(jax.tree.map(lambda a: a[None], held), Held(layout.clients, layout.counts)),
            jax.device_put(Clients((Federation(ids, train, validation, unread),), among=among), everywhere),
            jax.device_put(Drawn(places, drawn.left_out), everywhere),
        )

    def _write(self, run: int, of: np.ndarray, held: Held, write: Write) -> None:
        real = of[of < self._participation.num_clients]
        write(run, real, jax.tree.map(lambda a: np.asarray(a)[0, : len(real)], held))

    def program(self, given: tuple[Any, ...]) -> jax.stages.Compiled:
        """Compiled program of a round, cached by the lengths of the splits' arrays."""
        lengths = tuple(len(split.examples.y) for split in given[2].federations[0].splits)
        programs = self._programs.setdefault(lengths, _Programs(self._setting, self._execution))
        return programs.made.get(("advance", 1)) or programs.get("advance", 1, given)

    def example(self, state: RunState, values: RunValues) -> tuple[Any, ...]:
        """Arguments of a round's program, taken from round 0 of the first run."""
        take = partial(rows.take, state.clients[0])
        here = self.stage(0, state.counts, jax.device_put(state.released[0], self.placement.devices[0]), 0, take)
        one = jax.tree.map(lambda a: a[:1], state._replace(clients=(), counts=None))
        one = jax.device_put(one, self.placement.everywhere)
        source = jax.device_put(_places(here.rows, np.zeros(0, np.int32)), self.placement.everywhere)
        start = one._replace(clients=(here.held.clients,), counts=here.held.counts)
        return (start, here.held), values, here.clients, here.drawn, source


class _Programs(Programs):
    """Programs of a round on the stack of a cohort's rows."""

    def function(self, name: Name, block: int) -> Callable[..., Any]:
        of = self._of
        plan = RoundPlan(of.participation, of.groups, block, of.placement.spread, of.availability)
        rounds = partial(over_runs, partial(streamed_round, part_used(of.algorithm, name), plan), vectorised=False)
        return traced_as(rounds, self.execution.form, self.execution.matmul, linear=self._linear(name))

    def options(self, name: Name, arguments: tuple[Any, ...]) -> dict[str, Any]:
        return {"out_shardings": (self._of.placement.state, self._of.placement.everywhere)}


def _places(of: np.ndarray, before: np.ndarray) -> np.ndarray:
    """Index of each row ``of`` among the previous cohort's rows ``before``; -1 if it is not among them. Both are
    sorted.
    """
    if not len(before):
        return np.full(len(of), -1, np.int32)
    at = np.minimum(np.searchsorted(before, of), len(before) - 1)
    return np.where(before[at] == of, at, -1).astype(np.int32)


_BYTES = 64 * 2**20
"""Largest number of bytes of a block's states and examples. Drawing initial states takes several times as much."""
_SPLITS = ("train", "validation", "test")
_READ = {"scores": _SPLITS, "start": ()}
"""Splits that a program reads. A program that is not listed reads the training and validation examples."""


class Blocks:
    """Programs that run over all clients of a federation that is stored on the host, not on the devices.

    They run on one block of clients after another. All blocks have the same number of rows.

    Attributes:
      placement: placement of a block's rows on the devices.
      programs: programs that run over one block.
    """

    def __init__(self, setting: Setting, execution: Resolved, federation: Federation, states: PyTree):
        """Choose the size of the blocks.

        Args:
          setting: static inputs of the programs, for all m clients.
          execution: resolved plan of a round.
          federation: data on the host.
          states: shapes of the clients' states, [S, m, ...].
        """
        devices, self._clients = len(setting.placement.devices), federation.num_clients
        self._federation = federation
        self._size = self._rows(setting.scoring.block * devices, states)
        self.placement = place(self._size, devices, even=False)
        groups = (stack_of(self._size, devices),)
        self.programs = Programs(setting._replace(placement=self.placement, groups=groups), execution)
        firsts = np.arange(0, self._clients, self._size)
        self._lengths = {
            name: max(int(np.add.reduceat(np.asarray(getattr(federation, name).size, np.int64), firsts).max()), 1)
            for name in _SPLITS
        }

    def _rows(self, step: int, states: PyTree) -> int:
        """Number of clients in a block: all if their arrays fit in `_BYTES`, otherwise a multiple of ``step``."""
        of_states = sum(int(np.prod(a.shape[2:])) * a.dtype.itemsize for a in jax.tree.leaves(states))
        splits = (getattr(self._federation, name) for name in _SPLITS)
        of_data = sum(trees.num_bytes(split.examples) for split in splits) / self._clients
        fitting = int(_BYTES / max(of_states + of_data, 1))
        return self._clients if fitting >= self._clients else max(fitting // step, 1) * step

    def all_rows(self) -> Iterator[np.ndarray]:
        """Yield the rows of the clients in each block, with m in unused rows."""
        for first in range(0, self._clients, self._size):
            of = np.full(self.placement.rows, self._clients, np.int32)
            last = min(first + self._size, self._clients)
            of[: last - first] = np.arange(first, last)
            yield of

    def data(self, of: np.ndarray, name: Name) -> Clients:
        """Copy the data of some clients to the devices. Splits that the program does not read get no examples."""
        ids = np.asarray(self._federation.client_ids)[np.minimum(of, self._clients - 1)]
        nobody, made = np.full_like(of, self._clients), {}
        for split in _SPLITS:
            whole: ClientData = getattr(self._federation, split)
            read = split in _READ.get(name, _SPLITS[:2])
            made[split] = rows.packed(whole, of if read else nobody, self._lengths[split] if read else 1)
        among: Any = of[: self._size]
        return jax.device_put(Clients((Federation(ids, **made),), among=among), self.placement.everywhere)

    def read(
        self,
        name: Name,
        run: int,
        one: RunState,
        counts: Counts,
        hp: PyTree,
        take: rows.Take,
        was_read: Callable[[PyTree], None],
    ) -> PyTree:
        """Results of a program for all clients of one run, leaves [1, m, ...], on the host.

        Args:
          name: name of the program.
          run: index of the run.
          one: state of this run without clients, leaves [1], on the devices.
          counts: counts of all runs, on the host.
          hp: hyper-parameters of this run, leaves [1].
          take: function that reads rows of the clients' states.
          was_read: function that is called with the copies of examples, after these were read.
        """
        layout = self.placement.state

        def bring(of: np.ndarray) -> tuple[int, RunState, Clients]:
            tree, own = jax.tree.map(lambda a: a[None], (take(run, of), rows.take(counts, run, of)))
            data = self.data(of, name)
            was_read(data)
            tree, own = jax.device_put(tree, layout.clients), jax.device_put(own, layout.counts)
            here = one._replace(clients=(tree,), counts=own)
            return int((of < self._clients).sum()), here, data

        parts = []
        for real, here, data in _one_ahead(bring, self.all_rows()):
            given = (here, hp, data)
            program = self.programs.made.get((name, 1)) or self.programs.get(name, 1, given)
            parts.append(jax.tree.map(lambda a, real=real: np.asarray(a)[:, :real], program(*given)))
        return jax.tree.map(lambda *a: np.concatenate(a, axis=1), *parts)

    def start(self, keys: PyTree, hp: PyTree) -> Iterator[tuple[np.ndarray, RunState]]:
        """Yield each block's rows, and one run's initial state with the clients of the block, leaves [1, ...]."""
        for of in self.all_rows():
            given = (keys, hp, self.data(of, "start"))
            state = self.programs.get("start", 1, given)(*given)
            real = of[of < self._clients]
            clients = jax.tree.map(lambda a, real=real: np.asarray(a)[:, : len(real)], state.clients)
            yield real, state._replace(clients=clients)


def _one_ahead(make: Callable[[np.ndarray], Any], given: Iterator[np.ndarray] | Sequence[np.ndarray]) -> Iterator[Any]:
    """``map(make, given)``, where a thread computes the next result while the caller uses the current one."""
    with Courier() as courier:
        coming: Future[Any] | None = None
        for one in itertools.chain(given, [None]):
            ready, coming = coming, None if one is None else courier.submit(make, one)
            if ready is not None:
                yield ready.result()

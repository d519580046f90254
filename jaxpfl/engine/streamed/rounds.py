"""Rounds of clients on the host: while one computes, the rows of the next cohort come and those of the last go back."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxpfl.core.types import Array, Federation, Metrics, PyTree
from jaxpfl.engine.execution_plan import Resolved
from jaxpfl.engine.placement import place
from jaxpfl.engine.programs import Name, Programs, Setting, part_used
from jaxpfl.engine.round import Clients, RoundPlan, RunValues
from jaxpfl.engine.runs import over_runs
from jaxpfl.engine.state import Counts, RunState
from jaxpfl.engine.streamed import examples, rows
from jaxpfl.engine.streamed.courier import Courier
from jaxpfl.engine.streamed.program import Drawn, Held, make_draw, make_streamed, stack_of

Write = Callable[[int, np.ndarray, Held], None]
"""``(run, rows, held)`` writes rows back; the held leaves are [rows, ...], on the host."""


class Staged(NamedTuple):
    """A cohort on its way: its rows of all clients [K'] (m where empty), and what the round is given of them."""

    rows: np.ndarray
    held: Held
    clients: Clients
    drawn: Drawn


class Rounds:
    """The rounds of a federation that stays on the host.

    Attributes:
      placement: of the cohort's rows.
    """

    def __init__(
        self, setting: Setting, execution: Resolved, federation: Federation, was_read: Callable[[PyTree], None]
    ):
        """Prepare the draw; the program of a round is compiled when it is first needed.

        Args:
          setting: of all clients, with the participation of all m.
          execution: the resolved plan of a round.
          federation: the data, on the host.
          was_read: called with copies of examples.
        """
        self._was_read = was_read
        self._participation = setting.participation
        slots, devices = self._participation.capacity, len(setting.placement.devices)
        self.placement = place(slots, devices, even=False)
        self._setting = setting._replace(placement=self.placement, groups=(stack_of(slots, devices),))
        self._execution, self._federation = execution, federation
        self._ids = jax.device_put(np.asarray(federation.client_ids), self.placement.devices[0])
        self._draw = jax.jit(make_draw(self._participation))
        self._bounds = [examples.most(split, slots) for split in federation.splits]
        self._programs: dict[tuple[int, ...], _Programs] = {}

    def advance(
        self, run: int, state: RunState, values: RunValues, rounds: int, courier: Courier, take: rows.Take, write: Write
    ) -> tuple[RunState, dict[str, np.ndarray]]:
        """Run some rounds of one run.

        The courier's tasks are done in turn: stage 0, stage 1, write 0, stage 2, write 1, ... What a stage reads is
        thus written but for the round before its own, whose rows come from the device.

        Args:
          run: its number.
          state: of all runs, the clients on the host.
          values: of this run, leaves [1].
          rounds: at least 1.
          courier: one thread.
          take: reads rows of the run's states.
          write: writes them back.

        Returns:
          The run's server, round and keys, leaves [1], without clients; and the history of its metrics, [rounds].
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
                written.pop(0).result()  # an error of the disk ends the run here
        for task in written:
            task.result()
        return one, {name: np.array([np.asarray(metrics[name])[0] for metrics in history]) for name in history[0]}

    def stage(self, run: int, counts: Counts, released: Array, round: int, take: rows.Take) -> Staged:
        """Draw a round's cohort, and bring its rows to the devices."""
        drawn = self._draw(released, np.int32(round), self._ids)
        clients, slots = self._participation.num_clients, self._participation.capacity
        of = np.full(self.placement.rows, clients, np.int32)
        of[:slots] = np.asarray(drawn.rows)
        held = Held(take(run, of), rows.take(counts, run, of))
        train, validation = (
            examples.packed(split, of, examples.length_for(split, of, bound))
            for split, bound in zip(self._federation.splits, self._bounds, strict=True)
        )
        unread = examples.packed(self._federation.test, np.full_like(of, clients), 1)
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
        """Program of a round for arguments with buffers of these lengths."""
        lengths = tuple(len(split.examples.y) for split in given[2].federations[0].splits)
        programs = self._programs.setdefault(lengths, _Programs(self._setting, self._execution))
        return programs.made.get(("advance", 1)) or programs.of("advance", 1, given)

    def example(self, state: RunState, values: RunValues) -> tuple[Any, ...]:
        """Arguments of a round's program, of the first run's first round."""
        take = partial(rows.take, state.clients[0])
        here = self.stage(0, state.counts, jax.device_put(state.released[0], self.placement.devices[0]), 0, take)
        one = jax.tree.map(lambda a: a[:1], state._replace(clients=(), counts=None))
        one = jax.device_put(one, self.placement.everywhere)
        source = jax.device_put(_places(here.rows, np.zeros(0, np.int32)), self.placement.everywhere)
        start = one._replace(clients=(here.held.clients,), counts=here.held.counts)
        return (start, here.held), values, here.clients, here.drawn, source


class _Programs(Programs):
    """The program of a round on the stack of a cohort's rows."""

    def _function(self, name: Name, block: int) -> Callable[..., Any]:
        of = self._of
        plan = RoundPlan(of.participation, of.groups, block, of.placement.spread, of.availability)
        return over_runs(make_streamed(part_used(of.algorithm, name), plan), vectorised=False)

    def options(self, name: Name, arguments: tuple[Any, ...]) -> dict[str, Any]:
        return {"out_shardings": (self._of.placement.state, self._of.placement.everywhere)}


def _places(of: np.ndarray, before: np.ndarray) -> np.ndarray:
    """Place of each row among those of the round before; -1 where it was not in that cohort. Both are sorted."""
    if not len(before):
        return np.full(len(of), -1, np.int32)
    at = np.minimum(np.searchsorted(before, of), len(before) - 1)
    return np.where(before[at] == of, at, -1).astype(np.int32)

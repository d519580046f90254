"""States of runs that successive halving has stopped at a rung, kept on the host for those that go on.

A run whose state is not here (of an earlier process, of another worker, private, or for lack of memory) begins anew,
with the same numbers.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxpfl.core import trees
from jaxpfl.engine import RunState, Simulation
from jaxpfl.runs.sweep.plan import Run
from jaxpfl.support import host_memory

_SHARE = 0.25
"""Largest share of the free memory of the host that one chunk's states may take."""


class Stopped(NamedTuple):
    """Runs at a rung, all at the same round.

    Attributes:
      state: of S runs, trimmed.
      rounds: that they have run.
      seconds: of each run so far, without compiling and of compiling.
    """

    state: RunState
    rounds: int
    seconds: tuple[float, float]


class States:
    """The stopped runs of this process."""

    def __init__(self) -> None:
        self._kept: dict[str, Stopped] = {}

    def keep(self, runs: Sequence[Run], simulation: Simulation, stopped: Stopped) -> None:
        """Keep the states of some runs, unless they are private or take too much memory."""
        free, state = host_memory.free(), stopped.state
        size = trees.num_bytes((state.clients, state.server, state.counts, state.in_flight))
        if state.noise is not None or (free is not None and size > _SHARE * free):
            return
        state = jax.device_put(simulation.trim(state), jax.devices("cpu")[0])
        for i, run in enumerate(runs):
            self._kept[run.id] = stopped._replace(state=jax.tree.map(lambda a, i=i: a[i : i + 1], state))

    def take(self, runs: Sequence[Run], simulation: Simulation) -> Stopped | None:
        """The state from which all of these runs go on, as the simulation wants it; None if it is not here."""
        found = [self._kept.get(run.id) for run in runs]
        kept = [one for one in found if one is not None]
        if len(kept) < len(runs) or len({one.rounds for one in kept}) > 1:
            return None
        state = jax.tree.map(lambda *rows: jnp.concatenate(rows), *(one.state for one in kept))
        spent, compiling = (sum(column) / len(kept) for column in zip(*(one.seconds for one in kept), strict=True))
        return Stopped(simulation.adopt(state), kept[0].rounds, (spent, compiling))

    def only(self, runs: Iterable[Run]) -> None:
        """Forget all other runs."""
        wanted = {run.id for run in runs}
        self._kept = {name: one for name, one in self._kept.items() if name in wanted}

"""Passes over all clients on the host, block by block; each block comes while the one before it computes."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from typing import Any

import jax
import numpy as np

from jaxpfl.core import trees
from jaxpfl.core.types import ClientData, Federation, PyTree
from jaxpfl.engine.execution_plan import Resolved
from jaxpfl.engine.placement import place
from jaxpfl.engine.programs import Name, Programs, Setting
from jaxpfl.engine.round import Clients
from jaxpfl.engine.state import Counts, RunState
from jaxpfl.engine.streamed import examples, rows
from jaxpfl.engine.streamed.courier import Courier
from jaxpfl.engine.streamed.program import stack_of

_BYTES = 64 * 2**20
"""Bytes of the states and examples of a block; first states take several times as much while they are drawn."""
_SPLITS = ("train", "validation", "test")
_READ = {"test": _SPLITS, "start": ()}
"""Splits that the work reads; the first two, unless it is named."""


class Blocks:
    """The clients of a federation on the host in blocks of equal numbers.

    Attributes:
      placement: of a block's rows.
      programs: those that run over a block.
    """

    def __init__(self, setting: Setting, execution: Resolved, federation: Federation, states: PyTree):
        """Choose the size of the blocks.

        Args:
          setting: of all clients, with the participation of all m.
          execution: the resolved plan of a round.
          federation: the data, on the host.
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
        """Clients of a block: all if they fit, else a multiple of ``step``."""
        of_states = sum(int(np.prod(a.shape[2:])) * a.dtype.itemsize for a in jax.tree.leaves(states))
        splits = (getattr(self._federation, name) for name in _SPLITS)
        of_data = sum(trees.num_bytes(split.examples) for split in splits) / self._clients
        fitting = int(_BYTES / max(of_states + of_data, 1))
        return self._clients if fitting >= self._clients else max(fitting // step, 1) * step

    def all_rows(self) -> Iterator[np.ndarray]:
        """Rows of the clients of each block; m in the places beyond the last."""
        for first in range(0, self._clients, self._size):
            of = np.full(self.placement.rows, self._clients, np.int32)
            last = min(first + self._size, self._clients)
            of[: last - first] = np.arange(first, last)
            yield of

    def data(self, of: np.ndarray, name: Name) -> Clients:
        """The data of some clients, on the devices; splits that the work does not read are without examples."""
        ids = np.asarray(self._federation.client_ids)[np.minimum(of, self._clients - 1)]
        nobody, made = np.full_like(of, self._clients), {}
        for split in _SPLITS:
            whole: ClientData = getattr(self._federation, split)
            read = split in _READ.get(name, _SPLITS[:2])
            made[split] = examples.packed(whole, of if read else nobody, self._lengths[split] if read else 1)
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
        """Results of a pass over the clients of one run, leaves [1, m, ...], on the host.

        Args:
          name: of the work.
          run: its number.
          one: its server, round and keys, leaves [1], on the devices.
          counts: of all runs, on the host.
          hp: of this run, leaves [1].
          take: reads rows of the run's states.
          was_read: called with copies of examples.
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
            program = self.programs.made.get((name, 1)) or self.programs.of(name, 1, given)
            parts.append(jax.tree.map(lambda a, real=real: np.asarray(a)[:, :real], program(*given)))
        return jax.tree.map(lambda *a: np.concatenate(a, axis=1), *parts)

    def start(self, keys: PyTree, hp: PyTree) -> Iterator[tuple[np.ndarray, RunState]]:
        """Rows of each block of clients, and one run's first state, leaves [1, ...], with these clients."""
        for of in self.all_rows():
            given = (keys, hp, self.data(of, "start"))
            state = self.programs.start(1, given)(*given)
            real = of[of < self._clients]
            clients = jax.tree.map(lambda a, real=real: np.asarray(a)[:, : len(real)], state.clients)
            yield real, state._replace(clients=clients)


def _one_ahead(make: Callable[[np.ndarray], Any], given: Iterator[np.ndarray] | Sequence[np.ndarray]) -> Iterator[Any]:
    """``map(make, given)``, each made in a thread while the one before it is used."""
    with Courier() as courier:
        coming: Future[Any] | None = None
        for one in itertools.chain(given, [None]):
            ready, coming = coming, None if one is None else courier.submit(make, one)
            if ready is not None:
                yield ready.result()

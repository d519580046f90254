"""Compiling ahead: a thread compiles the programs of the next methods while one runs."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, suppress
from dataclasses import replace
from typing import Literal

import jax

from jaxpfl.core.types import Federation
from jaxpfl.engine import Simulation
from jaxpfl.runs.setup import Experiment, require


class Ahead(AbstractContextManager["Ahead"]):
    """Simulations of an experiment's methods; after the first, the others' programs are compiled in a thread.

    It compiles what the run would compile, from the same seeds and data, which lie on the devices once. What fails
    there fails again, and is reported, when the method's turn comes. Leaving the context waits for the program that is
    being compiled.
    """

    def __init__(self, experiment: Experiment, methods: tuple[str, ...], last: str | None = None):
        """Prepare the simulations.

        Args:
          experiment: experiment with their data.
          methods: methods to compile ahead, in this order.
          last: method whose simulation is made last; the examples on the host are then freed.
        """
        self._experiment, self._names, self._last = experiment, methods, last
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="compile")
        self._made: dict[str, Future[Simulation]] = {}

    def __exit__(self, *error: object) -> None:
        self._thread.shutdown(wait=True, cancel_futures=True)

    def simulation(self, name: str) -> Simulation:
        """The simulation of a method; the first one starts the thread on the others."""
        made, simulation = self._made.pop(name, None), None
        if made is not None:
            with suppress(Exception):  # made again here, where errors and warnings are the run's
                simulation = made.result()
        if simulation is None:
            simulation = self._experiment.simulation(name)
        others = self._names[self._names.index(name) + 1 :] if name in self._names else ()
        if made is None and others:
            self._start(simulation, others)
        if name == self._last:
            self._experiment = self._experiment.described()
        return simulation

    def _start(self, simulation: Simulation, others: tuple[str, ...]) -> None:
        shared = simulation.shared_data()
        if shared is not None and _same_types(shared, self._experiment.federation):
            runs = {one: replace(run, federation=shared) for one, run in self._experiment.runs.items()}
            placed = self._experiment._replace(federation=shared, runs=runs)
            for other in others:
                self._made[other] = self._thread.submit(placed.simulation, other)
                self._thread.submit(self._compile, self._made[other])

    def _compile(self, made: Future[Simulation]) -> None:
        config = self._experiment.config
        splits: list[Literal["test", "validation", "unseen"]] = [*self._experiment.scored_splits]
        if self._experiment.unseen is not None:
            splits.append("unseen")
        with suppress(Exception):
            made.result().compile(range(config.seed, config.seed + require(config.seeds)), *splits)


def _same_types(one: Federation, other: Federation) -> bool:
    """True if placing the data changed no type: a private run's noise is named after their bytes."""
    return [leaf.dtype for leaf in jax.tree.leaves(one)] == [leaf.dtype for leaf in jax.tree.leaves(other)]

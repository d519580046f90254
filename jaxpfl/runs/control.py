"""Control of a run: rounds per call of the compiled program, Ctrl-C, early stopping, and compilation in a thread.

While one method runs, a thread compiles the programs of the next methods.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import replace
from typing import Any, Literal, Self

import jax
import numpy as np

from jaxpfl.core.types import Federation
from jaxpfl.engine import Simulation
from jaxpfl.engine.evaluate import chosen
from jaxpfl.engine.programs import LOADED, WAITED
from jaxpfl.runs.setup import Experiment, require
from jaxpfl.support import files, processes, signals
from jaxpfl.support.errors import JaxpflError


class Interrupted(Exception):
    """A run was stopped on request and can be resumed.

    Attributes:
      status: exit status of the process: 130 for Ctrl-C, 143 for SIGTERM.
    """

    def __init__(self, message: str, number: int):
        super().__init__(message)
        self.status = 128 + number


class Interrupt(ExitStack):
    """Context manager in which the first Ctrl-C (or SIGTERM) lets the run save its rounds before it stops.

    While ``saves`` is true, the first signal only sets ``asked``. A second signal, and any signal while ``saves`` is
    false, has its usual effect.

    Attributes:
      asked: number of the signal that requested the stop; None if there was no signal.
      saves: whether the run must save before it stops, because some rounds are, or soon will be, in no checkpoint.
    """

    def __init__(self) -> None:
        super().__init__()
        self.asked: int | None = None
        self.saves = False

    def __enter__(self) -> Self:
        self.enter_context(signals.offered(self._take))
        return self

    def stop_signal(self) -> int | None:
        """Return the number of a signal that asked some process of the run to stop; None if there was no signal.

        All processes must call this function together.
        """
        # Return the exchanged value, not `asked`, which may change at any moment: all processes must decide the same.
        asked = next((number for number in processes.exchange(self.asked) if number is not None), None)
        self.asked = self.asked or asked
        return asked

    def end_if_asked(self, said: str) -> None:
        """If a signal requested a stop, print ``said`` on standard error and end the process."""
        if self.asked is not None:
            print(said, file=sys.stderr)
            raise SystemExit(128 + self.asked)

    def _take(self, number: int) -> bool:
        if self.asked is not None or not self.saves:
            return False
        self.asked = number
        return True


class Reporter:
    """Interface for reporting the progress of a run or a sweep. The methods of this class do nothing."""

    def start(self, name: str, runs: int, rounds: int, done: int = 0) -> None:
        """Called when runs begin, or continue after ``done`` rounds; ``name`` names the method or the group of runs."""

    def progress(self, rounds: int, loss: float, score: float | None = None) -> None:
        """Called when ``rounds`` rounds are done, with the score of the last evaluation (None if there is none)."""

    def finish(self, runs: int) -> None:
        """Called when a sweep has recorded ``runs`` further runs."""

    def say(self, text: str) -> None:
        """Called with a message for the user."""


_SECONDS_PER_CALL = 1.0


class Pace:
    """Number of rounds in one call of the compiled program, chosen so that a call takes about a second.

    The same compiled program runs any number of rounds, so the choice does not affect the results.

    Args:
      most: maximum number of rounds in one call.
    """

    def __init__(self, most: int):
        self._most = most
        self._length = 1

    @contextmanager
    def call(self, rounds: int) -> Iterator[int]:
        """Yield the number of rounds of one call, at most ``rounds``, and time the call in the ``with`` block."""
        # All processes use the first process's number: their clocks differ, but they must run the same rounds.
        length, began = processes.exchange(min(self._length, rounds))[0], time.perf_counter()
        yield length
        fitting = length * _SECONDS_PER_CALL / max(time.perf_counter() - began, 1e-9)
        # The length at most doubles from call to call, because the first call's time includes compilation.
        self._length = int(min(max(fitting, 1), 2 * self._length, self._most))


class Patience:
    """Early stopping of one method: its validation scores so far, and whether its patience has run out.

    Args:
      experiment: experiment of the run, whose config sets ``patience``.
      name: name of the method.
      records: records of the run up to round ``done``.
      done: round from which the run continues.

    Raises:
      JaxpflError: if the record of an earlier evaluation is lost.
    """

    def __init__(self, experiment: Experiment, name: str, records: files.Records, done: int):
        config, self._headline = experiment.config, experiment.headline
        self._patience, self._scores = require(config.patience), []
        if done == require(config.rounds):
            return
        key = self._headline.validation

        def earlier() -> list[tuple[int, Any]]:
            own = [r for r in records.read() if r["kind"] == "evaluation" and r["method"] == name]
            return [(record["round"], record.get(key)) for record in own]

        found = dict(processes.on_first(earlier))
        for round in range(config.eval_every, done + 1, config.eval_every):
            if found.get(round) is None:
                raise JaxpflError(
                    f"{records.path} lacks the evaluation of {name} after round {round}, which patience requires: "
                    "start a new run"
                )
            self.add({key: found[round]})

    def add(self, record: dict[str, Any]) -> None:
        """Add the record of an evaluation."""
        self._scores.append(np.asarray(record[self._headline.validation], float))

    @property
    def over(self) -> bool:
        """True once the patience of every seed has run out."""
        if not self._scores:
            return False
        return bool(chosen(np.stack(self._scores), self._patience, lower=self._headline.lower).over.all())


_COMPILING = (
    "/jax/core/compile/jaxpr_trace_duration",
    "/jax/core/compile/jaxpr_to_mlir_module_duration",
    "/jax/core/compile/backend_compile_duration",
    LOADED,
    WAITED,
)


class CompileClock(ExitStack):
    """Context manager that measures how long this thread compiles or waits for another thread's compilation.

    Attributes:
      seconds: seconds measured so far.
    """

    def __init__(self) -> None:
        super().__init__()
        self.seconds, self._thread = 0.0, threading.get_ident()
        self._spans: list[tuple[float, float]] = []  # (start, seconds) of events that a later event may enclose

    def __enter__(self) -> Self:
        jax.monitoring.register_event_duration_secs_listener(self._hear_duration)
        self.callback(jax.monitoring.unregister_event_duration_listener, self._hear_duration)
        return self

    def _hear_duration(self, event: str, duration_secs: float, **_: Any) -> None:
        if event not in _COMPILING or threading.get_ident() != self._thread:
            return
        start, own = time.perf_counter() - duration_secs, duration_secs
        # Events enclosed in this one ended earlier and are counted already, so their seconds are subtracted.
        while self._spans and self._spans[-1][0] >= start:
            own -= self._spans.pop()[1]
        self._spans.append((start, duration_secs))
        self.seconds += max(0.0, own)


class Ahead(AbstractContextManager["Ahead"]):
    """Simulations of an experiment's methods; while the first method runs, a thread compiles the other programs.

    The thread compiles exactly the programs that the run needs, so it uses the run's seeds and data. The simulations
    share one copy of the data on the devices. A compilation error in the thread is ignored, because the same error
    occurs again, and is reported, when the method runs. Leaving the context waits for the program that is being
    compiled.
    """

    def __init__(self, experiment: Experiment, methods: tuple[str, ...], last: str | None = None):
        """Prepare the simulations.

        Args:
          experiment: experiment whose methods are simulated.
          methods: names of the methods, in the order in which a background thread compiles their programs.
          last: name of the method whose simulation is made last; the examples in host memory are freed afterwards.
        """
        self._experiment, self._names, self._last = experiment, methods, last
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="compile")
        self._made: dict[str, Future[Simulation]] = {}

    def __exit__(self, *error: object) -> None:
        self._thread.shutdown(wait=True, cancel_futures=True)

    def simulation(self, name: str) -> Simulation:
        """Return the simulation of a method; the first call starts the thread that compiles the later methods."""
        made, simulation = self._made.pop(name, None), None
        if made is not None:
            with suppress(Exception):  # made again below, where the run reports the error
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
        scores: list[Literal["scores", "unseen"]] = ["scores"]
        if self._experiment.unseen is not None:
            scores.append("unseen")
        with suppress(Exception):
            made.result().compile(range(config.seed, config.seed + require(config.seeds)), *scores)


def _same_types(one: Federation, other: Federation) -> bool:
    """Return whether the two federations have the same dtypes.

    A private run derives its noise from the bytes of the data, so placing the data on the devices must not change these
    bytes.
    """
    return [leaf.dtype for leaf in jax.tree.leaves(one)] == [leaf.dtype for leaf in jax.tree.leaves(other)]

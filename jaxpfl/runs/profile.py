"""Profile of a run: its seconds by phase, and a trace of a few rounds. It does not change the run's results."""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import jax

from jaxpfl.engine.compiled import LOADED, WAITED
from jaxpfl.runs.operations import Operation
from jaxpfl.runs.trace import Trace, Tracer
from jaxpfl.support import files

PHASES = ("data", "compile", "rounds", "evaluation", "checkpoints", "profiler", "host")
"""``data``: loading, splitting, placing, the first state; ``compile``: wherever it occurs, so that the other phases
exclude it; ``profiler``: the cost of the trace itself; ``host``: everything else."""

_COMPILE_PARTS = {
    "/jax/core/compile/jaxpr_trace_duration": "tracing",
    "/jax/core/compile/jaxpr_to_mlir_module_duration": "lowering",
    "/jax/core/compile/backend_compile_duration": "xla",
    LOADED: "loading",
    WAITED: "waiting",
}
_FROM_CACHE = "/jax/compilation_cache/cache_hits"


class CompileClock:
    """Seconds that this thread compiles, or waits for another that does, while the clock runs; a context manager.

    Args:
      hear: called with the part of compiling ("xla", say) and its seconds, each time that JAX reports one.

    Attributes:
      seconds: so far.
    """

    def __init__(self, hear: Callable[[str, float], None] | None = None) -> None:
        self.seconds = 0.0
        self._hear, self._thread = hear, threading.get_ident()
        self._spans: list[tuple[float, float]] = []  # (start, seconds) of events that an outer one may hold

    def __enter__(self) -> Self:
        jax.monitoring.register_event_duration_secs_listener(self._hear_duration)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        jax.monitoring.unregister_event_duration_listener(self._hear_duration)

    def _hear_duration(self, event: str, duration_secs: float, **_: Any) -> None:
        part = _COMPILE_PARTS.get(event)
        if part is None or threading.get_ident() != self._thread:
            return
        start, own = time.perf_counter() - duration_secs, duration_secs
        # What ended inside this event was counted when it ended.
        while self._spans and self._spans[-1][0] >= start:
            own -= self._spans.pop()[1]
        self._spans.append((start, duration_secs))
        own = max(0.0, own)
        self.seconds += own
        if self._hear is not None:
            self._hear(part, own)


class Profile:
    """Timer of a run's phases (data, rounds, evaluation, ...) that measures nothing; `Recorder` is one that does."""

    def phase(self, name: str) -> AbstractContextManager[None]:
        """Attribute the block to this phase, except for inner phases and compiling."""
        return nullcontext()

    def method(self, name: str, folder: Path) -> AbstractContextManager[None]:
        """Attribute the block to one method, run into a folder."""
        return nullcontext()

    def rounds(self, done: int, count: int) -> AbstractContextManager[None]:
        """Attribute the block to one call of ``count`` rounds, after ``done`` rounds."""
        return nullcontext()


OFF = Profile()


class Recorder(Profile):
    """A recording profile, from its creation to `report`; use it as a context manager.

    Every second is charged to the innermost open phase, so that the phases sum to the total. JAX reports compile times
    afterwards: those seconds are moved from their phase to ``compile``.
    """

    def __init__(self) -> None:
        self._clock = CompileClock(self._compiled)
        self._seconds: defaultdict[tuple[str, str], float] = defaultdict(float)  # (method or "", phase)
        self._compile = dict.fromkeys(_COMPILE_PARTS.values(), 0.0)
        self._programs = self._from_cache = 0
        self._phases, self._method = ["host"], ""
        self._tracers: dict[str, Tracer] = {}
        self._mark = self._began = time.perf_counter()

    def __enter__(self) -> Self:
        self._clock.__enter__()
        jax.monitoring.register_event_listener(self._hear_event)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._clock.__exit__(kind, error, trace)
        jax.monitoring.unregister_event_listener(self._hear_event)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        self._charge()
        self._phases.append(name)
        try:
            yield
        finally:
            self._charge()
            self._phases.pop()

    @contextmanager
    def method(self, name: str, folder: Path) -> Iterator[None]:
        self._charge()
        self._method = name
        self._tracers[name] = Tracer(folder / "profile" / name)
        try:
            yield
        finally:
            self._charge()
            self._method = ""

    @contextmanager
    def rounds(self, done: int, count: int) -> Iterator[None]:
        tracer = self._tracers[self._method]
        with self.phase("profiler"):
            tracer.start()
        try:
            with self.phase("rounds"):
                yield
        finally:
            with self.phase("profiler"):
                tracer.stop(done + 1, done + count)

    def report(self, folder: Path) -> dict[str, Any]:
        """Finish the profile, and write ``profile/phases.json`` and ``plots/profile.png`` into a run folder.

        Returns:
          The content of the JSON file: ``total`` seconds, ``phases`` (which sum to it), the same for each of
          ``methods``, ``compile`` by part, and the ``traces`` with their longest operations.
        """
        self._charge()
        result = {
            "total": self._mark - self._began,
            "phases": self._by_phase(*{method for method, _ in self._seconds}),
            "methods": {name: self._by_phase(name) for name in self._tracers},
            "compile": self._compile | {"programs": self._programs, "from_cache": self._from_cache},
            "traces": {name: _describe(tracer.trace, tracer.problem) for name, tracer in self._tracers.items()},
        }
        (folder / "profile").mkdir(exist_ok=True)
        files.write_json(folder / "profile" / "phases.json", result)
        from jaxpfl.runs.plots import write_profile

        bars = {"whole run": result["phases"]} | (result["methods"] if len(result["methods"]) > 1 else {})
        write_profile(folder / "plots", bars)
        return result

    def _charge(self) -> None:
        now = time.perf_counter()
        self._seconds[self._method, self._phases[-1]] += now - self._mark
        self._mark = now

    def _compiled(self, part: str, own: float) -> None:
        self._charge()
        # JAX measures by another clock; no phase may fall below zero for that.
        own = min(own, self._seconds[self._method, self._phases[-1]])
        self._compile[part] += own
        self._programs += part in ("xla", "loading")
        self._from_cache += part == "loading"
        self._seconds[self._method, self._phases[-1]] -= own
        self._seconds[self._method, "compile"] += own

    def _hear_event(self, event: str, **_: Any) -> None:
        self._from_cache += event == _FROM_CACHE

    def _by_phase(self, *methods: str) -> dict[str, float]:
        return {phase: sum(self._seconds.get((method, phase), 0.0) for method in methods) for phase in PHASES}


def _describe(trace: Trace | None, problem: str) -> dict[str, Any]:
    if trace is None:
        return {"problem": problem}
    total = sum(operation.seconds for operation in trace.operations) or 1.0
    kinds: defaultdict[str, float] = defaultdict(float)
    for operation in trace.operations:
        kinds[operation.kind] += operation.seconds / total

    def row(operation: Operation) -> dict[str, Any]:
        return operation._asdict() | {"share": operation.seconds / total}

    return {
        "folder": str(trace.folder),
        "rounds": [trace.first, trace.last],
        "seconds": trace.seconds,
        "whole": trace.whole,
        "kinds": dict(sorted(kinds.items(), key=lambda kind: -kind[1])),
        "operations": [row(operation) for operation in trace.operations[:30]],
    }

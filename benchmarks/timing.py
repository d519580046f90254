"""Time before the first round: tracing, lowering, XLA."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .worker import Contender

PHASES = {
    "/jax/core/compile/jaxpr_trace_duration": "trace",
    "/jax/core/compile/jaxpr_to_mlir_module_duration": "lower",
    "/jax/core/compile/backend_compile_duration": "xla",
}


class CompileSeconds:
    """Seconds of tracing, lowering and XLA (including reads of the persistent cache) since the last `take`."""

    def __init__(self) -> None:
        import jax.monitoring

        self._seconds = dict.fromkeys(PHASES.values(), 0.0)
        jax.monitoring.register_event_duration_secs_listener(self._add)

    def take(self) -> dict[str, float]:
        """Return the seconds of each phase and their ``total``, and start again from zero."""
        taken = dict(self._seconds)
        self._seconds = dict.fromkeys(self._seconds, 0.0)
        return taken | {"total": sum(taken.values())}

    def _add(self, event: str, duration_secs: float, **_: Any) -> None:
        if event in PHASES:
            self._seconds[PHASES[event]] += duration_secs


def with_compile_seconds(build: Callable[[], Contender]) -> Contender:
    """Return the contender from ``build``, with the compile seconds of building and of a first run as facts."""
    seconds = CompileSeconds()
    contender = build()
    start, first = seconds.take(), {}

    def run(rounds: int) -> None:
        contender.run(rounds)
        if not first:
            first.update(seconds.take())

    return Contender(run, lambda: {"start": start, "round": first} | contender.facts())

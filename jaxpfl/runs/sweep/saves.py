"""Saves of the chunk at work, so that one that is stopped goes on in its middle; where they fail it goes on without."""

from __future__ import annotations

from collections.abc import Callable

from jaxpfl.core.trees import num_bytes
from jaxpfl.engine import RunState, Simulation
from jaxpfl.runs.checkpoint import Unfinished
from jaxpfl.runs.sweep.states import Stopped
from jaxpfl.support.errors import JaxpflError, is_exhausted

_MOST_BYTES = 2**30
"""Largest state that is saved on its way; two are on disk at times."""


class Saves:
    """Saves of a chunk's runs.

    Args:
      kept: where they are; None to save nothing.
      simulation: of the runs.
      first: a state of the runs, for its size: large ones are not saved.
      say: receives what fails, in words.
    """

    def __init__(
        self, kept: Unfinished | None, simulation: Simulation, first: RunState, say: Callable[[str], None]
    ) -> None:
        size = num_bytes((first.clients, first.server, first.counts, first.in_flight))
        self._kept = None if size > _MOST_BYTES else kept
        self._simulation, self._say = simulation, say

    @property
    def due(self) -> bool:
        """True once it is time for the next one."""
        return self._kept is not None and self._kept.due

    def later(self, begin: Stopped, rounds: int) -> Stopped:
        """The runs as they were saved, if that is of a later round than where they would begin.

        Args:
          begin: where they would begin.
          rounds: of each run.
        """
        if self._kept is None:
            return begin
        try:
            state, done, seconds, _ = self._kept.restore(self._simulation, begin.state, (rounds,))
        except Exception as error:
            if not is_exhausted(error):
                raise
            self._say(f"what was saved on the way is not used: {error}")
            return begin
        return Stopped(state, done, (seconds, begin.seconds[1])) if done > begin.rounds else begin

    def save(self, state: RunState, done: int, seconds: float) -> None:
        """Save the state after ``done`` rounds, and the seconds of each run so far; nothing before the first round."""
        if self._kept is None or not done:
            return
        try:
            self._kept.save(self._simulation, state, done, seconds)
        except Exception as error:
            if not isinstance(error, JaxpflError | OSError) and not is_exhausted(error):
                raise
            self._say(f"not saved on the way: {error}")

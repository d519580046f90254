"""Runs that are not finished, kept beside the file that shall hold what is read from them."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxpfl import sealed
from jaxpfl.engine import RunState, Simulation
from jaxpfl.errors import JaxpflError, warn
from jaxpfl.experiment import checkpoint

_READ = "read.json"


class Unfinished:
    """A folder with the state of some runs, and what was read from them on the way.

    Runs of other settings, data or versions that it holds are not gone on with.
    """

    def __init__(self, path: Path, asked: Mapping[str, Any]):
        self._folder = path.with_suffix(".unfinished")
        self._asked = dict(asked)

    def save(
        self, simulation: Simulation, state: RunState, done: int, read: Sequence[Mapping[str, Any]], seconds: float
    ) -> None:
        """Save the state after ``done`` rounds, the seconds spent so far, and what was read before.

        Raises:
          JaxpflError: if it cannot be written.
        """
        # First, so that a state that is found has what was read before it.
        sealed.write(self._folder / _READ, {"asked": self._asked, "read": [dict(one) for one in read]})
        checkpoint.save(checkpoint.Checkpoints(self._folder), done, simulation, state, seconds)

    def restore(
        self, simulation: Simulation, first: RunState, stops: Sequence[int]
    ) -> tuple[RunState, int, list[dict[str, Any]], float]:
        """The last state that was saved, its round, what was read before it, and the seconds spent; ``first`` and
        nothing where there is none.

        Args:
          simulation: of the runs.
          first: their initial state.
          stops: rounds after which something is read, the last of which is the runs' last.
        """
        if not (self._folder / _READ).exists():
            return first, 0, [], 0.0
        try:
            found = sealed.read(self._folder / _READ)
            if found["asked"] != self._asked:
                raise JaxpflError(f"{self._folder} is of other settings, data or another version")
            own = checkpoint.Checkpoints(self._folder)
            state, seconds = checkpoint.restore(own, simulation, first, stops[-1], warn)
            done = int(state.round[0])
            before = sum(stop <= done for stop in stops)
            if len(found["read"]) < before:
                raise JaxpflError(f"{self._folder} lacks what was read before round {done}")
        except JaxpflError as error:
            warn(f"{error}: its runs begin anew")
            self.remove()
            return first, 0, [], 0.0
        return state, done, found["read"][:before], seconds

    def remove(self) -> None:
        """Delete what is kept."""
        shutil.rmtree(self._folder, ignore_errors=True)

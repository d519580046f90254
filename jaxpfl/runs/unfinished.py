"""Runs that are not finished, kept in a folder until what is read from them is."""

from __future__ import annotations

import functools
import hashlib
import json
import shutil
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from jaxpfl import __version__
from jaxpfl.support import files, sealed
from jaxpfl.engine import RunState, Simulation
from jaxpfl.support.errors import JaxpflError, warn
from jaxpfl.runs import checkpoint

_READ = "read.json"
_SECONDS = 60.0
"""Between two saves at least: what a kill loses."""
_REST = 20
"""Times that a save took until the next one, so that saves of large states take a twentieth of the time at most."""


class Unfinished:
    """A folder with the state of some runs, and what was read from them on the way.

    Runs of other settings, data or versions that it holds are not gone on with.
    """

    def __init__(self, folder: Path, asked: Mapping[str, Any]):
        self._folder = folder
        self._asked = {**asked, "jaxpfl": __version__}
        self._next = time.monotonic() + _SECONDS

    @classmethod
    def within(cls, folder: Path, asked: Mapping[str, Any]) -> Self:
        """The runs of these settings, beside others in the same folder."""
        text = json.dumps(files.jsonable(dict(asked)), sort_keys=True)
        return cls(folder / hashlib.sha256(text.encode()).hexdigest()[:16], asked)

    @property
    def due(self) -> bool:
        """True once enough time has passed for the next save."""
        return time.monotonic() >= self._next

    @functools.cached_property
    def _checkpoints(self) -> checkpoint.Checkpoints:
        return checkpoint.Checkpoints(self._folder, resumed=False)

    def save(
        self,
        simulation: Simulation,
        state: RunState,
        done: int,
        seconds: float,
        read: Sequence[Mapping[str, Any]] = (),
    ) -> None:
        """Save the state after ``done`` rounds, the seconds spent so far, and what was read before.

        Raises:
          JaxpflError: if it cannot be written.
        """
        began = time.monotonic()
        try:
            # First, so that a state that is found has what was read before it.
            sealed.write(self._folder / _READ, {"asked": self._asked, "read": [dict(one) for one in read]})
            checkpoint.save(self._checkpoints, done, simulation, state, seconds)
        finally:  # a disk that is full is not tried again at once
            now = time.monotonic()
            self._next = now + max(_SECONDS, _REST * (now - began))

    def restore(
        self, simulation: Simulation, first: RunState, stops: Sequence[int]
    ) -> tuple[RunState, int, float, list[dict[str, Any]]]:
        """The last state that was saved, its round, the seconds spent, and what was read before it; ``first`` and
        nothing where there is none.

        Args:
          simulation: of the runs.
          first: their initial state.
          stops: rounds after which something is read, the last of which is the runs' last.
        """
        if not (self._folder / _READ).exists():
            return first, 0, 0.0, []
        try:
            found = sealed.read(self._folder / _READ)
            if found.get("asked") != files.jsonable(self._asked):
                raise JaxpflError(f"{self._folder} is of other settings, data, versions or devices")
            state, seconds = checkpoint.restore(self._checkpoints, simulation, first, stops[-1], warn)
            done = int(state.round[0])
            before = sum(stop <= done for stop in stops)
            if len(found["read"]) < before:
                raise JaxpflError(f"{self._folder} lacks what was read before round {done}")
        except JaxpflError as error:
            warn(f"{error}: its runs begin anew")
            self.remove()
            return first, 0, 0.0, []
        return state, done, seconds, found["read"][:before]

    def remove(self) -> None:
        """Delete what is kept."""
        self.__dict__.pop("_checkpoints", None)  # it knows which rounds there are
        shutil.rmtree(self._folder, ignore_errors=True)

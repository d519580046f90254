"""Checkpoints of one method's state, by orbax, written atomically with checksums; two are kept.

``checkpoints/METHOD/ROUND`` holds ``state`` (orbax's files) and ``SHA256SUMS``, written before it gets its name."""

from __future__ import annotations

import functools
import hashlib
import json
import logging
import os
import re
import shutil
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np

from jaxpfl import __version__
from jaxpfl.data.sources.base import one_line
from jaxpfl.engine import RunState, Simulation
from jaxpfl.engine.state import keyless
from jaxpfl.support import files, processes
from jaxpfl.support.errors import JaxpflError, warn
from jaxpfl.support.output_paths import discard_late, partial

_KEPT = 2
_STATE = "state"


def _report_unraisable(unraisable: sys.UnraisableHookArgs) -> None:
    """Report all but what the threads of a failed save say after the save has been reported."""
    if str(unraisable.exc_value) != "Event loop is closed":
        sys.__unraisablehook__(unraisable)


class Checkpoints:
    """The checkpoints of one method in a run folder.

    Args:
      folder: folder that holds them.
      resumed: whether ``--resume`` continues from them, which errors then mention.
    """

    def __init__(self, folder: Path, *, resumed: bool = True):
        import orbax.checkpoint as ocp

        # orbax logs every step of a save, and the traceback if one fails; a run reports both itself.
        for name in ("absl", "asyncio"):
            logging.getLogger(name).setLevel(logging.CRITICAL)
        if sys.unraisablehook is sys.__unraisablehook__:
            sys.unraisablehook = _report_unraisable
        self._ocp = ocp
        # Only one of several processes writes and reads.
        alone: dict[str, Any] = {}
        if processes.several():
            own = {processes.index()}
            options = ocp.options.MultiprocessingOptions(
                primary_host=processes.index(), active_processes=own, barrier_sync_key_prefix="jaxpfl"
            )
            alone = {"multiprocessing_options": options}
        self._orbax = ocp.Checkpointer(ocp.StandardCheckpointHandler(**alone), **alone)
        self._folder = folder.absolute()
        self._resumed = resumed
        self._latest: int | None = None

    def rounds(self) -> list[int]:
        """Rounds of all checkpoints, intact or damaged, latest first; other files are ignored."""
        if not self._folder.is_dir():
            return []
        names = (path.name for path in self._folder.iterdir() if path.is_dir())
        return sorted((int(name) for name in names if re.fullmatch("0|[1-9][0-9]{0,17}", name)), reverse=True)

    def save(self, round: int, state: RunState, seconds: float) -> None:
        """Save the state after ``round`` rounds, and the seconds spent so far, unless saved already.

        Raises:
          JaxpflError: if it cannot be written, for example on a full disk; the previous one stays.
        """
        if round == self._latest:
            return
        target = self._folder / str(round)
        tree = {"state": keyless(state), "seconds": np.float64(seconds)}
        try:
            with partial(target) as place:
                place.mkdir(parents=True)
                self._orbax.save(place / _STATE, args=self._ocp.args.StandardSave(tree))
                files.write_checksums(place)
                if target.exists():  # a damaged one, which `restore` skipped
                    shutil.rmtree(target)
        except Exception as error:  # orbax raises whatever its parts do
            discard_late(target)
            remedy = "; --resume continues from the previous one" if self._resumed else ""
            raise JaxpflError(
                f"cannot write the checkpoint of round {round} to {self._folder}: {_reason(error)}{remedy}"
            ) from None
        self._latest = round
        for old in [known for known in self.rounds() if known < round][_KEPT - 1 :]:
            shutil.rmtree(self._folder / str(old), ignore_errors=True)

    def keep_only(self, round: int) -> None:
        """Delete the checkpoints of all other rounds."""
        for other in self.rounds():
            if other != round:
                shutil.rmtree(self._folder / str(other), ignore_errors=True)

    def restore(self, like: RunState, most: int, say: Callable[[str], None]) -> tuple[RunState, float]:
        """Restore the latest intact checkpoint, or ``like`` itself if there is none at all.

        A damaged one (flipped bits, a copied folder) is reported and skipped: the run continues from the one before,
        with the same results, and writes it again.

        Args:
          like: a state of the same shapes, such as the initial one.
          most: rounds of the run.
          say: called with messages about damaged checkpoints.

        Returns:
          The state, and the seconds spent until it was saved.

        Raises:
          JaxpflError: if there are checkpoints, and none of them is intact.
        """
        problems: list[str] = []
        for round in self.rounds():
            if round > most:
                problems.append(f"the checkpoint of round {round} is beyond the run's {most} rounds")
                continue
            try:
                found = self.read(round, like)
            except JaxpflError as error:
                problems.append(str(error))
                continue
            if problems:
                say(f"{'; '.join(problems)}: continuing from round {round}")
            self._latest = round
            return found
        if problems:
            remedy = f": delete {self._folder}, then --resume starts the method again" if self._resumed else ""
            raise JaxpflError(f"{'; '.join(problems)}{remedy}")
        return like, 0.0

    def read(self, round: int, like: RunState) -> tuple[RunState, float]:
        """Read the checkpoint of one round: its state, and the seconds spent until it was saved.

        Raises:
          JaxpflError: if it is damaged or cannot be read.
        """
        place = self._folder / str(round)
        try:
            files.check_checksums(place)
        except JaxpflError as error:
            raise JaxpflError(f"the checkpoint of round {round} cannot be used ({error})") from None
        # With today's placement: it may have been saved from devices that this machine lacks.
        abstract = jax.tree.map(_abstract, like)
        wanted = self._ocp.args.StandardRestore({"state": abstract, "seconds": np.float64(0)})
        try:
            tree = self._orbax.restore(place / _STATE, args=wanted)
        except Exception as error:  # orbax raises whatever its parts do
            raise JaxpflError(f"the checkpoint of round {round} cannot be read ({_reason(error)})") from None
        state = jax.tree.map(_typed, tree["state"], like)
        if (found := int(np.ravel(state.round)[0])) != round:
            raise JaxpflError(f"the checkpoint of round {round} cannot be used (it holds round {found})")
        return state, float(tree["seconds"])


def save(checkpoints: Checkpoints | None, round: int, simulation: Simulation, state: RunState, seconds: float) -> None:
    """Save the state of a simulation's runs, by the first process alone; see `Checkpoints.save`."""
    whole = simulation.gather(state) if processes.several() else simulation.checkpointed(state)
    simulation.prepare(round)

    def write() -> None:
        assert checkpoints is not None
        assert whole is not None
        checkpoints.save(round, whole, seconds)

    processes.on_first(write)
    simulation.commit(round)


def restore(
    checkpoints: Checkpoints | None, simulation: Simulation, first: RunState, most: int, say: Callable[[str], None]
) -> tuple[RunState, float]:
    """Restore the runs of a simulation from the latest intact checkpoint; see `Checkpoints.restore`.

    Args:
      checkpoints: checkpoints of the first process; None in the others.
      simulation: simulation to restore, on any number of devices and processes.
      first: its first state, returned if there is no checkpoint.
      most: number of rounds of the run.
      say: called with messages about damaged checkpoints.
    """
    if not processes.several():
        assert checkpoints is not None
        # The stored state does not depend on the devices: a run may continue with more or fewer of them.
        state, seconds = checkpoints.restore(simulation.checkpointed(first), most, say)
        return simulation.adopt(state), seconds
    found: list[RunState] = []
    runs = first.round.shape[0]

    def read() -> tuple[bool, float]:
        assert checkpoints is not None
        here = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
        like = jax.tree.map(
            lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=here), simulation.trimmed_shapes(runs)
        )
        state, seconds = checkpoints.restore(like, most, say)
        if state is not like:
            found.append(jax.tree.map(np.asarray, keyless(state)))
        return bool(found), seconds

    there, seconds = processes.on_first(read)
    return simulation.scatter(found[0] if found else None, runs) if there else first, seconds


def _abstract(like: Any) -> Any:
    """Shape, type and placement as stored: of the data of a key, which every checkpoint reader supports."""
    if isinstance(like, np.ndarray):
        return like
    stored = jax.eval_shape(jax.random.key_data, like) if _is_key(like) else like
    return jax.ShapeDtypeStruct(stored.shape, stored.dtype, sharding=like.sharding)


def _typed(found: Any, like: Any) -> Any:
    if isinstance(like, np.ndarray):
        return np.asarray(found)
    return jax.device_put(jax.random.wrap_key_data(jnp.asarray(found)) if _is_key(like) else found, like.sharding)


def _is_key(leaf: Any) -> bool:
    return jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _reason(error: Exception) -> str:
    """The operating system's reason if there is one, else the message in a line."""
    code = re.search(r"os_error_code='(\d+)'", str(error))  # as tensorstore writes it
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return os.strerror(int(code[1])) if code else one_line(error)


_READ = "read.json"
_SECONDS = 60.0
"""Least time between two saves, and thus the work that a kill loses."""
_REST = 20
"""Least time between two saves in multiples of the last save's duration: saving takes at most a twentieth."""


class Unfinished:
    """A folder with the state of some runs, and what was read from them on the way.

    Stored runs with other settings, data or versions are not continued.
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
    def _checkpoints(self) -> Checkpoints:
        return Checkpoints(self._folder, resumed=False)

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
            # Written first, so that a stored state always has what was read before it.
            files.write_checksummed(self._folder / _READ, {"asked": self._asked, "read": [dict(one) for one in read]})
            save(self._checkpoints, done, simulation, state, seconds)
        finally:  # a full disk is not tried again at once
            now = time.monotonic()
            self._next = now + max(_SECONDS, _REST * (now - began))

    def restore(
        self, simulation: Simulation, first: RunState, stops: Sequence[int]
    ) -> tuple[RunState, int, float, list[dict[str, Any]]]:
        """The last state that was saved, its round, the seconds spent, and what was read before it; ``first`` and
        nothing where there is none.

        Args:
          simulation: simulation of the runs.
          first: initial state of the runs.
          stops: rounds after which something is read, up to the runs' last round.
        """
        if not (self._folder / _READ).exists():
            return first, 0, 0.0, []
        try:
            found = files.read_checksummed(self._folder / _READ)
            if found.get("asked") != files.jsonable(self._asked):
                raise JaxpflError(f"{self._folder} was saved with other settings, data, versions or devices")
            state, seconds = restore(self._checkpoints, simulation, first, stops[-1], warn)
            done = int(state.round[0])
            before = sum(stop <= done for stop in stops)
            if len(found["read"]) < before:
                raise JaxpflError(f"{self._folder} lacks the results before round {done}")
        except JaxpflError as error:
            warn(f"{error}: its runs start again")
            self.remove()
            return first, 0, 0.0, []
        return state, done, seconds, found["read"][:before]

    def remove(self) -> None:
        """Delete the stored state."""
        self.__dict__.pop("_checkpoints", None)  # it knows which rounds there are
        shutil.rmtree(self._folder, ignore_errors=True)

"""Checkpoints of one method's state, written with orbax and protected by checksums.

The latest two checkpoints are kept. The folder ``checkpoints/METHOD/ROUND`` contains ``state`` (orbax's files) and
``SHA256SUMS``. The folder is written under a temporary name and renamed when it is complete."""

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
from jaxpfl.support.errors import JaxpflError, warn, writing
from jaxpfl.support.output_paths import discard_late, partial

_KEPT = 2
_STATE = "state"


def _report_unraisable(unraisable: sys.UnraisableHookArgs) -> None:
    """Report an unraisable exception, unless it comes from orbax's threads after a save has failed.

    The failed save itself raises an error in the main thread.
    """
    if str(unraisable.exc_value) != "Event loop is closed":
        sys.__unraisablehook__(unraisable)


class Checkpoints:
    """The checkpoints of one method in a run folder.

    Args:
      folder: folder of the checkpoints.
      resumed: whether ``--resume`` can continue from the checkpoints; if so, error messages mention the flag.
    """

    def __init__(self, folder: Path, *, resumed: bool = True):
        import orbax.checkpoint as ocp

        # orbax logs every step of a save, and a traceback if a save fails; the run reports progress and errors itself.
        for name in ("absl", "asyncio"):
            logging.getLogger(name).setLevel(logging.CRITICAL)
        if sys.unraisablehook is sys.__unraisablehook__:
            sys.unraisablehook = _report_unraisable
        self._ocp = ocp
        # With several processes, only one of them writes and reads checkpoints, so orbax must not wait for the others.
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
        """Return the rounds that have a checkpoint, intact or damaged, latest first."""
        if not self._folder.is_dir():
            return []
        names = (path.name for path in self._folder.iterdir() if path.is_dir())
        return sorted((int(name) for name in names if re.fullmatch("0|[1-9][0-9]{0,17}", name)), reverse=True)

    def save(self, round: int, state: RunState, seconds: float) -> None:
        """Save the state after ``round`` rounds and the seconds spent so far.

        Nothing is written if the last checkpoint that this object saved or restored is of this round.

        Raises:
          JaxpflError: if the checkpoint cannot be written, for example on a full disk; the previous checkpoint is kept.
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
                if target.exists():  # a damaged checkpoint, which `restore` skipped
                    shutil.rmtree(target)
        except Exception as error:  # orbax raises exceptions of many types
            discard_late(target)
            remedy = "; --resume continues from the previous one" if self._resumed else ""
            raise JaxpflError(
                f"cannot write the checkpoint of round {round} to {self._folder}: {_reason(error)}{remedy}"
            ) from None
        self._latest = round
        for old in [known for known in self.rounds() if known < round][_KEPT - 1 :]:
            shutil.rmtree(self._folder / str(old), ignore_errors=True)

    def keep_only(self, round: int) -> None:
        """Delete all checkpoints, complete or not, except the checkpoint of ``round``.

        Raises:
          UnwritableError: if a checkpoint cannot be deleted.
        """
        for other in self._folder.iterdir():
            if other.name != str(round) and other.is_dir() and not other.is_symlink():
                with writing(other):
                    shutil.rmtree(other)

    def restore(self, like: RunState, most: int, say: Callable[[str], None]) -> tuple[RunState, float]:
        """Restore the latest intact checkpoint, or return ``like`` itself if the folder has no checkpoints.

        A checkpoint whose files were damaged or come from another checkpoint is reported and skipped. The run then
        continues from the previous checkpoint, reaches the same results, and replaces the damaged checkpoint.

        Args:
          like: state with the shapes to restore, such as the initial state.
          most: number of rounds of the run; checkpoints of later rounds are skipped.
          say: function called with a message about the skipped checkpoints.

        Returns:
          The state, and the seconds spent until it was saved.

        Raises:
          JaxpflError: if there are checkpoints but none of them can be used.
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
        """Read the checkpoint of one round: the state, and the seconds spent until it was saved.

        Raises:
          JaxpflError: if the checkpoint is damaged or cannot be read.
        """
        place = self._folder / str(round)
        try:
            files.check_checksums(place)
        except JaxpflError as error:
            raise JaxpflError(f"the checkpoint of round {round} cannot be used ({error})") from None
        # Restore to the devices of `like`, because this machine may lack the devices from which the state was saved.
        abstract = jax.tree.map(_abstract, like)
        wanted = self._ocp.args.StandardRestore({"state": abstract, "seconds": np.float64(0)})
        try:
            tree = self._orbax.restore(place / _STATE, args=wanted)
        except Exception as error:  # orbax raises exceptions of many types
            raise JaxpflError(f"the checkpoint of round {round} cannot be read ({_reason(error)})") from None
        state = jax.tree.map(_typed, tree["state"], like)
        if (found := int(np.ravel(state.round)[0])) != round:
            raise JaxpflError(f"the checkpoint of round {round} cannot be used (it contains round {found})")
        return state, float(tree["seconds"])


def save(checkpoints: Checkpoints | None, round: int, simulation: Simulation, state: RunState, seconds: float) -> None:
    """Save the state of a simulation's runs; only the first process writes (see `Checkpoints.save`)."""
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
      checkpoints: the method's checkpoints in the first process; None in the other processes.
      simulation: simulation to restore; its numbers of devices and processes may differ from the saved run's.
      first: initial state of the simulation, returned if there is no checkpoint.
      most: number of rounds of the run.
      say: function called with a message about the skipped checkpoints.
    """
    if not processes.several():
        assert checkpoints is not None
        # The stored state does not depend on the number of devices, so a run may continue with more or fewer.
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
    """Return the shape, dtype and placement of the leaf ``like`` as it is stored; a NumPy array is returned unchanged.

    A key is stored as its raw data, because not every reader of checkpoints supports JAX's key types.
    """
    if isinstance(like, np.ndarray):
        return like
    stored = jax.eval_shape(jax.random.key_data, like) if _is_key(like) else like
    return jax.ShapeDtypeStruct(stored.shape, stored.dtype, sharding=like.sharding)


def _typed(found: Any, like: Any) -> Any:
    """Convert a stored leaf to the type of ``like``: a NumPy array, or a key or JAX array with the same placement."""
    if isinstance(like, np.ndarray):
        return np.asarray(found)
    return jax.device_put(jax.random.wrap_key_data(jnp.asarray(found)) if _is_key(like) else found, like.sharding)


def _is_key(leaf: Any) -> bool:
    return jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _reason(error: Exception) -> str:
    """Return the operating system's reason if there is one, else the error's message on one line."""
    code = re.search(r"os_error_code='(\d+)'", str(error))  # as tensorstore writes it
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return os.strerror(int(code[1])) if code else one_line(error)


_READ = "read.json"
_SECONDS = 60.0
"""Minimum number of seconds between two saves. Unless saving is slow, a killed run loses about this much work."""
_REST = 20
"""Minimum time between two saves, in multiples of the last save's duration: saving takes at most 1/20 of the time."""


class Unfinished:
    """A folder with the state of unfinished runs, and the results of these runs so far.

    Stored runs are resumed only if their settings, data, versions and devices match the current ones.

    Args:
      folder: folder of the stored state.
      asked: settings, data, versions and devices that identify the runs.
    """

    def __init__(self, folder: Path, asked: Mapping[str, Any]):
        self._folder = folder
        self._asked = {**asked, "jaxpfl": __version__}
        self._next = time.monotonic() + _SECONDS

    @classmethod
    def within(cls, folder: Path, asked: Mapping[str, Any]) -> Self:
        """Return the unfinished runs with these settings, stored in a subfolder of ``folder`` named by their hash."""
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
        """Save the state after ``done`` rounds, the seconds spent so far, and the results recorded so far.

        Raises:
          JaxpflError: if the files cannot be written.
        """
        began = time.monotonic()
        try:
            # The results are written first, so that a stored state never lacks the results of earlier rounds.
            files.write_checksummed(self._folder / _READ, {"asked": self._asked, "read": [dict(one) for one in read]})
            save(self._checkpoints, done, simulation, state, seconds)
        finally:  # also after an error, so that a full disk is not tried again immediately
            now = time.monotonic()
            self._next = now + max(_SECONDS, _REST * (now - began))

    def restore(
        self, simulation: Simulation, first: RunState, stops: Sequence[int]
    ) -> tuple[RunState, int, float, list[dict[str, Any]]]:
        """Return the last saved state, its round, the seconds spent until then, and the results recorded until then.

        If no usable state is stored, the state is ``first``, the round and the seconds are 0, and there are no results.
        Files that cannot be used are deleted with a warning.

        Args:
          simulation: simulation of the runs.
          first: initial state of the runs.
          stops: rounds after which results are recorded, in increasing order; the last is the runs' last round.
        """
        if not (self._folder / _READ).exists():
            return first, 0, 0.0, []
        try:
            found = files.read_checksummed(self._folder / _READ)
            if found.get("asked") != files.jsonable(self._asked):
                raise JaxpflError(f"{self._folder} was saved with different settings, data, versions or devices")
            state, seconds = restore(self._checkpoints, simulation, first, stops[-1], warn)
            done = int(state.round[0])
            before = sum(stop <= done for stop in stops)
            if len(found["read"]) < before:
                raise JaxpflError(f"{self._folder} lacks results of evaluations up to round {done}")
        except JaxpflError as error:
            warn(f"{error}: its runs start again from round 0")
            self.remove()
            return first, 0, 0.0, []
        return state, done, seconds, found["read"][:before]

    def remove(self) -> None:
        """Delete the stored state."""
        self.__dict__.pop("_checkpoints", None)  # the cached object remembers which round it saved last
        shutil.rmtree(self._folder, ignore_errors=True)

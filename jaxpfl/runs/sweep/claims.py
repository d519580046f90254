"""Claims of workers on named pieces of work, in a folder that they share, on one machine or several.

The claim on a piece of work is a file ``NAME.GENERATION.claim``. Only one process can create a file, also on a network
file system, so only one has each generation; the claim that stands is the latest one. Its holder rewrites it with a
higher count every few seconds. Who wants it watches what it holds, on a monotonic clock of its own, because the clocks
of two machines differ and jump: a claim that has not changed for the lease is taken over, by creating the next
generation. An ended claim is free at once, and so is one of a dead process of the same machine.

A holder that was suspended for longer than the lease loses its claim without knowing. It writes to its own file alone,
never to the next generation's, and can ask whether it lost the claim. What it publishes between asking and writing is
published twice, so this must do no harm: records of a sweep are named by their content, are equal, and count once.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self

from jaxpfl.support import files
from jaxpfl.support.errors import JaxpflError, UnwritableError, shown
from jaxpfl.runs.sweep import processes

LEASE = 60.0
"""Seconds without a sign of life after which a claim is lost."""

_BEATS = 6  # signs of life in a lease
_LOOKS = 4  # the fewest looks at a claim in a lease before it is taken over
_MOST_BYTES = 4096  # of a claim; a file of that name may be anything


@dataclass(frozen=True)
class Holder:
    """Contents of a claim.

    Attributes:
      worker: name of the worker.
      host: name of its machine, for people.
      machine: identity of its machine, empty where unknown (see `processes.machine`).
      pid: number of its process.
      started: start of its process, where known.
      beat: count of the signs of life.
      ended: whether the holder has let go.
    """

    worker: str
    host: str
    machine: str
    pid: int
    started: int | None
    beat: int = 0
    ended: bool = False

    @property
    def is_dead(self) -> bool:
        """True if the holder is known to be dead; nothing is known about another machine's."""
        here = self.machine != "" and self.machine == processes.machine()
        return here and not processes.is_alive(self.pid, self.started)


class Claims:
    """The claims in a folder, as one worker sees them.

    Args:
      folder: of the claims; made with the first one.
      worker: name of the worker.
      lease: seconds after which a claim that does not change is taken over; the same for all workers.
      clock: seconds that never run backwards.
    """

    def __init__(self, folder: Path, worker: str, *, lease: float = LEASE, clock: Callable[[], float] = time.monotonic):
        self.folder, self.worker, self.lease = folder, worker, lease
        self._clock = clock
        self._watches: dict[str, _Watch] = {}

    def take(self, name: str) -> Claim | None:
        """Claim a piece of work if it is free, without waiting.

        A claim of another worker's is watched by calling again, several times in a lease.

        Args:
          name: of the work; a file name.

        Returns:
          The claim, or None while another worker holds it.

        Raises:
          JaxpflError: for a name that is no file name.
          UnwritableError: if the folder cannot be written.
        """
        if not name or name.startswith(".") or {"/", "\0", os.sep} & set(name):
            raise JaxpflError(f"a claim needs a name that a file can have, got {shown(name)}")
        generation = self.tries(name)
        if generation and not self._is_free(name, generation - 1):
            return None
        return self._create(name, generation)

    def tries(self, name: str) -> int:
        """Number of workers that have claimed a piece of work so far, one after the other."""
        generation = 0
        while os.path.lexists(self._path(name, generation)):
            generation += 1
        return generation

    def holder(self, name: str) -> Holder | None:
        """The contents of the claim that stands; None without one, and for one that cannot be read."""
        tries = self.tries(name)
        return _parsed(_contents(self._path(name, tries - 1))) if tries else None

    def standing(self) -> list[tuple[str, Holder]]:
        """The pieces of work that someone may be at, with who it is."""
        names = {path.name.rsplit(".", 2)[0] for path in self.folder.glob("*.claim")}
        found = ((name, self.holder(name)) for name in sorted(names))
        return [(name, one) for name, one in found if one is not None and not (one.ended or one.is_dead)]

    def _path(self, name: str, generation: int) -> Path:
        return self.folder / f"{name}.{generation}.claim"

    def _is_free(self, name: str, generation: int) -> bool:
        contents = _contents(self._path(name, generation))
        holder = _parsed(contents)
        if holder is not None and (holder.ended or holder.is_dead):
            return True
        return self._unchanged(name, (generation, contents)) >= self.lease

    def _unchanged(self, name: str, seen: tuple[int, bytes]) -> float:
        """Seconds for which a claim was watched without a change.

        A look counts for a part of the lease at most: a watcher that was itself suspended, maybe together with the
        holder, has watched nothing meanwhile.
        """
        now, watch = self._clock(), self._watches.get(name)
        unchanged = 0.0
        if watch is not None and watch.seen == seen:
            unchanged = watch.unchanged + min(now - watch.looked, self.lease / _LOOKS)
        self._watches[name] = _Watch(seen, now, unchanged)
        return unchanged

    def _create(self, name: str, generation: int) -> Claim | None:
        path = self._path(name, generation)
        pid = os.getpid()
        holder = Holder(self.worker, socket.gethostname(), processes.machine(), pid, processes.started(pid))
        try:
            self.folder.mkdir(exist_ok=True)
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)
        except FileExistsError:
            if self.folder.is_dir():
                return None  # another worker's, made a moment ago
            raise UnwritableError(f"cannot write to {self.folder}: it is no folder") from None
        except OSError as error:
            raise UnwritableError(f"cannot write to {self.folder}: {error.strerror}") from None
        claim = Claim(name, holder, descriptor, self._path(name, generation + 1), self.lease / _BEATS)
        try:
            claim.beat()
        except OSError as error:
            claim.close()
            with contextlib.suppress(OSError):
                path.unlink()
            raise UnwritableError(f"cannot write to {path}: {error.strerror}") from None
        self._watches.pop(name, None)
        claim.start()
        return claim


class Claim:
    """A claim that this process holds; it ends with the ``with`` block, or by `end`.

    Attributes:
      name: of the work.
    """

    def __init__(self, name: str, holder: Holder, descriptor: int, following: Path, interval: float):
        self.name = name
        self._holder, self._following, self._interval = holder, following, interval
        self._file = os.fdopen(descriptor, "r+b", buffering=0)
        self._lock = threading.Lock()
        self._over = threading.Event()
        self._heart = threading.Thread(target=self._live, name=f"claim {name}", daemon=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end()

    @property
    def is_lost(self) -> bool:
        """True once another worker has taken the claim over."""
        return os.path.lexists(self._following)

    def end(self) -> None:
        """Let go of the work; the first call counts."""
        self._over.set()
        with contextlib.suppress(OSError):  # others then wait for the lease
            self.beat(ended=True)
        self.close()

    def give_up(self, number: int) -> bool:
        """End the claim on a signal, which is left to others to handle."""
        self.end()
        return False

    def start(self) -> None:
        """Begin to show signs of life."""
        self._heart.start()

    def beat(self, *, ended: bool = False) -> None:
        """Show a sign of life in the claim's file; in nobody else's, whatever has happened to that one."""
        with self._lock:
            if self._file.closed or self._holder.ended:
                return
            self._holder = replace(self._holder, beat=self._holder.beat + 1, ended=ended)
            self._file.seek(0)
            length = self._file.write(json.dumps(asdict(self._holder)).encode() + b"\n")
            self._file.truncate(length)
            os.fsync(self._file.fileno())  # seen by other machines

    def close(self) -> None:
        """Close the file."""
        with self._lock, contextlib.suppress(OSError):
            self._file.close()

    def _live(self) -> None:
        while not self._over.wait(self._interval):
            with contextlib.suppress(OSError):  # the next may succeed; if none does, the claim is lost
                self.beat()


class _Watch(NamedTuple):
    """Another worker's claim: its generation and contents, when it was looked at, and for how long it was the same."""

    seen: tuple[int, bytes]
    looked: float
    unchanged: float


def _contents(path: Path) -> bytes:
    """Bytes of a claim; none if it cannot be read, which is then watched like any other contents."""
    try:
        with files.opened(path) as file:
            return file.read(_MOST_BYTES)
    except OSError:
        return b""


def _parsed(contents: bytes) -> Holder | None:
    """The holder that a claim names; None for contents that are no claim's."""
    try:
        values: Any = json.loads(contents)
        holder = Holder(**values)
    except (ValueError, TypeError, RecursionError):
        return None
    texts = (holder.worker, holder.host, holder.machine)
    numbers = type(holder.pid) is int and holder.pid > 0 and type(holder.started) in (int, type(None))
    known = all(isinstance(text, str) for text in texts) and numbers
    return holder if known and type(holder.beat) is int and type(holder.ended) is bool else None

"""Memory of the host: checks of free memory before large allocations, and arrays in memory-mapped files.

A large allocation is checked first, because a process that runs out of memory is killed by the kernel and prints no
message. A temporary file has no name, so it disappears with its array or process. The pages of a mapped file cannot
exhaust memory, because the system drops them when it needs room. They still count as resident memory, so the functions
in this module process a few of an array's N examples at a time and then release the pages.
"""

from __future__ import annotations

import math
import mmap
import os
import resource
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import IO, Any

import numpy as np

from jaxpfl.support.errors import JaxpflError, OutOfMemoryError, writing

USABLE = 0.9  # usable share of the free memory: allocators round up, and other processes share the machine

_SMALL = 2**20
"""Allocations of fewer bytes are not checked, because each check reads four files."""


def free() -> int | None:
    """Return the usable bytes under the limits of machine, container and process; None if they are unknown.

    Usable bytes are the fraction `USABLE` of the free bytes.
    """
    known = [amount for amount in (_machine(), _container(), _process()) if amount is not None]
    return int(USABLE * max(0, min(known))) if known else None


def check(need: int, what: str, advice: str) -> None:
    """Check that an allocation would fit.

    Args:
      need: bytes to allocate.
      what: beginning of the error message: the object or step that needs the memory.
      advice: end of the error message: how to use less memory.

    Raises:
      OutOfMemoryError: if not enough memory is free.
    """
    left = free() if need > _SMALL else None
    if left is not None and need > left:
        raise OutOfMemoryError(f"{what} {readable(need)} of memory, but only {readable(left)} is free: {advice}")


def readable(amount: float) -> str:
    """Format bytes in a readable unit: 1536 -> 1.5 KiB."""
    for unit in ("B", "KiB", "MiB"):
        if abs(amount) < 1024:
            return f"{amount:.3g} {unit}"
        amount /= 1024
    return f"{amount:.3g} GiB"


def _machine() -> int | None:
    path = Path("/proc/meminfo")
    if not path.exists():
        return None
    lines = dict(line.split(":", 1) for line in path.read_text().splitlines())
    return 1024 * int(lines["MemAvailable"].split()[0]) if "MemAvailable" in lines else None


def _container() -> int | None:
    """Return the bytes left under a container's limit (cgroup v2, then v1), or None if there is no limit."""
    root = Path("/sys/fs/cgroup")
    for limit, used in (
        (root / "memory.max", root / "memory.current"),
        (root / "memory/memory.limit_in_bytes", root / "memory/memory.usage_in_bytes"),
    ):
        try:
            return int(limit.read_text()) - int(used.read_text())
        except (OSError, ValueError):  # there is no such file, or the limit is "max"
            continue
    return None


def _process() -> int | None:
    """Return the bytes left under the limits of this process, or None without such limits.

    The limits are ``ulimit -v``, which counts memory-mapped files, and ``ulimit -d``, which does not.
    """
    try:
        pages = [int(count) for count in Path("/proc/self/statm").read_text().split()]
    except (OSError, ValueError):
        return None
    limits = [(resource.RLIMIT_AS, pages[0]), (resource.RLIMIT_DATA, pages[5])]
    left = [(resource.getrlimit(kind)[0], used * resource.getpagesize()) for kind, used in limits]
    return min((limit - used for limit, used in left if limit != resource.RLIM_INFINITY), default=None)


_ENTRIES = 2**23
"""Number of array entries processed at once."""
_FOLDER: ContextVar[Path | None] = ContextVar("folder", default=None)


@contextmanager
def files_in(folder: Path) -> Iterator[None]:
    """Create the temporary files of the block in a folder instead of the system's temporary folder."""
    before = _FOLDER.set(folder)
    try:
        yield
    finally:
        _FOLDER.reset(before)


def pages_of(array: Any) -> mmap.mmap | None:
    """Return the memory map behind an array or a view; None for an array in memory or a private map."""
    while array is not None:
        if isinstance(array, np.memmap):
            # Changed pages of a private mapping ("c") exist only in memory, so dropping them would lose the changes.
            return getattr(array, "_mmap", None) if getattr(array, "mode", None) != "c" else None
        array = getattr(array, "base", None)
    return None


def is_mapped(array: Any) -> bool:
    """Return True for an array in a memory-mapped file, or a view of such an array."""
    return pages_of(array) is not None


def give_back(*arrays: Any) -> None:
    """Release the resident pages of memory-mapped arrays; their content stays in the files."""
    for array in arrays:
        pages = pages_of(array)
        if pages is not None:
            pages.madvise(mmap.MADV_DONTNEED)


def iterate(x: np.ndarray, entries: int | None = None) -> Iterator[np.ndarray]:
    """Iterate over inputs [N, ...] in blocks of a few examples [k, ...], and release the pages after each block."""
    step = max(1, (entries or _ENTRIES) // max(1, x[:1].size))
    pages = pages_of(x)
    for start in range(0, len(x), step):
        yield x[start : start + step]
        if pages is not None:
            pages.madvise(mmap.MADV_DONTNEED)


def empty(shape: tuple[int, ...], dtype: Any, like: Any) -> np.ndarray:
    """Return an uninitialized array: in a temporary file if ``like`` is in a file, otherwise in memory.

    Args:
      shape: shape of the array.
      dtype: dtype of the array.
      like: array that determines where the result is stored.

    Raises:
      UnwritableError: if the disk has no room for the file.
    """
    size = math.prod(shape) * np.dtype(dtype).itemsize
    if not size or not is_mapped(like):
        return np.empty(shape, dtype)
    with writing(_place()), _temporary() as file:
        reserve(file, size)
        return np.memmap(file, dtype, "r+", shape=shape)


def converted(
    x: np.ndarray, dtype: Any, function: Callable[[np.ndarray], Any], shape: tuple[int, ...] | None = None
) -> np.ndarray:
    """Apply a function to inputs [N, ...] in blocks; the result is in a temporary file if the inputs are in a file.

    Args:
      x: inputs of the function.
      dtype: dtype of the result.
      function: function ``examples [k, ...] -> [k, ...]`` to apply to a block of k examples.
      shape: shape of the result; by default, the shape of the inputs.

    Raises:
      UnwritableError: as in `empty`.
    """
    made = empty(x.shape if shape is None else shape, dtype, like=x)
    for old, new in zip(iterate(x), iterate(made), strict=True):
        new[...] = function(old)
    return made


def reserve(file: IO[bytes], size: int) -> None:
    """Reserve disk space for a file. Without this, a full disk would kill the process by a signal at a later write."""
    if hasattr(os, "posix_fallocate"):  # macOS has no such call
        os.posix_fallocate(file.fileno(), 0, size)


def gathered(x: np.ndarray, places: np.ndarray) -> np.ndarray:
    """Gather examples [k, ...] from inputs [N, ...]; the result is in a temporary file if the inputs are in a file.

    Args:
      x: inputs to gather from.
      places: indices of the examples, [k].

    Raises:
      UnwritableError: as in `empty`.
    """
    if not is_mapped(x):
        return x[places]
    made, done = empty((len(places), *x.shape[1:]), x.dtype, like=x), 0
    for part in iterate(made):
        np.take(x, places[done : done + len(part)], axis=0, out=part, mode="clip")  # mode "raise" would need a buffer
        done += len(part)
        give_back(x)
    return made


def copy_runs(x: np.ndarray, start: np.ndarray, size: np.ndarray, out: np.ndarray) -> None:
    """Copy runs of consecutive examples from inputs [N, ...] to ``out``, one run after the other.

    Args:
      x: inputs to copy from.
      start, size: first index and length of each run, [k].
      out: destination [n, ...], at least as long as all runs together.
    """
    starts, ends = (np.asarray(a, np.int64)[size > 0] for a in (start, start + size))
    apart = np.flatnonzero(ends[:-1] != starts[1:]) + 1  # split only where runs are not adjacent
    step, done, kept = max(1, _ENTRIES // max(1, x[:1].size)), 0, 0
    for run in np.split(np.stack([starts, ends], axis=1), apart) if len(starts) else ():
        for first in range(int(run[0, 0]), int(run[-1, 1]), step):
            part = x[first : min(first + step, int(run[-1, 1]))]
            out[done : done + len(part)] = part
            done += len(part)
            if done - kept >= step:
                give_back(x)
                kept = done
    give_back(x)


def check_room(what: object, need: int, folder: Path | None = None) -> None:
    """Check that files would fit on the disk.

    Args:
      what: name of the files, for the message.
      need: bytes to write.
      folder: folder to write in; by default, the folder of temporary files.

    Raises:
      JaxpflError: if not enough space is free.
    """
    folder = folder or Path(_place())
    free = shutil.disk_usage(folder).free
    if need > free:
        raise JaxpflError(f"{what} needs {readable(need)} in {folder}, but only {readable(free)} is free")


class Growing:
    """An array [N, ...], in memory or in a temporary file, to which rows can be appended."""

    def __init__(self, in_file: bool) -> None:
        self._in_file = in_file
        self._file: IO[bytes] | None = None
        self._parts: list[np.ndarray] = []
        self._rows = 0

    def __len__(self) -> int:
        return self._rows

    def append(self, rows: np.ndarray) -> None:
        """Append rows [k, ...]; all calls must use the same row shape and dtype.

        Raises:
          UnwritableError: if the file cannot be written, for example on a full disk.
        """
        self._rows += len(rows)
        if not self._in_file:
            self._parts.append(rows)
            return
        self._parts = self._parts or [rows[:0].copy()]
        with writing(_place()):
            self._file = self._file or _temporary()
            self._file.write(np.ascontiguousarray(rows).data)

    def whole(self) -> np.ndarray:
        """Return the finished array. `append` must have been called before, and cannot be called afterwards."""
        shape, dtype = (self._rows, *self._parts[0].shape[1:]), self._parts[0].dtype
        if self._file is None or not math.prod(shape):
            return np.concatenate(self._parts)
        with writing(_place()), self._file as file:
            file.flush()
            return np.memmap(file, dtype, "r+", shape=shape)


def _place() -> Path:
    return _FOLDER.get() or Path(tempfile.gettempdir())


def _temporary() -> IO[bytes]:
    return tempfile.TemporaryFile(prefix="jaxpfl-", dir=_place())

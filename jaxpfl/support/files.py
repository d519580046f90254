"""Files of a run folder, written atomically: beside their place, then moved into it."""

from __future__ import annotations

import errno
import io
import json
import os
import stat
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import numpy as np

from jaxpfl.support import host_memory, strict_json
from jaxpfl.support.errors import JaxpflError, shown, writing
from jaxpfl.support.partial import partial


@contextmanager
def whole(path: Path, mode: str = "w") -> Iterator[IO[Any]]:
    """Open a file that appears under its name only if the block ends without an error.

    Raises:
      UnwritableError: as on a full disk.
    """
    with writing(path), partial(path) as place, open(place, mode) as file:
        yield file
        file.flush()
        os.fsync(file.fileno())


def opened(path: Path) -> io.BufferedReader:
    """Open a file to read its bytes, a regular one: a pipe or a device may never end.

    Raises:
      OSError: as `open`, and for anything but a regular file.
    """
    return open(path, "rb", opener=_regular)


def no_link(path: str, flags: int) -> int:
    """Opener of a file that is appended to, which must be no link: a folder that one was given may lead elsewhere."""
    return _regular(path, flags | getattr(os, "O_NOFOLLOW", 0))


def _regular(path: str, flags: int) -> int:
    descriptor = os.open(path, flags | getattr(os, "O_NONBLOCK", 0), 0o666)  # a pipe would wait for its other end
    mode = os.fstat(descriptor).st_mode
    if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):  # a folder is refused by `open`
        os.close(descriptor)
        raise OSError(errno.EINVAL, "not a regular file", path)
    return descriptor


def contents(path: Path, memory: int = 1) -> bytes:
    """The bytes of a file, once there is room for what is made of them.

    Args:
      path: regular file to read.
      memory: bytes of memory for each of its bytes.

    Raises:
      JaxpflError: if it cannot be read, or memory does not hold it.
    """
    try:
        with opened(path) as file:
            size = os.fstat(file.fileno()).st_size
            check_fits(path, memory * size)
            return file.read(size)
    except OSError as error:
        raise JaxpflError(f"cannot read {path}: {error.strerror or error}") from None


def own_contents(path: Path) -> bytes:
    """The bytes of a file of one's own, which is going to be executed.

    Raises:
      OSError: as `opened`, and if another user can have written it, or put it there.
    """
    with opened(path) as file:
        if not (is_own(os.fstat(file.fileno())) and is_own(path.parent.stat())):
            raise PermissionError(errno.EPERM, "not one's own", str(path))
        return file.read()


def is_own(status: os.stat_result) -> bool:
    """True for a file or folder of this user's to which no other can write."""
    return status.st_uid == os.geteuid() and not status.st_mode & 0o022


def check_fits(path: object, need: int) -> None:
    """Check that a file's contents fit in memory, before they are read.

    Args:
      path: the file, as named in the message.
      need: bytes that reading it takes.

    Raises:
      JaxpflError: if more is needed than is free.
    """
    host_memory.check(need, f"{path}: what it holds needs", "take a part of it, or a larger machine")


def write_json(path: Path, value: Any) -> None:
    """Write JSON atomically, with NaN as null."""
    with whole(path) as file:
        json.dump(jsonable(value), file, indent=2)
        file.write("\n")


def read_json(path: Path) -> Any:
    """Read JSON.

    Raises:
      JaxpflError: if the file cannot be read or is not JSON.
    """
    try:
        return strict_json.parse(contents(path))
    except (ValueError, RecursionError) as error:
        raise JaxpflError(f"cannot read {path}: no JSON: {' '.join(str(error).split())}") from None


def inside(folder: Path, name: str) -> Path:
    """Path of a file of a folder by the name that something in the folder gives it.

    Raises:
      JaxpflError: for a name that leads out of the folder, also by a link.
    """
    path, parts = folder / name, Path(name).parts
    try:
        leads_out = not parts or Path(name).is_absolute() or not path.resolve().is_relative_to(folder.resolve())
    except (OSError, ValueError, RuntimeError):  # a zero byte, or links in a circle
        leads_out = True
    if leads_out or ".." in parts:
        raise JaxpflError(f"{folder} names a file that is not in it: {shown(name)}")
    return path


def jsonable(value: Any) -> Any:
    """The value with arrays as lists, NumPy scalars as numbers, and non-finite floats as None."""
    if isinstance(value, dict):
        return {str(k): jsonable(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [jsonable(v) for v in value]
    if isinstance(value, np.ndarray | np.generic):
        return jsonable(value.tolist())
    if isinstance(value, float) and not np.isfinite(value):
        return None
    return value


class Records:
    """``metrics.jsonl``: one JSON object per line for every method's rounds and evaluations, in the order of events.

    A record has a ``kind`` (round or evaluation), a ``method`` and a ``round``, which together identify it; an
    evaluation also has its ``seconds``. Every other value is a list with one number per seed.
    """

    def __init__(self, path: Path):
        self.path = path

    def append(self, records: list[dict[str, Any]]) -> None:
        """Append records, on disk when the call returns.

        Raises:
          UnwritableError: as on a full disk.
        """
        with writing(self.path), open(self.path, "a", opener=no_link) as file:
            file.writelines(json.dumps(jsonable(record)) + "\n" for record in records)
            file.flush()
            os.fsync(file.fileno())

    def read(self) -> list[dict[str, Any]]:
        """All complete lines; a last line truncated by a kill is left out.

        Raises:
          JaxpflError: if a line is not a valid record.
        """
        if not self.path.exists():
            return []
        lines = contents(self.path).split(b"\n")[:-1]
        records: list[dict[str, Any]] = []
        seeds: defaultdict[str, set[int]] = defaultdict(set)  # of each method, the lengths of its lists
        for number, line in enumerate(lines, 1):
            record = _record(line)
            if record is not None:
                seeds[record["method"]] |= {len(value) for value in record.values() if isinstance(value, list)}
            if record is None or len(seeds[record["method"]]) > 1:
                raise JaxpflError(
                    f"{self.path} line {number} is damaged: delete the file, and --resume continues without those plots"
                )
            records.append(record)
        return records

    def keep(self, wanted: Callable[[dict[str, Any]], bool]) -> None:
        """Rewrite the file with the wanted records only; of several records of one round the last is kept."""
        records = {(r["kind"], r["method"], r["round"]): r for r in self.read() if wanted(r)}
        with whole(self.path) as file:
            file.writelines(json.dumps(record) + "\n" for record in records.values())


def _record(line: bytes) -> dict[str, Any] | None:
    """The record in a line; None if the line holds no valid one."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(record, dict) or record.get("kind") not in ("round", "evaluation"):
        return None
    if not isinstance(record.get("method"), str) or type(record.get("round")) is not int or record["round"] < 1:
        return None
    lists = [value for name, value in record.items() if name not in ("kind", "method", "round", "seconds")]
    if not all(isinstance(value, list) and value for value in lists):
        return None
    numbers = [record.get("seconds"), *(entry for value in lists for entry in value)]
    return record if all(entry is None or type(entry) in (int, float) for entry in numbers) else None

"""Files of a run folder: JSON, records, tables and checksums.

JSON and tables are written to a temporary path, which is then renamed. Records are appended to an existing file.
"""

from __future__ import annotations

import errno
import hashlib
import io
import json
import os
import stat
import zlib
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import numpy as np

from jaxpfl.support import host_memory
from jaxpfl.support.errors import JaxpflError, shown, writing
from jaxpfl.support.output_paths import partial

if TYPE_CHECKING:
    import pandas


def parse_json(text: str | bytes) -> Any:
    """Parse JSON.

    Raises:
      ValueError: if the text is not JSON, or an object has the same name twice.

    Examples:
      >>> parse_json('{"rounds": 3, "rounds": 4}')
      Traceback (most recent call last):
      ValueError: 'rounds' occurs twice in one object
    """
    return json.loads(text, object_pairs_hook=_unique)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    named = dict(pairs)
    if len(named) < len(pairs):
        ((name, _),) = Counter(name for name, _ in pairs).most_common(1)
        raise ValueError(f"{shown(name)} occurs twice in one object")
    return named


@contextmanager
def whole(path: Path, mode: str = "w") -> Iterator[IO[Any]]:
    """Open a temporary file, which is renamed to ``path`` if the block ends without an error.

    Raises:
      UnwritableError: if the file cannot be written, for example on a full disk.
    """
    with writing(path), partial(path) as place, open(place, mode) as file:
        yield file
        file.flush()
        os.fsync(file.fileno())


def opened(path: Path) -> io.BufferedReader:
    """Open a regular file to read its bytes; reading a pipe or a device might never end.

    Raises:
      OSError: as in `open`, and for anything but a regular file.
    """
    return open(path, "rb", opener=_regular)


def no_link(path: str, flags: int) -> int:
    """Open a regular file to append to it; a link is refused, because it may lead outside the folder."""
    return _regular(path, flags | getattr(os, "O_NOFOLLOW", 0))


def _regular(path: str, flags: int) -> int:
    descriptor = os.open(path, flags | getattr(os, "O_NONBLOCK", 0), 0o666)  # otherwise a pipe without a writer blocks
    mode = os.fstat(descriptor).st_mode
    if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):  # for a folder, `open` itself raises an error
        os.close(descriptor)
        raise OSError(errno.EINVAL, "not a regular file", path)
    return descriptor


def contents(path: Path, memory: int = 1) -> bytes:
    """Read a file's bytes, after checking that memory suffices for the objects that will be made from them.

    Args:
      path: regular file to read.
      memory: bytes of memory that these objects need per byte of the file.

    Raises:
      JaxpflError: if the file cannot be read or does not fit in memory.
    """
    try:
        with opened(path) as file:
            size = os.fstat(file.fileno()).st_size
            check_fits(path, memory * size)
            return file.read(size)
    except OSError as error:
        raise JaxpflError(f"cannot read {path}: {error.strerror or error}") from None


def own_contents(path: Path) -> bytes:
    """Read the user's own file, whose content will be executed.

    Raises:
      OSError: as in `opened`, and if another user could have written the file or placed it in its folder.
    """
    with opened(path) as file:
        if not (is_own(os.fstat(file.fileno())) and is_own(path.parent.stat())):
            raise PermissionError(errno.EPERM, "not one's own", str(path))
        return file.read()


def is_own(status: os.stat_result) -> bool:
    """Return True if a file or folder belongs to this user and no one else can write to it."""
    return status.st_uid == os.geteuid() and not status.st_mode & 0o022


def check_fits(path: object, need: int) -> None:
    """Check that a file's contents fit in memory, before they are read.

    Args:
      path: file, as named in the message.
      need: bytes of memory that reading needs.

    Raises:
      JaxpflError: if not enough memory is free.
    """
    host_memory.check(need, f"{path}: its contents need", "read a part of it, or use a larger machine")


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
        return parse_json(contents(path))
    except (ValueError, RecursionError) as error:
        raise JaxpflError(f"cannot read {path}, which is not JSON: {' '.join(str(error).split())}") from None


def inside(folder: Path, name: str) -> Path:
    """Return the path of a file in a folder, given a name that was read from the folder's files and may be malicious.

    Raises:
      JaxpflError: if the name leads out of the folder, directly or by a link.
    """
    path, parts = folder / name, Path(name).parts
    try:
        leads_out = not parts or Path(name).is_absolute() or not path.resolve().is_relative_to(folder.resolve())
    except (OSError, ValueError, RuntimeError):  # the name has a zero byte, or links form a cycle
        leads_out = True
    if leads_out or ".." in parts:
        raise JaxpflError(f"{folder} refers to a file outside the folder: {shown(name)}")
    return path


def jsonable(value: Any) -> Any:
    """Convert arrays to lists, NumPy scalars to numbers, and non-finite floats to None, for JSON."""
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
    """``metrics.jsonl``: one JSON object per line for each round and evaluation of each method, in chronological order.

    A record has a ``kind`` (round or evaluation), a ``method`` and a ``round``, which together identify it. An
    evaluation also has ``seconds``, the time spent on the method so far, without compilation. Every other value is a
    list with one number per seed.
    """

    def __init__(self, path: Path):
        self.path = path

    def append(self, records: list[dict[str, Any]]) -> None:
        """Append records, which are on disk when the call returns.

        Raises:
          UnwritableError: if the file cannot be written, for example on a full disk.
        """
        with writing(self.path), open(self.path, "a", opener=no_link) as file:
            file.writelines(json.dumps(jsonable(record)) + "\n" for record in records)
            file.flush()
            os.fsync(file.fileno())

    def read(self) -> list[dict[str, Any]]:
        """Read all complete records; an incomplete last line, left by a killed process, is skipped.

        Raises:
          JaxpflError: if a line is not a valid record.
        """
        if not self.path.exists():
            return []
        lines = contents(self.path).split(b"\n")[:-1]
        records: list[dict[str, Any]] = []
        seeds: defaultdict[str, set[int]] = defaultdict(set)  # method -> lengths of its lists
        for number, line in enumerate(lines, 1):
            record = _record(line)
            if record is not None:
                seeds[record["method"]] |= {len(value) for value in record.values() if isinstance(value, list)}
            if record is None or len(seeds[record["method"]]) > 1:
                raise JaxpflError(
                    f"{self.path} line {number} is damaged: delete the file, and --resume continues without its records"
                )
            records.append(record)
        return records

    def keep(self, wanted: Callable[[dict[str, Any]], bool]) -> None:
        """Rewrite the file with the wanted records only; the last of several records for one round is kept."""
        records = {(r["kind"], r["method"], r["round"]): r for r in self.read() if wanted(r)}
        with whole(self.path) as file:
            file.writelines(json.dumps(record) + "\n" for record in records.values())


def _record(line: bytes) -> dict[str, Any] | None:
    """Parse the record in a line, or return None if the line has no valid record."""
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


CHECKSUMS = "SHA256SUMS"


def write_checksums(folder: Path) -> None:
    """Write the checksums of all files in a folder to a file in this folder."""
    (folder / CHECKSUMS).write_bytes(_sums(folder))


def check_checksums(folder: Path) -> None:
    """Verify every file in a folder against its checksum.

    Raises:
      JaxpflError: if a file was changed, removed or added since `write_checksums`.
    """
    try:
        with opened(folder / CHECKSUMS) as file:
            written = file.read()
        found = _sums(folder)
    except FileNotFoundError:
        raise JaxpflError(f"{folder} has no checksums: its {CHECKSUMS} is missing") from None
    except OSError as error:
        raise JaxpflError(f"cannot read {folder}: {error.strerror or error}") from None
    if found != written:  # compared byte by byte, so that an edit of the checksum file is an error too
        raise JaxpflError(f"{folder} is damaged: {_first_difference(written, found)} does not match {CHECKSUMS}")


def check_checksum(folder: Path, name: str) -> None:
    """Verify one file in a folder against its checksum.

    Raises:
      JaxpflError: if the file is missing, cannot be read, or does not fit its checksum.
    """
    try:
        with opened(folder / CHECKSUMS) as file:
            known = file.read().splitlines()
        found = _line(folder, name)
    except OSError as error:
        missing = f"{Path(error.filename or name).name} is missing"
        why = missing if isinstance(error, FileNotFoundError) else error.strerror
        raise JaxpflError(f"cannot read {folder}: {why}") from None
    if found not in known:
        raise JaxpflError(f"{folder} is damaged: {name} does not match {CHECKSUMS}")


def _sums(folder: Path) -> bytes:
    names = (path.relative_to(folder).as_posix() for path in folder.rglob("*") if not path.is_dir())
    return b"".join(_line(folder, name) + b"\n" for name in sorted(names) if name != CHECKSUMS)


def _line(folder: Path, name: str) -> bytes:
    with opened(folder / name) as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return f"{digest}  {name}".encode(errors="surrogateescape")


def _first_difference(written: bytes, found: bytes) -> str:
    for line in (*found.splitlines(), *written.splitlines()):
        if (line in written.splitlines()) != (line in found.splitlines()):
            return line[66:].decode(errors="replace") or CHECKSUMS
    return CHECKSUMS


_SEAL = "crc32"
_AGAIN = "delete the file to run it again"


def write_checksummed(path: Path, content: Mapping[str, Any]) -> None:
    """Write an object with its checksum as JSON; missing parent folders are created.

    Raises:
      UnwritableError: if the file cannot be written, for example on a full disk.
    """
    content = dict(jsonable(dict(content)))
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, {**content, _SEAL: _sum(content)})


def read_checksummed(path: Path, remedy: str = _AGAIN) -> dict[str, Any]:
    """Read the object in a file that `write_checksummed` wrote.

    Args:
      path: file to read.
      remedy: advice in the error message for a file that is missing or damaged.

    Raises:
      JaxpflError: if the file cannot be read, or its content does not fit its checksum.
    """
    try:
        found = read_json(path)
    except JaxpflError as error:
        raise JaxpflError(f"{error}: {remedy}") from None
    if isinstance(found, dict) and _SEAL not in found:
        raise JaxpflError(f"{path} has no checksum, like files from before version 0.2: {remedy}")
    if not isinstance(found, dict) or found.pop(_SEAL) != _sum(found):
        raise JaxpflError(f"{path} is damaged or was changed: {remedy}")
    return found


def _sum(content: Mapping[str, Any]) -> str:
    return f"{zlib.crc32(json.dumps(content, sort_keys=True).encode()):08x}"


def write_table(path: Path, table: pandas.DataFrame) -> None:
    """Write a table atomically.

    A column of a Parquet file has one type. A column with values of several types, such as the cohorts "0.1m" and 10,
    is therefore written as strings.

    Raises:
      UnwritableError: if the file cannot be written.
    """
    table = table.copy()
    for name, column in table.items():
        if column.dtype == object and column.dropna().map(type).nunique() > 1:
            texts = column.map(lambda value: value if isinstance(value, str) else json.dumps(value), na_action="ignore")
            table[name] = texts
    with whole(path, "wb") as file:
        table.to_parquet(file, index=False)

"""Folders of results: their lock for one process at a time, and removal of earlier results."""

from __future__ import annotations

import errno
import os
import shutil
import socket
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from jaxpfl.support import files
from jaxpfl.support.errors import JaxpflError, warn, writing

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

_NONE_HERE = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)


@contextmanager
def lock(folder: Path) -> Iterator[None]:
    """Create a run folder if needed, and lock it for this process while the block runs.

    Folders created here, those above it among them, that are still empty at the end are removed.

    Raises:
      JaxpflError: if another process holds it, or it cannot be created.
    """
    made = [one for one in (folder, *folder.parents) if not one.exists()]
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = _lock(folder)
    try:
        yield
    finally:
        if descriptor is not None:
            with suppress(OSError):  # the whole folder may be gone
                (folder / ".lock").unlink()
            os.close(descriptor)
        with suppress(OSError):  # one is not empty
            for one in made:
                one.rmdir()


def is_locked(folder: Path) -> bool:
    """True if a process is at work in a run folder, as far as locks tell; nothing is written."""
    if fcntl is None:
        return False
    try:
        with files.opened(folder / ".lock") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError as error:  # also without a lock file
        return isinstance(error, BlockingIOError)
    return False


def _lock(folder: Path) -> int | None:
    """Descriptor that holds the lock; None without lock support."""
    path = folder / ".lock"
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            if fcntl is None:
                raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # The previous holder removes its file at its end: a lock on that file excludes no one.
            if _is_at(descriptor, path):
                os.truncate(descriptor, 0)
                os.write(descriptor, f"process {os.getpid()} on {socket.gethostname()}".encode())
                return descriptor
            os.close(descriptor)
        except BlockingIOError:
            holder = os.read(descriptor, 200).decode(errors="replace") or "another process"
            os.close(descriptor)
            raise JaxpflError(f"{holder} is at work in {folder}: wait for it, or choose another --output") from None
        except OSError as error:
            os.close(descriptor)
            if error.errno not in _NONE_HERE:
                raise
            path.unlink(missing_ok=True)
            warn(f"{folder} is on a file system without locks: do not start a second process in it")
            return None


def _is_at(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    except FileNotFoundError:
        return False


GRAPH = "graph.csv"
"""Graph of the clients, in a run folder."""
_FOLDERS = ("methods", "checkpoints", "clients", "profile", "tensorboard", "wandb")
RUN_PARTS = (*_FOLDERS, "metrics.jsonl", "clients.npz", "models", GRAPH)
"""Names in a run folder beside ``config.json`` and `SHARED`."""

SUMMARY = "summary.json"
SHARED = (SUMMARY, "plots", "report.html")
"""Names that any folder of results may hold."""


_ENDINGS = {"plots": (".png",), "methods": (".json", ".npz"), "best": (".json",), "journal": (".jsonl",)}
"""Endings of the written files, by subfolder in which a user might also put other files."""


def check_replaceable(folder: Path, mark: str, parts: Iterable[str]) -> None:
    """Refuse a folder that also holds something else, at the top or in a folder of files of one kind.

    Args:
      folder: folder of results, recognised by ``mark``.
      mark: the file that makes it a folder of results.
      parts: names of the other files and folders that are written there, beside `SHARED`.

    Raises:
      JaxpflError: with the name of what would be lost.
    """
    known = {mark, *SHARED, *parts}
    inner = [path for name in _ENDINGS if (folder / name).is_dir() for path in sorted((folder / name).iterdir())]
    foreign = [path for path in inner if path.suffix not in _ENDINGS[path.parent.name]]
    for path in [*(path for path in sorted(folder.iterdir()) if path.name not in known), *foreign]:
        if not path.name.startswith("."):
            raise JaxpflError(f"--force would delete {path}, which is not part of the results: move it away first")


def check_place(folder: Path, mark: str, kind: str, parts: Iterable[str], *, resume: bool, force: bool) -> None:
    """Refuse a folder in which results can neither begin, nor continue, nor replace others.

    Args:
      folder: folder to write to.
      mark: file that makes it a folder of results.
      kind: word for the results, such as "run".
      parts: names of the other files and folders that are written there, beside `SHARED`.
      resume: whether earlier results are continued.
      force: whether earlier results are replaced.

    Raises:
      JaxpflError: if it holds results that are neither continued nor replaced, none to continue, or something else.
    """
    stored = (folder / mark).exists()
    if resume and not stored:
        raise JaxpflError(f"nothing to resume in {folder}: leave out --resume to start")
    if stored and force:
        check_replaceable(folder, mark, parts)
    elif stored and not resume:
        ways = "--resume continues it, --force replaces it, --output chooses another folder"
        raise JaxpflError(f"{folder} already holds a {kind}: {ways}")
    # A hidden file is left by a kill while a file was being written.
    if not stored and folder.is_dir() and any(not path.name.startswith(".") for path in folder.iterdir()):
        raise JaxpflError(f"{folder} is not empty and holds no {kind}: choose another --output")


def clear(folder: Path, mark: str, parts: Iterable[str]) -> None:
    """Remove the results in a folder, the summary first and ``mark`` last: what a kill leaves does not count as
    complete, and can be replaced again.

    Hidden files, such as the folder's lock, stay.

    Raises:
      JaxpflError: as `check_replaceable`, before anything is removed.
    """
    check_replaceable(folder, mark, parts)
    with writing(folder):
        (folder / SUMMARY).unlink(missing_ok=True)
        for path in list(folder.iterdir()):
            if path.name == mark or path.name.startswith("."):
                continue
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink()
        (folder / mark).unlink(missing_ok=True)


def discard_unstarted(folder: Path) -> None:
    """Remove a run folder in which nothing was done, so that a refused run may be corrected and started there."""
    done = (path for pattern in ("methods/*", "checkpoints/*/*") for path in folder.glob(pattern))
    records = folder / "metrics.jsonl"
    if any(done) or (records.exists() and records.stat().st_size):
        return
    for name in _FOLDERS:
        shutil.rmtree(folder / name, ignore_errors=True)
    for path in (folder / "config.json", records, folder / GRAPH):
        path.unlink(missing_ok=True)
    with suppress(OSError):  # it holds files of the user's
        folder.rmdir()

"""Result folders: locking for one process at a time, removing earlier results, and copying the user's files."""

from __future__ import annotations

import dataclasses
import errno
import os
import shutil
import socket
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from jaxpfl import algorithms
from jaxpfl.engine.spec import OWN
from jaxpfl.support import files, own_code
from jaxpfl.support.errors import JaxpflError, expecting, warn, writing

if TYPE_CHECKING:
    from jaxpfl.runs.config import RunConfig

C = TypeVar("C", bound="RunConfig")

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

_NONE_HERE = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)


@contextmanager
def lock(folder: Path) -> Iterator[None]:
    """Create a run folder if needed, and lock it for this process during the ``with`` block.

    At the end of the block, the folders that this function created (the folder and its parents) are removed if they are
    empty.

    Raises:
      JaxpflError: if another process has locked the folder, or the folder cannot be created.
    """
    made = [one for one in (folder, *folder.parents) if not one.exists()]
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = _lock(folder)
    try:
        yield
    finally:
        if descriptor is not None:
            with suppress(OSError):  # the whole folder may have been deleted
                (folder / ".lock").unlink()
            os.close(descriptor)
        with suppress(OSError):  # stop at the first folder that is not empty
            for one in made:
                one.rmdir()


def is_locked(folder: Path) -> bool:
    """Return whether a process has locked a run folder; False if locks are not supported. Nothing is written."""
    if fcntl is None:
        return False
    try:
        with files.opened(folder / ".lock") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError as error:  # BlockingIOError if locked; another OSError if there is no lock file
        return isinstance(error, BlockingIOError)
    return False


def _lock(folder: Path) -> int | None:
    """Lock a folder; return the file descriptor that holds the lock, or None if locks are not supported."""
    path = folder / ".lock"
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            if fcntl is None:
                raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # The previous process may have removed this file, and a lock on a removed file excludes nobody: try again.
            with suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(descriptor), os.stat(path)):
                    os.truncate(descriptor, 0)
                    os.write(descriptor, f"process {os.getpid()} on {socket.gethostname()}".encode())
                    return descriptor
            os.close(descriptor)
        except BlockingIOError:
            holder = os.read(descriptor, 200).decode(errors="replace") or "another process"
            os.close(descriptor)
            raise JaxpflError(f"{holder} is using {folder}: wait until it ends, or choose another --output") from None
        except OSError as error:
            os.close(descriptor)
            if error.errno not in _NONE_HERE:
                raise
            path.unlink(missing_ok=True)
            warn(f"{folder} is on a file system without locks: do not start a second process in it")
            return None


GRAPH = "graph.csv"
"""File name of the graph of the clients in a run folder."""
FEDERATION = "fit-federation"
"""Name of the subfolder in which ``jaxpfl.fit`` saves the federation in its run folder."""
SUMMARY = "summary.json"
SHARED = (SUMMARY, "plots", "report.html")
"""Names of files and folders that runs and sweeps have in common."""

_FOLDERS = {
    "methods": "every client's scores and counts of work",
    "checkpoints": "the clients' states, and the key of the noise unless it was secret",
    "clients": "the clients' states",
    "code": "the user's files",
    "profile": "times of the programs",
    "tensorboard": "scores and norms of the uploads",
    "wandb": "scores and norms of the uploads",
    FEDERATION: "all clients' examples",
}
CONTENTS = {
    **_FOLDERS,
    "config.json": "the seed, settings that may be chosen on the data, and a checksum of the data",
    "metrics.jsonl": "losses, scores, norms of the uploads and sizes of the cohorts",
    "clients.npz": "every client's name, scores and counts of work",
    "models": "models, scaling and names, unless exported with --private-only",
    GRAPH: "the clients' neighbors",
    **dict.fromkeys(SHARED, "scores and names of the clients, counts of work"),
}
"""Files and folders of a run folder that no privacy claim covers -> the data in them."""
RUN_PARTS = tuple(CONTENTS)


def uncovered(folder: Path) -> dict[str, str]:
    """Return the parts of a finished private run's folder that no privacy claim covers, each with the data in it."""
    names = {SUMMARY, *(path.name for path in folder.iterdir())} - {".lock"}
    return {name: CONTENTS.get(name, "a file that is not part of the run") for name in sorted(names)}


_ENDINGS = {"plots": (".png",), "methods": (".json", ".npz"), "best": (".json",), "journal": (".jsonl",)}
"""Suffixes of the files that jaxpfl writes into each subfolder. A file with another suffix belongs to the user."""


def check_replaceable(folder: Path, mark: str, parts: Iterable[str]) -> None:
    """Refuse to replace a folder of results that also contains the user's own files.

    Args:
      folder: folder of results.
      mark: name of the file by which a folder of results is recognized.
      parts: names of the other files and folders of the results, in addition to `SHARED`.

    Raises:
      JaxpflError: if a file is not part of the results; the message names the file. The folder itself and some of its
        subfolders (the keys of `_ENDINGS`) are searched for such files; names that start with a dot are skipped.
    """
    known = {mark, *SHARED, *parts}
    inner = [path for name in _ENDINGS if (folder / name).is_dir() for path in sorted((folder / name).iterdir())]
    foreign = [path for path in inner if path.suffix not in _ENDINGS[path.parent.name]]
    for path in [*(path for path in sorted(folder.iterdir()) if path.name not in known), *foreign]:
        if not path.name.startswith("."):
            raise JaxpflError(f"--force would delete {path}, which is not part of the results: move it away first")


def check_place(folder: Path, mark: str, kind: str, parts: Iterable[str], *, resume: bool, force: bool) -> None:
    """Check that results can be written to a folder.

    Args:
      folder: folder to write to.
      mark: name of the file by which a folder of results is recognized.
      kind: word for the results in messages, such as "run".
      parts: names of the other files and folders of the results, in addition to `SHARED`.
      resume: whether to continue existing results.
      force: whether to replace existing results.

    Raises:
      JaxpflError: if the folder contains results but ``resume`` and ``force`` are false, if ``resume`` is true but
        there are no results, or if the folder contains files that are not part of the results.
    """
    stored = (folder / mark).exists()
    if resume and not stored:
        raise JaxpflError(f"nothing to resume in {folder}: leave out --resume to start")
    if stored and force:
        check_replaceable(folder, mark, parts)
    elif stored and not resume:
        ways = "choose another output folder; on the command line, --resume continues it and --force replaces it"
        raise JaxpflError(f"{folder} already contains a {kind}: {ways}")
    # Hidden files are ignored: a process that is killed while it writes a file leaves one.
    names = {path.name for path in folder.iterdir() if path.name[0] != "."} if folder.is_dir() else set()
    if not stored and names - {FEDERATION}:
        raise JaxpflError(f"{folder} is not empty and contains no {kind}: choose another output folder")


def clear(folder: Path, mark: str, parts: Iterable[str]) -> None:
    """Delete the results in a folder, except hidden files such as the lock.

    The summary is deleted first and ``mark`` last. If the process is killed in between, the remaining files are
    therefore recognized as incomplete results, which can be replaced.

    Raises:
      JaxpflError: as in `check_replaceable`; nothing is deleted then.
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
    """Delete a run folder in which no round was run, so that a corrected run can start in the same folder."""
    done = (path for pattern in ("methods/*", "checkpoints/*/*") for path in folder.glob(pattern))
    records = folder / "metrics.jsonl"
    if any(done) or (records.exists() and records.stat().st_size):
        return
    for name in _FOLDERS:
        shutil.rmtree(folder / name, ignore_errors=True)
    for path in (folder / "config.json", records, folder / GRAPH):
        path.unlink(missing_ok=True)
    with suppress(OSError):  # the folder also contains the user's own files
        folder.rmdir()


CODE = "code"
"""Subfolder with copies of the user's files, so that results can be continued and exported later.

It contains the files that the settings name as ``FILE.py:NAME``, the modules that these files import from their own
folders, and checksums. In ``config.json`` and ``sweep.json``, the entry ``code`` maps the name of each of the user's
methods to its reference ``FILE.py:NAME``."""


def sources_of(methods: Iterable[str]) -> dict[str, str]:
    """Return the reference ``FILE.py:NAME`` of each method that the user's files define, by method name.

    The references have bare file names, without folders.
    """
    found = {name: algorithms.get(name).source for name in methods}
    return {name: own_code.moved(source) for name, source in found.items() if source}


def texts_of(config: RunConfig, methods: Iterable[str]) -> dict[str, bytes]:
    """Return the contents of all the user's files that a run or sweep needs, by path relative to ``code/``.

    Raises:
      JaxpflError: if two different files have the same name.
    """
    named = [algorithms.get(name).source for name in methods] + [str(getattr(config, name)) for name in OWN]
    found: dict[str, bytes] = {}
    for path in {own_code.split(reference)[0] for reference in named if own_code.is_reference(reference)}:
        for name, text in own_code.load_file(path).texts.items():
            if found.setdefault(name, text) != text:
                raise JaxpflError(f"two different files are named {name}, but a folder can store only one: rename one")
    return found


def write_code(folder: Path, texts: Mapping[str, bytes]) -> None:
    """Write copies of files into a run or sweep folder; copies of other files are kept."""
    for name, text in texts.items():
        (folder / CODE / name).parent.mkdir(parents=True, exist_ok=True)
        with files.whole(folder / CODE / name, "wb") as file:
            file.write(text)
    files.write_checksums(folder / CODE)


def code_changes(folder: Path, texts: Mapping[str, bytes]) -> list[str]:
    """Return a remark about each file that differs from its copy in a run or sweep folder."""
    copies = {folder / CODE / name: text for name, text in texts.items()}
    changed = [copy for copy, text in copies.items() if copy.is_file() and files.contents(copy) != text]
    return [f"{copy.name} has changed (restore it from {copy}, or start anew)" for copy in changed]


def located(config: C, folder: Path = Path()) -> C:
    """Return the config with a new FOLDER in its ``FOLDER/FILE.py:NAME`` references to the user's code.

    By default, the references get no folder.
    """
    found = {name: getattr(config, name) for name in OWN if own_code.is_reference(getattr(config, name))}
    return dataclasses.replace(config, **{name: own_code.moved(text, folder) for name, text in found.items()})


def methods_in(folder: Path, methods: Iterable[str], sources: Mapping[str, str]) -> list[str]:
    """Return the names of the methods; a method from a user's file is replaced by a reference to its copy.

    A warning says that code from the folder will be run.

    Args:
      folder: subfolder ``code/`` with the copies.
      methods: names of the methods.
      sources: entry ``code`` of ``config.json`` or ``sweep.json``.

    Raises:
      JaxpflError: if a copy was changed, or if ``sources`` is not a mapping from names to references.
    """
    files.check_checksums(folder)
    warn(f"running code of {folder}, written by the author of these results")
    with expecting(folder, "code of these results"):
        return [own_code.moved(sources[name], folder) if name in sources else name for name in methods]

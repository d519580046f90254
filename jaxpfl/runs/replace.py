"""Removal of results, those that ``--force`` replaces and those of a run that never began: nothing else goes."""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from jaxpfl.support.errors import JaxpflError, writing
from jaxpfl.runs.stored_run import GRAPH

_FOLDERS = ("methods", "checkpoints", "clients", "profile", "tensorboard", "wandb")
RUN_PARTS = (*_FOLDERS, "metrics.jsonl", "clients.npz", "models", GRAPH)
"""Names in a run folder beside ``config.json`` and `SHARED`."""

SUMMARY = "summary.json"
SHARED = (SUMMARY, "plots", "report.html")
"""Names that any folder of results may hold."""


_ENDINGS = {"plots": (".png",), "methods": (".json", ".npz"), "best": (".toml",), "journal": (".jsonl",)}
"""Endings of the files in the folders of results into which one might put a file of one's own."""


def check(folder: Path, mark: str, parts: Iterable[str]) -> None:
    """Refuse a folder that also holds something else, at the top or in a folder of files of one kind.

    Args:
      folder: with results, as ``mark`` says.
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
            raise JaxpflError(f"--force would delete {path}, which is no part of the results: move it away first")


def clear(folder: Path, mark: str, parts: Iterable[str]) -> None:
    """Remove the results in a folder, the summary first and ``mark`` last: whatever a kill leaves is taken for no whole
    results, and can be replaced again.

    Hidden files, such as the folder's lock, stay.

    Raises:
      JaxpflError: as `check`, before anything is removed.
    """
    check(folder, mark, parts)
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
    with suppress(OSError):  # something of the user's
        folder.rmdir()

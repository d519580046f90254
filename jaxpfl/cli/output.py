"""Output of a study's results: JSON on standard output, or a folder with a summary and plots."""

from __future__ import annotations

import functools
import inspect
import json
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from jaxpfl.support.errors import JaxpflError
from jaxpfl.support.output_paths import NEW_FOLDER, scratch


@dataclass(frozen=True)
class Output:
    """Destination of the results."""

    json: bool = False
    """Print the results as one JSON object, the only thing on standard output."""
    output: Annotated[Path | None, NEW_FOLDER] = None
    """Folder for summary.json and plots: a new or empty one, or one with earlier results of the same study."""


TO = Output()
_SUMMARY = "summary.json"
_NOTE = ".results.json"
"""While results are moved into a folder: whose they are, for a summary comes last and a kill may come before it."""


def claiming(study: Callable[..., None]) -> Callable[..., None]:
    """The same command, which first refuses an output folder with other contents than its own results."""

    @functools.wraps(study)
    def run(*args: Any, **kwargs: Any) -> None:
        to = inspect.signature(study).bind(*args, **kwargs).arguments.get("to", TO)
        if to.output is not None:
            _claim(to.output, study.__name__.replace("_", "-"))
        study(*args, **kwargs)

    return run


def write(
    result: dict[str, Any],
    to: Output,
    draw: Callable[[Path], list[Path]],
    files: str = "summary.json, plots/",
    again: Sequence[str] = (),
) -> None:
    """Write a study's results and its plots if a folder was asked for, and print JSON if that was.

    Args:
      result: of the study.
      to: the destination.
      draw: writes the plots into a given folder, and other files beside it; returns the plots.
      files: the contents of the output folder, in words.
      again: the command that gives the same results; kept in the folder's summary.
    """
    from jaxpfl.support.files import jsonable

    if to.output is not None:
        result = _write_folder(result | {"command": list(again)}, to.output, draw)
    if to.json:
        print(json.dumps(jsonable(result)))
    elif to.output is not None:
        print(f"results: {to.output} ({files})")


def _claim(folder: Path, study: str) -> None:
    """Refuse a folder with anything but earlier results of the study, which may be replaced."""
    try:
        others = sorted(path.name for path in folder.iterdir() if not path.name.startswith("."))
    except FileNotFoundError:
        return
    except OSError as error:
        raise JaxpflError(f"cannot write to {folder}: {error.strerror}") from None
    if others and _earlier(folder).get("study") != study:
        raise JaxpflError(
            f"{folder} holds {others[0]}, and no results of jaxpfl estimate {study}: choose another --output"
        )


def _earlier(folder: Path) -> dict[str, Any]:
    """Summary in a folder, or the note of one that was not reached; empty if there is none that can be read."""
    from jaxpfl.support.files import read_json

    for name in (_SUMMARY, _NOTE):
        with suppress(JaxpflError):
            found = read_json(folder / name)
            if isinstance(found, dict):
                return found
    return {}


def _write_folder(result: dict[str, Any], folder: Path, draw: Callable[[Path], list[Path]]) -> dict[str, Any]:
    """Write the results into a folder by way of one beside it: earlier results stay until all new ones are written.

    What is then left is to move them. A kill in the middle leaves no summary, and a note by which the same study may
    write there again.

    Returns:
      The results with their ``files``, which a later call of the same study may replace, and ``plots`` among them.

    Raises:
      JaxpflError: if a file of one of these names is not among the earlier results.
    """
    from jaxpfl.support.files import write_json

    before = _earlier(folder).get("files")
    with scratch(folder / "results") as place:
        (place / "plots").mkdir(parents=True)
        plots = [path.relative_to(place).as_posix() for path in draw(place / "plots")]
        names = sorted(path.relative_to(place).as_posix() for path in place.rglob("*") if path.is_file())
        for name in names:
            if (folder / name).exists() and not (isinstance(before, list) and name in before):
                raise JaxpflError(f"{folder / name} exists, and is no earlier result: choose another --output")
        result = result | {"plots": plots, "files": names}
        write_json(place / _SUMMARY, result)
        known = sorted({*names, *(before if isinstance(before, list) else [])})
        write_json(folder / _NOTE, {"study": result.get("study"), "files": known})
        (folder / _SUMMARY).unlink(missing_ok=True)  # old and new files together are nobody's results
        (folder / "plots").mkdir(exist_ok=True)
        for name in [*names, _SUMMARY]:
            os.replace(place / name, folder / name)
        (folder / _NOTE).unlink()
    return result

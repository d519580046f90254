"""Where a study's results go: standard output as JSON, or a folder with a summary and plots."""

from __future__ import annotations

import functools
import inspect
import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from jaxpfl.errors import JaxpflError
from jaxpfl.partial import scratch
from jaxpfl.places import NEW_FOLDER


@dataclass(frozen=True)
class Output:
    """Where the results go."""

    json: bool = False
    """Print the results as one JSON object, the only thing on standard output."""
    output: Annotated[Path | None, NEW_FOLDER] = None
    """Folder for summary.json and plots: a new or empty one, or one with earlier results of the same study."""


TO = Output()
_SUMMARY = "summary.json"


def claiming(study: Callable[..., None]) -> Callable[..., None]:
    """The same command of ``jaxpfl estimate``, which first refuses an output folder that is not its own."""

    @functools.wraps(study)
    def run(*args: Any, **kwargs: Any) -> None:
        to = inspect.signature(study).bind(*args, **kwargs).arguments.get("to", TO)
        if to.output is not None:
            _claim(to.output, study.__name__.replace("_", "-"))
        study(*args, **kwargs)

    return run


def write(
    result: dict[str, Any], to: Output, draw: Callable[[Path], list[Path]], files: str = "summary.json, plots/"
) -> None:
    """Writes a study's results and its plots where a folder was asked for, and prints JSON where that was.

    Args:
      result: of the study.
      to: where it goes.
      draw: writes the plots into the folder that it is given, and what else there is beside it; returns the plots.
      files: what is then in the output folder.
    """
    from jaxpfl.files import jsonable

    if to.output is not None:
        result = _write_folder(result, to.output, draw)
    if to.json:
        print(json.dumps(jsonable(result)))
    elif to.output is not None:
        print(f"results: {to.output} ({files})")


def _claim(folder: Path, study: str) -> None:
    """Refuses a folder that holds something else than earlier results of the study, which may be replaced."""
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
    """The summary in a folder; empty where there is none that can be read."""
    from jaxpfl.files import read_json

    try:
        found = read_json(folder / _SUMMARY)
    except JaxpflError:
        return {}
    return found if isinstance(found, dict) else {}


def _write_folder(result: dict[str, Any], folder: Path, draw: Callable[[Path], list[Path]]) -> dict[str, Any]:
    """Writes the results into a folder, beside it first: what they replace stays until all of them are there.

    Returns:
      The results with their ``files``, which a later call of the same study may replace, and ``plots`` among them.

    Raises:
      JaxpflError: where a file of one of their names is none of the earlier results.
    """
    from jaxpfl.files import write_json

    before = _earlier(folder).get("files")
    with scratch(folder / "results") as place:
        (place / "plots").mkdir(parents=True)
        plots = [path.relative_to(place).as_posix() for path in draw(place / "plots")]
        names = sorted(path.relative_to(place).as_posix() for path in place.rglob("*") if path.is_file())
        for name in names:
            if (folder / name).exists() and not (isinstance(before, list) and name in before):
                raise JaxpflError(f"{folder / name} exists, and is no earlier result: choose another --output")
        result = result | {"plots": plots, "files": names}
        (folder / "plots").mkdir(exist_ok=True)
        for name in names:
            os.replace(place / name, folder / name)
        write_json(folder / _SUMMARY, result)
    return result

"""The group ``jaxpfl estimate`` with a command for every registered study, which can write its results into a
folder.
"""

from __future__ import annotations

import inspect
import json
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from tyro.conf import arg

from jaxpfl.runs.run_folder import SUMMARY
from jaxpfl.studies import registry
from jaxpfl.support.errors import JaxpflError
from jaxpfl.support.files import jsonable, read_json, write_json
from jaxpfl.support.output_paths import NEW_FOLDER, scratch


@dataclass(frozen=True)
class Output:
    """Output flags of a study."""

    json: bool = False
    """Print the results as one JSON object and nothing else on standard output."""
    output: Annotated[Path | None, NEW_FOLDER] = None
    """Folder for summary.json and plots; it may be new, empty, or contain earlier results of the same study."""


def commands(args: Sequence[str] | None = None) -> tuple[Callable[..., None], ...]:
    """Return the commands of the group.

    Args:
      args: arguments after ``estimate``. Only the study named in the arguments is imported; the commands of other
        studies have only the name and description that ``--help`` shows. If None, all studies are imported.
    """
    named = [argument.replace("_", "-") for argument in args[:1]] if args is not None else list(registry.STUDIES)
    found: list[Callable[..., None]] = []
    for name, text in registry.STUDIES.items():
        command = _command(name) if name in named else lambda: None
        command.__name__, command.__doc__ = name.replace("-", "_"), text
        found.append(command)
    return tuple(found)


def _command(name: str) -> Callable[..., None]:
    """Return the command of a study, with flags for its settings, its options (if any) and its output."""
    study = registry.get(name)

    def command(settings: Any, to: Output, options: Any = None) -> None:
        from jaxpfl.runs import compile_cache
        from jaxpfl.support.console import Console

        if to.output is not None:
            claim(to.output, name)
        compile_cache.enable()
        results = study.run(settings, options)
        if not to.json:
            console = Console()
            lines = [results.hint] if results.hint is not None and to.output is None else []
            for block in [*results.tables(), *lines]:
                plain = {"highlight": False, "soft_wrap": True, "markup": False} if isinstance(block, str) else {}
                console.print(block, **plain)
        if to.json or to.output is not None:
            again = ["jaxpfl", "estimate", name, *study.arguments(settings, options)]
            write(results.json, to, results.plots, results.files, again)

    defaults = {"settings": study.settings(), "to": Output()}
    if study.options is not None:
        defaults["options"] = study.options()
    kinds = {part: Annotated[type(value), arg(name="")] for part, value in defaults.items()}
    command.__annotations__ = kinds
    vars(command)["__signature__"] = inspect.Signature([
        inspect.Parameter(part, inspect.Parameter.KEYWORD_ONLY, default=value, annotation=kinds[part])
        for part, value in defaults.items()
    ])  # fmt: skip
    return command


_NOTE = ".results.json"
"""File that names the study while its results are moved into a folder; the summary, which also names the study, is
moved last."""


def write(
    result: dict[str, Any],
    to: Output,
    draw: Callable[[Path], list[Path]],
    files: str = "summary.json, plots/",
    again: Sequence[str] = (),
) -> None:
    """Write a study's results and plots into the output folder, if there is one.

    Then print the results as JSON (``to.json``) or, if a folder was written, its path.

    Args:
      result: results of the study.
      to: values of the output flags.
      draw: function that writes the plots into a given folder, and other files into its parent; returns the plots'
        paths.
      files: description of the output folder's content, for the message.
      again: command line that reproduces the results; stored in the summary.
    """
    if to.output is not None:
        result = _write_folder(result | {"command": list(again)}, to.output, draw)
    if to.json:
        print(json.dumps(jsonable(result)))
    elif to.output is not None:
        print(f"results: {to.output} ({files})")


def claim(folder: Path, study: str) -> None:
    """Refuse an output folder that contains anything other than earlier results of the same study."""
    try:
        others = sorted(path.name for path in folder.iterdir() if not path.name.startswith("."))
    except FileNotFoundError:
        return
    except OSError as error:
        raise JaxpflError(f"cannot write to {folder}: {error.strerror}") from None
    if others and _earlier(folder).get("study") != study:
        raise JaxpflError(
            f"{folder} contains {others[0]} but no results of jaxpfl estimate {study}: choose another --output"
        )


def _earlier(folder: Path) -> dict[str, Any]:
    """Return the summary in a folder, or else the note of an interrupted move; empty if neither can be read."""
    for name in (SUMMARY, _NOTE):
        with suppress(JaxpflError):
            found = read_json(folder / name)
            if isinstance(found, dict):
                return found
    return {}


def _write_folder(result: dict[str, Any], folder: Path, draw: Callable[[Path], list[Path]]) -> dict[str, Any]:
    """Write the results of a study into a folder, and replace its earlier results.

    All files are first written into a temporary folder, and then moved. If the process is killed during the move, the
    folder has no summary, but a note (`_NOTE`), so that the same study may write there again.

    Returns:
      The results with the entries ``plots`` (names of the plots) and ``files`` (names of all files, plots included,
      which the same study may replace later).

    Raises:
      JaxpflError: if a file would be overwritten that is not part of the earlier results.
    """
    before = _earlier(folder).get("files")
    with scratch(folder / "results") as place:
        (place / "plots").mkdir(parents=True)
        plots = [path.relative_to(place).as_posix() for path in draw(place / "plots")]
        names = sorted(path.relative_to(place).as_posix() for path in place.rglob("*") if path.is_file())
        for name in names:
            if (folder / name).exists() and not (isinstance(before, list) and name in before):
                raise JaxpflError(f"{folder / name} exists and is not an earlier result: choose another --output")
        result = result | {"plots": plots, "files": names}
        write_json(place / SUMMARY, result)
        known = sorted({*names, *(before if isinstance(before, list) else [])})
        write_json(folder / _NOTE, {"study": result.get("study"), "files": known})
        (folder / SUMMARY).unlink(missing_ok=True)  # a mixture of old and new files must not look complete
        (folder / "plots").mkdir(exist_ok=True)
        for name in [*names, SUMMARY]:
            os.replace(place / name, folder / name)
        (folder / _NOTE).unlink()
    return result

"""Flags for output, which several commands share, and functions that write a study's results."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from tyro.conf import arg

from jaxpfl.runs.run_folder import SUMMARY
from jaxpfl.support.console import Console
from jaxpfl.support.errors import JaxpflError
from jaxpfl.support.output_paths import NEW_FOLDER, scratch

QUIET = "--quiet"


@dataclass(frozen=True)
class WriteFlags:
    """Flags for replacing earlier results, and for progress and notes."""

    force: bool = False
    """Replace earlier results of the same command in --output; a folder that contains anything else is refused."""
    quiet: bool = False
    """Print only the result and errors: no progress, notes or warnings (--strict turns warnings into errors)."""

    def check_force(self, output: Path | None, *, resume: bool) -> None:
        """Check that ``--force``, which is given, has ``--output`` beside it and not ``--resume``.

        Raises:
          JaxpflError: if ``--force`` is used in another way.
        """
        if resume:
            raise JaxpflError("--resume continues the earlier results and --force replaces them: give only one of them")
        if output is None:
            raise JaxpflError("--force replaces the folder that --output names: give --output too")

    def notes(self, *, writes: bool = True) -> Console:
        """Return a console on standard error for progress and notes.

        Args:
          writes: whether this process prints; otherwise, or if ``--quiet`` is given, the console is silent.
        """
        return Console(stderr=True, quiet=self.quiet or not writes)

    def note(self, text: str) -> None:
        """Print a line on standard error, unless ``--quiet`` is given."""
        if not self.quiet:
            print(text, file=sys.stderr, flush=True)


@dataclass(frozen=True)
class Session(WriteFlags):
    """Flags of a run for its output, resuming, tracking, and several processes."""

    output: Annotated[Path | None, NEW_FOLDER] = None
    """Run folder; runs/COMMAND-DATA-HASH unless given."""
    resume: bool = False
    """Continue an earlier run of the same config from its last checkpoint."""
    config: Path | None = None
    """TOML or YAML file with flags and methods (methods = ["local", "adaped"]), or a run folder's config.json; flags on
    the command line take precedence."""
    json: bool = False
    """Print the summary as one JSON object and nothing else on standard output."""
    strict: bool = False
    """Turn warnings into errors."""
    profile: bool = False
    """Write a trace of a few rounds of each method to RUN/profile, for xprof or TensorBoard."""
    tensorboard: bool = False
    """Also write TensorBoard event files to RUN/tensorboard: means over the seeds, by method and round."""
    mlflow: Annotated[str | None, arg(metavar="URI")] = None
    """Also send each method's records to MLflow: address of its server, or a folder (needs the extra mlflow)."""
    wandb: Annotated[str | None, arg(metavar="PROJECT")] = None
    """Also send each method's records to this Weights & Biases project (needs the extra wandb)."""
    explain_plan: bool = False
    """Show how the run would be executed and why, and how much memory it would need; nothing is trained or written."""
    distributed: Annotated[str | None, arg(metavar="HOST:PORT")] = None
    """Run in several processes: host and a free port of process 0, the same for every process. With auto, the
    address, --processes and --process are detected under Slurm, Open MPI, Kubernetes and on Cloud TPUs. Only process 0
    prints and writes."""
    processes: int | None = None
    """Number of processes of a distributed run."""
    process: int | None = None
    """Index of this process in a distributed run, from 0."""
    distributed_token: Annotated[Path | None, arg(metavar="FILE")] = None
    """File with a secret that all processes of a distributed run share; only you may be able to read it. The variable
    JAXPFL_DISTRIBUTED_TOKEN can give the secret instead. Needed unless the address is localhost."""


@dataclass(frozen=True)
class Output:
    """Flags of a study for its output."""

    json: bool = False
    """Print the results as one JSON object and nothing else on standard output."""
    output: Annotated[Path | None, NEW_FOLDER] = None
    """Folder for summary.json and plots; it may be new, empty, or contain earlier results of the same study."""


_NOTE = ".results.json"
"""File that names the study while its results are moved into a folder; the summary, which also names it, is moved
last."""


def write(
    result: dict[str, Any],
    to: Output,
    draw: Callable[[Path], list[Path]],
    files: str = "summary.json, plots/",
    again: Sequence[str] = (),
) -> None:
    """Write a study's results and plots into the output folder, if there is one.

    Print the results as JSON if ``to.json``, otherwise the folder's path, if there is one.

    Args:
      result: results of the study.
      to: values of the output flags.
      draw: function that writes the plots into a given folder, and other files into its parent; returns the plots'
        paths.
      files: description of the output folder's content, for the message.
      again: command line that reproduces the results; stored in the summary.
    """
    from jaxpfl.support.files import jsonable

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
            f"{folder} holds {others[0]} but no results of jaxpfl estimate {study}: choose another --output"
        )


def _earlier(folder: Path) -> dict[str, Any]:
    """Return the summary in a folder, or else the note of an interrupted move; empty if neither can be read."""
    from jaxpfl.support.files import read_json

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
    from jaxpfl.support.files import write_json

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

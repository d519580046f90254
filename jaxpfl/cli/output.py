"""Flags about results that several commands share, and the output of a study's results."""

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
    """Treatment of earlier results, and of progress and notes."""

    force: bool = False
    """Replace the earlier results of the same command in --output; a folder with anything else in it is refused."""
    quiet: bool = False
    """Print the result and errors alone: no progress, no notes, no warnings (--strict makes errors of them)."""

    def check_force(self, output: Path | None, *, resume: bool) -> None:
        """Refuse ``--force`` where it does not say what it replaces.

        Raises:
          JaxpflError: without ``--output``, and with ``--resume``.
        """
        if self.force and resume:
            raise JaxpflError("--resume continues the earlier results and --force replaces them: give one")
        if self.force and output is None:
            raise JaxpflError("--force replaces the folder that --output names: give --output too")

    def notes(self, *, writes: bool = True) -> Console:
        """Standard error, for progress and notes; silent under ``--quiet`` and where another process ``writes``."""
        return Console(stderr=True, quiet=self.quiet or not writes)

    def note(self, text: str) -> None:
        """Print a line on standard error, unless ``--quiet`` is given."""
        if not self.quiet:
            print(text, file=sys.stderr, flush=True)


@dataclass(frozen=True)
class Session(WriteFlags):
    """Destination of a run's results, and use of an earlier run."""

    output: Annotated[Path | None, NEW_FOLDER] = None
    """Run folder; runs/COMMAND-DATA-HASH unless given."""
    resume: bool = False
    """Continue an earlier run of the same config from its last checkpoint."""
    config: Path | None = None
    """TOML or YAML file of flags and methods (methods = ["local", "adaped"]), or a run folder's config.json; what is
    given on the command line wins."""
    json: bool = False
    """Print the summary as one JSON object, the only thing on standard output."""
    strict: bool = False
    """Turn warnings into errors."""
    profile: bool = False
    """Write a trace of a few rounds of each method to RUN/profile, for xprof or TensorBoard."""
    tensorboard: bool = False
    """Write TensorBoard's event files to RUN/tensorboard too: means over the seeds, by method and round."""
    mlflow: Annotated[str | None, arg(metavar="URI")] = None
    """Send each method's records to MLflow too: the address of its server, or a folder (needs the extra mlflow)."""
    wandb: Annotated[str | None, arg(metavar="PROJECT")] = None
    """Send each method's records to this project of Weights & Biases too (needs the extra wandb)."""
    explain_plan: bool = False
    """Show how the run would execute, what memory it would take and why; nothing is trained or written."""
    distributed: Annotated[str | None, arg(metavar="HOST:PORT")] = None
    """Share the run with other processes: host and a free port of process 0, the same in each; auto finds all three
    under Slurm, Open MPI, Kubernetes and on Cloud TPUs. Process 0 prints and writes."""
    processes: int | None = None
    """Number of processes of a distributed run."""
    process: int | None = None
    """This process's number in a distributed run, from 0."""
    distributed_token: Annotated[Path | None, arg(metavar="FILE")] = None
    """File with a secret that all processes of a distributed run share, readable by you alone; or the variable
    JAXPFL_DISTRIBUTED_TOKEN holds it. Needed unless the address is localhost."""


@dataclass(frozen=True)
class Output:
    """Destination of the results."""

    json: bool = False
    """Print the results as one JSON object, the only thing on standard output."""
    output: Annotated[Path | None, NEW_FOLDER] = None
    """Folder for summary.json and plots: a new or empty one, or one with earlier results of the same study."""


_NOTE = ".results.json"
"""Note in a folder that names the owner of the results being moved into it, as the summary is written last."""


def write(
    result: dict[str, Any],
    to: Output,
    draw: Callable[[Path], list[Path]],
    files: str = "summary.json, plots/",
    again: Sequence[str] = (),
) -> None:
    """Write a study's results and its plots if a folder was asked for, and print JSON if that was.

    Args:
      result: result of the study.
      to: the destination.
      draw: writes the plots into a given folder, and other files beside it; returns the plots.
      files: contents of the output folder, in words.
      again: the command that gives the same results; kept in the folder's summary.
    """
    from jaxpfl.support.files import jsonable

    if to.output is not None:
        result = _write_folder(result | {"command": list(again)}, to.output, draw)
    if to.json:
        print(json.dumps(jsonable(result)))
    elif to.output is not None:
        print(f"results: {to.output} ({files})")


def claim(folder: Path, study: str) -> None:
    """Refuse a folder with anything but earlier results of the study, which may be replaced."""
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
    """Summary in a folder, or the note of an interrupted move; empty if neither can be read."""
    from jaxpfl.support.files import read_json

    for name in (SUMMARY, _NOTE):
        with suppress(JaxpflError):
            found = read_json(folder / name)
            if isinstance(found, dict):
                return found
    return {}


def _write_folder(result: dict[str, Any], folder: Path, draw: Callable[[Path], list[Path]]) -> dict[str, Any]:
    """Write the results into a folder by way of one beside it: earlier results stay until all new ones are written.

    They are then moved. A kill in the middle leaves no summary, but a note that lets the same study write there again.

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
                raise JaxpflError(f"{folder / name} exists and is not an earlier result: choose another --output")
        result = result | {"plots": plots, "files": names}
        write_json(place / SUMMARY, result)
        known = sorted({*names, *(before if isinstance(before, list) else [])})
        write_json(folder / _NOTE, {"study": result.get("study"), "files": known})
        (folder / SUMMARY).unlink(missing_ok=True)  # old and new files together are nobody's results
        (folder / "plots").mkdir(exist_ok=True)
        for name in [*names, SUMMARY]:
            os.replace(place / name, folder / name)
        (folder / _NOTE).unlink()
    return result

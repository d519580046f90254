"""Where a study's results go: standard output as JSON, or a folder with a summary and plots."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from jaxpfl.cli.places import NEW_FOLDER


@dataclass(frozen=True)
class Output:
    """Where the results go."""

    json: bool = False
    """Print the results as one JSON object, the only thing on standard output."""
    output: Annotated[Path | None, NEW_FOLDER] = None
    """Folder for summary.json and plots."""


TO = Output()


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
    from jaxpfl.experiment.files import jsonable, write_json

    if to.output is not None:
        to.output.mkdir(parents=True, exist_ok=True)
        drawn = draw(to.output / "plots")
        result = result | {"plots": [str(path.relative_to(to.output)) for path in drawn]}
        write_json(to.output / "summary.json", result)
    if to.json:
        print(json.dumps(jsonable(result)))
    elif to.output is not None:
        print(f"results: {to.output} ({files})")

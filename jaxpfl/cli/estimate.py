"""``jaxpfl estimate``: estimation studies, simulated or on data, with tables, plots and JSON."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from tyro.conf import arg

from jaxpfl.estimate.gaussian import GaussianSettings
from jaxpfl.experiment import compile_cache


@dataclass(frozen=True)
class Output:
    """Where the results go."""

    json: bool = False
    """Print the results as one JSON object, the only thing on standard output."""
    output: Path | None = None
    """Folder for summary.json and plots."""


_TO, _GAUSSIAN = Output(), GaussianSettings()


def commands() -> tuple[Callable[..., None], ...]:
    """The commands of the group."""
    return (gaussian,)


def gaussian(
    settings: Annotated[GaussianSettings, arg(name="")] = _GAUSSIAN,
    to: Annotated[Output, arg(name="")] = _TO,
) -> None:
    """Means of Gaussian clients: local, global, personalised, quantised and private, beside exact errors."""
    from jaxpfl.estimate import gaussian as study
    from jaxpfl.estimate import gaussian_sweeps

    compile_cache.enable()
    title = (
        f"{settings.clients} Gaussian clients of {settings.samples} samples, d = {settings.dim}, "
        f"{settings.repetitions} repetitions"
    )
    show(study.run(settings), title, to, lambda folder: gaussian_sweeps.write_plots(folder, settings))


def show(
    result: dict[str, Any],
    title: str,
    to: Output,
    draw: Callable[[Path], list[Path]],
    notes: tuple[str, ...] = (),
) -> None:
    """Prints a study's results, and writes them and its plots where a folder was asked for."""
    from rich.console import Console

    from jaxpfl.estimate.report import print_study
    from jaxpfl.experiment.files import write_json

    if to.output is not None:
        to.output.mkdir(parents=True, exist_ok=True)
        drawn = draw(to.output / "plots")
        result = result | {"plots": [str(path.relative_to(to.output)) for path in drawn]}
        write_json(to.output / "summary.json", result)
    if to.json:
        from jaxpfl.experiment.files import jsonable

        print(json.dumps(jsonable(result)))
        return
    print_study(Console(), result, title, notes)
    if to.output is not None:
        print(f"results: {to.output} (summary.json, plots/)")

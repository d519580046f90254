"""``jaxpfl papers``: commands for the papers' tables and figures, with the published values beside jaxpfl's."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from tyro.conf import Positional, arg

from jaxpfl.support import signals
from jaxpfl.support.errors import JaxpflError, warn
from jaxpfl.support.output_paths import NEW_FOLDER

if TYPE_CHECKING:
    from .declared import Experiment
    from .results import Result

FOLDER = Path("runs") / "papers"
_Folder = Annotated[Path, NEW_FOLDER]


def commands(args: Sequence[str] = ()) -> tuple[Callable[..., None], ...]:
    """Return the commands of the group, which do not depend on the arguments."""
    del args
    return list_, run, show


def list_(json: bool = False) -> None:
    """List the tables and figures with their papers and running times in minutes.

    The times are measured if results come with the package, and estimated otherwise.

    Args:
        json: Print one JSON array.
    """
    from jaxpfl.support.console import Console

    from . import results
    from .registry import EXPERIMENTS
    from .show import print_list

    measured = {one.name: one.minutes for one in results.committed()}
    if json:
        about = [
            {name: getattr(one, name) for name in ("name", "paper", "what", "minutes")} for one in EXPERIMENTS.values()
        ]
        for one in about:
            one["measured"] = one["name"] in measured
            one["minutes"] = measured.get(one["name"], one["minutes"])
        _print(about)
        return
    print_list(Console(), EXPERIMENTS.values(), measured)


list_.__name__ = "list"


def run(
    name: Annotated[Positional[str], arg(metavar="NAME", help="Name of a table or figure (see jaxpfl papers list).")],
    quick: bool = False,
    output: _Folder = FOLDER,
    data_dir: str | None = None,
    json: bool = False,
) -> None:
    """Run a table or figure, and print its rows beside the published values; finished parts of earlier runs are kept.

    Args:
        quick: Scale the run down to a minute or two, on included or simulated data. The values are not comparable with
            the paper. A table whose full run takes no longer is not scaled down.
        output: Folder of results, with a subfolder for each table; rows.json and rows.csv contain all rows.
        data_dir: Folder of the data sets; by default, $JAXPFL_DATA_DIR, or ./data if that is not set.
        json: Print the rows as one JSON object and nothing else on standard output.
    """
    from . import registry, results

    experiment = registry.get(name)
    result = _run(experiment, output, quick, data_dir)
    if json:
        _print({"rows": [row.to_json() for row in result.rows]})
        return
    from jaxpfl.support.console import Console

    from .show import print_result

    print_result(Console(), result)
    place = results.place(output, experiment, quick=result.quick).name
    print(f"results: {output} (rows.json, rows.csv; table.md and runs in {place}/)")


def show(
    names: Annotated[
        Positional[tuple[str, ...]], arg(metavar="[NAMES ...]", help="Names of tables and figures; all by default.")
    ] = (),
    output: Path = FOLDER,
    json: bool = False,
    markdown: bool = False,
) -> None:
    """Print all tables with results, from the package and from a folder, beside the published values.

    Args:
        output: Folder of results of jaxpfl papers run.
        json: Print all rows as one JSON object.
        markdown: Print the tables in Markdown.
    """
    from . import results
    from .results import QUICK

    if json and markdown:
        raise JaxpflError("--json and --markdown each print nothing else on standard output: give only one of them")
    if output.exists() and not output.is_dir():
        raise JaxpflError(f"--output must be a folder of results, {output} is a file")
    if output != FOLDER and not output.is_dir():
        raise JaxpflError(f"no folder {output}: jaxpfl papers run NAME --output {output} creates it")
    own = results.of_folder(output)
    damaged = [str(error) for place, error in own.damaged.items() if not names or place.removesuffix(QUICK) in names]
    if output != FOLDER and not own.results and not damaged:
        warn(f"{output} has no results: showing those of the package")
    found = results.latest(results.committed(), own.results)
    _show(_chosen(found, names, damaged), as_json=json, markdown=markdown)
    if damaged:  # last, because the exit status is for the whole command
        raise JaxpflError("; ".join(damaged))


def _chosen(found: list[Result], names: Sequence[str], damaged: Sequence[str]) -> list[Result]:
    from . import registry

    for name in names:
        registry.get(name)
        if not damaged and all(one.name != name for one in found):
            raise JaxpflError(f"no results of {name}: run jaxpfl papers run {name} first")
    order = list(registry.EXPERIMENTS)
    chosen = [one for one in found if not names or one.name in names]
    return sorted(chosen, key=lambda one: (order.index(one.name) if one.name in order else len(order), one.quick))


def _show(found: list[Result], *, as_json: bool, markdown: bool) -> None:
    from . import show as shown

    if as_json:
        _print({"rows": [row for result in found for row in result.tidy()]})
        return
    if markdown:
        print(shown.markdown(found), end="")
        return
    from jaxpfl.support.console import Console

    console = Console()
    for result in found:
        shown.print_result(console, result)
        console.print()


def _run(experiment: Experiment, output: Path, quick: bool, data_dir: str | None) -> Result:
    from jaxpfl.engine import use_cpu_cores
    from jaxpfl.runs import compile_cache, run_folder
    from jaxpfl.runs.control import Interrupt
    from jaxpfl.runs.terminal import SweepTerminal
    from jaxpfl.support.console import Console

    from . import results
    from . import run as papers
    from .way import Interrupted, Way

    quick = quick and experiment.scales
    folder = results.place(output, experiment, quick=quick)
    kept = f"; kept in {folder}: the same command goes on"
    with ExitStack() as stack:
        use_cpu_cores()
        compile_cache.enable()
        planned = papers.units(experiment, quick=quick)
        stack.enter_context(run_folder.lock(folder))
        interrupt = stack.enter_context(Interrupt())

        def saves(on: bool) -> None:
            interrupt.saves = on

        saves(True)
        stack.enter_context(signals.noted(kept))
        with SweepTerminal(Console(stderr=True), planned) as reporter:
            way = Way(folder, quick, data_dir, reporter, lambda: interrupt.asked is not None, saves)
            try:
                return papers.run(experiment, way)
            except Interrupted:
                pass
    interrupt.end_if_asked(f"stopped{kept}")
    raise AssertionError("stopped without a signal")


def _print(value: Any) -> None:
    print(json.dumps(value))
    sys.stdout.flush()

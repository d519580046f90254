"""``jaxpfl winners``: commands that measure or show the map of the best methods."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from jaxpfl.support import signals
from jaxpfl.support.errors import JaxpflError
from jaxpfl.support.output_paths import NEW_FOLDER

if TYPE_CHECKING:
    from .atlas import Atlas

FOLDER = Path("runs") / "winners"


def commands(args: Sequence[str] = ()) -> tuple[Callable[..., None], ...]:
    """Return the commands of the group, which do not depend on the arguments."""
    del args
    return run, show


def run(
    quick: bool = False,
    output: Annotated[Path | None, NEW_FOLDER] = None,
    data_dir: str | None = None,
    json: bool = False,
) -> None:
    """Measure the map, and print its tables; finished parts of an earlier run are kept.

    Args:
        quick: Measure one small federation with two methods and two splits, in half a minute, only to show that the
            command works.
        output: Folder of the map: map.json, tables.md and pictures. By default runs/winners, or runs/winners-quick for
            a quick map.
        data_dir: Folder of the data sets; by default, $JAXPFL_DATA_DIR, or ./data if that is not set.
        json: Print the map as one JSON object and nothing else on standard output.
    """
    folder = output or (FOLDER.with_name(f"{FOLDER.name}-quick") if quick else FOLDER)
    found = _run(folder, quick, data_dir)
    _print(found, as_json=json, markdown=False)
    if not json:
        print(f"map: {folder} (map.json, tables.md, who-wins.png)")


def show(output: Path | None = None, json: bool = False, markdown: bool = False) -> None:
    """Print the map of the package or of a folder: each federation's best method, with its leads over other methods.

    Args:
        output: Folder of jaxpfl winners run; by default, the package's map is shown.
        json: Print the map as one JSON object.
        markdown: Print the tables in Markdown.
    """
    from . import atlas

    if json and markdown:
        raise JaxpflError("--json and --markdown each print nothing else on standard output: give only one of them")
    path = atlas.COMMITTED if output is None else output / atlas.FILE
    if not path.is_file():
        raise JaxpflError(f"no map in {output}: jaxpfl winners run --output {output} creates it")
    _print(atlas.read(path), as_json=json, markdown=markdown)


def _print(found: Atlas, *, as_json: bool, markdown: bool) -> None:
    if as_json:
        print(json.dumps(found.to_json()))
    elif markdown:
        from .page import tables

        print(tables(found), end="")
    else:
        from jaxpfl.support.console import Console

        from .show import print_atlas

        print_atlas(Console(), found)
    sys.stdout.flush()


def _run(folder: Path, quick: bool, data_dir: str | None) -> Atlas:
    from jaxpfl.engine import use_cpu_cores
    from jaxpfl.runs import compile_cache, run_folder
    from jaxpfl.runs.control import Interrupt
    from jaxpfl.runs.terminal import SweepTerminal
    from jaxpfl.support.console import Console

    from .run import Interrupted, Plan, check_folder
    from .run import run as measured

    kept = f"; kept in {folder}: the same command goes on"
    with ExitStack() as stack:
        use_cpu_cores()
        compile_cache.enable()
        check_folder(folder, quick=quick)
        plan = Plan(quick, data_dir)
        stack.enter_context(run_folder.lock(folder))
        interrupt = stack.enter_context(Interrupt())
        interrupt.saves = True
        stack.enter_context(signals.noted(kept))
        done, planned = plan.progress(folder)
        with SweepTerminal(Console(stderr=True), planned, done) as reporter:
            try:
                return measured(plan, folder, reporter, lambda: interrupt.asked is not None)
            except Interrupted:
                pass
    interrupt.end_if_asked(f"stopped{kept}")
    raise AssertionError("stopped without a signal")

"""Commands about results (report, runs, compare-runs, check, predict), new projects, and shell completion."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from tyro import MISSING
from tyro.conf import Positional, arg

from jaxpfl.support.console import claim_file
from jaxpfl.support.errors import JaxpflError, writing
from jaxpfl.support.files import contents, jsonable, opened, whole
from jaxpfl.support.output_paths import NEW_FILE, partial

_PAGE = "report.html"
_MARK = b"<!DOCTYPE html>"
_Folders = Annotated[Positional[tuple[Path, ...]], arg(metavar="FOLDER [FOLDER ...]", help="Folders of results.")]
_Json = Annotated[bool, arg(help="Print one JSON object, the only thing on standard output.")]


def commands(args: Sequence[str] = ()) -> tuple[Callable[..., None], ...]:
    """Return the commands, which do not depend on the arguments."""
    del args
    return report, runs, compare_runs, check, predict, new, completion


def report(
    folders: _Folders = MISSING,
    output: Annotated[Path | None, NEW_FILE] = None,
    data_dir: str | None = None,
    json: _Json = False,
) -> None:
    """Write one self-contained HTML page about runs, sweeps and studies, finished or not.

    Args:
        output: HTML file to write. Unless given, it is report.html in the folder of results, or in the current folder
            if the page is about several folders.
        data_dir: Folder of the data sets, for plots of the splits; by default, as in the run.
    """
    from jaxpfl.runs.reports.report import write

    path = output or (folders[0] / _PAGE if len(folders) == 1 else Path(_PAGE))
    claim_file(path, "--output", "jaxpfl report", _is_page)
    write(folders, path, data_dir=data_dir)
    if json:
        _print({"report": str(path)})
    else:
        print(f"report: {path}")


def runs(
    folder: Annotated[Positional[Path], arg(metavar="[FOLDER]", help="The folder to search.")] = Path("runs"),
    json: _Json = False,
) -> None:
    """List the run, sweep and study folders below a folder, with their status."""
    from jaxpfl.runs.reports.folders import below, print_folders
    from jaxpfl.support.console import Console

    found = below(folder)
    if json:
        _print({"folders": [one._asdict() | {"path": str(one.path)} for one in found]})
    else:
        print_folders(Console(), found)


def compare_runs(
    first: Annotated[Positional[Path], arg(metavar="FIRST", help="A run folder.")] = MISSING,
    second: Annotated[Positional[Path], arg(metavar="SECOND", help="Another run folder.")] = MISSING,
    json: _Json = False,
) -> None:
    """Show how two finished runs differ: in their settings, and in the scores of the methods that both have."""
    from jaxpfl.runs.reports.compare import compare, print_comparison
    from jaxpfl.support.console import Console

    found = compare(first, second)
    if json:
        _print(found)
    else:
        print_comparison(Console(), found)


def check(folders: _Folders = MISSING, json: _Json = False) -> None:
    """Check that result folders are complete, files match their checksums, and summaries match the files.

    The exit status is 2 if anything is damaged.
    """
    from jaxpfl.runs.reports.folders import check as checked

    found = [checked(folder) for folder in folders]
    if json:
        rows = [{"path": str(o.folder.path), "kind": o.folder.kind, "status": o.folder.status} for o in found]
        more = [{"troubles": one.troubles, "looked_at": one.looked_at} for one in found]
        _print({"folders": [row | own for row, own in zip(rows, more, strict=True)]})
    else:
        for one in found:
            counts = ", ".join(f"{count} {name}" for name, count in one.looked_at.items())
            done = f" ({one.folder.done})" * bool(one.folder.done and not one.troubles)
            print(f"{one.folder.path}: {one.folder.kind}, {one.folder.status}{done}{'; ' if counts else ''}{counts}")
            for trouble in one.troubles:
                print(f"  {trouble}")
    damaged = [str(one.folder.path) for one in found if one.troubles]
    if damaged:
        raise JaxpflError(f"damaged: {', '.join(damaged)}")


def predict(
    models: Annotated[Positional[Path], arg(metavar="MODELS", help="The folder that jaxpfl export wrote.")] = MISSING,
    csv: Annotated[Path, arg(metavar="FILE")] = MISSING,
    output: Annotated[Path | None, NEW_FILE] = None,
    client: str | None = None,
    only_global: Annotated[bool, arg(name="global")] = False,
    method: str | None = None,
    encoding: str | None = None,
    adapt: bool = False,
    target: str | None = None,
) -> None:
    """Predict each row of a new table with its client's model, or with the global model if the client is new.

    Args:
        csv: Table with the columns of the run's features; other columns are not used.
        output: CSV file to write, with the columns client, prediction, and a probability for each class; by default,
            standard output.
        client: Column with the clients' names; by default, the run's client column.
        only_global: Predict every row with the global model.
        method: Method whose models are used; optional if there is only one method.
        encoding: Encoding of the table; by default, as in the run.
        adapt: Adapt the model to the labeled rows of each new client, as jaxpfl run --unseen-clients does, and predict
            all rows of the client with the adapted model. The models must be in the run folder.
        target: Column of the labels for --adapt; by default, as in the run.
    """
    from jaxpfl.data.sources import csv_text
    from jaxpfl.engine.model_files import load_models

    claim_file(output, "--output", "jaxpfl predict", lambda path: contents(path).startswith(b"client,prediction"))
    loaded = load_models(models, method)
    config = loaded.manifest.get("config", {})  # missing in an export with --private-only
    column = None if only_global else client or config.get("client")
    if column is None and not only_global:
        raise JaxpflError("the run had no client column: give --client, the client column of this table, or --global")
    table = csv_text.read(csv, encoding=encoding or config.get("encoding"), missing_words=config.get("missing_words"))
    column = column and table.find(column)
    adaptation = None
    if adapt and column is not None:
        from jaxpfl.runs import newcomers

        adaptation = functools.partial(newcomers.adapt, models.absolute().parent, loaded, table, column, target)
    elif adapt:
        raise JaxpflError("--adapt adapts clients' models: leave out --global")
    predictions = loaded.predict_table(table, column, adaptation)
    text = predictions.to_csv(index=False)
    if output is None:
        print(text, end="")
    else:
        with whole(output) as file:
            file.write(text)
        print(f"predictions: {output} ({len(predictions)} rows)")


def new(folder: Annotated[Positional[Path], arg(metavar="FOLDER", help="The folder to create.")] = MISSING) -> None:
    """Write a small project: a method, a data loader, a config, and a test that runs in seconds."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise JaxpflError(f"{folder} is not an empty folder: choose another")
    if folder.resolve() == Path.cwd():  # the rename below would take the folder away from the user's shell
        raise JaxpflError(f"{folder} is the current folder: choose another")
    with writing(folder):
        folder.parent.mkdir(parents=True, exist_ok=True)
        with partial(folder) as place:
            place.mkdir()
            for template in Path(__file__).with_name("project").glob("*.txt"):
                (place / template.stem).write_bytes(contents(template))
    print(f"{folder}: cd {folder}; jaxpfl run --config config.toml; pytest")


def completion(
    shell: Annotated[Positional[Literal["bash", "zsh", "tcsh"]], arg(metavar="SHELL", help="The shell.")],
) -> None:
    """Print the script that completes commands and flags in a shell.

    Load the script with source <(jaxpfl completion bash). Saving the script in a file once and sourcing this file is
    faster.
    """
    from jaxpfl.cli.app import command_table
    from jaxpfl.cli.parsing import print_completion

    print_completion(command_table(), shell)


def _is_page(path: Path) -> bool:
    """Return whether a file is a report written by jaxpfl, so that a new report may replace it."""
    try:
        with opened(path) as file:
            head = file.read(300)
    except OSError:
        return False
    return head.startswith(_MARK) and b'content="jaxpfl report"' in head


def _print(value: Any) -> None:
    print(json.dumps(jsonable(value)))

"""``jaxpfl data``: the data sets, a split in figures and as a picture, and a split as files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from jaxpfl.runs.config import TEST_USERS, DataConfig, RunConfig, resolve
from jaxpfl.support.console import claim_file, columns, filled, signed
from jaxpfl.support.errors import JaxpflError

if TYPE_CHECKING:
    from jaxpfl.data import Entry

_DESCRIBE = "jaxpfl data describe"


def about(action: str, settings: DataConfig, as_json: bool, plot: Path | None, output: Path | None) -> None:
    """List the data sets, describe a split or convert it, as ``action`` says.

    Raises:
      JaxpflError: for an output that the action does not write, and what the data sets raise.
    """
    from jaxpfl import data

    if output is not None and action != "convert":
        raise JaxpflError(f"--output is for jaxpfl data convert: leave it out with {action}")
    if plot is not None and action != "describe":
        raise JaxpflError(f"--plot is for {_DESCRIBE}: leave it out with {action}")
    if action == "convert":
        _convert(settings, output, as_json)
        return
    if action == "list":
        entries = data.available(settings.data_dir)
        if as_json:
            print(json.dumps([entry._asdict() for entry in entries]))
            return
        _list(entries)
        return
    from jaxpfl.runs.data_sets import is_stored, is_table
    from jaxpfl.runs.results import client_clusters
    from jaxpfl.runs.setup import clients_of, load_federation

    claim_file(plot, "--plot", _DESCRIBE)
    config = resolve(RunConfig(**vars(settings)))
    source, federation = load_federation(config)
    if config.standardize:
        data.check_standardizable(source)
    clusters = client_clusters(config, source.num_classes)
    whole, unseen = None if is_stored(config.data) else source, None
    if config.unseen_clients == TEST_USERS:
        whole, unseen = data.seen(source), clients_of(config, source, federation)[1]
    task = config.task if isinstance(config.task, str) else source.task
    summary = data.summary(federation, source.num_classes, whole, clusters, task)
    if plot is not None:
        with signed(_DESCRIBE):
            data.plot_split(summary, plot)
    description = data.describe(summary) | {"standardized": config.standardize or is_table(config)}
    if unseen is not None:
        counts = {s: len(getattr(unseen, s).examples.y) for s in ("train", "validation", "test")}
        description["unseen"] = {"clients": unseen.num_clients, "examples": counts}
    if source.class_names is not None:
        description["class_names"] = source.class_names.tolist()
    print(json.dumps(description) if as_json else data.format_description(description))


def _list(entries: list[Entry]) -> None:
    """A line for each data set; on a narrow terminal the note stands below."""
    narrow = columns() < 60
    for entry in entries:
        state = "ready" if entry.present else "missing"
        if narrow:
            print("\n".join([f"{entry.name}: {state}", *filled(entry.note, "  ")]))
        else:
            print(f"{entry.name:<16}{state:<9}{entry.note}")


def _convert(settings: DataConfig, output: Path | None, as_json: bool) -> None:
    from jaxpfl.runs.data_sets import PREFIX, convert
    from jaxpfl.support.host_memory import readable

    if output is None:
        raise JaxpflError("jaxpfl data convert needs --output, the folder to make")
    folder = output.absolute()
    federation = convert(resolve(RunConfig(**vars(settings))), folder).federation
    splits = {name: getattr(federation, name) for name in ("train", "validation", "test")}
    examples = {name: len(split.examples.y) for name, split in splits.items()}
    size = sum(path.stat().st_size for path in folder.iterdir())
    if as_json:
        about = {"folder": str(folder), "clients": federation.num_clients, "examples": examples, "bytes": size}
        print(json.dumps(about | {"data": f"{PREFIX}{folder}"}))
        return
    print(f"{federation.num_clients} clients, {sum(examples.values())} examples, {readable(size)}")
    print(f"train them with --data {PREFIX}{folder}, and --plan.clients-in disk if they do not fit in memory")

"""Every file of a run folder, damaged or edited: resume, export and warm start say one line, or what the run said."""

import json
import random
import shutil
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from finished_run import SETTINGS, run

sys.path.append(str(Path(__file__).parents[1] / "fuzz"))
from fuzz_target import damaged_file

from jaxpfl import JaxpflError
from jaxpfl.runs import stored_run
from jaxpfl.runs.config import RunConfig, resolve
from jaxpfl.runs.control import Reporter
from jaxpfl.runs.export import Selection, export, read_parameters
from jaxpfl.runs.run import open_folder, run_methods
from jaxpfl.runs.setup import prepare

METHODS = ("local", "fedavg")
slow = partial(pytest.param, marks=pytest.mark.slow)


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> Path:
    return run(tmp_path_factory.mktemp("damaged") / "run", METHODS)


@pytest.fixture(scope="module")
def experiment():
    return prepare(resolve(RunConfig(**SETTINGS)), METHODS)


def contents(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def scores(summary: dict) -> dict:
    """The methods' rows of a summary, without elapsed times."""
    return {name: {**row, "seconds": 0, "compile_seconds": 0} for name, row in summary["methods"].items()}


def one_line_or(want: Callable[[Any], bool], call: Callable[[], Any]) -> str:
    """Calls, and asserts that it says one line or gives what is wanted."""
    try:
        found = call()
    except JaxpflError as error:
        line = str(error)
    else:
        assert want(found)
        line = ""
    assert "\n" not in line
    return line


def damages(folder: Path) -> Iterator[tuple[str, bytes]]:
    """Names of files, and what they might hold: one damage of each, and four of the config."""
    rng = random.Random(0)
    for name, whole in sorted(contents(folder).items()):
        for _ in range(0 if name.startswith("plots") else 4 if name == "config.json" else 1):
            yield name, damaged_file(rng, name, whole)


def sweep(finished: Path, experiment, tmp_path: Path) -> dict[str, int]:
    """Damages one file after the other, and calls one command after the other.

    Returns:
      Of each command, how often it refused.
    """
    original = json.loads((finished / "summary.json").read_text())
    parameters = read_parameters(f"{finished}:fedavg")
    folder = tmp_path / "run"

    def resume() -> dict:
        open_folder(folder, experiment, resume=True)
        return run_methods(experiment, folder, Reporter())

    def export_global() -> Path:
        return export(folder, tmp_path / "models", Selection("fedavg", only_global=True))[0]

    commands = {
        "resume": lambda: one_line_or(lambda summary: scores(summary) == scores(original), resume),
        "export": lambda: one_line_or(Path.is_dir, export_global),
        "warm start": lambda: one_line_or(
            lambda found: same(found, parameters), lambda: read_parameters(f"{folder}:fedavg")
        ),
    }
    refused = dict.fromkeys(commands, 0)
    for number, (name, content) in enumerate(damages(finished)):
        shutil.copytree(finished, folder)
        (folder / name).write_bytes(content)
        for command in ("resume", ("export", "warm start")[number % 2]):
            refused[command] += bool(commands[command]())
        for made in (folder, tmp_path / "models"):
            shutil.rmtree(made, ignore_errors=True)
    return refused


def cached(prepare: Callable[..., Any]) -> Callable[..., Any]:
    """Configs that were prepared before are not prepared again."""
    known: dict[str, Any] = {}

    def call(config: RunConfig, methods: tuple[str, ...], **own: Any) -> Any:
        key = repr((config, methods))
        if key not in known:
            known[key] = prepare(config, methods, **own)
        return known[key]

    return call


def same(found: dict, want: dict) -> bool:
    flat = [json.dumps(tree, default=np.ndarray.tolist, sort_keys=True) for tree in (found, want)]
    return flat[0] == flat[1]


@pytest.mark.parametrize("value", [None, 7, "x", *map(slow, (True, [None], {"x": []}))])
def test_every_field_of_a_stored_config_is_checked(experiment, tmp_path, value):
    folder = tmp_path / "run"
    open_folder(folder, experiment, resume=False)
    record = json.loads((folder / "config.json").read_text())
    for name in record["config"]:
        edited = {**record, "config": {**record["config"], name: value}}
        (folder / "config.json").write_text(json.dumps(edited))
        for call in (lambda: open_folder(folder, experiment, resume=True), lambda: stored_run.open_run(folder)):
            one_line_or(lambda found: True, call)
    (folder / "config.json").write_text(json.dumps({**record, "config": {**record["config"], "plan": 7}}))
    with pytest.raises(JaxpflError, match=r"plan in .*config\.json must be a table, got 7"):
        open_folder(folder, experiment, resume=True)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::jaxpfl.support.errors.JaxpflWarning")
def test_damaged_files_are_one_line_or_change_nothing(finished, experiment, tmp_path, monkeypatch):
    monkeypatch.setattr(stored_run, "prepare", cached(stored_run.prepare))
    refused = sweep(finished, experiment, tmp_path)
    assert min(refused.values()) > 0

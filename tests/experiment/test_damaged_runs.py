"""Every file of a run folder, damaged or edited: resume, export and warm start say one line, or what the run said."""

import copy
import json
import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from finished_run import SETTINGS, run

from jaxpfl import JaxpflError, load_models
from jaxpfl.runs import stored_run
from jaxpfl.runs.config import RunConfig, read, resolve
from jaxpfl.runs.control import Reporter
from jaxpfl.runs.export import Selection, export, read_parameters
from jaxpfl.runs.run import open_folder, run_methods
from jaxpfl.runs.setup import prepare

METHODS = ("local", "fedavg")
slow = partial(pytest.param, marks=pytest.mark.slow)
OTHERS: tuple[Any, ...] = (None, True, -1, 10**30, 1.5, float("nan"), "", "x", [], [None], {}, {"x": []})
"""Values that an edited JSON file may hold in place of another."""


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> Path:
    return run(tmp_path_factory.mktemp("damaged") / "run", METHODS)


@pytest.fixture(scope="module")
def experiment():
    return prepare(resolve(RunConfig(**SETTINGS)), METHODS)


@pytest.fixture(scope="module")
def exported(finished, tmp_path_factory) -> Path:
    return export(finished, tmp_path_factory.mktemp("damaged") / "models")[0]


def contents(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def scores(summary: dict) -> dict:
    """The methods' rows of a summary, without elapsed times."""
    return {name: {**row, "seconds": 0, "compile_seconds": 0} for name, row in summary["methods"].items()}


def torn(whole: bytes, rng: np.random.Generator) -> Iterator[bytes]:
    """Cut, emptied, overwritten, and with a flipped bit."""
    yield b""
    yield whole[: len(whole) // 2]
    yield whole[:-1]
    yield rng.bytes(64)
    yield whole + rng.bytes(16)
    yield b"\x00" * len(whole)
    flipped = bytearray(whole)
    flipped[rng.integers(len(whole))] ^= 1 << rng.integers(8)
    yield bytes(flipped)


def edited(value: Any, rng: np.random.Generator) -> Iterator[bytes]:
    """JSON with one value of another kind in its place, or one name missing or spelled otherwise."""
    yield b"[" * 100_000
    for path in paths(value):
        for _ in range(2):
            other = copy.deepcopy(value)
            at = other
            for key in path[:-1]:
                at = at[key]
            choice = rng.integers(len(OTHERS) + 1)
            if not path:
                other = OTHERS[choice % len(OTHERS)]
            elif choice < len(OTHERS):
                at[path[-1]] = OTHERS[choice]
            elif isinstance(at, dict):
                at[f"{path[-1]}x"] = at.pop(path[-1])
            else:
                del at[path[-1]]
            yield json.dumps(other).encode()


def paths(value: Any) -> Iterator[tuple[Any, ...]]:
    yield ()
    for key, below in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        yield from ((key, *path) for path in paths(below))


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


def damages(folder: Path, seed: int, most: int) -> Iterator[tuple[str, bytes]]:
    """Names of files and what they might hold, at most so many of a file."""
    rng = np.random.default_rng(seed)
    for name, whole in sorted(contents(folder).items()):
        if name.startswith("plots"):
            continue
        kinds = list(torn(whole, rng))
        if name.endswith(".json"):
            kinds += edited(json.loads(whole), rng)
        elif name.endswith(".jsonl"):
            *before, last = whole.splitlines()
            kinds += (b"\n".join([*before, line, b""]) for line in edited(json.loads(last), rng))
        for i in rng.permutation(len(kinds))[: 4 * most if name == "config.json" else most]:
            yield name, kinds[i]


def sweep(finished: Path, exported: Path, experiment, tmp_path: Path, most: int) -> dict[str, int]:
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
        "config": lambda: one_line_or(bool, lambda: read(folder / "config.json")),
    }
    refused = dict.fromkeys((*commands, "load"), 0)
    for number, (name, content) in enumerate(damages(finished, 0, most)):
        shutil.copytree(finished, folder)
        (folder / name).write_bytes(content)
        for command in ("resume", ("export", "warm start")[number % 2], *["config"] * (name == "config.json")):
            refused[command] += bool(commands[command]())
        for made in (folder, tmp_path / "models"):
            shutil.rmtree(made, ignore_errors=True)
    models = {method: load_models(exported, method).client(1) for method in METHODS}
    for name, content in damages(exported, 1, 2 * most):
        shutil.copytree(exported, folder)
        (folder / name).write_bytes(content)
        for method, want in models.items():
            line = one_line_or(
                lambda found, want=want: same(found, want), lambda method=method: load_models(folder, method).client(1)
            )
            refused["load"] += bool(line)
        shutil.rmtree(folder)
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
def test_damaged_files_are_one_line_or_change_nothing(finished, exported, experiment, tmp_path, monkeypatch):
    monkeypatch.setattr(stored_run, "prepare", cached(stored_run.prepare))
    refused = sweep(finished, exported, experiment, tmp_path, most=1)
    assert min(refused.values()) > 0

"""Every file of a run folder, damaged or edited: resume, export and warm start say one line, or what the run said.

``--warm-start``: runs that start from given parameters, from wherever they are read."""

import functools
import json
import random
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from finished_run import SETTINGS, run

import jaxpfl
from jaxpfl import JaxpflError
from jaxpfl.runs.config import RunConfig, resolve
from jaxpfl.runs.export import Selection, export, read_parameters
from jaxpfl.runs.run import open_folder
from jaxpfl.runs.setup import prepare

sys.path.append(str(Path(__file__).parents[1] / "fuzz"))
from fuzz_target import damaged_file

from jaxpfl.runs import stored_run
from jaxpfl.runs.control import Reporter
from jaxpfl.runs.run import run_methods

METHODS = ("local", "fedavg")
slow = functools.partial(pytest.param, marks=pytest.mark.slow)


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


def same(found: dict, want: dict) -> bool:
    flat = [json.dumps(tree, default=np.ndarray.tolist, sort_keys=True) for tree in (found, want)]
    return flat[0] == flat[1]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::jaxpfl.support.errors.JaxpflWarning")
def test_damaged_files_are_one_line_or_change_nothing(finished, experiment, tmp_path, monkeypatch):
    """Damages one file after the other, and calls one command after the other; each refuses some."""
    prepared_once = functools.cache(stored_run.prepare)
    monkeypatch.setattr(stored_run, "prepare", lambda config, methods, own: prepared_once(config, methods))
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
    assert min(refused.values()) > 0


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


@pytest.fixture(scope="module")
def exported(finished, tmp_path_factory) -> Path:
    return export(finished, tmp_path_factory.mktemp("exported") / "models", Selection(per_client=True))[0]


@pytest.fixture
def flat(tmp_path) -> Path:
    """A global model in an archive of its own."""
    path, rng = tmp_path / "start.npz", np.random.default_rng(0)
    shapes = {"head/bias": (10,), "head/kernel": (64, 10)}
    np.savez(path, **{name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()})
    return path


def prepared(start: str | Path | None, *methods: str, **changes) -> jaxpfl.runs.setup.Experiment:
    where = None if start is None else str(start)
    initial = None if where is None else read_parameters(where)
    return prepare(resolve(RunConfig(**SETTINGS | {"warm_start": where} | changes)), methods, initial=initial)


@pytest.mark.slow
def test_the_same_parameters_from_a_run_an_export_and_a_file(finished, exported):
    places = (f"{finished}:fedavg", f"{exported}:fedavg", exported / "fedavg" / "global.npz")
    read = [read_parameters(str(place)) for place in places]
    for other in read[1:]:
        assert other.keys() == read[0].keys() == {"head/bias", "head/kernel"}
        jax.tree.map(np.testing.assert_array_equal, other, read[0])
    assert read_parameters(str(exported / "local" / "clients" / "3.npz")).keys() == read[0].keys()


@pytest.mark.slow
def test_servers_and_clients_of_every_method_start_from_them(flat):
    methods = ("local", "fedavg-ft", "fedprox", "adaped")
    experiment, given = prepared(flat, *methods), read_parameters(str(flat))
    for name in methods:
        simulation = experiment.simulation(name)
        scores = simulation.evaluate(simulation.init([0, 1]))["before"]["accuracy"]
        test = experiment.federation.test
        x, y, mask = test.x, test.y, test.mask
        logits = np.asarray(x).reshape(*y.shape, -1) @ given["head/kernel"] + given["head/bias"]
        expected = ((logits.argmax(-1) == y) & mask).sum(1) / np.asarray(mask).sum(1)
        np.testing.assert_allclose(scores, np.stack([expected, expected]), rtol=1e-6)


@pytest.mark.slow
def test_fit_starts_from_a_tree(flat):
    federation = prepared(None, "local").federation
    given = {"head": {key.split("/")[1]: value for key, value in read_parameters(str(flat)).items()}}
    result = jaxpfl.fit("fedavg", federation, model="linear", warm_start=given, rounds=1, hyper={"lr": 1e-30})
    server = result.state.server
    found = [leaf for leaf in jax.tree.leaves(server) if leaf.shape == (1, 64, 10)]
    np.testing.assert_array_equal(found[0][0], given["head"]["kernel"])
    with pytest.raises(JaxpflError, match=r"'dense0/bias' must be \(64,\), got absent"):
        jaxpfl.fit("fedavg", federation, model="mlp", warm_start=given)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("place", "message"),
    [
        ("{run}", "contains several methods: choose one of local, fedavg"),
        ("{run}:fedavgg", "did you mean 'fedavg'"),
        ("{run}:local", "local of .* has no global model"),
        ("{models}:local", "local of .* has no global model"),
        ("{models}/none.npz", "is neither a run folder, nor exported models, nor an .npz file"),
        ("{models}/local/clients", "is neither a run folder, nor exported models, nor an .npz file"),
        ("{models}/manifest.json", "damaged or is not an .npz archive"),
    ],
)
def test_what_cannot_be_read(finished, exported, place: str, message: str):
    with pytest.raises(JaxpflError, match=message):
        read_parameters(place.format(run=finished, models=exported))


@pytest.mark.slow
def test_the_models_of_several_clients_are_no_start(finished, tmp_path):
    folder, _ = export(finished, tmp_path / "stacked", Selection("local"))
    with pytest.raises(JaxpflError, match="contains several clients' models"):
        read_parameters(str(folder / "local" / "personal.npz"))


def test_resuming_keeps_the_parameters_and_lets_the_path_change(flat, tmp_path):
    folder = tmp_path / "run"
    open_folder(folder, prepared(flat, "local"), resume=False)
    stored = json.loads((folder / "config.json").read_text())
    assert stored["config"]["warm_start"] == str(flat)
    moved = flat.rename(tmp_path / "moved.npz")
    assert open_folder(folder, prepared(moved, "local"), resume=True) == [f"warm_start: {flat} -> {moved}"]
    with np.load(moved) as arrays:
        np.savez(moved, **{key: array + 1 for key, array in arrays.items()})
    for other in (moved, None):
        with pytest.raises(JaxpflError, match="the parameters of --warm-start have changed"):
            open_folder(folder, prepared(other, "local"), resume=True)


def test_a_start_that_is_not_given_is_not_forgotten(flat):
    with pytest.raises(ValueError, match="warm_start"):
        prepare(resolve(RunConfig(**SETTINGS, warm_start=str(flat))), ("local",))

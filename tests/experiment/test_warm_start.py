"""``--warm-start``: runs that start from given parameters, from wherever they are read."""

import json
from pathlib import Path

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


@pytest.fixture(scope="module")
def first(tmp_path_factory) -> Path:
    return run(tmp_path_factory.mktemp("first") / "run", ("local", "fedavg"))


@pytest.fixture(scope="module")
def exported(first) -> Path:
    return export(first, wanted=Selection(per_client=True))[0]


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
def test_the_same_parameters_from_a_run_an_export_and_a_file(first, exported):
    places = (f"{first}:fedavg", f"{exported}:fedavg", exported / "fedavg" / "global.npz")
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
    with pytest.raises(JaxpflError, match=r"'dense0/bias' is absent in them but \(64,\) in the model"):
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
def test_what_cannot_be_read(first, exported, place: str, message: str):
    with pytest.raises(JaxpflError, match=message):
        read_parameters(place.format(run=first, models=exported))


@pytest.mark.slow
def test_the_models_of_several_clients_are_no_start(first, tmp_path):
    folder, _ = export(first, tmp_path / "stacked", Selection("local"))
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

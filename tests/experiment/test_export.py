"""Exported models score what the run says, on its own test data; and what is refused."""

import json
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest
from finished_run import run

from jaxpfl import JaxpflError, load, load_models
from jaxpfl.runs import export as export_module
from jaxpfl.runs.export import Selection, export
from jaxpfl.runs.stored_run import open_run

pytestmark = pytest.mark.slow  # the run of three methods that they export

METHODS = ("local", "fedavg-ft", "adaped")


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> Path:
    """A run of methods with and without a global model, and one whose personal models are made when scored."""
    return run(tmp_path_factory.mktemp("export") / "run", METHODS, set=("fedavg-ft.fine_tune_steps=3",))


@pytest.fixture(scope="module")
def exported(finished, tmp_path_factory) -> Path:
    folder, _ = export(finished, tmp_path_factory.mktemp("export") / "models")
    return folder


def scored(folder: Path, key: str, sizes: np.ndarray, seed: int = 0) -> np.ndarray:
    """Number of test examples that the run had right for each client, [m]: its accuracies times the clients' sizes."""
    with np.load(folder / "clients.npz") as clients:
        counts = clients[key][seed] * sizes
    np.testing.assert_allclose(counts, np.rint(counts), atol=1e-3)
    return np.rint(counts)


def right(task, params, examples, client: int) -> int:
    """Number of one client's test examples that a model predicts correctly."""
    x, y, mask = (np.asarray(a)[client] for a in (examples.x, examples.y, examples.mask))
    logits = jax.jit(task.model.apply)(params, x)
    return int((np.argmax(logits, axis=-1) == y)[mask].sum())


@pytest.mark.parametrize("method", METHODS)
def test_every_clients_model_scores_what_the_run_says(finished, exported, method):
    experiment = open_run(finished).experiment()
    models, test = load_models(exported, method), experiment.federation.test
    assert models.client_ids.tolist() == list(range(7))
    got = [right(experiment.task, models.client(i), test, i) for i in range(7)]
    np.testing.assert_array_equal(got, scored(finished, f"{method}/after_accuracy", test.size))
    scale = models.manifest["pixels"][0]
    raw = np.rint(16 * (np.asarray(test.x) * scale["deviation"] + scale["mean"])) / 16  # digits have 17 grey levels
    found = [models.predict(i, raw[i, : test.size[i]]).argmax(axis=1) for i in range(7)]
    got = [(own == test.y[i, : test.size[i]]).sum() for i, own in enumerate(found)]
    np.testing.assert_array_equal(got, scored(finished, f"{method}/after_accuracy", test.size))
    levels = (255 * raw[0, :2, ..., 0]).astype(np.uint8)  # bytes, without the axis of channels
    np.testing.assert_allclose(models.predict(0, levels), models.predict(0, levels[..., None] / 255), rtol=1e-5)
    with pytest.raises(JaxpflError, match=r"real numbers from 0 to 1, got float32, from 0.0 to 16.0"):
        models.predict(0, 16 * raw[0])
    if method == "local":
        assert models.global_model is None
    else:
        got = [right(experiment.task, models.global_model, test, i) for i in range(7)]
        np.testing.assert_array_equal(got, scored(finished, f"{method}/global_accuracy", test.size))


def test_numpy_alone_reads_them(finished, exported):
    entry = json.loads((exported / "manifest.json").read_text())["methods"]["adaped"]["groups"][0]
    with np.load(exported / entry["file"], allow_pickle=False) as models:
        assert sorted(models.files) == ["client_ids", "head/bias", "head/kernel"]
        kernel, bias, ids = models["head/kernel"], models["head/bias"], models["client_ids"]
    assert entry["parameters"]["head/kernel"] == {"shape": list(kernel.shape[1:]), "dtype": "float32"}
    test = open_run(finished).experiment().federation.test
    logits = np.einsum("mnd,mdk->mnk", np.asarray(test.x).reshape(*test.x.shape[:2], -1), kernel) + bias[:, None]
    got = ((logits.argmax(-1) == test.y) & test.mask).sum(1)
    np.testing.assert_array_equal(got, scored(finished, "adaped/after_accuracy", test.size))
    assert ids.tolist() == entry["client_ids"]


def test_the_manifest_says_what_is_needed_to_use_them(exported):
    manifest = json.loads((exported / "manifest.json").read_text())
    assert manifest["format"] == "jaxpfl-models-1"
    assert (manifest["model"], manifest["classes"], manifest["input_shape"]) == ("linear", 10, [8, 8, 1])
    mean, deviation = manifest["pixels"][0]["mean"], manifest["pixels"][0]["deviation"]
    raw, seen = load("digits", standardize=False).x_train, load("digits").x_train
    np.testing.assert_allclose((raw - mean) / deviation, seen, atol=1e-6)
    assert (manifest["seed"], manifest["config"]["clients"]) == (0, 7)
    assert set(manifest["versions"]) == {"jaxpfl", "jax", "run"}
    assert [entry["round"] for entry in manifest["methods"].values()] == [3, 3, 3]
    assert manifest["methods"]["fedavg-ft"]["groups"][0]["of_model"]


def test_one_seed_some_clients_a_file_each(finished, tmp_path):
    wanted = Selection("fedavg-ft", clients=(5, 2), seed=1, per_client=True)
    folder, _ = export(finished, tmp_path / "some", wanted)
    assert sorted(p.name for p in (folder / "fedavg-ft" / "clients").iterdir()) == ["2.npz", "5.npz"]
    models, experiment = load_models(folder), open_run(finished).experiment()
    assert models.client_ids.tolist() == [2, 5]
    test = experiment.federation.test
    for client in (2, 5):
        got = right(experiment.task, models.client(client), test, client)
        assert got == scored(finished, "fedavg-ft/after_accuracy", test.size, seed=1)[client]
    with pytest.raises(JaxpflError, match=r"unknown client 3: did you mean 2\? \(known: 2 ids, 2 to 5\)"):
        models.client(3)


@pytest.mark.slow
def test_groups_of_other_models_have_files_of_their_own(tmp_path):
    folder = run(tmp_path / "run", ("adaped",), set=("architectures=same+mlp:8",), seeds=1, rounds=1)
    models = load_models(export(folder, tmp_path / "models")[0])
    groups = models.manifest["methods"]["adaped"]["groups"]
    assert [group["client_ids"] for group in groups] == [[0, 2, 4, 6], [1, 3, 5]]
    assert [group["of_model"] for group in groups] == [True, False]
    assert models.client(2).keys() == {"head"}
    assert models.client(3)["dense0"]["kernel"].shape == (64, 8)
    experiment = open_run(folder).experiment()
    test = experiment.federation.test
    got = [right(experiment.task, models.client(i), test, i) for i in (0, 2, 4, 6)]
    np.testing.assert_array_equal(got, scored(folder, "adaped/after_accuracy", test.size)[::2])


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        (Selection(method="adapd"), "did you mean 'adaped'"),
        (Selection(seed=7), r"unknown seed 7 \(known: 0 to 1\)"),
        (Selection(clients=(0, 9)), r"unknown client 9: did you mean 6\?"),
    ],
)
def test_what_the_run_does_not_have(finished, tmp_path, wanted, message):
    with pytest.raises(JaxpflError, match=message):
        export(finished, tmp_path / "out", wanted)
    assert not list(tmp_path.iterdir())


@pytest.fixture
def copied(finished, tmp_path) -> Path:
    return shutil.copytree(finished, tmp_path / "copy")


def test_an_unfinished_method(copied):
    path = copied / "config.json"
    stored = json.loads(path.read_text())
    path.write_text(json.dumps(stored | {"config": stored["config"] | {"rounds": 4}}))
    with pytest.raises(JaxpflError, match=r"local of .* has not finished"):
        export(copied)
    path.write_text(json.dumps(stored))
    (copied / "methods" / "adaped.json").unlink()
    with pytest.raises(JaxpflError, match=r"adaped of .* has not finished"):
        export(copied, wanted=Selection("adaped"))


def test_a_lost_or_damaged_checkpoint(copied):
    place = copied / "checkpoints" / "local" / "3"
    for path in place.rglob("*"):
        if path.is_file():
            path.write_bytes(b"")
    with pytest.raises(JaxpflError, match=r"checkpoint of round 3 cannot be used \(.* is damaged"):
        export(copied, wanted=Selection("local"))
    assert place.is_dir(), "only a run that goes on may delete it"
    shutil.rmtree(place)
    with pytest.raises(JaxpflError, match="contains no checkpoint of round 3"):
        export(copied, wanted=Selection("local"))
    assert not (copied / "models").exists()


@pytest.mark.parametrize(
    ("change", "message"), [({"data": 1}, "the data have changed"), ({"hyper": {}}, "hyper-parameters differ")]
)
def test_other_data_or_settings_than_the_runs(copied, change, message):
    path = copied / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(JaxpflError, match=message):
        export(copied)


def test_a_kill_leaves_no_folder_and_the_next_export_cleans_up(finished, tmp_path, monkeypatch):
    output = tmp_path / "models"
    (tmp_path / ".models.partial").mkdir()
    (tmp_path / ".models.partial" / "old.npz").write_bytes(b"half")

    def stop(*args):
        assert not output.exists()
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(export_module, "_write_stack", stop)
        with pytest.raises(KeyboardInterrupt):
            export(finished, output, Selection("local"))
    assert not list(tmp_path.iterdir())
    export(finished, output, Selection("local"))
    assert sorted(p.name for p in output.rglob("*")) == [
        *("SHA256SUMS", "local", "manifest.json", "personal.npz", "personal.stablehlo"),
    ]


def test_a_run_that_was_warm_started_needs_its_start_no_more(tmp_path):
    start = tmp_path / "start.npz"
    np.savez(start, **{"head/kernel": np.zeros((64, 10)), "head/bias": np.arange(10.0)})
    folder = run(tmp_path / "run", ("local",), warm_start=str(start), seeds=1)
    start.unlink()
    models = load_models(export(folder)[0])
    assert models.client(0)["head"]["kernel"].shape == (64, 10)

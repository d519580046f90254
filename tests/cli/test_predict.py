"""Exported models predict a new table as the run scored its test rows."""

import io
import json
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pandas
import pytest
from command import Result, jaxpfl
from scipy import special

from jaxpfl import JaxpflError, Model, classification, load_models
from jaxpfl.engine.model_files import Models, write_program
from jaxpfl.models import TASKS
from jaxpfl.models.base import regression_task
from jaxpfl.runs.export import outcome
from jaxpfl.runs.stored_run import open_run
from jaxpfl.support import files

SHORT = ["--rounds", "2", "--seeds", "1", "--local-steps", "3", "--batch-size", "5", "--lr", "0.3", "--model", "linear"]
NAMES = ["007", "2", "B, C", "Zug"]  # their ids are 0 to 3
METHODS = ("fedavg", "ditto", "fedem")


def visits() -> pandas.DataFrame:
    """Rows of four hospitals, each with an age of its own, a number far from zero, a text and a number with gaps."""
    rng, rows = np.random.default_rng(0), []
    ages = iter(rng.permutation(1000) / 10)
    for i, name in enumerate(NAMES):
        for day in range(20 + 3 * i):
            ward, second, dose = rng.choice(["icu", "x-ray", "ward 2"]), 1.7e9 + rng.integers(1000), rng.normal(5, 2)
            score = (-1) ** i * (dose - 5) + 0.004 * (second - 1.7e9 - 500) + (ward == "icu") + 0.5 * rng.normal()
            label = ["low", "middle", "high"][int(np.digitize(score, [-1, 1]))]
            shown = "NA" if day % 7 == 6 else f"{dose:.2f}"
            rows.append([name, next(ages), f"{second:.0f}", ward, shown, label, f"{score:.3f}"])
    return pandas.DataFrame(rows, columns=["hospital", "age", "second", "ward", "dose", "label", "score"])


def trained(capsys, folder: Path, *args: object) -> Path:
    """The folder of a run on the visits, with its exported models; it is made once."""
    if not (folder / "models").exists():
        folder.mkdir()
        visits().to_csv(folder / "visits.csv", index=False)
        data = ["--data", f"csv:{folder / 'visits.csv'}", "--client", "hospital"]
        for command in (["compare", *SHORT, *args, *data, "--output", folder / "run"], ["export", folder / "run"]):
            result = jaxpfl(capsys, *command)
            assert result.status == 0, result.err
        (folder / "run" / "models").rename(folder / "models")
    return folder


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("visits")


@pytest.fixture
def labels(place, capsys) -> Path:
    return trained(
        capsys, place / "labels", *METHODS, "--target", "label", "--ignore", "second,score", "--missing", "drop"
    )


def test_rows(folder: Path, client: int) -> pandas.DataFrame:
    """The rows of the table that are a client's test examples, found by their ages."""
    experiment = open_run(folder / "run").experiment()
    (mean, *_), (deviation, *_) = experiment.scaling
    own = experiment.federation.test.client(client)
    ages = np.round(np.asarray(own.x)[: int(own.size), 0] * deviation + mean, 1)
    return visits().set_index("age", drop=False).loc[ages]


test_rows.__test__ = False


def predicted(
    capsys, folder: Path, rows: pandas.DataFrame, method: str, *args: object
) -> tuple[Result, pandas.DataFrame]:
    """The command's result for some rows in a new file, and the table that it printed."""
    rows.to_csv(folder.parent / "new.csv", index=False)
    result = jaxpfl(capsys, "predict", folder / "models", "--csv", folder.parent / "new.csv", "--method", method, *args)
    assert result.status == 0, result.err
    return result, pandas.read_csv(io.StringIO(result.out), dtype={"client": str})


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_the_runs_own_test_rows_have_the_runs_own_scores(capsys, labels, method):
    own = [test_rows(labels, client) for client in range(4)]
    rows = pandas.concat(own)[["score", "dose", "label", "ward", "hospital", "age"]]  # another order, and no 'second'
    mixed = rows.sample(frac=1, random_state=1)
    result, found = predicted(capsys, labels, mixed, method)
    assert result.err == ""
    assert list(found) == ["client", "prediction", "probability_high", "probability_low", "probability_middle"]
    assert found["client"].tolist() == mixed["hospital"].tolist()
    probabilities = found.filter(like="probability").to_numpy()
    np.testing.assert_allclose(probabilities.sum(axis=1), 1, atol=1e-6)
    assert (found["prediction"] == np.array(["high", "low", "middle"])[probabilities.argmax(axis=1)]).all()
    scored = {"after": found}
    if method != "fedem":
        scored["global"] = predicted(capsys, labels, mixed, method, "--global")[1]
    scores = np.load(labels / "run" / "clients.npz")
    for name, own in scored.items():
        right = pandas.Series(own["prediction"].to_numpy() == mixed["label"].to_numpy())
        got = right.groupby(mixed["hospital"].to_numpy()).mean()[NAMES]
        np.testing.assert_allclose(got, scores[f"{method}/{name}_accuracy"][0], rtol=1e-6)


@pytest.mark.slow
def test_python_takes_names_ids_and_every_form_of_the_same_rows(capsys, labels):
    models, rows = load_models(labels / "models", "ditto"), visits().iloc[:5]
    wanted = predicted(capsys, labels, rows, "ditto")[1].filter(like="probability").to_numpy()
    features = (
        rows[["age"]].to_numpy(),
        *[rows[["ward"]] == ward for ward in ("icu", "ward 2", "x-ray")],
        rows[["dose"]],
    )
    numbers = rows.astype({"dose": float})
    for client, x in (("007", rows), (0, numbers), (0, dict(rows)), ("007", np.hstack(features).astype(float))):
        np.testing.assert_allclose(models.predict(client, x), wanted, rtol=1e-5)
    single = models.predict("007", {"age": rows["age"][0], "ward": rows["ward"][0], "dose": rows["dose"][0]})
    np.testing.assert_allclose(single, wanted[:1], rtol=1e-5)
    assert models.predict(None, rows.iloc[:0]).shape == (0, 3)
    assert np.abs(models.predict(None, rows) - wanted).max() > 1e-3
    for client, x, message in (
        (2, rows, "client 2 is the id of one client and the name of another"),
        ("Zugg", rows, "did you mean 'Zug'"),
        (9, rows, "unknown client 9"),
        (0, np.zeros((2, 4)), r"shape \['n', 5\], got \[2, 4\]"),
        (0, np.full((2, 5), np.nan), "features must be finite numbers"),
        (0, rows[["age", "ward"]], "dose"),
    ):
        with pytest.raises(JaxpflError, match=message):
            models.predict(client, x)


@pytest.mark.slow
def test_new_clients_and_what_a_new_table_may_not_hold(capsys, labels, tmp_path):
    rows = visits().iloc[[0, 1, 30, 31]].assign(hospital=["007", "7", "2", "Ulm"])
    result, found = predicted(capsys, labels, rows, "ditto")
    assert result.err.count("\n") == 1
    assert "2 row(s) of new clients (7, Ulm) are predicted by the global model" in result.err
    models = load_models(labels / "models", "ditto")
    by_hand = [models.predict(client, rows.iloc[[i]])[0] for i, client in enumerate(("007", None, "2", None))]
    np.testing.assert_allclose(found.filter(like="probability"), by_hand, rtol=1e-5)
    good = visits().iloc[[0]]
    cases = {
        "require a global model, but fedem has none": (rows, "fedem"),
        "'dose'": (good.drop(columns="dose"), "ditto"),
        "line 2: column 'ward' contains 'ER'": (good.assign(ward="ER"), "ditto"),
        "line 2: no value in column 'dose'": (good.assign(dose=""), "ditto"),
        "line 2: dose must be a finite number": (good.assign(dose="much"), "ditto"),
        "line 2: no name in column 'hospital'": (good.assign(hospital=""), "ditto"),
        "did you mean 'Hospitals'": (good.rename(columns={"hospital": "Hospitals"}), "ditto"),
        "the file has a header but no rows": (good.iloc[:0], "ditto"),
        "contains several methods": (good, None),
    }
    for message, (table, method) in cases.items():
        table.to_csv(tmp_path / "new.csv", index=False)
        named = [] if method is None else ["--method", method]
        out = ["--output", tmp_path / "out.csv"]
        refused = jaxpfl(capsys, "predict", labels / "models", "--csv", tmp_path / "new.csv", *named, *out)
        assert (refused.status, refused.out, refused.err.count("\n")) == (2, "", 1), message
        assert message in refused.err
    # A semicolon and a decimal comma are found; a file of another origin is not replaced, an earlier result is.
    commas = {name: str(good[name].item()).replace(".", ",") for name in ("age", "dose", "score")}
    good.assign(**commas).to_csv(tmp_path / "new.csv", index=False, sep=";")
    command = ["predict", labels / "models", "--csv", tmp_path / "new.csv", "--method", "ditto", "--output"]
    for _ in range(2):
        assert jaxpfl(capsys, *command, tmp_path / "out.csv").out == f"predictions: {tmp_path / 'out.csv'} (1 rows)\n"
    written = pandas.read_csv(tmp_path / "out.csv").filter(like="probability").to_numpy()
    np.testing.assert_allclose(written, models.predict("007", good), rtol=1e-5)
    assert "choose another path" in jaxpfl(capsys, *command, tmp_path / "new.csv").err


@pytest.mark.slow
def test_models_of_an_older_version_and_damaged_programs(capsys, labels, tmp_path):
    folder = shutil.copytree(labels / "models", tmp_path / "models")
    (folder / "ditto" / "personal.stablehlo").write_bytes(b"x")
    with pytest.raises(JaxpflError, match=r"personal.stablehlo does not match"):
        load_models(folder, "ditto").predict("Zug", visits().iloc[:1])
    manifest = json.loads((folder / "manifest.json").read_text())
    for name in ("inputs", "columns", "client_names", "task"):
        del manifest[name]
    for entry in manifest["methods"].values():
        for group in (*entry["groups"], entry["global"] or {}):
            group.pop("program", None)
    (folder / "manifest.json").write_text(json.dumps(manifest))
    files.write_checksums(folder)
    models = load_models(folder, "ditto")
    assert models.client(0).keys() == {"head"}
    with pytest.raises(JaxpflError, match="export the run again"):
        models.predict(0, np.zeros((1, 5)))
    refused = jaxpfl(capsys, "predict", folder, "--csv", labels / "visits.csv", "--method", "ditto")
    assert (refused.status, refused.err.count("\n")) == (2, 1)
    assert "export the run again" in refused.err


@pytest.mark.slow
def test_a_program_alone_needs_no_jaxpfl(capsys, labels, tmp_path):
    export = ["export", labels / "run", "--stablehlo", "--clients", "2", "--output", tmp_path / "models"]
    assert jaxpfl(capsys, *export).status == 0
    models = load_models(tmp_path / "models", "fedem")
    x = np.random.default_rng(0).normal(size=(7, 5)).astype(np.float32)
    np.save(tmp_path / "x.npy", x)
    script = """
import sys
import jax.export
import numpy as np
folder, x = sys.argv[1], np.load(sys.argv[1] + "/x.npy")
for name in ("fedem/alone/2", "ditto/alone/global"):
    program = jax.export.deserialize(bytearray(open(f"{folder}/models/{name}.stablehlo", "rb").read()))
    np.save(f"{folder}/{name.split('/')[0]}.npy", np.concatenate([program.call(x[:3]), program.call(x[3:])]))
assert "jaxpfl" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", script, tmp_path], check=True)
    np.testing.assert_allclose(np.load(tmp_path / "fedem.npy"), models.predict("B, C", x), rtol=1e-5)
    shared = load_models(tmp_path / "models", "ditto").predict(None, x)
    np.testing.assert_allclose(np.load(tmp_path / "ditto.npy"), shared, rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("missing", ["impute", "impute-client"])
def test_a_new_client_adapts_to_its_labelled_rows_as_the_run_adapts_an_unseen_client(capsys, place, missing):
    settings = ["--target", "label", "--ignore", "second,score", "--missing", missing, "--batch-size", "100"]
    apart = ["--unseen-clients", "1", "--split-seed", "1"]
    folder = trained(capsys, place / missing, "fedavg", "ditto", *settings, *apart)
    experiment = open_run(folder / "run").experiment()
    unseen, ((mean, *_), (deviation, *_)) = experiment.unseen, experiment.scaling
    rows, own = visits()[visits()["hospital"] == unseen.client_names[0]], unseen.test.client(0)
    asked = rows["age"].isin(np.round(np.asarray(own.x)[: int(own.size), 0] * deviation + mean, 1))
    rows["label"] = rows["label"].where(~asked, "")
    assert unseen.client_ids[0] < max(experiment.federation.client_ids)  # no new client gets the id, or its fills
    assert 0 < asked.sum() == unseen.test.size[0] < len(rows)
    (folder / "models").rename(folder / "run" / "models")  # --adapt finds the run beside its models
    try:
        result, found = predicted(capsys, folder / "run", rows, "ditto", "--adapt")
        _, plain = predicted(capsys, folder / "run", rows, "ditto")
        same, _ = predicted(capsys, folder / "run", rows, "fedavg", "--adapt")
        rows.assign(label="").to_csv(folder / "none.csv", index=False)
        refused = ["--csv", folder / "none.csv", "--method", "ditto", "--adapt"]
        none = jaxpfl(capsys, "predict", folder / "run" / "models", *refused)
    finally:
        (folder / "run" / "models").rename(folder / "models")
    assert result.err == ""
    labels, found_there = visits()["label"][asked[asked].index], found[asked.to_numpy()]
    chances = [row[f"probability_{label}"] for label, (_, row) in zip(labels, found_there.iterrows(), strict=True)]
    scores = np.load(folder / "run" / "clients.npz")
    right = found_there["prediction"].to_numpy() == labels.to_numpy()
    assert right.mean() == pytest.approx(scores["ditto/unseen_after_accuracy"][0, 0], rel=1e-6)
    assert -np.log(chances).mean() == pytest.approx(scores["ditto/unseen_after_loss"][0, 0], rel=1e-4)
    assert np.abs(found.filter(like="prob") - plain.filter(like="prob")).to_numpy().max() > 1e-3
    assert "fedavg does not adapt new clients" in same.err
    assert "has no row with a label: leave out --adapt" in none.err
    moved = jaxpfl(capsys, "predict", folder / "models", *refused)
    assert moved.err == f"error: --adapt requires the run that trained the models: {folder} is not a run folder\n"


@pytest.mark.slow
def test_numbers_are_predicted_with_the_runs_own_error(capsys, place):
    flags = ("--target", "score", "--task", "regression", "--ignore", "label", "--missing", "impute-client")
    folder = trained(capsys, place / "scores", "local", *flags)
    imputed = 0
    for client, error in enumerate(np.load(folder / "run" / "clients.npz")["local/after_rmse"][0]):
        rows = test_rows(folder, client)
        found = predicted(capsys, folder, rows, "local")[1]
        assert list(found) == ["client", "prediction"]
        imputed += (rows["dose"] == "NA").sum()
        misses = found["prediction"].to_numpy() - rows["score"].to_numpy(float)
        assert np.sqrt(np.mean(misses**2)) == pytest.approx(error, rel=1e-5)
    assert imputed > 1, "the client's own values replace missing ones"
    # Seconds since 1970 lose their digits in single precision, in which a program alone would read them.
    refused = jaxpfl(capsys, "export", folder / "run", "--stablehlo", "--output", folder / "alone")
    assert refused.status == 2
    assert "stablehlo" in refused.err
    assert not (folder / "alone").exists()


@pytest.mark.parametrize("kind", [*TASKS, "own"])
def test_outcomes_are_probabilities_or_expected_labels(kind):
    rng = np.random.default_rng(0)
    outputs = {"regression": 2, "multilabel": 3}.get(kind, 1 if kind in ("binary", "ranking") else 4)
    task = classification(Model(lambda key, x: {}, lambda params, x: x), (1,), outputs)
    task = TASKS[kind](task) if kind in TASKS else task._replace(kind="own")
    logits = rng.normal(size=(5, 2, 4) if kind == "next-token" else (5, outputs))
    positive = special.expit(logits)
    wanted = {
        "regression": logits,
        "multilabel": positive,
        "own": logits,
        **dict.fromkeys(("binary", "ranking"), np.hstack([1 - positive, positive])),
    }.get(kind, special.softmax(logits, axis=-1))
    np.testing.assert_allclose(outcome(task, None)(jnp.array(logits)), wanted, rtol=1e-5)
    if kind in ("binary", "ranking"):  # a model may return [n] for one label
        np.testing.assert_allclose(outcome(task, None)(jnp.array(logits[:, 0])), wanted, rtol=1e-5)
    if kind == "regression":
        counts = outcome(regression_task(task._replace(num_classes=1), "poisson"), "poisson")
        np.testing.assert_allclose(counts(jnp.array(logits[:, :1])), np.exp(logits[:, 0]), rtol=1e-5)


def test_functions_that_count_their_examples_are_written_too(tmp_path):
    def function(parameters, x):
        assert len(range(len(x))) > 0
        return x @ parameters["w"]

    w, x = np.ones((3, 2), np.float32), np.arange(12, dtype=np.float32).reshape(4, 3)
    write_program(tmp_path / "p", function, {"w": w}, jax.ShapeDtypeStruct((3,), np.float32))
    program = jax.export.deserialize(bytearray((tmp_path / "p").read_bytes()))
    np.testing.assert_allclose(program.call({"w": w}, x), x @ w)


@pytest.mark.parametrize(
    ("kind", "wanted"),
    [
        ("multilabel", {"prediction_a": 0, "prediction_b": 1, "probability_a": 0.2, "probability_b": 0.8}),
        ("regression", {"prediction_a": 0.2, "prediction_b": 0.8}),
        ("binary", {"prediction": "yes", "probability_no": 0.2, "probability_yes": 0.8}),
    ],
)
def test_columns_of_each_task(kind, wanted):
    manifest = {"task": kind, "class_names": ["no", "yes"] if kind == "binary" else None, "config": {"target": "a, b"}}
    columns = Models._columns(SimpleNamespace(manifest=manifest, method="m"), np.array([[0.2, 0.8]]))
    assert {name: column[0] for name, column in columns.items()} == wanted
    bad = manifest if kind == "binary" else {**manifest, "task": "next-token"}
    with pytest.raises(JaxpflError, match=r"not finite|next-token"):
        Models._columns(SimpleNamespace(manifest=bad, method="m"), np.full((1, 2), np.nan))

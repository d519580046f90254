"""``fit(output=...)``: the numbers of ``fit``, in a run folder that every command reads; and the table of a fit."""

import os
import signal
from pathlib import Path

import flax.linen as nn
import jax
import numpy as np
import pandas
import pytest

import jaxpfl
from jaxpfl.cli import main
from jaxpfl.core.types import Names
from jaxpfl.data import TableOptions
from jaxpfl.engine.fit import Evaluated
from jaxpfl.privacy import Mechanism, PrivacyConfig
from jaxpfl.runs import results
from jaxpfl.runs.stored_run import open_run

SMALL = {"model": "linear", "rounds": 4, "eval_every": 2, "cohort": 3, "local_steps": 2, "batch_size": 5, "seeds": 2}
METHOD = "from jaxpfl import METHODS\nmine = METHODS['adaped']._replace(name='mine')\n"


@pytest.fixture(scope="module")
def federation() -> jaxpfl.Federation:
    split = {"classes_per_client": 3, "test_share": 0.5, "validation_share": 0.2}
    return jaxpfl.federate(jaxpfl.load("digits"), clients=6, **split)


def test_it_gives_the_numbers_of_fit_in_a_folder_that_the_commands_read(federation, tmp_path, capsys) -> None:
    (tmp_path / "own.py").write_text(METHOD)
    named = federation._replace(client_names=Names("abcdef"))
    settings = {**SMALL, "hyper": {"psi_init": 2.0}, "options": {"gate": False}, "num_classes": 12, "lr": np.float32(1)}
    given = f"{tmp_path / 'own.py'}:mine", named
    seen = []
    alone, found = (
        jaxpfl.fit(*given, **settings, output=output, callbacks=[lambda one: seen.append(one.round)])
        for output in (None, tmp_path / "run")
    )
    assert seen == [2, 4, 2, 4]
    for one, other in zip(*(jax.tree.leaves(tuple(fit[2:6])) for fit in (alone, found)), strict=True):
        np.testing.assert_array_equal(one, other)
    assert alone.table() == repr(found)
    assert found.task.num_classes == 12
    moved = (tmp_path / "run").rename(tmp_path / "moved")
    main(["check", str(moved)])
    assert "complete (4 rounds)" in capsys.readouterr().out
    main(["report", str(moved)])
    main(["export", str(moved)])
    models = jaxpfl.load_models(moved / "models")
    test, (scale,) = federation.test.client(1), models.manifest["pixels"]
    pixels = np.clip(test.x[test.mask] * scale["deviation"] + scale["mean"], 0, 1)
    right = models.predict("b", pixels).argmax(axis=1) == test.y[test.mask]
    np.testing.assert_allclose(right.mean(), found.personalized_accuracy[0, 1], rtol=1e-6)
    main(["run", "--config", str(moved / "config.json"), "--output", str(tmp_path / "again"), "--quiet"])
    again, before = (results.read_arrays(folder, "mine")[1] for folder in (tmp_path / "again", moved))
    for name, values in before.items():
        np.testing.assert_array_equal(again[name], values, err_msg=name)


@pytest.mark.parametrize("standardize", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_table_that_python_federated_predicts_its_raw_rows(tmp_path, capsys, standardize) -> None:
    (tmp_path / "own.py").write_text(f"{METHOD}from flax import linen\nnet = linen.Dense(3)\n")
    rng, names = np.random.default_rng(0), ["A", "B, C", "D"]
    ward, dose = rng.choice(["icu", "hall"], 90), rng.normal(5, 2, 90)
    rows = pandas.DataFrame({"hospital": np.repeat(names, 30), "age": rng.permutation(90), "ward": ward})
    rows["dose"] = [f"{value:.2f}" if day % 7 else "" for day, value in enumerate(dose)]
    rows["label"] = np.where(ward == "icu", "low", np.where(dose > 5, "middle", "top"))
    rows.to_csv(tmp_path / "rows.csv", index=False)
    table = TableOptions(target="label", client="hospital", missing="impute")
    source = jaxpfl.load(f"csv:{tmp_path / 'rows.csv'}", task="classification", table=table)
    federation = jaxpfl.federate(source, partition="natural", standardize=standardize)
    own = {"method": f"{tmp_path / 'own.py'}:mine", "model": f"{tmp_path / 'own.py'}:net"}
    found = jaxpfl.fit(federation=federation, **SMALL | own, output=tmp_path / "run")
    with pytest.raises(jaxpfl.JaxpflError, match=f"jaxpfl export {tmp_path / 'run'} writes them"):
        jaxpfl.load_models(tmp_path / "run")
    main(["export", str(tmp_path / "run")])
    output = tmp_path / "found.csv"
    where = ["--csv", str(tmp_path / "rows.csv"), "--client", "hospital", "--output", str(output)]
    main(["predict", str(tmp_path / "run" / "models"), *where])
    predicted = pandas.read_csv(output)
    assert list(predicted) == ["client", "prediction", "probability_low", "probability_middle", "probability_top"]
    mean, deviation = federation.preparation.scaling or (np.zeros(5), np.ones(5))
    for client in range(3):
        test = federation.test.client(client)
        ages = np.rint(test.x[test.mask][:, 0] * deviation[0] + mean[0])
        right = (predicted["prediction"] == rows["label"])[rows["age"].isin(ages)]
        assert len(right) == test.size
        np.testing.assert_allclose(right.mean(), found.personalized_accuracy[0, client], rtol=1e-6)
    if standardize:
        config = str(tmp_path / "run" / "config.json")
        with pytest.raises(SystemExit):
            main(["run", "--config", config, "--standardize", "--output", str(tmp_path / "again")])
        assert "already standardized" in capsys.readouterr().err


@pytest.mark.slow
def test_a_fit_that_ctrl_c_stops_is_resumed(federation, tmp_path) -> None:
    def stop(found: Evaluated) -> None:
        if found.round == 2:
            os.kill(os.getpid(), signal.SIGINT)

    folder = tmp_path / "run"
    with pytest.raises(KeyboardInterrupt, match=r"after round 2 of 4; jaxpfl run --config .* --resume continues"):
        jaxpfl.fit("fedavg", federation, **SMALL, output=folder, callbacks=[stop])
    assert [path.name for path in (folder / "checkpoints" / "fedavg").iterdir()] == ["2"]
    main(["run", "--config", str(folder / "config.json"), "--output", str(folder), "--resume", "--quiet"])
    whole = jaxpfl.fit("fedavg", federation, **SMALL)
    np.testing.assert_array_equal(
        results.read_arrays(folder, "fedavg")[1]["after_accuracy"], whole.personalized_accuracy
    )
    assert open_run(folder).config.cohort == 3
    with pytest.raises(jaxpfl.JaxpflError, match="already contains a run"):
        jaxpfl.fit("fedavg", federation, **SMALL, output=folder)


REFUSED = [
    ({"model": nn.Dense(10)}, "model must be a string or a number in a stored run, got .*write FILE.py:NAME"),
    ({"method": jaxpfl.METHODS["fedavg"]._replace(name="own")}, "method must be .*: put it into a file and write"),
    ({"lr": [0.1, 0.2]}, r"lr must be a string or a number in a stored run, got .*: call fit without output"),
    ({"hyper": {"lr": np.array([0.1, 0.2])}}, "fedavg.lr must be a string or a number"),
    ({"seeds": [0, 2]}, "seeds must be consecutive numbers"),
    ({"seeds": [1, 0]}, "seeds must be consecutive numbers"),
    ({"warm_start": {"head/kernel": np.zeros(3)}}, "warm_start must be a string or a number"),
    ({"privacy": Mechanism(1.0, 1.0)}, "privacy must be .*: write a PrivacyConfig"),
    ({"privacy": PrivacyConfig(epsilon=8.0)}, "delta"),
    (
        {"unseen": jaxpfl.stack_clients([(np.ones((3, 64)), np.arange(3))], client_ids=[77])},
        "supports neither unseen clients",
    ),
    ({"patience": 2, "rounds": 3, "task": "regression", "loss": "poisson", "label_smoothing": 0.1}, "label_smoothing"),
]


@pytest.mark.parametrize(("settings", "message"), REFUSED, ids=lambda value: None)
def test_what_a_folder_cannot_hold_is_refused_and_nothing_is_left(federation, tmp_path, settings, message) -> None:
    output: Path = tmp_path / "a" / "run"
    with pytest.raises(jaxpfl.JaxpflError, match=message) as error:
        jaxpfl.fit(**{"method": "fedavg", "federation": federation, **SMALL, "output": output} | settings)
    assert "\n" not in str(error.value)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_the_table_has_every_model_and_names_the_worst_clients(federation) -> None:
    named = federation._replace(client_names=Names("abcdef"))
    trained, unseen = jaxpfl.set_apart(named, 2, 0)
    fit = jaxpfl.fit("fedavg-ft", trained, unseen=unseen, **SMALL)
    table = repr(fit)
    assert len(table.splitlines()) <= 10
    rows = {line.split("  ")[0] or line.split()[0]: line for line in map(str.strip, table.splitlines())}
    means = {
        "personalized": fit.personalized_accuracy,
        "global": fit.global_accuracy,
        "unseen clients": fit.unseen_accuracy,
    }
    for name, scores in means.items():
        assert f" {100 * scores.mean():.2f} ±" in rows[name], name
    counts = np.bincount(trained.train.y[trained.train.mask])
    right = [(trained.test.y[i][trained.test.mask[i]] == counts.argmax()).mean() for i in range(4)]
    assert f" {100 * np.mean(right):.2f} " in rows[f"constant {counts.argmax()}"]
    worst = "abcdef"[trained.client_ids[fit.personalized_accuracy.mean(axis=0).argmin()]]
    assert f"worst clients: {worst} {100 * fit.personalized_accuracy.mean(axis=0).min():.2f}" in table

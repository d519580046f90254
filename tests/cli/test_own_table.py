"""A table and texts of one's own, modules of Python's library, end to end as a new user runs them."""

import json
import re
import sysconfig
from pathlib import Path

import numpy as np
import pytest
from command import jaxpfl, timeless

import jaxpfl as package
from jaxpfl.data import scaled, scaling_of
from jaxpfl.privacy import PrivacyConfig

SHORT = ["--rounds", "4", "--seeds", "1", "--local-steps", "5", "--batch-size", "5"]
RUN = [*SHORT, "--eval-every", "2"]


@pytest.fixture
def houses(tmp_path: Path) -> list[str]:
    """Flags for a table of five cities, in each of which a square metre has a price of its own."""
    rng, lines = np.random.default_rng(0), ["city,area,heating,price"]
    for i, city in enumerate(("Bern", "Chur", "Genf", "Visp", "Zug")):
        for _ in range(12 + i):
            area, heating = rng.uniform(30, 160), rng.choice(["gas", "oil", "pump"])
            price = area * (0.2 + 0.1 * i) + 5 * (heating == "pump") + rng.normal()
            lines.append(f"{city},{area:.1f},{heating},{price:.3f}")
    (tmp_path / "houses.csv").write_text("\n".join(lines))
    return ["--data", "csv:houses.csv", "--data-dir", str(tmp_path), "--target", "price", "--client", "city"]


def test_a_table_is_described(capsys, houses):
    result = jaxpfl(capsys, "data", "describe", *houses, "--json")
    assert result.status == 0
    assert "column 'price' contains 70 different values, real numbers, so task = regression" in result.err
    found = result.json
    assert (found["clients"], found["input_shape"], found["standardized"]) == (5, [4], True)
    assert found["source"].endswith("houses.csv, 4 features: area; heating (3 categories)")
    assert sum(found["examples"].values()) == 70
    assert {"mean", "std"} == found["labels"].keys()
    assert all({"label_mean", "label_std"} <= one.keys() for one in found["per_client"])
    text = jaxpfl(capsys, "data", "describe", *houses, "--task", "regression")
    assert "5 clients, labels " in text.out
    assert found["source"] in text.out
    refused = jaxpfl(capsys, "data", "describe", *houses, "--task", "regression", "--plot", "x.png")
    assert (refused.status, refused.err.count("\n")) == (2, 1)


def test_a_claim_about_persons(capsys, tmp_path):
    """From a table, from its saved federation and in Python; persons are never lost."""
    rng = np.random.default_rng(0)
    rows = [f"{'xyz'[i % 3]},p{i // 9}{i % 3},{rng.normal():.3f},{i % 2}" for i in range(108)]
    (tmp_path / "h.csv").write_text("\n".join(["hospital,patient,age,back", *rows]))
    table = ["--data", f"csv:{tmp_path / 'h.csv'}", "--target", "back", "--client", "hospital", "--task", "binary"]
    flags = ["--privacy.unit=example", "--privacy.epsilon=8", "--privacy.delta=1e-3", "--rounds=2", "--model=linear"]
    ran = jaxpfl(capsys, "run", "fedavg", *table, "--person", "patient", *flags, "--output", tmp_path / "run")
    assert ran.status == 0, ran.err
    claim = json.loads((tmp_path / "run" / "summary.json").read_text())["methods"]["fedavg"]["privacy"]
    (silo,) = claim["silos"]
    assert (claim["unit"], silo["clients"], silo["persons"], silo["examples"]) == ("person", 3, 9, 27)
    assert "for each person of a silo (all of the person's examples)" in " ".join(ran.out.split())

    saved = jaxpfl(capsys, "data", "convert", *table, "--person", "patient", "--output", tmp_path / "made")
    assert saved.status == 0, saved.err
    federation = package.open_federation(tmp_path / "made")
    for made in (federation, federation.rows([2, 0]), federation.pooled(), scaled(federation, scaling_of(federation))):
        persons, most = made.train.count_persons()
        assert (most, persons.sum()) == (3, 9 * made.num_clients if made.num_clients > 1 else 27)
    privacy = PrivacyConfig(unit="example", noise_multiplier=1.0, delta=1e-3)
    settings = {"task": "binary", "model": "linear", "rounds": 1, "privacy": privacy, "batch_size": 20}
    result = package.fit("local", federation, **settings, plan=package.ExecutionPlan(clients_in="disk", devices=1))
    assert result.statement().unit == "person"
    shared = federation._replace(train=federation.train.rows([0, 1, 1]))
    lost = federation._replace(train=federation.train.without_persons())
    for wrong, words in ((shared, "9 of 18 persons have examples at several"), (lost, "no longer has the person")):
        with pytest.raises(package.JaxpflError, match=words):
            package.fit("local", wrong, **settings)


@pytest.mark.slow
def test_a_table_is_trained_resumed_and_reported_by_its_error(capsys, houses, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    houses[2:4] = []  # the file is in the present folder
    run = ["compare", "local", "fedavg", *houses, "--task", "regression", *RUN, "--output", str(tmp_path / "run")]
    first = jaxpfl(capsys, *run, "--validation-share", "0.2")
    assert first.status == 0, first.err
    assert "test RMSE after the last round" in " ".join(first.out.split())
    assert "p90" in first.out
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (summary["task"], summary["metric"], summary["lower_is_better"]) == ("regression", "rmse", True)
    row = summary["methods"]["fedavg"]
    with (
        np.load(tmp_path / "run" / "methods" / "fedavg.npz") as own,
        np.load(tmp_path / "run" / "methods" / "local.npz") as local,
    ):
        after, alone = own["after_rmse"], local["after_rmse"]
    assert row["fraction_hurt"] == (after > alone).mean()
    assert row["personalized_rmse"]["worst_decile"] == pytest.approx(after.max())
    assert (tmp_path / "run" / "plots" / "rmse.png").exists()
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    Path("houses.csv").write_text("another table")
    config = ["--config", "../run/config.json", "--output", "../run"]
    more = jaxpfl(capsys, "compare", *config, "--rounds", "6", "--resume")
    assert more.status == 0, more.err
    assert jaxpfl(capsys, "export", "../run", "--method", "fedavg").status == 0
    monkeypatch.chdir(tmp_path)
    other = jaxpfl(capsys, *run, "--validation-share", "0.2", "--resume", "--loss", "huber")
    assert other.status == 2
    assert "loss: None -> huber" in other.err


@pytest.mark.slow
def test_a_table_with_gaps_is_trained_and_stored(capsys, houses, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    file = Path("houses.csv")
    lines = file.read_text().splitlines()
    file.write_text(
        "\n".join(re.sub(r",[^,]*", ",", line, count=1) if i % 5 == 1 else line for i, line in enumerate(lines))
    )
    flags = [*houses, "--task", "regression", "--missing", "impute-client"]
    assert jaxpfl(capsys, "data", "convert", *flags, "--unseen-clients", "1", "--output", "made").status == 0
    plan = ["--unseen-clients", "1", "--cohort", "2", "--plan.devices", "1", "--plan.runs", "map", "--json"]
    own = jaxpfl(capsys, "run", "fedavg", *flags, *RUN, *plan, "--output", "one")
    assert own.status == 0, own.err
    disk = ["--data", "federation:made", "--data-dir", ".", "--plan.clients-in", "disk", "--output", "two"]
    made = jaxpfl(capsys, "run", "fedavg", "--task", "regression", *disk, *RUN, *plan)
    assert made.status == 0, made.err
    assert timeless(made.json) == timeless(own.json)
    private = ["--privacy.epsilon", "8", "--privacy.delta", "1e-3", "--output", "private"]
    refused = jaxpfl(capsys, "run", "fedavg", *flags, *RUN, "--strict", *private)
    assert refused.status == 2
    assert "the means and deviations and the values that replace missing ones of all training" in refused.err


@pytest.fixture
def sold(tmp_path: Path) -> list[str]:
    """Flags for a table of five cities of which one has sold nothing, and validation examples."""
    rng, lines = np.random.default_rng(1), ["city,area,sold"]
    for i, city in enumerate(("Bern", "Chur", "Genf", "Visp", "Zug")):
        for area in rng.normal(size=20 + 5 * i):
            lines.append(f"{city},{area:.3f},{'yes' if area > 0.2 * rng.normal() and i else 'no'}")
    (tmp_path / "sold.csv").write_text("\n".join(lines))
    data = ["--data", "csv:sold.csv", "--data-dir", str(tmp_path), "--target", "sold", "--client", "city"]
    return [*data, "--task", "ranking", "--validation-share", "0.4"]


@pytest.mark.slow
def test_a_ranking_is_trained_by_its_auc_with_other_metrics_and_resumed(capsys, sold, tmp_path):
    run = ["run", "fedavg", *sold, *RUN, "--output", str(tmp_path / "run"), "--metrics", "accuracy,macro_f1"]
    first = jaxpfl(capsys, *run)
    assert first.status == 0, first.err
    text = " ".join(first.out.split())
    assert "test AUC in % after the last round" in text
    assert "AUC: undefined on the test examples of 1 of 5 clients, so means leave these clients out" in text
    assert "macro F1" in text
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (summary["task"], summary["metric"], summary["lower_is_better"]) == ("ranking", "auc", False)
    row = summary["methods"]["fedavg"]
    with np.load(tmp_path / "run" / "methods" / "fedavg.npz") as own:
        auc, accuracy = own["after_auc"][0], own["after_accuracy"][0]
    assert np.isnan(auc).sum() == row["undefined"] == 1
    described = jaxpfl(capsys, "data", "describe", *sold, "--json").json
    sizes = np.array([one["test"] for one in described["per_client"]])
    there = ~np.isnan(auc)
    assert row["personalized_auc"]["mean"] == pytest.approx(auc[there].mean())
    assert row["personalized_auc"]["mean_examples"] == pytest.approx(np.average(auc[there], weights=sizes[there]))
    found = row["metrics"]["accuracy"]["personalized"]
    assert found["mean_examples"] == pytest.approx(np.average(accuracy, weights=sizes))
    assert found["median"] == pytest.approx(np.median(accuracy))
    records = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert {"validation_auc", "personalized_macro_f1"} <= records[-1].keys()
    assert records[-1]["validation_auc"][0] > 0.8
    changed = jaxpfl(capsys, *run[:-1], "accuracy", "--resume")
    assert changed.status == 2
    assert "metrics: accuracy,macro_f1 -> accuracy" in changed.err


TEXTS = ["--model", "gru:8", "--rounds", "2", "--seeds", "1", "--local-steps", "2", "--batch-size", "4"]


@pytest.fixture
def modules(tmp_path: Path) -> list[str]:
    """Flags for two modules and a package."""
    library, folder = Path(sysconfig.get_path("stdlib")), tmp_path / "modules"
    for name in ("cmd.py", "bisect.py", "json/__init__.py", "json/tool.py"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes((library / name).read_bytes()[:2500])
    return ["--data", f"text:{folder}", "--window", "24"]


@pytest.mark.slow
def test_texts_are_compared(capsys, modules, tmp_path):
    out = tmp_path / "run"
    result = jaxpfl(capsys, "run", "fedavg", *modules, *TEXTS, "--output", str(out))
    assert result.status == 0, result.err
    assert "perplexity" in result.out
    summary = json.loads((out / "summary.json").read_text())
    assert json.loads((out / "config.json").read_text())["config"]["task"] == "next-token"
    assert set(summary["methods"]) == {"fedavg"}
    with np.load(out / "methods" / "fedavg.npz") as scores:
        for name in ("after_accuracy", "after_perplexity", "after_loss", "global_perplexity"):
            assert np.isfinite(scores[name]).all()
        np.testing.assert_allclose(np.exp(scores["global_loss"]), scores["global_perplexity"], rtol=1e-5)


def test_texts_are_described_and_refused(capsys, modules):
    described = jaxpfl(capsys, "data", "describe", *modules, "--json")
    assert described.status == 0
    assert (described.json["clients"], described.json["input_shape"]) == (3, [24])
    assert described.json["tokens"] == {split: 24 * n for split, n in described.json["examples"].items()}
    assert "labels" not in described.json
    other = jaxpfl(capsys, "data", "describe", "--data", "digits", "--window", "24")
    assert "window applies to text:FOLDER, not to digits" in other.err
    model = jaxpfl(capsys, "run", "fedavg", *modules, "--model", "mlp")
    assert (model.status, model.err.count("\n")) == (2, 1)
    assert "the task 'next-token' requires a model with a label per token, got 'mlp'" in model.err

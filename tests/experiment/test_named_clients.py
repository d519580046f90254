"""Clients' names from a table to every result of a run, and the constant predictor beside the methods."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from command import jaxpfl

import jaxpfl as package
from jaxpfl.cli import main
from jaxpfl.data import Source, federate, split_figure, summary
from jaxpfl.engine.evaluate import ACCURACY, HEADLINES, constant_scores, worst
from jaxpfl.runs import plots, results
from jaxpfl.runs.terminal import notes

NAMES = ["Zug", "Bern", "<b>Ulm</b>", "[red]Ada", "x" * 500, "tab\there", "$a$"]
ORDER = sorted(NAMES)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two finished runs on a table whose clients have odd names."""
    folder, rng = tmp_path_factory.mktemp("named"), np.random.default_rng(0)
    with open(folder / "own.csv", "w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["who", "a", "b", "label"])
        for place, name in enumerate(NAMES):
            for _ in range(16):
                a, b = rng.normal(size=2)
                rows.writerow([name, f"{a:.3f}", f"{b:.3f}", "yes" if a + place / 3 - 1 + rng.normal() > 0 else "no"])
    flags = ["--data", "csv:own.csv", "--data-dir", str(folder), "--target", "label", "--client", "who"]
    flags += ["--task", "binary", "--rounds", "4", "--local-steps", "3", "--plan.devices", "1"]
    for name, lr in (("one", "0.5"), ("two", "0.01")):
        main(["compare", "local", "fedavg", *flags, "--seeds", "2", "--lr", lr, "--output", str(folder / name)])
    return folder


@pytest.mark.slow
def test_every_result_names_the_clients(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    told = json.loads((folder / "one" / "summary.json").read_text())
    with np.load(folder / "one" / "clients.npz") as stored:
        assert stored["client_names"].tolist() == ORDER
        assert stored["client_ids"].tolist() == list(range(len(ORDER)))
        local, own = (stored[f"{method}/after_accuracy"].mean(axis=0) for method in ("local", "fedavg"))
    # The clients that are hurt, by hand.
    gains = {name: own[i] - local[i] for i, name in enumerate(ORDER)}
    hurt = told["methods"]["fedavg"]["hurt_clients"]
    assert [one["client_name"] for one in hurt] == sorted((n for n in ORDER if gains[n] < 0), key=gains.__getitem__)[:5]
    assert hurt
    assert all(one["value"] == pytest.approx(gains[ORDER[one["client_id"]]]) for one in hurt)
    lowest = told["methods"]["local"]["worst_clients"]
    assert lowest[0]["value"] == pytest.approx(local.min())
    assert told["methods"]["local"]["hurt_clients"] == []
    # On the terminal, in the report and in the comparison of two runs, names are shown literally and shortened.
    text = "\n".join(notes(told))
    assert "fedavg: most hurt clients, against local training: " in text
    assert "local: worst clients: " in text
    assert jaxpfl(capsys, "report", folder / "one", "--data-dir", folder).status == 0
    page = (folder / "one" / "report.html").read_text()
    for whole in ("<b>Ulm", "tab\there", "x" * 100):
        assert whole not in page
    for shown in ("&lt;b&gt;Ulm&lt;/b&gt;", "[red]Ada", "Zug", "7 of 7 clients"):
        assert shown in page
    found = jaxpfl(capsys, "compare-runs", folder / "one", folder / "two", "--json").json["methods"]
    assert any(row["worse"] for row in found)
    assert all(set(ORDER) >= {one["client_name"] for one in row["worse"]} for row in found)
    # In plots, the worst dots have names.
    arrays = {name: results.read_arrays(folder / "one", name)[1] for name in ("local", "fedavg")}
    who = results.read_clients(folder / "one")
    records = [json.loads(line) for line in (folder / "one" / "metrics.jsonl").read_text().splitlines()]
    figure = plots.figures([one for one in records if "method" in one], arrays, ACCURACY, who)["clients"]
    drawn = {one.get_text() for one in figure.axes[0].texts}
    assert drawn & {"Zug", "Bern", "<b>Ulm</b>", "[red]Ada", r"'tab\\there'", r"\$a\$", repr("x" * 500)[:30] + " ..."}
    figure.draw_without_rendering()
    assert plots.gains(arrays, ACCURACY, who["client_names"]).axes[0].texts


@pytest.mark.slow
def test_describe_and_warnings_name_the_clients(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--data", "csv:own.csv", "--data-dir", str(folder), "--target", "label", "--client", "who"]
    found = jaxpfl(capsys, "data", "describe", *flags, "--task", "binary", "--json").json["per_client"]
    assert [one["client_name"] for one in found] == ORDER
    described = jaxpfl(capsys, "data", "describe", *flags, "--task", "binary", "--plot", folder / "split.png")
    lines = described.out.splitlines()
    table = lines[lines.index("training examples by class") + 1 :]
    assert len({len(line) for line in table}) == 1
    assert any(line.startswith("<b>Ulm</b> ") for line in table)
    assert any(line.startswith("'xxx") for line in table)


def test_messages_name_the_client() -> None:
    users = np.repeat(np.arange(3), [5, 1, 5]).astype(np.int32)
    x, names = np.ones((11, 2), np.float32) * np.arange(11)[:, None], np.array(["Zug", "Bern\n", "Ulm"])
    source = Source("own", x, users % 2, None, None, 2, "", users)._replace(user_names=names)
    with pytest.raises(package.JaxpflError, match=r"too few examples to be tested \(namely 'Bern\\n'\)"):
        federate(source, partition="natural")
    with pytest.raises(package.JaxpflError, match="client 'b', train: 2 inputs but 1 labels"):
        package.stack_clients([(x, users % 2), (x[:2], [0])], client_names=["a", "b"])
    whole = federate(source, partition="natural", test_share=0.0)
    ticks = split_figure(summary(whole, 2)).axes[1].get_xticklabels()
    assert [tick.get_text() for tick in ticks] == ["Zug", r"'Bern\n'", "Ulm"]


def client(n: int, seed: int, kind: str) -> tuple[Any, Any]:
    rng = np.random.default_rng(seed)
    labels = {
        "classification": lambda: rng.integers(3, size=n),
        "binary": lambda: rng.integers(2, size=n),
        "regression": lambda: rng.normal(size=(n, 2)),
        "next-token": lambda: rng.integers(-1, 4, size=(n, 5)),
    }[kind]()
    return (rng.integers(4, size=(n, 5)) if kind == "next-token" else rng.normal(size=(n, 3))), labels


@pytest.mark.parametrize("kind", ["classification", "binary", "regression", "next-token"])
def test_the_constant_predictor_by_hand(kind: str) -> None:
    train = [client(n, i, kind) for i, n in enumerate((4, 9, 2))]
    test = [client(n, 10 + i, kind) for i, n in enumerate((3, 0, 5))]
    found = constant_scores(package.stack_clients(train, test).rows([2, 0, 1]), kind)
    assert found is not None
    everything = np.concatenate([y for _, y in train])
    if kind == "regression":
        best = sum(everything) / len(everything)
        want = [np.sqrt(np.mean((np.float32(y) - best) ** 2)) for _, y in (test[2], test[0])]
    else:
        flat = [label for label in everything.ravel().tolist() if label >= 0]
        best = max(sorted(set(flat)), key=flat.count)
        want = [np.mean([label == best for label in y.ravel() if label >= 0]) for _, y in (test[2], test[0])]
    assert found[0] == pytest.approx(best)
    np.testing.assert_allclose(found[1], np.array([*want, np.nan]), rtol=1e-6)


@pytest.mark.slow
def test_the_score_of_a_model_that_predicts_a_constant_is_the_constant_predictors() -> None:
    """The engine's metric and the constant predictor's agree."""
    clients = [client(n, n, "regression") for n in (4, 9, 2)]
    federation = package.stack_clients(clients, clients)
    found = constant_scores(federation, "regression")
    assert found is not None
    model = package.Model(init=lambda key, x: {"w": np.zeros(2)}, apply=lambda p, x: 0 * x[:, :1] * p["w"] + found[0])
    fit = package.fit("local", federation, model=model, task="regression", rounds=1, lr=1e-9)
    np.testing.assert_allclose(fit.personalized_score[0], found[1], rtol=1e-5)


def test_no_constant_where_it_means_nothing() -> None:
    federation = package.stack_clients([client(5, 1, "binary")], [client(5, 2, "binary")])
    assert constant_scores(federation, "ranking") is None
    assert constant_scores(federation, "multilabel") is None


@pytest.mark.parametrize(("metric", "below"), [("accuracy", ["a", "b"]), ("rmse", ["b", "c"])])
def test_methods_that_do_not_beat_the_constant_are_named(metric: str, below: list[str]) -> None:
    quiet = dict.fromkeys(("privacy", "diverged_clients", "lost_uploads", "idle_rounds"))
    scores = {"a": 0.4, "b": 0.5, "c": 0.6}
    methods = {name: {f"personalized_{metric}": {"mean": score}, **quiet} for name, score in scores.items()}
    constant = {"prediction": "no\n[b]", "mean": 0.5}
    told = notes({"methods": methods, "metric": metric, "constant": constant, "clients": 3})
    number = HEADLINES[metric].number(0.5)
    assert told[0].startswith("constant predictor (the m")
    assert told[0].endswith(f"): {number}")
    assert told[1:] == [f"{name} does not beat the constant predictor ({number})" for name in below]
    assert notes({"methods": methods, "metric": metric, "clients": 3}) == []  # of a run of an earlier version


def test_equal_and_missing_scores_are_no_losses() -> None:
    who = {"client_ids": np.arange(4), "client_names": np.array(["a", "b", "c", "d"])}
    scores, local = np.array([[0.5, 0.2, np.nan, 0.1]]), np.array([[0.5, 0.3, 0.4, 0.0]])
    assert [one["client_name"] for one in worst(scores, who, ACCURACY, local)] == ["b"]
    assert [one["client_name"] for one in worst(scores, who, ACCURACY)] == ["d", "b", "a"]
    assert [one["client_name"] for one in worst(scores, who, HEADLINES["rmse"], local)] == ["d"]

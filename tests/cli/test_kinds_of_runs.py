"""Compressed runs, optimizers, the centralised reference, graphs and clusters: what a run folder holds, and resumes."""

import json
from pathlib import Path

import numpy as np
import pytest
from command import SMALL, jaxpfl

from jaxpfl.data import PlantedSettings, draw_planted

FLAGS = ["--client-optimizer", "sgd:momentum=0.5", "--server-optimizer", "fedadam", "--server-lr", "0.05"]


@pytest.mark.slow
def test_a_comparison_with_pooled(capsys, tmp_path):
    folder = tmp_path / "run"
    result = jaxpfl(capsys, "compare", "local", "fedavg", "pooled", *SMALL, *FLAGS, "--json", "--output", folder)
    assert result.status == 0, result.err
    assert "warning" not in result.err
    methods = result.json["methods"]
    pooled = methods["pooled"]
    for same in ("global_accuracy", "personalized_before_accuracy"):
        assert pooled[same] == pytest.approx(pooled["personalized_accuracy"], abs=1e-6)
    assert (pooled["bytes_up"], pooled["bytes_down"]) == (0, 0)
    assert pooled["client_steps"] == 4 * 2  # rounds * tau
    assert methods["fedavg"]["client_steps"] == 4 * 2 * 3
    assert pooled["fraction_hurt"] is not None
    with np.load(folder / "clients.npz") as clients:
        assert clients["pooled/after_accuracy"].shape == clients["fedavg/after_accuracy"].shape == (2, 6)
    assert {"accuracy.png", "clients.png"} <= {path.name for path in (folder / "plots").iterdir()}

    stored = json.loads((folder / "config.json").read_text())
    config = stored["config"]
    assert [config[name] for name in ("client_optimizer", "server_optimizer", "server_lr")] == [*FLAGS[1:4:2], 0.05]
    assert stored["hyper"]["fedavg"]["server_lr"] == 0.05
    assert "server_lr" not in stored["hyper"]["local"]


def test_a_normalizing_server_at_rate_one_is_warned_about(capsys, monkeypatch):
    monkeypatch.setattr("jaxpfl.runs.terminal.explain_plan", lambda experiment: dict.fromkeys(experiment.methods))
    args = ["compare", "local", "fedavg", *SMALL, "--server-optimizer", "fedyogi", "--explain-plan", "--json"]
    result = jaxpfl(capsys, *args)
    assert result.status == 0
    assert result.err.count("warning: server optimizer fedyogi moves every parameter by about server_lr = 1") == 1
    strict = jaxpfl(capsys, *args, "--strict")
    assert strict.status == 2
    assert strict.err.startswith("error: server optimizer fedyogi moves every parameter")
    assert jaxpfl(capsys, *args, "--set", "fedavg.server_lr=0.1", "--strict").status == 0
    no_server = jaxpfl(capsys, "run", "local", *args[3:])
    assert no_server.status == 0
    assert "moves every parameter" not in no_server.err


TOP_K = ["--compress", "top-k:share=0.05"]


def records(folder: Path, method: str, kind: str) -> list[dict]:
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [r for r in lines if (r["method"], r["kind"]) == (method, kind)]


@pytest.mark.slow
def test_bits_are_counted_stored_and_shown(capsys, tmp_path):
    folder = tmp_path / "run"
    shown = jaxpfl(capsys, "compare", "local", "fedavg", *SMALL, *TOP_K, "--output", folder)
    assert shown.status == 0, shown.err
    assert "fedavg: uploads compressed by top-k:share=0.05, " in " ".join(shown.out.split())
    methods = json.loads((folder / "summary.json").read_text())["methods"]
    fedavg, entries, uploads, runs = methods["fedavg"], 650, 4 * 3, 2
    assert fedavg["bytes_up_uncoded"] == 4 * entries * uploads
    assert fedavg["compress"] == "top-k:share=0.05"
    assert methods["local"]["bytes_up"] == 0
    assert "compress" not in methods["local"]
    rounds = records(folder, "fedavg", "round")
    each = np.array([r["upload_bits"] for r in rounds])
    np.testing.assert_array_equal([r["bits_up"] for r in rounds], np.cumsum(each, axis=0))
    assert fedavg["bytes_up"] == each.sum() // (8 * runs)
    # Of each of three messages 32 numbers (a twentieth, rounded), and for where they stand at least a bit each.
    assert (each > 3 * 32 * (32 + 1)).all()
    assert (each < 3 * 32 * (32 + 15)).all()
    assert [r["bits_up"] for r in records(folder, "fedavg", "evaluation")] == [
        rounds[1]["bits_up"],
        rounds[3]["bits_up"],
    ]
    with np.load(folder / "clients.npz") as clients:
        np.testing.assert_array_equal(clients["fedavg/upload_bits"].sum(axis=1), each.sum(axis=0))
        assert "local/upload_bits" not in clients
    for plot in ("accuracy-by-bytes", "loss-by-bytes"):
        assert (folder / "plots" / f"{plot}.png").stat().st_size > 5000


RUN = ("run", "network-lasso", *SMALL)


@pytest.mark.slow
def test_a_run_writes_its_graph_and_its_clusters(tmp_path, capsys):
    folder, edges = tmp_path / "run", tmp_path / "edges.csv"
    edges.write_text("client,neighbour\n0,2\n3,4\n")
    args = (*RUN, "--graph", edges, "--set", "lam=1000", "--set", "personal=head/*", "--output", folder)
    result = jaxpfl(capsys, *args)
    assert result.status == 0, result.err
    assert "network-lasso: clusters of clients (a number for each seed): 4, 4" in result.out
    assert json.loads((folder / "summary.json").read_text())["methods"]["network-lasso"]["clusters"] == [4, 4]
    with np.load(folder / "clients.npz") as stored:
        np.testing.assert_array_equal(stored["network-lasso/cluster"], [[0, 1, 0, 2, 2, 3]] * 2)
    assert (folder / "graph.csv").read_text().split() == ["client,neighbour", "0,2", "3,4"]
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert {"admm_steps", "admm_primal", "admm_dual", "fused_edges"} <= records[0].keys()

    edges.write_text("0,2\n3,5\n")
    refused = jaxpfl(capsys, *args, "--rounds", "6", "--resume")
    assert refused.status == 2
    assert "the graph of the clients has changed" in refused.err
    edges.unlink()  # the run folder holds what it was
    result = jaxpfl(capsys, "export", folder)
    assert result.status == 0, result.err
    assert "6 personal models" in result.out


@pytest.mark.slow
def test_clusters_are_compared_with_the_true_ones(tmp_path, capsys):
    """Edges within the planted clusters alone find them; with one more between them there is one cluster."""
    member = draw_planted(PlantedSettings(clients=6, clusters=2, examples=10, dim=2)).member
    within = [np.flatnonzero(member == c) for c in range(2)]
    edges = [f"{a},{b}" for a, b, c in within for a, b in ((a, b), (b, c))]
    args = [*RUN, "--data", "planted:clients=6,clusters=2,examples=10,dim=2", "--set", "lam=1000"]
    del args[args.index("--clients") : args.index("--clients") + 2]  # they are the data's own
    for more, index in (([], "1.00, 1.00"), ([f"{within[0][0]},{within[1][0]}"], "0.00, 0.00")):
        (tmp_path / "edges.csv").write_text("\n".join(edges + more))
        result = jaxpfl(capsys, *args, "--graph", tmp_path / "edges.csv", "--output", tmp_path / f"run{len(more)}")
        assert result.status == 0, result.err
        assert f"adjusted Rand index to the true clusters: {index}" in result.out
        summary = json.loads((tmp_path / f"run{len(more)}" / "summary.json").read_text())
        assert summary["methods"]["network-lasso"]["rand_index"] == [float(index[:4])] * 2

"""The network lasso from the command line: --graph, the graph and the clusters in the run folder, resume and export;
and the clusters of IFCA."""

import json

import numpy as np
import pytest
from command import SMALL, jaxpfl

from jaxpfl.data import PlantedSettings, draw_planted

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

"""Optimizers and the centralised reference from the command line: what a run folder holds, and what resumes."""

import json

import numpy as np
import pytest
from command import SMALL, jaxpfl

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

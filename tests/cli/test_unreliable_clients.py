"""Dropout, stragglers, idle and unseen clients on the command line: what they cost and leave in the run folder."""

import json

import numpy as np
import pytest
from command import jaxpfl

SMALL = ["--clients", "10", "--cohort", "4", "--rounds", "6", "--local-steps", "3", "--seeds", "2"]


@pytest.mark.slow
def test_every_failure_in_one_run(capsys, tmp_path):
    folder = tmp_path / "run"
    flags = ["--dropout", "0.4", "--stragglers", "0.5", "--unseen-clients", "3", "--adapt-rounds", "2"]
    flags += ["--set", "adaped.idle_rounds=2", "--json", "--output", str(folder)]
    result = jaxpfl(capsys, "compare", "fedavg", "adaped", *SMALL, *flags)
    summary = json.loads(result.out)
    assert summary["clients"] == 10
    fedavg, adaped = summary["methods"]["fedavg"], summary["methods"]["adaped"]
    # It has nothing to adapt; two programs round the same quotient of counts.
    assert fedavg["unseen_accuracy"] == pytest.approx(fedavg["unseen_before_accuracy"], rel=1e-6)
    assert adaped["unseen_accuracy"]["mean"] is not None
    assert 0 < fedavg["lost_uploads"] < 6 * 4
    assert fedavg["idle_rounds"] == 0 < adaped["idle_rounds"]
    assert 6 * 4 <= fedavg["client_steps"] < 6 * 4 * 3
    assert fedavg["bytes_up"] < fedavg["bytes_down"]
    assert fedavg["gradients"]["training"]["mean"] == pytest.approx(fedavg["client_steps"] / 10, abs=0.1)
    # Of four of ten clients in six rounds each takes part in 2.4 on average.
    assert adaped["unseen_rounds"] == {"adapted": 2, "as_trained": 2}
    assert adaped["gradients"]["unseen"] == adaped["gradients"]["unseen_as_trained"]
    assert adaped["gradients"]["unseen"]["mean"] == 2 * 3 * 2
    with np.load(folder / "clients.npz") as stored:
        assert not set(stored["unseen_client_ids"]) & set(stored["client_ids"])
        assert stored["adaped/unseen_after_accuracy"].shape == (2, 3)
        steps, turns = stored["adaped/steps"], stored["adaped/participations"] + stored["adaped/idle_rounds"]
        assert ((turns <= steps) & (steps <= 3 * turns)).all()
        assert (stored["fedavg/uploads"] + stored["fedavg/dropped"] == stored["fedavg/participations"]).all()
    assert (folder / "plots" / "unseen.png").exists()

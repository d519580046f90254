"""``jaxpfl export`` and ``--warm-start`` from the command line."""

import shutil
from pathlib import Path

import numpy as np
import pytest
from command import SMALL, jaxpfl

import jaxpfl as package


@pytest.fixture(scope="module")
def original(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("original") / "run"


@pytest.fixture
def run(original: Path, tmp_path: Path, capsys) -> Path:
    """A copy of a run that was made once."""
    if not original.exists():
        assert jaxpfl(capsys, "run", "fedavg", *SMALL, "--output", original).status == 0
    return shutil.copytree(original, tmp_path / "run")


@pytest.mark.slow
def test_export_says_what_it_wrote(run, capsys):
    result = jaxpfl(capsys, "export", run, "--clients", "1", "4", "--per-client")
    assert (result.status, result.err) == (0, "")
    assert "fedavg, seed 0, round 4: 2 personal models and the global model" in result.out
    assert str(run / "models") in result.out.replace("\n", "")
    models = package.load_models(run / "models")
    np.testing.assert_array_equal(models.client(4)["head"]["bias"], models.global_model["head"]["bias"])
    again = jaxpfl(capsys, "export", run)
    assert (again.status, again.out) == (2, "")
    assert again.err == f"error: {run / 'models'} exists: choose another --output\n"


@pytest.mark.slow
def test_a_run_goes_on_where_another_ended(run, tmp_path, capsys):
    args = ("run", "fedavg", *SMALL, "--rounds", "1", "--lr", "1e-30", "--json", "--output", tmp_path / "next")
    before = jaxpfl(capsys, "run", "fedavg", *SMALL, "--seeds", "1", "--json", "--output", tmp_path / "one").json
    after = jaxpfl(capsys, *args, "--warm-start", run)
    assert after.status == 0, after.err
    reached = [summary["methods"]["fedavg"]["global_accuracy"]["mean"] for summary in (before, after.json)]
    assert reached[0] == pytest.approx(reached[1])
    refused = jaxpfl(capsys, *args, "--resume")
    assert refused.status == 2
    assert "the parameters of --warm-start have changed" in refused.err


def test_a_start_that_does_not_fit_leaves_no_folder(tmp_path, capsys):
    start = tmp_path / "start.npz"
    np.savez(start, **{"head/bias": np.zeros(10), "head/kernel": np.zeros((64, 10))})
    args = ("--model", "mlp", "--warm-start", start, "--output", tmp_path / "next")
    result = jaxpfl(capsys, "run", "fedavg", *SMALL, *args)
    assert result.status == 2
    assert "'dense0/bias' must be (64,), got absent" in result.err
    assert result.err.count("\n") == 1
    assert not (tmp_path / "next").exists()

"""Texts of one's own, end to end as a new user runs them: modules of Python's standard library."""

import json
import sysconfig
from pathlib import Path

import numpy as np
import pytest
from command import jaxpfl

SHORT = ["--model", "gru:8", "--rounds", "2", "--seeds", "1", "--local-steps", "2", "--batch-size", "4"]


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
    result = jaxpfl(capsys, "run", "fedavg", *modules, *SHORT, "--output", str(out))
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
    long = jaxpfl(capsys, "data", "describe", *modules[:2], "--window", "4000")
    assert (long.status, long.err.count("\n")) == (2, 1)
    assert "bisect.py has 2500 bytes, but a window of 4000 needs 4001: use a shorter window" in long.err
    other = jaxpfl(capsys, "data", "describe", "--data", "digits", "--window", "24")
    assert "window applies to text:FOLDER, not to digits" in other.err
    model = jaxpfl(capsys, "run", "fedavg", *modules, "--model", "mlp")
    assert (model.status, model.err.count("\n")) == (2, 1)
    assert "the model 'mlp' predicts one label, but next-token needs one per position" in model.err

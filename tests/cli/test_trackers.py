"""``--mlflow`` and ``--wandb`` where they are not there, and a run with one; its rounds as a table."""

import sys
from pathlib import Path

import pytest
from command import SMALL, jaxpfl

LACKING = {"mlflow": "mlflow-skinny or mlflow", "wandb": "wandb", "tensorboard": "tensorboardX"}


@pytest.mark.parametrize("name", LACKING)
def test_without_the_package_nothing_begins(name: str, tmp_path: Path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorboardX" if name == "tensorboard" else name, None)
    given = [f"--{name}"] if name == "tensorboard" else [f"--{name}", "x"]
    result = jaxpfl(capsys, "run", "local", *SMALL, "--output", tmp_path / "run", *given)
    ways = f"pip install '.[{name}]' in a clone, or pip install 'jaxpfl[{name}]'"
    assert (result.status, result.err) == (2, f"error: --{name} requires the package {LACKING[name]}: {ways}\n")
    assert not (tmp_path / "run").exists()

"""``jaxpfl data convert`` and runs on what it saved: the numbers of the data set itself, and what is refused."""

import json
from pathlib import Path

import numpy as np
import pytest
from command import SMALL, jaxpfl, timeless

SPLIT = ["--data", "npz:own.npz", "--partition", "dirichlet", "--alpha", "1", "--test-share", "0.3", "--drop-empty"]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A data directory with an archive of images, and the federation of six clients that was made of it."""
    rng = np.random.default_rng(0)
    y = rng.integers(5, size=300)
    x = (rng.integers(120, size=(300, 6, 6)) + 20 * y[:, None, None]).astype(np.uint8)
    np.savez(tmp_path / "own.npz", x_train=x, y_train=y)
    monkeypatch.setenv("JAXPFL_DATA_DIR", str(tmp_path))
    return tmp_path


@pytest.mark.slow
def test_a_run_on_files_is_the_run_on_the_data_set(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    convert = ["data", "convert", *SPLIT, "--clients", "6", "--unseen-clients", "2", "--output", folder / "made"]
    made = jaxpfl(capsys, *convert, "--json")
    assert made.status == 0, made.err
    assert made.json["clients"] == 8
    assert made.json["data"] == f"federation:{folder / 'made'}"
    run = ["run", "local", *SMALL, "--plan.devices", "1", "--plan.runs", "map", "--unseen-clients", "2", "--json"]
    one = jaxpfl(capsys, *run, *SPLIT, "--output", folder / "one")
    given = [*run, "--data", "federation:made", "--plan.clients-in", "disk", "--output", folder / "two"]
    other = jaxpfl(capsys, *given)
    assert (one.status, other.status) == (0, 0), other.err
    assert timeless(other.json) == timeless(one.json)
    for name in ("one", "two"):
        exported = jaxpfl(capsys, "export", folder / name, "--output", folder / f"{name}-models", "--json")
        assert exported.status == 0, exported.err
    manifests = [json.loads((folder / f"{name}-models" / "manifest.json").read_text()) for name in ("one", "two")]
    assert manifests[0]["pixels"]
    assert manifests[0]["pixels"] == manifests[1]["pixels"]
    described = [
        jaxpfl(capsys, "data", "describe", *more, "--unseen-clients", "2", "--json").json["examples_per_client"]
        for more in ([*SPLIT, "--clients", "6"], ["--data", "federation:made"])
    ]
    assert described[0] == described[1]

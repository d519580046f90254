"""Saved federations and clients on disk: the numbers of the data set itself, what is refused, what a resumed run may
change, and ``kill -9`` in the middle.
"""

import json
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from command import SMALL, jaxpfl, timeless
from forks import Forked

ONE = ["--plan.devices", "1", "--plan.runs", "map"]
ON_DISK = ["--plan.clients-in", "disk"]


def records(folder: Path) -> list[dict[str, Any]]:
    found = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [{name: value for name, value in one.items() if name != "seconds"} for one in found]


@pytest.mark.slow
def test_it_goes_on_and_is_exported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, models = tmp_path / "run", tmp_path / "models"
    command = ["run", "adaped", *SMALL, *ONE, "--output", folder]
    assert jaxpfl(capsys, *command, *ON_DISK).status == 0
    assert (folder / "clients" / "adaped" / "store.json").exists()
    more = ["--resume", "--rounds", "6"]
    refused = jaxpfl(capsys, *command, *more)
    assert refused.status == 2
    assert "clients' states are on disk" in refused.err
    assert "plan.clients_in = disk" in refused.err.splitlines()[-1]
    assert jaxpfl(capsys, *command, *more, *ON_DISK).status == 0
    assert jaxpfl(capsys, "export", folder, "--output", models).status == 0

    whole = tmp_path / "whole"
    assert jaxpfl(capsys, "run", "adaped", *SMALL, *ONE, "--rounds", "6", "--output", whole).status == 0
    assert [r for r in records(folder) if r["kind"] == "round"] == [r for r in records(whole) if r["kind"] == "round"]
    other = jaxpfl(capsys, "run", "adaped", *SMALL, *ONE, "--output", whole, "--resume", "--rounds", "8", *ON_DISK)
    assert other.status == 2
    assert "are not stored in" in other.err
    # Those in the host's memory are in the checkpoints, as those on the device are.
    host = ["--plan.clients-in", "host", "--resume", "--rounds", "8", "--output", whole]
    assert jaxpfl(capsys, "run", "adaped", *SMALL, *ONE, *host).status == 0


@pytest.mark.slow
@pytest.mark.parametrize(("every", "written"), [("6", "checkpoints/adaped/24"), ("60", "clients/adaped/undo-0")])
def test_kill_minus_nine_loses_nothing_beyond_the_last_checkpoint(tmp_path: Path, every: str, written: str) -> None:
    """Also before the first checkpoint, when some rounds have overwritten initial states."""
    long = ["--rounds", "60", "--eval-every", "60", "--checkpoint-every", every, "--seeds", "1"]

    def start(folder: Path, *more: str) -> Forked:
        return Forked("run", "adaped", *SMALL, *ONE, *long, "--json", "--output", folder, *more)

    whole, folder = tmp_path / "whole", tmp_path / "run"
    out, err = start(whole).communicate(timeout=300)
    assert out, err
    process, deadline = start(folder, *ON_DISK), time.monotonic() + 120
    while process.poll() is None and time.monotonic() < deadline:
        if (folder / written).exists() and (folder / written).stat().st_size:
            break
        time.sleep(0.002)
    process.kill()
    process.communicate()
    assert process.returncode == -signal.SIGKILL
    out, err = start(folder, *ON_DISK, "--resume").communicate(timeout=300)
    assert out, err
    assert records(folder) == records(whole)
    with np.load(folder / "clients.npz") as got, np.load(whole / "clients.npz") as want:
        for name in want.files:
            np.testing.assert_array_equal(got[name], want[name])


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

"""``kill -9`` and Ctrl-C in the middle: the same final numbers, bit for bit, and nothing half taken for whole."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from command import SMALL

COMMAND = [sys.executable, "-m", "jaxpfl.cli", "run", "adaped", *SMALL]
LONG = ["--rounds", "40", "--eval-every", "5", "--checkpoint-every", "5", "--plan.rounds-per-call", "1"]


def start(folder: Path, *more: str) -> subprocess.Popen:
    command = [*COMMAND, *LONG, "--json", "--output", str(folder), *more]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def wait_for_round(folder: Path, round: int, process: subprocess.Popen) -> None:
    records = folder / "metrics.jsonl"
    deadline = time.monotonic() + 120
    while process.poll() is None and time.monotonic() < deadline:
        if records.exists() and f'"round": {round},' in records.read_text():
            return
        time.sleep(0.005)
    raise AssertionError("the run ended before it could be stopped")


def last_state(folder: Path) -> dict[str, np.ndarray]:
    with np.load(folder / "clients.npz") as clients:
        return dict(clients)


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> tuple[Path, dict]:
    folder = tmp_path_factory.mktemp("whole") / "run"
    out, err = start(folder).communicate(timeout=300)
    assert out, err
    return folder, json.loads(out)


def assert_same(folder: Path, out: str, whole: tuple[Path, dict]) -> None:
    got, want = json.loads(out)["methods"]["adaped"], dict(whole[1]["methods"]["adaped"])
    assert {**got, "seconds": 0} == {**want, "seconds": 0}
    for name, values in last_state(whole[0]).items():
        np.testing.assert_array_equal(last_state(folder)[name], values, err_msg=name)
    for records in (folder / "metrics.jsonl", whole[0] / "metrics.jsonl"):
        rounds = [r["round"] for r in map(json.loads, records.read_text().splitlines()) if r["kind"] == "round"]
        assert rounds == list(range(1, 41))


@pytest.mark.parametrize("round", [pytest.param(1, marks=pytest.mark.slow), 13])
def test_kill_minus_nine(tmp_path: Path, whole, round: int):
    folder = tmp_path / "run"
    process = start(folder)
    wait_for_round(folder, round, process)
    process.kill()
    process.wait()
    assert not (folder / "summary.json").exists()
    out, err = start(folder, "--resume").communicate(timeout=300)
    assert out, err
    assert_same(folder, out, whole)


def test_ctrl_c_keeps_what_is_done(tmp_path: Path, whole):
    folder = tmp_path / "run"
    process = start(folder)
    wait_for_round(folder, 8, process)
    os.kill(process.pid, signal.SIGINT)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 130
    assert (out, "--resume" in err, "Traceback" in err) == ("", True, False)
    # The stop wrote a checkpoint of its own, beyond the last regular one.
    saved = max(int(p.name) for p in (folder / "checkpoints" / "adaped").iterdir() if p.name.isdigit())
    assert saved >= 8
    out, err = start(folder, "--resume").communicate(timeout=300)
    assert out, err
    assert_same(folder, out, whole)

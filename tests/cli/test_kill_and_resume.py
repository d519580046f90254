"""``kill -9`` and Ctrl-C in the middle: the same final numbers, bit for bit, and nothing half taken for whole."""

import json
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from command import SMALL, timeless
from forks import COMMAND as COMMAND_LINE
from forks import Forked

LONG = ["--rounds", "20", "--eval-every", "5", "--checkpoint-every", "5", "--plan.rounds-per-call", "1"]
COMMAND = ["run", "local", *SMALL, *LONG, "--json", "--output"]
MOMENTS = 3


def start(folder: Path, *more: str, code: str = COMMAND_LINE) -> Forked:
    return Forked(*COMMAND, folder, *more, code=code)


def interpreter(folder: Path) -> subprocess.Popen[str]:
    """The same command with its imports, in which a signal may come too."""
    command = [sys.executable, "-m", "jaxpfl.cli", *COMMAND, str(folder)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def wait_for_round(folder: Path, round: int, process: Forked | subprocess.Popen[str]) -> None:
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
    assert timeless(json.loads(out)) == timeless(whole[1])
    for name, values in last_state(whole[0]).items():
        np.testing.assert_array_equal(last_state(folder)[name], values, err_msg=name)
    for records in (folder / "metrics.jsonl", whole[0] / "metrics.jsonl"):
        rounds = [r["round"] for r in map(json.loads, records.read_text().splitlines()) if r["kind"] == "round"]
        assert rounds == list(range(1, 21))


def one_line(err: str) -> str:
    """The message, which must be one line below the progress display."""
    said = [line for line in err.splitlines() if line.strip() and not re.match(" +local ", line)]
    assert len(said) == 1, err
    return said[0]


@pytest.mark.slow
def test_three_ctrl_c_end_at_once_and_lose_no_more_than_kill_does(tmp_path: Path, whole):
    folder = tmp_path / "run"
    process = start(folder)
    wait_for_round(folder, 8, process)
    for _ in range(3):
        process.send_signal(signal.SIGINT)
        time.sleep(0.02)
    out, err = process.communicate(timeout=120)
    assert (process.returncode, out) == (130, "")
    assert "--resume continues" in one_line(err)
    out, err = start(folder, "--resume").communicate(timeout=300)
    assert out, err
    assert_same(folder, out, whole)


@pytest.mark.slow
def test_sigterm_ends_a_compilation(tmp_path: Path):
    folder = tmp_path / "run"
    process = start(folder)
    records, deadline = folder / "metrics.jsonl", time.monotonic() + 120
    while not records.exists() and time.monotonic() < deadline:  # made just before the first round compiles
        time.sleep(0.005)
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=120)
    assert (process.returncode, out, records.read_text()) == (143, "", "")
    assert one_line(err).startswith(f"interrupted; kept in {folder}: the same command with")


def wait_for_watch(process: subprocess.Popen[str]) -> None:
    """Return once the process has a handler for SIGTERM; Python itself has none."""
    status = Path(f"/proc/{process.pid}/status")
    while process.poll() is None:
        caught = re.search(r"SigCgt:\s*(\w+)", status.read_text())
        if caught and int(caught[1], 16) >> (signal.SIGTERM - 1) & 1:
            return
        time.sleep(0.001)


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="looks at the signals that a process handles")
def test_ctrl_c_at_any_moment_of_the_start(tmp_path: Path):
    """Some moments, from the command's first lines to its first round, over the time that this takes here."""
    process = interpreter(tmp_path / "timed")
    wait_for_watch(process)
    began = time.monotonic()
    wait_for_round(tmp_path / "timed", 1, process)
    took = time.monotonic() - began
    process.kill()
    process.communicate()
    for number, share in enumerate(np.random.default_rng(0).uniform(0, 1, MOMENTS)):
        folder = tmp_path / str(number)
        process = interpreter(folder)
        wait_for_watch(process)
        time.sleep(share * took)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=120)
        assert (process.returncode, out) == (130, "")
        said = one_line(err)
        assert said.startswith(("interrupted", "stopped local after round"))
        assert ("--resume continues" in said) == (folder / "config.json").exists()


FULL = """
import resource, sys
from jaxpfl.cli import main
from jaxpfl.runs import checkpoint
save = checkpoint.Checkpoints.save
def limited(self, round, state, seconds):
    size = 2000 if round == 10 else resource.RLIM_INFINITY
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))
    save(self, round, state, seconds)
checkpoint.Checkpoints.save = limited
main(sys.argv[1:])
"""


@pytest.mark.slow
def test_a_disk_that_fills_up_in_a_checkpoint(tmp_path: Path, whole):
    folder = tmp_path / "run"
    process = start(folder, code=FULL)
    out, err = process.communicate()
    assert (process.returncode, out) == (2, "")
    # On a busy machine the checkpoint's other writes end after the one that failed: tensorstore then prints that their
    # event loop is closed, and may make its hidden folder again, which the next write removes. Ours is the last line,
    # and the only one that names the package.
    *others, said = err.splitlines()
    assert "cannot write the checkpoint of round 10 to" in said
    assert said.endswith("File too large; --resume continues from the previous one")
    assert not [line for line in others if "jaxpfl" in line or line.startswith("error")]
    kept = {p.name for p in (folder / "checkpoints" / "local").iterdir()}
    assert kept - {".10.partial"} == {"5"}
    out, err = start(folder, "--resume").communicate(timeout=300)
    assert out, err
    assert_same(folder, out, whole)

"""``jaxpfl run`` and ``compare`` in several processes: the same results, one writer, stops, kills and refusals."""

import json
import os
import signal
import socket
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from forks import COMMAND, Forked
from process_group import TOGETHER, ended, free_address, said, started

pytestmark = pytest.mark.slow

SMALL = ("--data", "digits", "--clients", "9", "--cohort", "4", "--model", "linear", "--seeds", "1")
PRIVATE = (*SMALL, "--privacy.clipping-norm", "0.5", "--privacy.noise-multiplier", "0.5", "--privacy.delta", "1e-3")


def commands(*arguments: str, processes: int, each: Sequence[Sequence[str]] = ()) -> list[list[str]]:
    """A command of each process, with what it alone is given."""
    address = free_address()
    shared = [*arguments, "--distributed", address, "--processes", str(processes)]
    own = each or [()] * processes
    return [[*shared, "--process", str(i), *own[i]] for i in range(processes)]


def run(folder: Path, *arguments: str, processes: int, each: Sequence[Sequence[str]] = ()) -> list[int]:
    """Exit statuses of a distributed command, whose process 0 compiles for all; one process runs without the flags."""
    given = commands(*arguments, processes=processes, each=each) if processes > 1 else [list(arguments)]
    with started(given, folder, code=TOGETHER if processes > 1 else COMMAND) as running:
        return ended(running, 240)


def results(folder: Path) -> dict[str, np.ndarray]:
    with np.load(folder / "clients.npz") as arrays:
        return dict(arrays)


def assert_same(got: Path, want: Path) -> None:
    found, expected = results(got), results(want)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, rtol=1e-4, atol=1e-5, err_msg=name)


def until_rounds(folder: Path, rounds: int) -> None:
    """Wait until a run has recorded so many rounds."""
    records, until = folder / "metrics.jsonl", time.monotonic() + 120
    while not (records.exists() and records.read_text().count("\n") >= rounds):
        assert time.monotonic() < until, "no round in two minutes"
        time.sleep(0.1)


def test_a_private_run_of_two_processes_and_its_resume_by_others(tmp_path):
    """AdaPeD with differential privacy: 4 rounds by two processes, then one process goes on, and two finish."""
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    ragged = ("--partition", "lognormal", "--sigma", "1.0")  # dealt in another order to each number of processes
    private = ("run", "adaped", *PRIVATE, *ragged)
    assert run(tmp_path, *private, "--rounds", "8", "--output", str(whole), processes=1) == [0]
    for rounds, processes in ((4, 2), (6, 1), (8, 2)):
        more = ("--resume",) if rounds > 4 else ()
        arguments = (*private, "--rounds", str(rounds), "--output", str(parts), "--json", *more)
        assert run(tmp_path, *arguments, processes=processes) == [0] * processes, said(tmp_path, 0)
    summary = json.loads(said(tmp_path, 0, "out"))
    assert said(tmp_path, 1, "out") == ""
    assert summary == json.loads((parts / "summary.json").read_text())
    assert_same(parts, whole)


def test_compare_in_two_processes_that_find_each_other_under_slurm(tmp_path):
    """Methods with and without states, and a secret noise seed, which process 0 draws for both."""
    step = {"SLURM_STEP_NODELIST": "localhost", "SLURM_STEP_NUM_NODES": "1", "SLURM_JOB_ID": str(os.getpid())}
    step |= {"SLURM_NTASKS": "2", "JAXPFL_DISTRIBUTED_TOKEN": "0123456789abcdef"}
    ours = ("compare", "fedavg", "adaped", *PRIVATE, "--rounds", "3", "--privacy.noise-seed", "secret")
    each = [step | {"SLURM_PROCID": i, "SLURM_LOCALID": i} for i in "01"]
    command = (*ours, "--distributed", "auto", "--output", str(tmp_path / "run"))
    with started([command] * 2, tmp_path, code=TOGETHER, each=each) as running:
        assert ended(running, 240) == [0, 0], said(tmp_path, 0)
    assert set(json.loads((tmp_path / "run" / "summary.json").read_text())["methods"]) == {"fedavg", "adaped"}
    assert "run folder" in said(tmp_path, 0, "out")
    assert said(tmp_path, 1, "out") == said(tmp_path, 1) == ""


@pytest.mark.parametrize(("which", "number"), [(1, signal.SIGINT), (0, signal.SIGKILL)])
def test_stopped_and_killed_runs_go_on(tmp_path, which, number):
    """One process is told to stop, or killed: the others end within seconds, in one line, and the run goes on."""
    folder = tmp_path / "run"
    arguments = ("run", "fedavg", *SMALL, "--output", str(folder), "--checkpoint-every", "5", "--rounds", "300")
    with started(commands(*arguments, processes=2), tmp_path, code=TOGETHER) as running:
        until_rounds(folder, 12)
        running[which].send_signal(number)
        statuses = ended(running, 60)  # seconds, where nothing else runs
    other = 1 - which
    last = said(tmp_path, other if number == signal.SIGKILL else 0).strip().splitlines()
    if number == signal.SIGINT:
        assert statuses == [130, 130]
        assert any("stopped fedavg after round" in line for line in last)
        assert said(tmp_path, 1) == ""
    else:
        assert statuses[which] == -number
        assert statuses[other] == 2
        assert last[-1].startswith(f"error: process {which} of 2 ended before the run did; kept in {folder}")
        assert not any("Traceback" in line for line in last), last
    assert run(tmp_path, *arguments, "--resume", processes=1) == [0], said(tmp_path, 0)
    assert json.loads((folder / "summary.json").read_text())["rounds"] == 300


def test_what_differs_between_the_processes_is_refused(tmp_path):
    """Other settings, and other data under the same name: one line in each process, and no folder."""
    for number in (0, 1):
        x = np.random.default_rng(number).normal(size=(900, 3))
        (tmp_path / str(number)).mkdir()
        np.savez(tmp_path / str(number) / "own.npz", x_train=x, y_train=np.arange(900) % 3)
    arguments = ("run", "fedavg", "--clients", "9", "--model", "linear", "--output", str(tmp_path / "run"))
    digits, own = ("--data", "digits", "--rounds"), ("--rounds", "3", "--data")
    for each, message in (
        ([(*digits, "3"), (*digits, "4")], "rounds must be the same in every process: process 0 has 3, process 1 4"),
        (
            [(*own, f"npz:{tmp_path}/0/own.npz"), (*own, f"npz:{tmp_path}/1/own.npz")],
            "data must be the same in every process",
        ),
    ):
        assert run(tmp_path, *arguments, processes=2, each=each) == [2, 2], said(tmp_path, 0)
        for number in (0, 1):
            assert message in said(tmp_path, number)
            (_,) = [line for line in said(tmp_path, number).splitlines() if not line.startswith("waiting")]
        assert not (tmp_path / "run").exists()


def test_without_a_cluster_nothing_is_found_and_ports_in_use_are_named(monkeypatch):
    for name in [name for name in os.environ if name.startswith(("SLURM", "OMPI", "KUBERNETES"))]:
        monkeypatch.delenv(name)
    lone = Forked("run", "local", "--distributed", "auto", JAXPFL_DISTRIBUTED_TOKEN="0123456789abcdef")
    _, err = lone.communicate(100)
    assert lone.returncode == 2, err
    assert "no Slurm, Open MPI, Kubernetes or Cloud TPU was found" in err
    assert err.count("\n") == 1
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        code = f"from jaxpfl.support import distributed; distributed.start({address!r}, 2, 0, timeout=3)"
        _, err = Forked(code=code).communicate(100)
    assert "is in use on this host" in err.splitlines()[-1], err


def test_a_wait_for_another_process_is_said_and_ends():
    """Process 0, whom nobody joins, says so and gives up."""
    address = free_address()
    code = f"from jaxpfl.support import distributed; distributed.start({address!r}, 2, 0, timeout=8, on_wait=print)"
    out, err = Forked(code=code).communicate(100)
    assert out == f"waiting for 1 of 2 processes at {address}\n"
    assert f"JaxpflError: cannot join the processes of the run: not all processes reached {address}" in err


def test_a_stranger_is_refused_and_nobody_else_can_come(tmp_path):
    """Process 1 joins with another token: both end in one line. Until then all listen at the loopback alone."""
    tokens = ("the token of this run", "the token of a stranger")
    for number, token in enumerate(tokens):
        (tmp_path / f"token{number}").write_text(token)
        (tmp_path / f"token{number}").chmod(0o600)
    each = [("--distributed-token", str(tmp_path / f"token{number}")) for number in (0, 1)]
    arguments = ("run", "local", *SMALL, "--output", str(tmp_path / "run"))
    first, second = commands(*arguments, processes=2, each=each)
    with started([first], tmp_path) as (one,):
        until = time.monotonic() + 60
        while not (heard := listening(one.pid)):
            assert time.monotonic() < until, "process 0 does not listen"
            time.sleep(0.1)
        assert all(place.endswith("0100007F") for place in heard), heard  # 127.0.0.1, also as a part of IPv6
        (tmp_path / "second").mkdir()
        with started([second], tmp_path / "second") as (other,):
            assert ended([one, other], 120) == [2, 2]
    assert "process 1 has a different token, or none: give the same one to every process" in said(tmp_path, 0)
    assert "process 0 has a different token" in said(tmp_path / "second", 0)


def listening(pid: int) -> list[str]:
    """Addresses at which a process listens, in the hexadecimal form of the kernel."""
    own = {os.readlink(entry) for entry in Path(f"/proc/{pid}/fd").iterdir() if entry.is_symlink()}
    lines = [
        line.split() for kind in ("tcp", "tcp6") for line in Path(f"/proc/net/{kind}").read_text().splitlines()[1:]
    ]
    return [line[1].split(":")[0] for line in lines if line[3] == "0A" and f"socket:[{line[9]}]" in own]

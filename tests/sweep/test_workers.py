"""Many workers of one sweep: every group once, whoever dies, and the numbers of one process."""

import dataclasses
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from small import sweep_of

from jaxpfl.runs.records import Journal, Record
from jaxpfl.runs.sweep import processes, ray_workers, worker, workers
from jaxpfl.runs.sweep import sweep as module
from jaxpfl.runs.sweep.claims import Claims
from jaxpfl.runs.sweep.execute import Reporter
from jaxpfl.runs.sweep.plan import Group
from jaxpfl.runs.sweep.sweep import CLAIMS, Sweep
from jaxpfl.support.errors import JaxpflError, UnwritableError

TIMES = {"compile_seconds"}


@pytest.fixture
def toy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Sweep, list[str]]:
    """A sweep of six groups whose runs do nothing, and the groups that were run."""
    ran: list[str] = []

    def run(self: Sweep, group: Group, journal: Journal, reporter: Reporter, **more: Any) -> None:
        ran.append(group.name)
        time.sleep(0.05)
        journal.append([Record(r.method, r.settings, r.seed, rounds=3, group=group.name) for r in group.runs])
        reporter.finish(len(group.runs))

    monkeypatch.setattr(Sweep, "run", run)
    monkeypatch.setattr(module, "prepared", lambda *given: None)
    return Sweep(tmp_path, sweep_of("clients=5,6,7", methods=("fedavg", "local"))), ran


def test_two_workers_run_each_group_once(toy: tuple[Sweep, list[str]], monkeypatch: pytest.MonkeyPatch):
    sweep, ran = toy
    once, both, begun = Sweep.run, threading.Barrier(2), threading.local()

    def run(self: Sweep, *given: Any, **more: Any) -> None:
        if not hasattr(begun, "here"):  # or the first could do all before the second is there
            begun.here = both.wait(60)
        once(self, *given, **more)

    monkeypatch.setattr(Sweep, "run", run)
    threads = [
        threading.Thread(target=sweep.run_missing, args=(Reporter(),), kwargs={"worker": name, "ahead": False})
        for name in ("w0", "w1")
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(ran) == sorted(group.name for group in sweep.groups)
    assert len(sweep.journal().read()) == 12
    assert {path.stem for path in sweep.journal().folder.iterdir()} == {"w0", "w1"}


def test_without_room_for_a_thread_nothing_is_compiled_ahead(
    toy: tuple[Sweep, list[str]], monkeypatch: pytest.MonkeyPatch
):
    sweep, ran = toy

    def submit(self: Any, *given: Any) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(module.ThreadPoolExecutor, "submit", submit)
    sweep.run_missing(Reporter())
    assert len(ran) == 6


def test_the_group_of_a_dead_worker_comes_last(toy: tuple[Sweep, list[str]], monkeypatch: pytest.MonkeyPatch):
    """It may have been the group that killed it, and the others' records are then there."""
    sweep, ran = toy
    first = sweep.groups[0].name
    claim = Claims(sweep.folder / CLAIMS, "dead").take(first)
    assert claim is not None
    claim.close()
    monkeypatch.setattr(processes, "is_alive", lambda pid, started: False)
    sweep.run_missing(Reporter(), ahead=False)
    assert len(ran) == 6
    assert ran[-1] == first


def test_a_worker_waits_for_those_that_hold_the_rest(toy: tuple[Sweep, list[str]]):
    sweep, ran = toy
    waited: list[str] = []

    class Told(Reporter):
        def wait(self, workers: str) -> None:
            waited.append(workers)
            claim.end()

    claim = Claims(sweep.folder / CLAIMS, "w7").take(sweep.groups[2].name)
    assert claim is not None
    sweep.run_missing(Told(), ahead=False)
    assert len(waited) == 1
    assert waited[0].startswith("w7 on ")
    assert ran[-1] == sweep.groups[2].name


def test_a_claim_that_is_lost_stops_the_group(toy: tuple[Sweep, list[str]], monkeypatch: pytest.MonkeyPatch):
    sweep, ran = toy
    asked: list[bool] = []
    once = Sweep.run

    def run(self: Sweep, group: Group, journal: Journal, reporter: Reporter, **more: Any) -> None:
        if not asked:
            asked.append(more["lost"]())
            (self.folder / CLAIMS / f"{group.name}.1.claim").touch()  # another worker's, whose end is a dead one's
            asked.append(more["lost"]())
            return
        once(self, group, journal, reporter, **more)

    monkeypatch.setattr(Sweep, "run", run)
    sweep.run_missing(Reporter(), ahead=False, lease=0.2)
    assert asked == [False, True]
    assert len(ran) == 6


def test_each_worker_has_a_name_of_its_own(tmp_path: Path):
    assert [worker.new_name(tmp_path) for _ in range(3)] == ["w0", "w1", "w2"]
    (tmp_path / "file").touch()
    with pytest.raises(UnwritableError, match=r"cannot write to .*workers"):
        worker.new_name(tmp_path / "file")


@pytest.mark.parametrize(
    ("versions", "devices"),
    [
        ({"platform": "cpu", "devices": 3}, 3),
        ({"platform": "gpu", "devices": 3}, None),
        ({}, None),
        ({"platform": "cpu", "devices": "3"}, None),
    ],
)
def test_devices_are_those_that_the_sweep_began_with(tmp_path: Path, versions: dict[str, Any], devices: int | None):
    (tmp_path / "sweep.json").write_text(json.dumps({"versions": versions}))
    assert worker.cpu_devices(tmp_path) == devices


def test_a_folder_without_a_sweep_has_no_workers(tmp_path: Path):
    done = subprocess.run(
        [sys.executable, "-m", "jaxpfl.runs.sweep.worker", str(tmp_path), "--name", "w0"],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2
    assert done.stderr.startswith(f"error: cannot read {tmp_path}")
    assert done.stderr.count("\n") == 1


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="cores are dealt where the system can")
def test_cores_are_dealt_among_those_at_work(tmp_path: Path):
    cores = sorted(os.sched_getaffinity(0))
    sleepers = [subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) for _ in range(3)]
    some = [workers.Worker(f"w{i}", process, tmp_path) for i, process in enumerate(sleepers)]
    try:
        workers._deal(some, {"w0", "w2"})
        given = [os.sched_getaffinity(process.pid) for process in sleepers]
        if len(cores) > 1:
            assert not given[0] & given[2]
        assert given[0] | given[2] == set(cores)
        workers._deal(some, {"w1"})
        assert os.sched_getaffinity(sleepers[1].pid) == set(cores)
    finally:
        for process in sleepers:
            process.communicate(b"\n")
    workers._deal(some, set())  # they have ended


COMMAND = [
    *(sys.executable, "-m", "jaxpfl.cli", "sweep", "fedavg", "adaped", "--grid", "clients=5,6", "--grid", "lr=.05,.1"),
    *("--model", "linear", "--local-steps", "2", "--batch-size", "5", "--rounds", "3", "--seeds", "2", "--cohort", "3"),
]


def begun(folder: Path, **changes: Any) -> Sweep:
    return Sweep.open(folder, sweep_of("clients=5,6", **changes), resume=False)


def numbers(folder: Path) -> dict[str, Record]:
    """The records of a sweep, but for their times."""
    return {
        record.id: dataclasses.replace(
            record, seconds=0.0, metrics={name: v for name, v in record.metrics.items() if name not in TIMES}
        )
        for record in Journal(folder).read()
    }


def kill_the_first_at_work(folder: Path) -> str:
    """Kill the first worker that has claimed a group, and return the group's name."""
    until = time.monotonic() + 120
    while time.monotonic() < until:
        for path in (folder / CLAIMS).glob("*.0.claim"):
            holder = Claims(folder / CLAIMS, "").holder(path.name.removesuffix(".0.claim"))
            if holder is not None and not holder.ended:
                os.kill(holder.pid, signal.SIGKILL)
                return path.name.removesuffix(".0.claim")
        time.sleep(0.02)
    raise AssertionError("no worker began")


@pytest.mark.slow
def test_a_worker_killed_in_the_middle_loses_its_group_and_the_numbers_are_those_of_one_process(tmp_path: Path):
    alone, folder = tmp_path / "alone", tmp_path / "s"
    one = json.loads(
        subprocess.run([*COMMAND, "--output", str(alone), "--json"], check=True, capture_output=True).stdout
    )
    process = subprocess.Popen(
        [*COMMAND, "--output", str(folder), "--workers", "2", "--json"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    killed = kill_the_first_at_work(folder)
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    assert err.count("was ended by SIGKILL") == 1
    assert "the others do its group" in err
    assert Claims(folder / CLAIMS, "").tries(killed) == 2
    lines = sum(path.read_bytes().count(b"\n") for path in (folder / "journal").iterdir())
    assert lines == 16  # every run was recorded once
    assert numbers(folder) == numbers(alone)
    assert json.loads(out)["best"] == one["best"]


@pytest.mark.slow
def test_all_workers_die(tmp_path: Path):
    sweep = begun(tmp_path / "s")
    (tmp_path / "s" / "sweep.json").write_text("{}")  # what they read
    with pytest.raises(JaxpflError, match=r"all workers died: w0 failed: .*sweep\.json.*; w1 failed: .*--resume goes"):
        workers.run(sweep, 2, Reporter())


@pytest.mark.slow
def test_workers_end_with_the_process_that_started_them(tmp_path: Path):
    begun(tmp_path / "s", rounds=100_000)
    code = (
        "import sys; from pathlib import Path\n"
        "from jaxpfl.runs.sweep import workers; from jaxpfl.runs.sweep.sweep import Sweep\n"
        "from jaxpfl.runs.sweep.execute import Reporter\n"
        "workers.run(Sweep.read(Path(sys.argv[1])), 1, Reporter())"
    )
    parent = subprocess.Popen([sys.executable, "-c", code, str(tmp_path / "s")])
    claims, until = Claims(tmp_path / "s" / CLAIMS, ""), time.monotonic() + 120
    while not (held := [h for g in Sweep.read(tmp_path / "s").groups if (h := claims.holder(g.name))]):
        assert time.monotonic() < until
        time.sleep(0.2)
    parent.kill()
    parent.wait()
    while processes.is_alive(held[0].pid, held[0].started):
        assert time.monotonic() < until
        time.sleep(0.1)
    assert claims.take(next(g.name for g in Sweep.read(tmp_path / "s").groups if claims.tries(g.name)))


@pytest.mark.slow
def test_a_ray_cluster_of_two_workers_gives_the_numbers_of_one_process(tmp_path: Path):
    pytest.importorskip("ray", reason="the extra jaxpfl[ray] is not installed")
    alone, folder = tmp_path / "alone", tmp_path / "s"
    for path, more in (alone, []), (folder, ["--workers", "2", "--ray", "local"]):
        done = subprocess.run([*COMMAND, "--output", str(path), *more], capture_output=True, text=True, timeout=500)
        assert done.returncode == 0, done.stderr
        assert "Warning" not in done.stderr
    ran = {path.stem for path in (folder / "journal").iterdir()}  # on a slow machine the first may have run them all
    assert ran
    assert ran <= {"w0", "w1"}
    assert numbers(folder) == numbers(alone)


def test_without_ray_the_command_to_install_it_is_told(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with (
        pytest.raises(JaxpflError, match=r"--ray needs the package ray: pip install 'jaxpfl\[ray\]'"),
        ray_workers.cluster("local", 2),
    ):
        pass

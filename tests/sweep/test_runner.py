"""Runners of a sweep: the groups of one process, and tasks of a Ray cluster whose processes die."""

import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from forks import Forked
from small import sweep_of, timeless

from jaxpfl.cli import main
from jaxpfl.runs import run_folder
from jaxpfl.runs.control import Reporter
from jaxpfl.runs.records import Journal, Record
from jaxpfl.runs.sweep import runner
from jaxpfl.runs.sweep.plan import Group
from jaxpfl.runs.sweep.sweep import Sweep
from jaxpfl.support import files
from jaxpfl.support.errors import JaxpflError


@pytest.fixture
def toy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Sweep, list[str]]:
    """A sweep of six groups whose runs do nothing, and the groups that were run."""
    ran: list[str] = []

    def run(group: Group, loaded: Any, record: Callable[[list[Record]], None], reporter: Reporter, **more: Any) -> None:
        ran.append(group.name)
        record([Record(r.method, r.settings, r.seed, rounds=3, group=group.name) for r in group.runs])

    monkeypatch.setattr(runner, "run_group", run)
    monkeypatch.setattr(runner, "prepare_group", lambda *given: None)
    return Sweep(tmp_path, sweep_of("clients=5,6,7", methods=("fedavg", "local"))), ran


def test_each_group_runs_once_in_order(toy: tuple[Sweep, list[str]]):
    sweep, ran = toy
    runner.run_missing(sweep, Reporter())
    assert ran == [group.name for group in sweep.groups]
    assert len(sweep.journal.read()) == 12
    runner.run_missing(sweep, Reporter())
    assert len(ran) == 6


def test_without_room_for_a_thread_nothing_is_compiled_ahead(
    toy: tuple[Sweep, list[str]], monkeypatch: pytest.MonkeyPatch
):
    def submit(self: Any, *given: Any) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(runner.ThreadPoolExecutor, "submit", submit)
    runner.run_missing(toy[0], Reporter())
    assert len(toy[1]) == 6


class Cluster:
    """Ray as the runner uses it, its tasks run here; the group of some number, from 1, is lost with its process."""

    def __init__(self, lost: int = 0) -> None:
        self.lost, self.asked, self.cancelled = lost, list[dict[str, Any]](), list[Any]()

    def nodes(self) -> list[dict[str, Any]]:
        return [{"Resources": {"CPU": 4.0}}]

    def remote(self, **options: Any) -> Any:
        self.asked.append(options)
        return lambda function: type("Task", (), {"remote": lambda *given: lambda: function(*given[1:])})()

    def wait(self, tasks: list[Any], timeout: float) -> tuple[list[Any], list[Any]]:
        return tasks[-1:], tasks[:-1]

    def get(self, task: Any) -> Any:
        self.lost -= 1
        if self.lost == 0:
            raise RuntimeError("The worker died.\nIt had no memory.")
        return task()

    def cancel(self, task: Any, force: bool) -> None:
        self.cancelled.append(task)


@pytest.fixture
def stored(toy: tuple[Sweep, list[str]], monkeypatch: pytest.MonkeyPatch) -> tuple[Sweep, list[str]]:
    """The same with its definition on disk, begun on three devices."""
    sweep, ran = toy
    versions = {"platform": "cpu", "devices": 3}
    files.write_json(sweep.folder / "sweep.json", sweep.definition.to_json() | {"versions": versions})
    monkeypatch.setattr(runner, "_sweep_there", lambda folder: sweep)
    return sweep, ran


def test_tasks_have_the_devices_that_the_sweep_began_with(stored: tuple[Sweep, list[str]]):
    sweep, ran = stored
    runner.run_on_ray(sweep, Reporter(), cluster := Cluster())
    assert sorted(ran) == sorted(group.name for group in sweep.groups)
    assert {one["num_cpus"] for one in cluster.asked} == {3}
    assert cluster.asked[0]["runtime_env"] == {"env_vars": {"NPROC": "3"}}
    versions = {"platform": "gpu", "devices": 2}
    files.write_json(sweep.folder / "sweep.json", sweep.definition.to_json() | {"versions": versions})
    os.remove(sweep.journal.path)
    runner.run_on_ray(sweep, Reporter(), cluster := Cluster())
    assert {one["num_gpus"] for one in cluster.asked} == {1}


def test_a_group_that_is_lost_stops_no_other(stored: tuple[Sweep, list[str]]):
    sweep, ran = stored
    with pytest.raises(JaxpflError, match=r"^\S+ is lost: It had no memory\.; --resume runs what is missing$"):
        runner.run_on_ray(sweep, Reporter(), Cluster(lost=2))
    assert len(ran) == 5
    runner.run_on_ray(sweep, Reporter(), Cluster())
    assert len(ran) == 6


def test_tasks_are_cancelled_when_the_sweep_is_stopped(stored: tuple[Sweep, list[str]]):
    sweep, ran = stored
    runner.run_on_ray(sweep, Reporter(), cluster := Cluster(), stopped=lambda: bool(ran))
    assert (len(ran), len(cluster.cancelled)) == (1, 5)


def test_without_ray_the_command_to_install_it_is_shown(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with (
        pytest.raises(JaxpflError, match=r"--ray requires the package ray: pip install '\.\[ray\]' in a clone"),
        runner.ray_cluster("local"),
    ):
        pass


COMMAND = [
    *("sweep", "fedavg", "--grid", "clients=5,6", "--grid", "lr=.05,.1"),
    *("--model", "linear", "--local-steps", "2", "--batch-size", "5", "--seeds", "2", "--cohort", "3"),
    *("--rounds", "300", "--plan.devices", "1"),
]


def test_a_second_sweep_is_kept_out_of_the_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    folder = tmp_path / "s"
    Sweep.open(folder, sweep_of("clients=5,6"), resume=False)
    with run_folder.lock(folder), pytest.raises(SystemExit) as ended:
        main([*COMMAND, "--output", str(folder), "--resume"])
    assert ended.value.code == 2
    assert "is using" in capsys.readouterr().err.splitlines()[-1]


def parent(pid: int) -> int:
    """The parent of a process; 0 for one that has ended."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return 0


def task_at_work(driver: int) -> int:
    """A process below this one in which Ray runs a task."""
    until = time.monotonic() + 240
    while time.monotonic() < until:
        for place in Path("/proc").glob("[0-9]*"):
            try:
                name = (place / "cmdline").read_bytes()
            except OSError:
                continue
            above = pid = int(place.name)
            while name.startswith(b"ray::_run_there") and above:
                above = parent(above)
                if above == driver:
                    return pid
        time.sleep(0.02)
    raise AssertionError("no task began")


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The sweep in one process."""
    pytest.importorskip("ray", reason="the extra jaxpfl[ray] is not installed")
    folder = tmp_path_factory.mktemp("alone") / "s"
    assert (process := Forked(*COMMAND, "--output", folder)).wait() == 0, process.communicate()
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("killed", ["task", "sweep"])
def test_a_ray_cluster_gives_the_numbers_of_one_process_whatever_is_killed(tmp_path: Path, alone: Path, killed: str):
    folder = tmp_path / "s"
    command = [*COMMAND, "--output", str(folder), "--ray", "local"]
    process = Forked(*command)
    if killed == "task":
        os.kill(task_at_work(process.pid), signal.SIGKILL)
    elif killed == "sweep":
        task = task_at_work(process.pid)
        process.kill()
        until = time.monotonic() + 60
        while parent(task):
            assert time.monotonic() < until, "the cluster ends with the process that started it"
            time.sleep(0.1)
    _, err = process.communicate(timeout=400)
    if killed == "sweep":
        process = Forked(*command, "--resume")
        _, err = process.communicate(timeout=400)
    assert process.returncode == 0, err
    assert killed == "sweep" or "Warning" not in err
    assert Journal(folder).path.read_bytes().count(b"\n") == 8  # every run was recorded once
    assert timeless(folder) == timeless(alone)

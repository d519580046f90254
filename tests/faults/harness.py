"""Faults at chosen calls of a command: it loses nothing, says one line, and the same command ends as if undisturbed.

`Harness` starts a process with `faults.c` preloaded (`forking`), which runs each command in a fork. A `Job` is a
command that writes; a `Point` is a fault at the N-th call by which it changes its folder. `Harness.visit` runs the job
into the fault, looks at what is left, runs it again, and compares the results with those of a job that nothing
disturbed.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self

import numpy as np

from jaxpfl.runs.records import load_sweep

FAULTS = ("count", "kill", "full", "broken", "read-only", "vanish", "term", "slow", "clock", "memory")
"""None; kill -9; a disk that is full from a call on; one call that fails (EIO); a file system that is read-only from a
call on; a folder that is moved away; SIGTERM; calls that take their time; a calendar that jumps; little memory."""

ALLOWED = {
    "kill": (-9,),
    "full": (0, 2),
    "broken": (0, 2),
    "read-only": (0, 2),
    "vanish": (0, 2),
    "term": (0, 143),
    "slow": (0,),
    "clock": (0,),
    "memory": (0, 2, 127, -5, -6, -9, -11),  # XLA and the C library end where they find no memory
}
"""Exit statuses after a fault; 0 is that of a job that got its work done all the same."""

HERE = Path(__file__).parent
SMALL = shlex.split("--model linear --clients 6 --cohort 3 --batch-size 5 --local-steps 2 --json --quiet")
ROUNDS = shlex.split("--rounds 4 --eval-every 2 --checkpoint-every 2 --seeds 2")
RUN = [*SMALL, *ROUNDS, "--plan.devices", "1", "--plan.runs", "map"]


class Point(NamedTuple):
    """A fault: its kind, the call at which it strikes, and its seconds or bytes.

    Calls that change nothing to be seen, those on files below hidden names and fsync, count if ``hidden``.
    """

    fault: str
    at: int = 0
    amount: float = 0.0
    hidden: bool = True


@dataclass(frozen=True)
class Job:
    """A command that writes a folder.

    Attributes:
      args: the command, but for the folder.
      mark: the file from which on the command is given ``--resume``; none for a command that is given as it was.
      before: another job, whose results are in the folder before.
      cut: share of the calls of that job after which it is killed; 1 lets it end.
      source: whether the job reads the folder of the other job, and writes one beside it.
    """

    args: tuple[str, ...]
    mark: str | None = None
    before: Job | None = None
    cut: float = 1.0
    source: bool = False

    def command(self, folder: Path) -> list[str]:
        """The command, as one gives it with what is in the folder."""
        resume = self.mark is not None and (folder / self.mark).exists() and "--force" not in self.args
        run = [str(folder.with_name("source"))] if self.source else []
        return [self.args[0], *run, *self.args[1:], "--output", str(folder), *["--resume"] * resume]

    def commands_again(self, folder: Path) -> list[list[str]]:
        """The commands after a fault: the same, unless its results are there, and a check of them."""
        if self.source:
            return [] if folder.exists() else [self.command(folder)]
        return [self.command(folder), ["check", str(folder)]]


run = Job(("run", "adaped", *RUN), "config.json")
disk = Job((*run.args, "--plan.clients-in", "disk"), "config.json")
sweep = Job(("sweep", "fedavg", "local", *SMALL, *shlex.split("--rounds 3 --seeds 1 --grid lr=.05,.1")), "sweep.json")
study = Job(("estimate", "when", *shlex.split("--clients 50 --samples 5 --json")))
JOBS = {
    "run": run,
    "resume": Job(run.args, run.mark, run, 0.7),
    "force": Job((*run.args, "--force"), None, run),
    "compare": Job(("compare", "local", *run.args[1:]), run.mark),
    "export": Job(("export", "--json"), None, run, source=True),
    "disk": disk,
    "disk-resume": Job(disk.args, disk.mark, disk, 0.8),
    "sweep": sweep,
    "sweep-resume": Job(sweep.args, sweep.mark, sweep, 0.5),
    "sweep-force": Job((*sweep.args, "--force"), None, sweep),
    "study": study,
    "study-again": Job((*study.args, "--sigma-theta", "0.3"), None, study),
}


def library(place: Path) -> Path:
    """Compile `faults.c` into a folder.

    Raises:
      OSError, subprocess.CalledProcessError: without a C compiler, or where there is no Linux.
    """
    path = place / "faults.so"
    command = ["gcc", "-O1", "-shared", "-fPIC", "-o", path, HERE / "faults.c", "-ldl"]
    subprocess.run(command, check=True, capture_output=True)
    return path


class Visit(NamedTuple):
    """A visited point: the job's exit status and last line, whether the fault struck, and the seconds of both runs."""

    status: int
    said: str
    struck: bool
    cpu: float


class Harness:
    """A process that runs commands in forks, and a place for their folders."""

    def __init__(self, place: Path, cache: Path):
        """Compile `faults.c`, and start the process.

        Args:
          place: folder for the jobs' folders.
          cache: folder for compiled programs.

        Raises:
          OSError, subprocess.CalledProcessError: as `library`.
        """
        self._place = place
        environ = {
            "LD_PRELOAD": str(library(place)),
            "XDG_CACHE_HOME": str(cache),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "JAX_PLATFORMS": "cpu",
            "MPLBACKEND": "Agg",
            "XLA_FLAGS": "--xla_backend_optimization_level=0",
        }
        self._process = subprocess.Popen(
            [sys.executable, HERE / "forking.py"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | environ,
        )
        self._wholes: dict[Job, Path] = {}
        self._counts: dict[tuple[Job, bool], dict[str, Any]] = {}
        self._cuts: dict[Job, Path] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(timeout=300)

    @property
    def process(self) -> int:
        """Number of the process that runs the commands."""
        return self._process.pid

    def count(self, job: Job, *, hidden: bool = True) -> dict[str, Any]:
        """The answer of `forking` for a job that nothing disturbed, with the numbers of its calls.

        Args:
          job: the job.
          hidden: as of a `Point`.
        """
        if (job, hidden) not in self._counts:
            place = self._begun(job)
            answer, _, err = self._run(place, [job.command(place / "out")], Point("count", hidden=hidden))
            assert answer["status"] == 0, err
            self._counts[job, hidden] = answer
            self._wholes.setdefault(job, place)
        return self._counts[job, hidden]

    def whole(self, job: Job) -> Path:
        """Folder of a job that nothing disturbed."""
        if job not in self._wholes:
            self.count(job)
        return self._wholes[job] / "out"

    def visit(self, job: Job, point: Point) -> Visit:
        """Run a job into a fault, and again.

        Raises:
          AssertionError: for anything but the same results, or one line before them.
        """
        want = results(self.whole(job))
        place = self._begun(job)
        folder = place / "out"
        before = results(folder)
        answer, _, err = self._run(place, [job.command(folder)], point)
        status, gone = answer["status"], place.with_name(f"{place.name}.gone")
        assert status in ALLOWED[point.fault] or not (answer["hit"] or status), f"status {status}: {err}"
        anew = None
        if gone.exists():
            anew = results(folder)
            shutil.rmtree(place, ignore_errors=True)
            gone.rename(place)
        said = [line for line in err.splitlines() if line.strip()]
        if status >= 0 and point.fault != "memory":
            assert len(said) == (status != 0), f"status {status}: {err}"
        assert "Traceback" not in err, err
        if status == 2:
            assert said[-1].startswith("error: "), err
        left = results(folder)
        same(left, want, before, None)
        if status == 0:  # the folder had all when it went, or was made anew with all
            same(left if anew is None else anew, want)
        again, out, err = self._run(place, job.commands_again(folder), Point("count"))
        assert again["status"] == 0, f"run again: {err}\n{out}"
        assert not err.strip(), f"run again: {err}"
        same(results(folder), want)
        shutil.rmtree(place)
        return Visit(status, said[-1] if said else "", bool(answer["hit"]), answer["cpu"] + again["cpu"])

    def _begun(self, job: Job) -> Path:
        """A new place for a job's folder, with what is there before it."""
        place = Path(tempfile.mkdtemp(dir=self._place, prefix="job-"))
        if job.before is not None:
            name = "source" if job.source else "out"
            shutil.copytree(self.whole(job.before) if job.cut == 1 else self._cut(job), place / name)
        return place

    def _cut(self, job: Job) -> Path:
        """Folder of the job before, killed."""
        if job not in self._cuts:
            assert job.before is not None
            place = self._begun(job.before)
            at = round(job.cut * self.count(job.before)["seen"])
            answer, _, err = self._run(place, [job.before.command(place / "out")], Point("kill", at))
            assert answer["status"] == -9, err
            self._cuts[job] = place / "out"
        return self._cuts[job]

    def _run(self, place: Path, commands: list[list[str]], point: Point) -> tuple[dict[str, Any], str, str]:
        """The answer of `forking`, with the output and the errors of the commands."""
        memory = point.fault == "memory"
        out, err = self._place / "stdout", self._place / "stderr"
        request = {
            "commands": commands,
            "folder": str(place),
            "fault": 0 if memory else FAULTS.index(point.fault),
            "at": point.at,
            "hidden": point.hidden,
            "seconds": point.amount,
            "memory": int(point.amount) if memory else 0,
            "out": str(out),
            "err": str(err),
        }
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(json.dumps(request), file=self._process.stdin, flush=True)
        answer = json.loads(self._process.stdout.readline())
        return answer, out.read_text(), err.read_text()


def results(folder: Path) -> Any:
    """The numbers of a folder that says that it is whole, without times and paths; None for another, and the name of a
    file that is missing for one that is not.
    """
    try:
        return _results(folder)
    except OSError as error:
        return f"missing: {error.filename}"


def _results(folder: Path) -> Any:
    if (folder / "manifest.json").exists():
        told: list[Any] = [json.loads((folder / "manifest.json").read_text())["methods"]]
        return [*told, *(_arrays(path) for path in sorted(folder.rglob("*.npz")))]
    if not (folder / "summary.json").exists():
        return None
    summary = _timeless(json.loads((folder / "summary.json").read_text()))
    if (folder / "sweep.json").exists():
        table = load_sweep(folder)
        records = table.astype(object).where(table.notna(), None).to_dict("records")
        return [summary, *sorted(_timeless(records), key=repr)]
    if (folder / "config.json").exists():
        lines = (folder / "metrics.jsonl").read_text().splitlines()
        return [summary, _arrays(folder / "clients.npz"), *(_timeless(json.loads(line)) for line in lines)]
    if "files" not in summary:
        return "missing: all that the summary is of"
    return [summary, *(_pixels(folder / name) for name in summary["files"])]


def same(found: Any, *allowed: Any) -> None:
    """Assert that results are among those that are allowed."""
    if not any(found == one for one in allowed):
        raise AssertionError(f"other results: {_difference(found, allowed[0])}")


def _difference(found: Any, wanted: Any, where: str = "") -> str:
    """The first place at which results differ, with both values."""
    if isinstance(found, dict) and isinstance(wanted, dict) and found.keys() == wanted.keys():
        pairs = [(f"{where}.{name}", found[name], wanted[name]) for name in found]
    elif isinstance(found, list) and isinstance(wanted, list) and len(found) == len(wanted):
        pairs = [(f"{where}[{i}]", *both) for i, both in enumerate(zip(found, wanted, strict=True))]
    else:
        return f"{where}: {str(found)[:200]} for {str(wanted)[:200]}"
    return next((_difference(a, b, name) for name, a, b in pairs if a != b), where)


def _arrays(path: Path) -> dict[str, Any]:
    with np.load(path) as arrays:
        return {name: arrays[name].tolist() for name in arrays.files}


def _pixels(path: Path) -> Any:
    import matplotlib.image

    return float(matplotlib.image.imread(path).astype(np.float64).sum()) if path.suffix == ".png" else path.name


def _timeless(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _timeless(v) for k, v in value.items() if not re.search("seconds|run_dir", k)}
    return [_timeless(one) for one in value] if isinstance(value, list) else value

"""Many workers of one sweep: processes of this machine, and of others that see its folder.

Each takes groups by claims (`claims`) until none is missing. The process that starts them computes nothing: it shows
the progress from the journals, deals the CPU cores among those at work, and tells of workers that died, whose groups
the others take.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from jaxpfl.support.errors import JaxpflError
from jaxpfl.runs.sweep.claims import LEASE, Claims
from jaxpfl.runs.sweep.execute import Reporter
from jaxpfl.runs.sweep.plan import Group
from jaxpfl.runs.sweep.sweep import CLAIMS, Sweep
from jaxpfl.runs.sweep.worker import LOGS, new_name

_LOOK_SECONDS = 0.5
_END_SECONDS = 10.0  # for a worker to end by itself


class Worker(NamedTuple):
    """A process at work."""

    name: str
    process: subprocess.Popen[bytes]
    log: Path


def run(
    sweep: Sweep,
    count: int,
    reporter: Reporter,
    *,
    stopped: Callable[[], int | None] = lambda: None,
    lease: float = LEASE,
) -> None:
    """Run all that a sweep's folder lacks in processes of this machine, beside any others that work on it.

    Args:
      sweep: the sweep.
      count: number of processes.
      reporter: receives the progress, and a line for each worker that died.
      stopped: the signal by which the user asked to stop, which is passed on; None as long as there is none.
      lease: seconds after which the group of a worker that shows no life is taken over.

    Raises:
      JaxpflError: if all workers died; what is done is kept.
    """
    watched = Watched(sweep, reporter)
    if not watched.missing():
        return
    with _started(sweep.folder, count, lease) as workers:
        alive, ends = list(workers), []
        while alive and watched.missing():
            if (number := stopped()) is not None:
                for worker in alive:
                    worker.process.send_signal(number)
                return
            _deal(alive, watched.busy())
            time.sleep(_LOOK_SECONDS)
            for worker in [one for one in alive if one.process.poll() is not None]:
                alive.remove(worker)
                if worker.process.returncode:
                    ends.append(f"{worker.name} {_end_of(worker)}")
                    reporter.say(f"{ends[-1]} ({worker.log})" + "; the others do its group" * bool(alive))
        _wait(alive)
    if watched.missing():
        raise died(sweep.folder, ends)


def died(folder: Path, ends: Sequence[str]) -> JaxpflError:
    """The error for a sweep that has no workers left."""
    told = "; ".join(sorted(set(ends))) or "they ended without a word"  # not in the order of their deaths
    return JaxpflError(
        f"all workers died: {told}; {folder / LOGS} holds their words, and --resume goes on with what is missing"
    )


class Watched:
    """A sweep whose runs others make: what is missing, read again only where a journal has grown."""

    def __init__(self, sweep: Sweep, reporter: Reporter):
        self._sweep, self._reporter = sweep, reporter
        self._claims = Claims(sweep.folder / CLAIMS, "")
        self._sizes: dict[str, int] | None = None
        self._missing: tuple[Group, ...] = ()
        self._told: int | None = None

    def missing(self) -> tuple[Group, ...]:
        """Groups that are not done, the reporter told of the runs that are."""
        journal = self._sweep.journal()
        sizes = {path.name: path.stat().st_size for path in journal.folder.glob("*.jsonl")}
        if sizes != self._sizes:
            records = journal.read()
            self._missing, self._sizes = self._sweep.missing(records), sizes
            done = self._sweep.progress(records)[0]
            if self._told is not None and done > self._told:
                self._reporter.finish(done - self._told)
            self._told = done
        return self._missing

    def busy(self) -> set[str]:
        """Names of the workers that hold a group that is not done."""
        holders = [self._claims.holder(group.name) for group in self._missing]
        return {holder.worker for holder in holders if holder is not None and not holder.ended}


@contextlib.contextmanager
def _started(folder: Path, count: int, lease: float) -> Iterator[list[Worker]]:
    """Workers, all of which have ended when the block has."""
    workers: list[Worker] = []
    try:
        for _ in range(count):
            workers.append(_start(folder, lease))
        yield workers
    except BaseException:
        for worker in workers:
            worker.process.terminate()
        raise
    finally:
        _wait(workers)


def _start(folder: Path, lease: float) -> Worker:
    name = new_name(folder)
    log = folder / LOGS / f"{name}.log"
    command = [sys.executable, "-m", "jaxpfl.runs.sweep.worker", str(folder), "--name", name, "--lease", str(lease)]
    with log.open("wb") as file:
        # A session of its own: Ctrl-C in a terminal reaches the worker through this process alone, and once.
        process = subprocess.Popen(
            [*command, "--attached"], stdin=subprocess.PIPE, stdout=file, stderr=file, start_new_session=True
        )
    return Worker(name, process, log)


def _wait(workers: Sequence[Worker]) -> None:
    """Wait for processes that are about to end, and kill those that do not, as one that is suspended."""
    until = time.monotonic() + _END_SECONDS
    for worker in workers:
        with contextlib.suppress(subprocess.TimeoutExpired):
            worker.process.wait(max(0.0, until - time.monotonic()))
        if worker.process.returncode is None:
            worker.process.kill()
            worker.process.wait()
        if worker.process.stdin is not None:
            worker.process.stdin.close()


def _deal(workers: Sequence[Worker], busy: set[str]) -> None:
    """Give each worker that has a group a fair share of the cores; the others wait, and need none of their own."""
    if not hasattr(os, "sched_setaffinity"):
        return
    cores = sorted(os.sched_getaffinity(0))
    at_work = [worker for worker in workers if worker.name in busy] or list(workers)
    for i, worker in enumerate(at_work):
        share = cores[i :: len(at_work)] or [cores[i % len(cores)]]
        with contextlib.suppress(OSError):  # it has ended
            for thread in os.listdir(f"/proc/{worker.process.pid}/task"):
                with contextlib.suppress(OSError):
                    os.sched_setaffinity(int(thread), share)


def _end_of(worker: Worker) -> str:
    """The end of a process in words: the signal, or the last line that it wrote."""
    status = worker.process.returncode
    if status < 0:
        return f"was ended by {signal.Signals(-status).name}"
    lines = worker.log.read_text(errors="replace").strip().splitlines()
    return f"failed: {lines[-1].removeprefix('error: ')}" if lines else f"ended with status {status}"

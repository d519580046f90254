"""Comparison of contenders that run in separate processes and are timed in turn, by medians of the same run."""

from __future__ import annotations

import json
import math
import os
import statistics
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

SHORTEST = 0.5  # seconds; a shorter timing measures the clock and the scheduler more than the work


class Job(NamedTuple):
    """Work of one process.

    Attributes:
      module: benchmark whose function ``work`` is called.
      settings: argument of ``work``, as JSON values.
      python: interpreter that runs the process.
    """

    module: str
    settings: Mapping[str, Any]
    python: str = sys.executable

    @property
    def command(self) -> list[str]:
        return [self.python, str(Path(__file__).with_name("worker.py")), self.module, json.dumps(self.settings)]


class JobError(RuntimeError):
    """A process failed; the message is one line."""


def compare(jobs: Mapping[str, Job], *, repetitions: int, rounds: int | None = None) -> dict[str, Any]:
    """Time all contenders in turn, ``repetitions`` times; they start one after the other, undisturbed.

    Args:
      jobs: name -> job, whose ``work`` returns a `worker.Contender`.
      repetitions: number of timings of each contender.
      rounds: number of rounds in one timing; None to choose it for each contender so that a timing takes `SHORTEST`.

    Returns:
      Name -> ``first`` (seconds of the first round, with its compilation), ``rounds`` (number in one timing),
      ``seconds`` (seconds per round of every timing), their ``median``, and the contender's ``facts``.
    """
    workers: dict[str, _Worker] = {}
    results: dict[str, Any] = {}
    try:
        for name, job in jobs.items():
            workers[name] = _Worker(job)
            first = workers[name].answer()["first"]
            results[name] = {"first": first, "rounds": rounds or workers[name].long_enough(), "seconds": []}
        for _ in range(repetitions):
            for name, worker in workers.items():
                results[name]["seconds"].append(worker.time(results[name]["rounds"]) / results[name]["rounds"])
        for name, worker in workers.items():
            results[name]["median"] = statistics.median(results[name]["seconds"])
            results[name]["facts"] = worker.facts()
    finally:
        for worker in workers.values():
            worker.stop()
    return results


def once(job: Job, timeout: float | None = None) -> dict[str, Any]:
    """Run a job whose ``work`` returns a dictionary, and return the dictionary.

    Raises:
      JobError: if the process fails or takes longer than ``timeout`` seconds.
    """
    process = _start(job, subprocess.DEVNULL)
    try:
        output, _ = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        raise JobError(f"took longer than {timeout:.0f} s") from None
    finally:
        process.kill()
        process.wait()
    return _parse(output, process)


class _Worker:
    def __init__(self, job: Job):
        self.process = _start(job, subprocess.PIPE)

    def answer(self) -> Any:
        assert self.process.stdout is not None
        return _parse(self.process.stdout.readline(), self.process)

    def time(self, rounds: int) -> float:
        return self._ask(rounds)

    def facts(self) -> dict[str, Any]:
        return self._ask(0)

    def long_enough(self) -> int:
        """Return the number of rounds that take about `SHORTEST` seconds."""
        return min(max(1, math.ceil(SHORTEST / max(self.time(1), 1e-6))), 1000)

    def stop(self) -> None:
        """End the process by closing its input; if it is still at work, kill it."""
        assert self.process.stdin is not None
        try:
            self.process.stdin.close()
            self.process.wait(timeout=5)
        except (OSError, subprocess.TimeoutExpired):
            self.process.kill()
            self.process.wait()

    def _ask(self, rounds: int) -> Any:
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(json.dumps({"rounds": rounds}) + "\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            pass  # it has ended, and the answer below reports this
        return self.answer()


def _start(job: Job, stdin: int) -> subprocess.Popen[str]:
    # First rounds are compiled anew whatever cache the user has, because their seconds are measured.
    inherited = {name: value for name, value in os.environ.items() if name != "JAX_COMPILATION_CACHE_DIR"}
    return subprocess.Popen(job.command, stdin=stdin, stdout=subprocess.PIPE, text=True, env=inherited)


def _parse(line: str, process: subprocess.Popen[str]) -> Any:
    if not line.strip():
        raise JobError(f"the process ended without an answer (status {process.wait()})")
    answer = json.loads(line)
    if isinstance(answer, dict) and "error" in answer:
        raise JobError(answer["error"])
    return answer

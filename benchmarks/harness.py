"""Contenders side by side: each in a process of its own, timed in turn, compared by ratios of medians."""

from __future__ import annotations

import json
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple


class Contender(NamedTuple):
    """What a worker times: ``run(rounds)`` returns when the work is done; ``accuracy()`` shows that it was real."""

    run: Callable[[int], None]
    accuracy: Callable[[], float]


def serve(contender: Contender) -> None:
    """A worker: warms up by one round, then answers each line ``ROUNDS`` with seconds, and ``accuracy`` with it."""
    began = time.perf_counter()
    contender.run(1)
    print(json.dumps({"first": time.perf_counter() - began}), flush=True)
    for line in sys.stdin:
        if line.strip() == "accuracy":
            print(json.dumps(contender.accuracy()), flush=True)
            continue
        began = time.perf_counter()
        contender.run(int(line))
        print(json.dumps(time.perf_counter() - began), flush=True)


def compare(commands: dict[str, list[str]], *, rounds: int, repetitions: int) -> dict[str, Any]:
    """Times every contender in turn, ``repetitions`` times over.

    Args:
      commands: name -> the command of its worker.
      rounds: rounds in one timing.
      repetitions: timings of each contender.

    Returns:
      name -> seconds of a round (every timing and their median), the first round with its compilation, accuracy.
    """
    workers = {name: _start(command) for name, command in commands.items()}
    results: dict[str, Any] = {name: {"first": _answer(w)["first"], "seconds": []} for name, w in workers.items()}
    for _ in range(repetitions):
        for name, worker in workers.items():
            results[name]["seconds"].append(_ask(worker, str(rounds)) / rounds)
    for name, worker in workers.items():
        results[name]["median"] = statistics.median(results[name]["seconds"])
        results[name]["accuracy"] = _ask(worker, "accuracy")
        assert worker.stdin is not None
        worker.stdin.close()
        worker.wait()
    return results


def environment() -> dict[str, Any]:
    """Versions and machine, for the record of a measurement."""
    versions = {}
    for name in ("jax", "jaxlib", "numpy", "torch", "jaxpfl"):
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            versions[name] = None
    cpu = next(
        (line.split(":")[1].strip() for line in _cpu_info() if line.startswith("model name")), platform.machine()
    )
    return {"python": platform.python_version(), "versions": versions, "cpu": cpu}


def write(path: Path, record: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record, indent=2) + "\n")


def _cpu_info() -> list[str]:
    path = Path("/proc/cpuinfo")
    return path.read_text().splitlines() if path.exists() else []


def _start(command: list[str]) -> subprocess.Popen[str]:
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def _ask(worker: subprocess.Popen[str], question: str) -> Any:
    assert worker.stdin is not None
    worker.stdin.write(question + "\n")
    worker.stdin.flush()
    return _answer(worker)


def _answer(worker: subprocess.Popen[str]) -> Any:
    assert worker.stdout is not None
    line = worker.stdout.readline()
    if not line:
        raise RuntimeError(f"a worker ended early: {' '.join(map(str, worker.args))}")  # type: ignore[arg-type]
    return json.loads(line)

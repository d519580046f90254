"""Two processes with one core each, compared with one process with two devices on the same two cores.

    python -m benchmarks processes

The task is FedAvg with full participation and with a tenth of the clients in the cohort. The processes exchange sums by
Gloo on this machine, and each has half of the clients. One process distributes a small cohort evenly over its devices;
several processes do not.
"""

from __future__ import annotations

import atexit
import os
import socket
import subprocess
from dataclasses import asdict, replace
from typing import Any

if not __package__:
    import _script

    __package__ = _script.package

from .harness import Job, compare
from .problems import Problem, rounds_of, simulate, use_devices
from .record import command, parser, table, target, write
from .worker import Contender

ONE, TWO = "one process, two devices", "two processes"
ASKED = target(1.1, 1.0)  # maximum time relative to one process
PROBLEMS = {
    "linear": Problem("linear", clients=2000, steps=10, batch=10),
    "linear, a tenth": Problem("linear", clients=2000, cohort=200, steps=10, batch=10),
    "CNN": Problem(clients=10, steps=5, batch=20, source="digits"),
}


@command
def main(argv: list[str] | None = None) -> None:
    args = parser("processes", __doc__).parse_args(argv)
    problems, rounds, repetitions = PROBLEMS, None, args.repetitions
    if args.quick:
        problems, rounds, repetitions = {"linear": replace(PROBLEMS["linear"], clients=20, steps=2)}, 2, 1
    results, rows = {}, []
    for name, problem in problems.items():
        settings = {"problem": asdict(problem)}
        jobs = {ONE: Job("processes", settings), TWO: Job("processes", settings | {"process": 0})}
        results[name] = found = compare(jobs, repetitions=repetitions, rounds=rounds)
        found[TWO]["ratio"] = found[TWO]["median"] / found[ONE]["median"]
        rows.append((name, found[ONE]["median"], found[TWO]["median"], found[TWO]["ratio"], *ASKED.values()))
    table("seconds of a round", ("", ONE, TWO, "ratio", "floor", "aim"), rows)
    settings = {"problems": {name: asdict(problem) for name, problem in problems.items()}, "repetitions": repetitions}
    write(args.json, "processes", settings, results, asked=ASKED)


def work(settings: dict[str, Any]) -> Contender | dict[str, Any]:
    """Run a single process, or one of two; the first process starts the second, and tells it how many rounds to run."""
    problem, process = Problem(**settings["problem"]), settings.get("process")
    if process is None:
        use_devices(2)
        return rounds_of(simulate(problem))
    from jaxpfl.support import distributed, processes

    address = settings.get("address") or _free_address()
    if process == 0:
        other = Job("processes", settings | {"process": 1, "address": address})
        second = subprocess.Popen(other.command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
        atexit.register(_end, second)
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[process % len(cores)]})
    distributed.start(address, 2, process)
    contender = rounds_of(simulate(problem))
    if process == 0:
        return Contender(lambda rounds: contender.run(processes.exchange(rounds)[0]), contender.facts)
    while True:  # until the first process ends this one
        contender.run(processes.exchange(0)[0])


def _end(second: subprocess.Popen) -> None:
    second.kill()
    second.wait()
    os._exit(0)  # without this, JAX would wait for the other process


def _free_address() -> str:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{found.getsockname()[1]}"


if __name__ == "__main__":
    main()

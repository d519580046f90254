"""Runs benchmarks, for each line of input: JSON of arguments, and of files for the output and the errors.

Each answer is the exit status. The benchmark and its workers run in forks of this process, which imports what they need
and starts no backend of JAX: a fork is as a process of its own, without its seconds of imports.
"""

import json
import multiprocessing
import os
import subprocess
import sys
import traceback
from collections.abc import Callable
from typing import ClassVar, TextIO

import flax.linen  # noqa: F401
import optax  # noqa: F401
import scipy.stats  # noqa: F401
import sklearn.datasets  # noqa: F401

import jaxpfl.public
import jaxpfl.runs.run  # noqa: F401
from jaxpfl.benchmarks import harness, worker
from jaxpfl.benchmarks.__main__ import main

FORK = multiprocessing.get_context("fork")
started = harness._start


def forked(out: int, err: int, function: Callable[[], None]) -> None:
    """Run a function in this process, which was forked for it; its exit status is that of a script."""
    os.dup2(out, 1)
    os.dup2(err, 2)
    status = 0
    try:
        function()
    except SystemExit as stop:
        status = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    except BaseException:
        traceback.print_exc()
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


class Worker:
    """A worker's process: what `harness` uses of `subprocess.Popen`."""

    open: ClassVar[list[TextIO]] = []
    """Ends of pipes to other workers, which must end with this process alone."""

    def __init__(self, job: harness.Job):
        (asked, ask), (told, tell) = os.pipe(), os.pipe()
        self.stdin, self.stdout = os.fdopen(ask, "w"), os.fdopen(told)
        self.open.extend((self.stdin, self.stdout))

        def work() -> None:
            for end in self.open:
                if not end.closed:
                    os.close(end.fileno())
            sys.stdin = os.fdopen(asked)
            sys.argv = ["worker.py", job.module, json.dumps(job.settings)]
            worker.main()

        self._process = FORK.Process(target=forked, args=(tell, 2, work))
        self._process.start()
        os.close(asked)
        os.close(tell)

    def communicate(self, timeout: float | None = None) -> tuple[str, None]:
        self.wait(timeout)
        return self.stdout.read(), None

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired(self._process.name, timeout or 0)
        return self._process.exitcode

    def kill(self) -> None:
        self._process.kill()


harness._start = lambda job, stdin: Worker(job) if job.python == sys.executable else started(job, stdin)

if __name__ == "__main__":
    for line in sys.stdin:
        arguments, *files = json.loads(line)
        out, err = (os.open(file, os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o666) for file in files)
        benchmark = FORK.Process(target=forked, args=(out, err, lambda arguments=arguments: main(arguments)))
        benchmark.start()
        os.close(out)
        os.close(err)
        benchmark.join()
        print(benchmark.exitcode, flush=True)

"""Runs benchmarks, for each line of input: JSON of arguments, and of files for the output and the errors.

Each answer is the exit status. The benchmark and its workers run in forks of this process, which imports what they need
and starts no backend of JAX: a fork is as a process of its own, without its seconds of imports. Timings are short.
Programs run on one device and train clients in turn, so that they compile quickly, and are kept in the folder that the
argument names.
"""

import gc
import json
import multiprocessing
import os
import subprocess
import sys
from collections.abc import Callable
from typing import ClassVar, TextIO

import flax.linen  # noqa: F401
import jax
import optax  # noqa: F401
import scipy.stats  # noqa: F401
import sklearn.datasets  # noqa: F401

import jaxpfl.public
import jaxpfl.runs.run  # noqa: F401
from jaxpfl.benchmarks import harness, worker
from jaxpfl.benchmarks.__main__ import main
from jaxpfl.engine import execution_plan

FORK = multiprocessing.get_context("fork")
started = harness._start


def forked(out: int, err: int, function: Callable[[], None]) -> None:
    """Run a function in this process, which was forked for it, with these files as its output and its errors."""
    os.dup2(out, 1)
    os.dup2(err, 2)
    function()


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


def run(arguments: list[str]) -> None:
    """Run a benchmark in this process, which was forked for it."""
    if arguments[0] != "second_fit":  # which measures what such a folder saves
        jax.config.update("jax_compilation_cache_dir", sys.argv[1])
    main(arguments)


jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
execution_plan._MOST_DEVICES, execution_plan._CACHE_BYTES = 1, 0
harness.SHORTEST = 0.01
harness._start = lambda job, stdin: Worker(job) if job.python == sys.executable else started(job, stdin)

if __name__ == "__main__":
    gc.freeze()
    for line in sys.stdin:
        arguments, *files = json.loads(line)
        out, err = (os.open(file, os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o666) for file in files)
        benchmark = FORK.Process(target=forked, args=(out, err, lambda arguments=arguments: run(arguments)))
        benchmark.start()
        os.close(out)
        os.close(err)
        benchmark.join()
        print(benchmark.exitcode, flush=True)

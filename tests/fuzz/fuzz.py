"""Reads damaged files with every reader, in a process of little memory each: only a `JaxpflError` may come out.

``python tests/fuzz/fuzz.py TARGET|all COUNT [FIRST]`` reads COUNT damaged inputs, fewer with dear readers, and prints
what came out of each target as a line of JSON. Case i depends on the target and i alone.
"""

from __future__ import annotations

import collections
import json
import os
import random
import resource
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import folder_targets
import good_runs
import jax
import pyarrow
from folder_targets import FOLDERS
from fuzz_target import Target, outcome
from own_targets import OWN
from reader_targets import READERS
from wire_targets import WIRES

TARGETS: Mapping[str, Target] = READERS | OWN | FOLDERS | WIRES
SPARE = 2**30
"""Bytes of address space that a reader may take beside what its libraries have."""


def cases(name: str, count: int) -> int:
    """Number of inputs that a target reads of the count that is asked for."""
    return max(1, round(count * TARGETS[name].share))


def run(name: str, count: int, first: int) -> dict[str, Any]:
    """Outcomes of a target's cases from ``first`` on: read, refused, and failures."""

    target, counts = TARGETS[name], collections.Counter[str]()
    failures: list[str] = []
    began = time.process_time()
    warnings.simplefilter("ignore")
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place, "here")
        folder.mkdir()
        target.begin(folder)
        if name in FOLDERS:  # whole; and what it needs is loaded
            target.read(folder)
        # Arrow's own pool reserves a gibibyte of address space, whatever it holds: more than the limit leaves.
        pyarrow.set_memory_pool(pyarrow.system_memory_pool())
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + SPARE, resource.getrlimit(resource.RLIMIT_AS)[1]))
        for case in range(first, first + cases(name, count)):
            target.damage(random.Random(case), folder)
            kind, failure = outcome(lambda: target.read(folder), target.slowest)
            counts[kind] += 1
            failures += [f"case {case}: {failure}"] if failure else []
    return {
        "outcomes": dict(counts),
        "failures": failures[:10],
        "number": len(failures),
        "seconds": round(time.process_time() - began, 1),
    }


def alone(function: Callable[[], Any]) -> Any:
    """The value of a function in a process of its own; the signal or the status of one that died instead."""
    receiving, sending = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that JAX has threads: no backend runs yet
        child = os.fork()
    if child == 0:
        os.close(receiving)
        status = 1
        try:
            with os.fdopen(sending, "w") as file:
                json.dump(function(), file)
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    os.close(sending)
    with os.fdopen(receiving) as file:
        text = file.read()
    _, status = os.waitpid(child, 0)
    if status:
        raise RuntimeError(f"the process ended with {os.waitstatus_to_exitcode(status)}")
    return json.loads(text)


def run_all(names: list[str], count: int, first: int = 0) -> Iterator[tuple[str, dict[str, Any]]]:
    """Outcomes of the targets by name, each in a process of its own."""
    with tempfile.TemporaryDirectory() as place:
        folder_targets.GOOD = Path(place)
        if FOLDERS.keys() & set(names):
            alone(lambda: good_runs.make(Path(place)))
        for name in names:
            try:
                found = alone(lambda name=name: run(name, count, first))
            except RuntimeError as error:  # killed by a signal: an input has ended the process
                found = {"outcomes": {}, "failures": [str(error)], "number": 1, "seconds": 0.0}
            yield name, found


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")
    asked, number = sys.argv[1], int(sys.argv[2])
    chosen = list(TARGETS) if asked == "all" else asked.split(",")
    for one, came_out in run_all(chosen, number, int(sys.argv[3]) if len(sys.argv) > 3 else 0):
        print(json.dumps({"target": one} | came_out), flush=True)

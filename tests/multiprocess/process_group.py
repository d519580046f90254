"""Groups of real processes on this machine, none of which outlives its test."""

import itertools
import os
import pickle
import socket
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from forks import COMMAND, Forked, script

HERE = str(Path(__file__).parent)
WORKER = script(Path(HERE) / "worker.py")
PROGRAMS = tempfile.TemporaryDirectory()
TOGETHER = (
    f"import sys; sys.path.insert(0, {HERE!r}); import worker; worker.share_programs({PROGRAMS.name!r}); {COMMAND}"
)
"""A command whose process 0 compiles for all; later groups have its programs."""

_PORTS = itertools.cycle(range(12_000 + 16 * (os.getpid() % 1000), 12_000 + 16 * (os.getpid() % 1000) + 16))
"""Ports of this process of tests: below those that systems hand out themselves, so that nothing takes one between its
choice and its use, and other than those of the tests that run beside."""


def free_address() -> str:
    """Address of a port that is free, and that no other call of late was given."""
    for port in itertools.islice(_PORTS, 16):
        with socket.socket() as found, suppress(OSError):
            found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            found.bind(("127.0.0.1", port))
            return f"127.0.0.1:{port}"
    raise AssertionError("no port is free")


@contextmanager
def started(
    commands: Sequence[Sequence[str]], folder: Path, *, code: str = COMMAND, each: Sequence[dict[str, str]] = ()
) -> Iterator[list[Forked]]:
    """Processes of these commands, with their output in folders of the folder; killed when the block ends.

    Args:
      commands: arguments of each.
      folder: for what they say.
      code: what each runs.
      each: variables of each.
    """
    running = []
    try:
        for i, command in enumerate(commands):
            (place := folder / f"process{i}").mkdir(exist_ok=True)
            running.append(Forked(*command, code=code, place=place, **(each[i] if each else {})))
        yield running
    finally:
        for process in running:
            process.kill()
            process.wait()


def ended(running: Sequence[Forked], seconds: float) -> list[int]:
    """Exit statuses of all processes.

    Raises:
      subprocess.TimeoutExpired: if one is still there.
    """
    until = time.monotonic() + seconds
    return [process.wait(max(0.0, until - time.monotonic())) for process in running]


def said(folder: Path, number: int, stream: str = "err") -> str:
    """Output of a process."""
    return (folder / f"process{number}" / stream).read_text(errors="replace")


def run_cases(cases: Sequence[str], *, processes: int, devices: int = 1, seconds: float = 1800) -> dict[str, Any]:
    """Result of each case of `process_cases.CASES` in the first process of a group; a traceback where it failed."""
    with tempfile.TemporaryDirectory() as name:
        folder, address = Path(name), free_address()
        found = folder / "found"
        commands = [[address, str(processes), str(i), str(devices), str(found), *cases] for i in range(processes)]
        with started(commands, folder, code=WORKER) as running:
            statuses = ended(running, seconds)
        if any(statuses):
            errors = "\n".join(f"process {i}: {said(folder, i)[-2000:]}" for i in range(processes))
            raise AssertionError(f"exit statuses {statuses} of {processes} processes\n{errors}")
        return pickle.loads(found.read_bytes())

"""Worker of a sweep: a process that takes groups of a sweep's folder until none is missing.

``python -m jaxpfl.runs.sweep.worker FOLDER`` is one, on any machine that sees the folder; `workers.run` starts several.
"""

from __future__ import annotations

import argparse
import itertools
import os
import signal
import sys
import threading
import warnings
from pathlib import Path

from jaxpfl.runs.sweep.claims import LEASE
from jaxpfl.support import files, signals
from jaxpfl.support.errors import JaxpflError, JaxpflWarning, writing

LOGS = "workers"
THREADS = "NPROC"
"""Environment variable of the threads of XLA on a CPU, read when the first device is made."""


def new_name(folder: Path) -> str:
    """A name that no worker of the sweep has had, on no machine: its log ``workers/NAME.log`` is made here.

    Raises:
      UnwritableError: if the folder cannot be written.
    """
    with writing(folder / LOGS):
        (folder / LOGS).mkdir(exist_ok=True)
        for number in itertools.count():
            try:
                (folder / LOGS / f"w{number}.log").open("x").close()
            except FileExistsError:
                continue
            return f"w{number}"
    raise AssertionError


def cpu_devices(folder: Path) -> int | None:
    """Number of CPU devices that the sweep began with; None where it is on others."""
    from jaxpfl.runs.sweep.definition import FILE

    versions = files.read_json(folder / FILE).get("versions", {})
    devices = versions.get("devices")
    return devices if versions.get("platform") == "cpu" and type(devices) is int and devices > 0 else None


def work(folder: Path, name: str, lease: float = LEASE) -> None:
    """Run groups of a sweep in this process until none is missing, with the numbers of any other process.

    The devices and XLA's threads are those that the sweep began with, whatever cores this process may use: the order
    of additions depends on both.

    Args:
      folder: of the sweep.
      name: of this worker; no other may have it.
      lease: seconds after which the group of a worker that shows no life is taken over.

    Raises:
      JaxpflError: for a folder without a sweep.
    """
    devices = cpu_devices(folder)
    if devices is not None:
        os.environ[THREADS] = str(devices)

    from jaxpfl.engine import use_cpu_cores
    from jaxpfl.runs import compile_cache
    from jaxpfl.runs.sweep.execute import Reporter
    from jaxpfl.runs.sweep.sweep import Sweep

    use_cpu_cores(devices)
    compile_cache.enable()
    with warnings.catch_warnings():
        warnings.simplefilter("always", JaxpflWarning)
        Sweep.read(folder).run_missing(Reporter(), worker=name, ahead=False, lease=lease)


def main() -> None:
    """Entry point of ``python -m jaxpfl.runs.sweep.worker``."""
    signals.watch()
    parser = argparse.ArgumentParser(prog="python -m jaxpfl.runs.sweep.worker", description="A worker of a sweep.")
    parser.add_argument("folder", type=Path, help="of the sweep")
    parser.add_argument("--name", help="of the worker, which no other may have; a new one unless given")
    parser.add_argument("--lease", type=float, default=LEASE, help="seconds until a silent worker's group is taken")
    parser.add_argument("--attached", action="store_true", help="end when standard input is closed")
    given = parser.parse_args()
    if given.attached:
        threading.Thread(target=_end_with_input, daemon=True).start()
    try:
        work(given.folder, given.name or new_name(given.folder), given.lease)
    except JaxpflError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from None


def _end_with_input() -> None:
    """End this process once the one that started it has ended, however that happened."""
    while os.read(0, 1024):
        pass
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    main()

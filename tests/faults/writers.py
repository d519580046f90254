"""Faults at every call of the package's smallest writers, each in a fork; prints counts as JSON.

What there was before is there after, or the new in its place; what is written next is read too.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from forking import TYPES

from jaxpfl.runs import records
from jaxpfl.support import files
from jaxpfl.support.errors import UnwritableError

FAULTS = {"kill": 1, "full": 2, "broken": 3, "read-only": 4}
"""Numbers of the faults in `faults.c`."""


class Writer(NamedTuple):
    """A writer of numbers: ``write(folder, n)``, and ``read(folder)``, the list of those that are there."""

    write: Callable[[Path, int], None]
    read: Callable[[Path], list[int]]
    replaces: bool


def _round(folder: Path, number: int) -> None:
    log = files.Records(folder / "metrics.jsonl")
    log.keep(lambda record: True)  # as a run that is resumed does first
    log.append([{"kind": "round", "method": "local", "round": number, "train_loss": [0.5] * 50}])


WRITERS = {
    "json": Writer(
        lambda folder, number: files.write_json(folder / "a.json", [number] * 50),
        lambda folder: list(dict.fromkeys(files.read_json(folder / "a.json"))),
        True,
    ),
    "metrics": Writer(
        _round, lambda folder: [record["round"] for record in files.Records(folder / "metrics.jsonl").read()], False
    ),
    "journal": Writer(
        lambda folder, number: records.Journal(folder).append([records.Record("local", {"lr": 0.1}, number)]),
        lambda folder: [record.seed for record in records.Journal(folder).read()],
        False,
    ),
}


def visit(writer: Writer, fault: int, at: int, shared: mmap.mmap) -> bool | None:
    """Write 1, then 2 into a fault, then 3.

    Returns:
      Whether 2 is there; None if the fault was not reached.
    """
    shared[:] = bytes(4096)
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        writer.write(folder, 1)
        if not (child := os.fork()):
            status = 1
            try:
                arm = ctypes.CDLL(None).fault_arm
                arm.argtypes = TYPES
                arm(place.encode(), fault, at, 0.0, 1, ctypes.addressof(ctypes.c_char.from_buffer(shared)))
                writer.write(folder, 2)
                status = 0
            except UnwritableError:
                status = 2
            finally:
                os._exit(status)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        hit = memoryview(shared).cast("l")[1]
        assert status in ((-9,) if fault == 1 else (0, 2)) or not hit, status
        found = writer.read(folder)
        assert found in (([1], [2]) if writer.replaces else ([1], [1, 2])), found
        assert status != 0 or 2 in found, found
        writer.write(folder, 3)
        assert writer.read(folder) == ([3] if writer.replaces else [*found, 3])
        return 2 in found if hit else None


def main() -> None:
    shared, counts = mmap.mmap(-1, 4096), Counter[str]()
    for name, writer in WRITERS.items():
        for kind, fault in FAULTS.items():
            at = 1
            while (there := visit(writer, fault, at, shared)) is not None:
                counts[f"{name} {kind} {'new' if there else 'old'}"] += 1
                at += 1
    json.dump(counts, sys.stdout)


if __name__ == "__main__":
    main()

"""Damaged inputs: every reader, many of them, each reader in a process of its own with a gibibyte to spare."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from folder_targets import FOLDERS
from fuzz import TARGETS
from fuzz_target import MOST, outcome

from jaxpfl.support.errors import JaxpflError

COUNT = int(os.environ.get("JAXPFL_MUTATIONS", "500"))
"""Damaged inputs a reader of files in the slow run, fewer of dear ones; a change of a reader is worth 100,000."""

FEWER = 3 / 5
"""Share of them that readers of folders read, and fits, which take milliseconds and seconds."""
DEAR = {*FOLDERS, "normal means"}
FILES = sorted({*TARGETS} - DEAR)
PARTS = {f"files {part}": (FILES[part::4], COUNT) for part in range(4)}  # none so long that CI could end within it
PARTS |= {f"folders {part}": (sorted(DEAR)[part::2], int(FEWER * COUNT)) for part in range(2)}

UNREFUSED = ("run", "undo")
"""Readers that tell of damage by a value, or read what is left of it."""


@pytest.mark.slow
@pytest.mark.parametrize("part", PARTS)
def test_only_our_own_error_leaves_a_reader(part: str, record_property: Callable[[str, object], None]) -> None:
    """Damaged inputs are either read, as what the reader promises, or refused in one line of bounded length.

    There is no other error, no signal, none takes the CPU of a hang, and none a gibibyte.
    """
    script, (names, count) = str(Path(__file__).with_name("fuzz.py")), PARTS[part]
    command = [sys.executable, script, ",".join(names), str(count)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    found = {one["target"]: one for one in map(json.loads, done.stdout.splitlines())}
    assert sorted(found) == names
    assert {name: one["failures"] for name, one in found.items() if one["number"]} == {}
    for name, one in found.items():
        counts, number = one["outcomes"], sum(one["outcomes"].values())
        assert counts.get("read", 0) > 0 or number < 100, name
        assert counts.get("refused", 0) > number / 10 or number < 8 or name in UNREFUSED, name
        record_property("counts", f"{name}: {counts}")


def test_what_counts_as_a_failure() -> None:
    def raised(error: BaseException) -> Any:
        def read() -> None:
            raise error

        return outcome(read)

    def hang() -> None:
        while True:
            pass

    assert outcome(lambda: None) == ("read", None)
    assert raised(JaxpflError("one line")) == ("refused", None)
    for text in ("", "two\nlines", "x" * (MOST + 1)):
        assert raised(JaxpflError(text))[1], text
    assert raised(KeyError("x"))[1].startswith("KeyError at test_fuzz.py:")
    assert raised(MemoryError())[0] == "MemoryError"
    kind, failure = outcome(hang, slowest=0.01)
    assert kind == "Slow"
    assert failure

"""Damaged files: every reader, many of them, in a process of its own with a gibibyte to spare."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import mutations
import pytest

COUNT = int(os.environ.get("JAXPFL_MUTATIONS", "5000"))
"""Damaged files a reader in the slow run; a change of a reader is worth 100,000."""


@pytest.mark.slow
@pytest.mark.parametrize("name", mutations.READERS)
def test_only_our_own_error_leaves_a_reader(name: str) -> None:
    """Damaged files are either read or refused in one line of bounded length.

    There is no other error, none takes ten seconds, and none a gibibyte.
    """
    script = str(Path(mutations.__file__))
    done = subprocess.run([sys.executable, script, name, str(COUNT)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout)
    assert found["failures"] == []
    assert found["outcomes"]["read"] > 0
    assert found["outcomes"]["refused"] > COUNT / 10
    assert sum(found["outcomes"].values()) == COUNT

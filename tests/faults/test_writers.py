"""Faults at every call of the smallest writers: the old or the new, whole, and what is written next is read."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from harness import HERE, library


@pytest.mark.slow
def test_each_call_of_the_smallest_writers(tmp_path: Path) -> None:
    try:
        preloaded = os.environ | {"LD_PRELOAD": str(library(tmp_path))}
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"the faults are a preloaded library, compiled by gcc on Linux: {error}")
    command = [sys.executable, str(HERE / "writers.py")]
    done = subprocess.run(command, env=preloaded, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    counts = json.loads(done.stdout)
    for name in ("json", "metrics", "journal"):
        for fault in ("kill", "full", "broken", "read-only"):
            assert counts[f"{name} {fault} old"] > 0
            assert counts[f"{name} {fault} new"] > 0

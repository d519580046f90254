"""One process at a time in a run folder: the lock goes with its holder, and leaves nothing behind."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from jaxpfl import JaxpflError
from jaxpfl.runs import run_folder
from jaxpfl.support.errors import JaxpflWarning

HOLD = """
import sys, time
from pathlib import Path
from jaxpfl.runs.run_folder import lock
with lock(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(60)
"""


@pytest.fixture
def holder(tmp_path):
    """Another process that holds the folder ``run``."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path / "run")],
        stdout=subprocess.PIPE,
        text=True,
        stderr=subprocess.DEVNULL,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    yield process
    process.kill()
    process.wait()


def take(folder: Path) -> None:
    with run_folder.lock(folder):
        pass


@pytest.mark.slow
def test_a_second_process_is_refused_until_the_first_is_dead(tmp_path, holder):
    with pytest.raises(JaxpflError, match=f"process {holder.pid} on .* is using .*run: wait until it ends, or choose"):
        take(tmp_path / "run")
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    assert (tmp_path / "run" / ".lock").exists()
    take(tmp_path / "run")
    assert list((tmp_path / "run").iterdir()) == []


def test_a_folder_in_which_nothing_was_done_is_gone(tmp_path):
    take(tmp_path / "run")
    assert not (tmp_path / "run").exists()
    (tmp_path / "own").mkdir()
    take(tmp_path / "own")
    assert (tmp_path / "own").is_dir()
    take(tmp_path / "own" / "new" / "run")
    assert not list((tmp_path / "own").iterdir())


def test_the_lock_of_a_file_that_is_gone_keeps_nobody_out(tmp_path, monkeypatch):
    """A process that opened the file just before the holder removed it must not take that for the lock."""
    path, opened = tmp_path / ".lock", os.open
    first = []

    def open_and_lose(*args):
        descriptor = opened(*args)
        if not first:
            first.append(descriptor)
            path.unlink()
        return descriptor

    monkeypatch.setattr(run_folder.os, "open", open_and_lose)
    with run_folder.lock(tmp_path):
        assert path.exists()
        with pytest.raises(JaxpflError, match=f"process {os.getpid()} on"):
            take(tmp_path)


def test_a_file_system_without_locks_is_said(tmp_path, monkeypatch):
    def refuse(*args):
        raise OSError(run_folder.errno.ENOLCK, "No locks available")

    monkeypatch.setattr(run_folder.fcntl, "flock", refuse)
    with pytest.warns(JaxpflWarning, match="without locks"):
        take(tmp_path)
    assert list(tmp_path.iterdir()) == []

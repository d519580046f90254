"""Signals end a watched process at once, in one line, whatever it is at; a run that has something to save takes the
first."""

import os
import signal
import subprocess
import sys

import pytest

from jaxpfl.runs.control import Interrupt
from jaxpfl.support import signals

START = """
import os, sys, time
from pathlib import Path
from jaxpfl.support import output_paths, signals
signals.watch()
def ready():
    print("ready", flush=True)
"""
SWALLOWS = """
ready()
while True:
    try:
        time.sleep(0.01)
    except BaseException:
        pass
"""
# As XLA does while it compiles: no Python runs in the main thread until it is done.
COMPUTES = """
import hashlib
ready()
hashlib.pbkdf2_hmac("sha256", b"x", b"y", 10**9)
"""
LOST_ITS_WAKEUP = """
import signal, socket
mine, _ = socket.socketpair()
mine.setblocking(False)
signal.set_wakeup_fd(mine.fileno())
ready()
while True:  # a signal that comes between Python's look and the sleep waits for the sleep's end
    time.sleep(1)
"""
WRITES = """
with signals.noted(lambda: "; kept"), output_paths.partial(Path(sys.argv[1]) / "whole") as place:
    place.write_text("half")
    ready()
    time.sleep(60)
"""
# As a library whose files are removed under it: it reports that, and the process ends by its error.
NOTICES = """
remove = output_paths.discard
def discard():
    remove()
    time.sleep(0.5)
output_paths.discard = discard
with output_paths.scratch(Path(sys.argv[1]) / "whole") as place:
    place.write_text("half")
    ready()
    while place.exists():
        time.sleep(0.001)
    print("gone", flush=True)
    print("gone", file=sys.stderr, flush=True)
signals.finished(1)
os._exit(1)
"""
# Python 3.12 and later warn of a fork where there are threads.
FORKS = """
import warnings
warnings.simplefilter("ignore", DeprecationWarning)
if (child := os.fork()) == 0:
    try:
        os.kill(os.getpid(), 2)
        time.sleep(60)
    except KeyboardInterrupt:
        os._exit(7)
ready()
os._exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def ended(script: str, *numbers: int, folder: str = ".") -> tuple[int, str, str]:
    """Status, output and errors of a script that gets signals once it says that it is ready."""
    process = subprocess.Popen(
        [sys.executable, "-c", START + script, folder],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    for number in numbers:
        os.killpg(process.pid, number)
    out, err = process.communicate(timeout=30)
    return process.returncode, out, err


@pytest.mark.parametrize("script", [SWALLOWS, COMPUTES, LOST_ITS_WAKEUP])
@pytest.mark.parametrize("number", signals.NUMBERS)
def test_one_signal_is_enough(script, number):
    assert ended(script, number) == (128 + number, "", "interrupted\n")


def test_three_in_a_row_are_one_line():
    assert ended(SWALLOWS, *[signal.SIGINT] * 3) == (130, "", "interrupted\n")


def test_nothing_half_written_stays(tmp_path):
    assert ended(WRITES, signal.SIGTERM, folder=str(tmp_path)) == (143, "", "interrupted; kept\n")
    assert not list(tmp_path.iterdir())


def test_nobody_reports_what_the_end_discards(tmp_path):
    assert ended(NOTICES, signal.SIGINT, folder=str(tmp_path)) == (130, "", "interrupted\n")


def test_what_is_finished_keeps_its_status():
    assert ended("signals.finished(3)" + SWALLOWS, signal.SIGINT) == (3, "", "")


def test_a_process_that_was_forked_has_its_own_signals():
    assert ended(FORKS) == (7, "", "")


@pytest.fixture
def _interruptible():
    """Ctrl-C as at a terminal: a test run in the background of a shell ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("_interruptible")
def test_a_run_takes_the_first_signal_where_it_has_rounds_to_save():
    with Interrupt() as interrupt:
        interrupt.saves = True
        signal.raise_signal(signal.SIGTERM)
        assert interrupt.asked == signal.SIGTERM
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    with Interrupt() as interrupt, pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)
    assert interrupt.asked is None
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler

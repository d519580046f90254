"""Ctrl-C and SIGTERM: the process stops once, with one line and the matching exit status.

Python would raise KeyboardInterrupt at whatever the main thread is at: an import that swallows it, a callback that
prints it and goes on, a second one inside the clean-up of the first; and not at all while XLA compiles. The command
line calls `watch` before it imports anything heavy: from then on a thread of its own hears the signals, and ends the
process at once unless a run with rounds to save has `offered` to take them. Without `watch` (a notebook, a script),
signals mean what they did before, unless a run takes them.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, NoReturn

from jaxpfl.support import output_paths

NUMBERS = (signal.SIGINT, signal.SIGTERM)
Taker = Callable[[int], bool]
"""A function of a signal's number that returns whether it handles the signal."""

_takers: list[Taker] = []
_leaving = threading.Event()
_wakeup: int | None = None
_note: str | Callable[[], str] = ""


def watch() -> None:
    """End this process on any signal that no taker handles, from now on; to be called in the main thread."""
    global _wakeup
    heard, _wakeup = os.pipe()
    os.set_blocking(_wakeup, False)
    threading.Thread(target=_listen, args=(heard,), name="signals", daemon=True).start()
    for number in NUMBERS:
        signal.signal(number, _handle)
    signal.set_wakeup_fd(_wakeup, warn_on_full_buffer=False)
    os.register_at_fork(after_in_child=unwatch)


def unwatch() -> None:
    """Restore Python's signal handlers: KeyboardInterrupt for SIGINT, termination for SIGTERM."""
    global _wakeup
    if _wakeup is not None:
        _wakeup = None
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def finished(status: int) -> None:
    """Make later signals end a watched process with ``status``: its work is done and reported.

    Waits for the end if a signal is ending the process already, so that its status is the signal's.
    """
    if _leaving.is_set():
        threading.Event().wait()

    def end(number: int) -> NoReturn:
        os._exit(status)

    _takers.append(end)


@contextmanager
def offered(taker: Taker) -> Iterator[None]:
    """Offer signals to ``taker`` first while the block runs."""
    if _wakeup is not None:
        _takers.append(taker)
        try:
            yield
        finally:
            _takers.remove(taker)
        return
    if threading.current_thread() is not threading.main_thread():  # only it may set handlers
        yield
        return
    before: dict[int, Any] = {}

    def handle(number: int, frame: FrameType | None) -> None:
        if taker(number):
            return
        if callable(before[number]):
            before[number](number, frame)
        elif before[number] == signal.SIG_DFL:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)

    for number in NUMBERS:
        before[number] = signal.signal(number, handle)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def noted(note: str | Callable[[], str]) -> Iterator[None]:
    """While the block runs, add ``note`` to the line that is printed when a signal ends the process.

    Args:
      note: the text, or a function that returns it at the end of the process, in another thread than the main one.
    """
    global _note
    before, _note = _note, note
    try:
        yield
    finally:
        _note = before


def _listen(heard: int) -> None:
    while _wakeup is not None:
        for number in os.read(heard, 64):
            if number in NUMBERS:
                _arrived(number)


def _handle(number: int, frame: FrameType | None) -> None:
    del frame
    # The thread has been notified, unless a library has replaced this wake-up.
    if _wakeup is not None and signal.set_wakeup_fd(_wakeup, warn_on_full_buffer=False) != _wakeup:
        _arrived(number)


def _arrived(number: int) -> None:
    if not any(taker(number) for taker in reversed(_takers)):
        _leave(number)


def _leave(number: int) -> NoReturn:
    """End the process from any of its threads, without output from the others."""
    _leaving.set()
    try:
        err = os.dup(2)
        # Threads that write what is discarded here would report that it is gone.
        nowhere = os.open(os.devnull, os.O_WRONLY)
        for output in (1, 2):
            os.dup2(nowhere, output)
        output_paths.discard()
        shown = b"\x1b[?25h\n" if os.isatty(err) else b""  # a progress display hides the cursor
        os.write(err, shown + f"interrupted{_note() if callable(_note) else _note}\n".encode())
    except OSError:  # nobody reads it
        pass
    finally:
        os._exit(128 + number)

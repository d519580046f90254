"""Handling of Ctrl-C and SIGTERM: the process stops with one line of output and the signal's exit status.

By default, Python raises KeyboardInterrupt at any point of the main thread. An import may swallow the exception,
a callback may print it and continue, and a second Ctrl-C may interrupt the clean-up after the first. While XLA
compiles, no exception is raised at all. The command line therefore calls `watch` before it imports anything large. From
then on, a separate thread receives the signals. It ends the process at once, unless a run with rounds to save handles
the signal through `offered`. Without `watch` (in a notebook or script), signals keep their previous handlers unless a
run handles them.
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
"""Function that receives a signal's number, and returns True if it handled the signal."""

_takers: list[Taker] = []
_leaving = threading.Event()
_wakeup: int | None = None
_note: str | Callable[[], str] = ""


def watch() -> None:
    """Let signals that no `offered` function handles end this process. Must be called in the main thread."""
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
    """Make later signals end a watched process with ``status``, because its work is done and its results are printed.

    If a signal is already ending the process, this function never returns, so the exit status remains the signal's.
    """
    if _leaving.is_set():
        threading.Event().wait()

    def end(number: int) -> NoReturn:
        os._exit(status)

    _takers.append(end)


@contextmanager
def offered(taker: Taker) -> Iterator[None]:
    """While the block runs, call ``taker`` for each signal. If it returns False, the signal is handled as before."""
    if _wakeup is not None:
        _takers.append(taker)
        try:
            yield
        finally:
            _takers.remove(taker)
        return
    if threading.current_thread() is not threading.main_thread():  # only the main thread may set handlers
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
      note: text, or a function that returns the text; it is called when the process ends, not in the main thread.
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
    # The thread was woken by the signal, unless a library has replaced the wake-up descriptor.
    if _wakeup is not None and signal.set_wakeup_fd(_wakeup, warn_on_full_buffer=False) != _wakeup:
        _arrived(number)


def _arrived(number: int) -> None:
    if not any(taker(number) for taker in reversed(_takers)):
        _leave(number)


def _leave(number: int) -> NoReturn:
    """End the process from any thread, and suppress the output of all other threads."""
    _leaving.set()
    try:
        err = os.dup(2)
        # The files that other threads write are removed below, so these threads would print errors.
        nowhere = os.open(os.devnull, os.O_WRONLY)
        for output in (1, 2):
            os.dup2(nowhere, output)
        output_paths.discard()
        shown = b"\x1b[?25h\n" if os.isatty(err) else b""  # a progress display hides the cursor
        os.write(err, shown + f"interrupted{_note() if callable(_note) else _note}\n".encode())
    except OSError:  # standard error is closed
        pass
    finally:
        os._exit(128 + number)

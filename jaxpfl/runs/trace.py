"""Size-limited trace of a few rounds, for Perfetto and TensorBoard."""

from __future__ import annotations

import gzip
import os
import re
import shutil
import threading
import time
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import jax

from jaxpfl.runs.operations import Operation, read_file
from jaxpfl.support.output_paths import scratch

_MOST_EVENTS = 250_000  # 15 MB, and about two seconds to write
_LONGEST = 5.0
_SHORTEST = 0.01
# A thread of a CPU finishes at most about this many operations a second: the first window must suit any program.
_EVENTS_PER_SECOND = 2_500_000
_GROWTH = 4  # at most, from a window to the next: later parts of a round may run at another rate


class Trace(NamedTuple):
    """A trace on disk.

    Attributes:
      folder: for TensorBoard; ``perfetto_trace.json.gz`` in it is for Perfetto.
      first, last: the rounds of the traced call.
      seconds: duration of the recording.
      whole: whether it contains the rounds to their end; else recording stopped before, to limit its size.
      operations: the XLA operations, longest own time first.
    """

    folder: Path
    first: int
    last: int
    seconds: float
    whole: bool
    operations: list[Operation]


class Tracer:
    """Tracing of one call of rounds of one method, after the first call, which compiles.

    A program may write a hundred megabytes of events per second, so the first window is short enough for any program on
    this machine. If the rounds exceed it, its events determine the length of the next call's window; the last trace is
    kept. A trace is written atomically: a kill leaves a readable one or none.
    """

    def __init__(self, folder: Path):
        self._folder = folder
        self._scratch = ExitStack()
        self._window = max(_MOST_EVENTS / _EVENTS_PER_SECOND / (os.cpu_count() or 1), _SHORTEST)
        self._first_call, self._done = True, False
        self._lock = threading.Lock()
        self._timer: threading.Timer | None = None
        self._recording, self._began, self._seconds, self._cut = False, 0.0, 0.0, False
        self._error: Exception | None = None
        self.trace: Trace | None = None
        self.problem = "the first call of rounds compiles, and there was no second one"

    def start(self) -> None:
        """Start recording if this call of rounds is to be traced."""
        first, self._first_call = self._first_call, False
        if first or self._done:
            return
        options = jax.profiler.ProfileOptions()
        options.python_tracer_level = 0  # every Python call: ten times the rest, and nothing of the rounds
        self._partial = self._scratch.enter_context(scratch(self._folder))
        try:
            jax.profiler.start_trace(self._partial, profiler_options=options)
        except Exception as error:  # another profiler is at work, or a driver refuses
            self._give_up(error)
            return
        self._recording, self._began = True, time.perf_counter()
        # No daemon: a process that ends while one writes a trace aborts.
        self._timer = threading.Timer(self._window, self._stop, kwargs={"cut": True})
        self._timer.start()

    def stop(self, first: int, last: int) -> None:
        """End the recording of a call of rounds, if there is one, and keep it.

        Args:
          first, last: the rounds of the call.
        """
        if self._timer is None:
            return
        timer, self._timer = self._timer, None
        try:
            timer.cancel()
            self._stop(cut=False)
            if self._error is None:
                self._keep(first, last)
            else:
                self._give_up(self._error)
        except Exception as error:  # a trace that cannot be written or read is no reason to lose the run
            self._give_up(error)
        finally:  # also after a second Ctrl-C
            timer.cancel()
            timer.join()
            self._scratch.close()

    def _stop(self, cut: bool) -> None:
        """Stop recording, in the timer's thread during the call or after the call, whichever is first."""
        with self._lock:
            if not self._recording:
                return
            self._recording, self._cut, self._seconds = False, cut, time.perf_counter() - self._began
            try:
                jax.profiler.stop_trace()
            except Exception as error:  # reported by `stop`: an exception in a timer's thread would be lost
                self._error = error

    def _keep(self, first: int, last: int) -> None:
        planes = next(self._partial.rglob("*.xplane.pb"))
        operations, events = read_file(planes)
        for written in self._partial.rglob("*.trace.json.gz"):
            _write_for_perfetto(written, self._partial / "perfetto_trace.json.gz")
            written.unlink()
        shutil.rmtree(self._folder, ignore_errors=True)
        os.replace(self._partial, self._folder)
        self.trace = Trace(self._folder, first, last, self._seconds, not self._cut, operations)
        longer = min(self._window * min(_MOST_EVENTS / max(events, 1), _GROWTH), _LONGEST)
        self._done = not self._cut or longer < 2 * self._window
        self._window = longer

    def _give_up(self, error: Exception) -> None:
        self._done = True
        self.problem = " ".join(str(error).split()) or type(error).__name__


def _write_for_perfetto(source: Path, target: Path) -> None:
    """Write the events in Perfetto's format, without the recorder's own table, which it does not support."""
    text = gzip.decompress(source.read_bytes())
    text = re.sub(rb'"metadata":\{[^{}]*\},', b"", text, count=1)
    target.write_bytes(gzip.compress(text, compresslevel=4))

"""Number of rounds per call."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

_SECONDS_PER_CALL = 1.0


class Pace:
    """Adaptive number of rounds per call, about a second's worth, for progress reports and a quick Ctrl-C.

    Every length runs the same compiled program, so that the choice does not affect the results.
    """

    def __init__(self, most: int):
        self._most = most
        self._length = 1

    @contextmanager
    def call(self, rounds: int) -> Iterator[int]:
        """Time one call of at most ``rounds`` rounds; yields its length."""
        length, began = min(self._length, rounds), time.perf_counter()
        yield length
        fitting = length * _SECONDS_PER_CALL / max(time.perf_counter() - began, 1e-9)
        # The first call compiles; at most doubling lets a slow start recover and prevents overshooting.
        self._length = int(min(max(fitting, 1), 2 * self._length, self._most))

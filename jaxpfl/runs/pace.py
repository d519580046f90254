"""Lengths of calls: about a second's worth of rounds, so that progress moves and Ctrl-C is soon heeded."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from jaxpfl.support import processes

_SECONDS_PER_CALL = 1.0


class Pace:
    """Rounds of one call: about a second's worth.

    Every length runs the same compiled program, so the choice does not touch the numbers.
    """

    def __init__(self, most: int):
        self._most = most
        self._length = 1

    @contextmanager
    def call(self, rounds: int) -> Iterator[int]:
        """Time one call of at most ``rounds`` rounds; gives its length."""
        # Clocks differ, the number of rounds must not.
        length, began = processes.exchange(min(self._length, rounds))[0], time.perf_counter()
        yield length
        fitting = length * _SECONDS_PER_CALL / max(time.perf_counter() - began, 1e-9)
        # The first call compiles; doubling at most lets a slow start recover and a fast one not overshoot.
        self._length = int(min(max(fitting, 1), 2 * self._length, self._most))

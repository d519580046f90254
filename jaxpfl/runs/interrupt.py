"""Ctrl-C that waits for the running call, so that no finished round is lost."""

from __future__ import annotations

from contextlib import AbstractContextManager
from types import TracebackType
from typing import Self

from jaxpfl.support import processes, signals


class Interrupted(Exception):
    """A run was stopped on request and can be resumed.

    Attributes:
      status: the exit status of the signal: 130 for Ctrl-C, 143 for SIGTERM.
    """

    def __init__(self, message: str, number: int):
        super().__init__(message)
        self.status = 128 + number


class Interrupt:
    """Context manager in which the first Ctrl-C (or SIGTERM) only sets ``asked`` if there are rounds to save.

    Otherwise, and the second time, the signal has its usual effect.

    Attributes:
      asked: the signal that requested the stop; None without one.
      saves: whether there are, or soon will be, rounds without a checkpoint.
    """

    def __init__(self) -> None:
        self.asked: int | None = None
        self.saves = False
        self._offered: AbstractContextManager[None] = signals.offered(self._take)

    def __enter__(self) -> Self:
        self._offered.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._offered.__exit__(kind, error, trace)

    def asked_of_any(self) -> int | None:
        """The signal that requested the stop of any process, which all of them then heed; all must call it."""
        # What was exchanged counts, not what has arrived since: only that is the same in all of them.
        asked = next((number for number in processes.exchange(self.asked) if number is not None), None)
        self.asked = self.asked or asked
        return asked

    def _take(self, number: int) -> bool:
        if self.asked is not None or not self.saves:
            return False
        self.asked = number
        return True

"""Progress of a sweep on a terminal: the runs done, and the group at work."""

from __future__ import annotations

from types import TracebackType
from typing import Any, Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn


class Reporter:
    """Receiver of a sweep's progress; this one shows nothing."""

    def start(self, group: str, runs: int, rounds: int) -> None:
        """A chunk of runs begins."""

    def progress(self, rounds: int, loss: float) -> None:
        """So many rounds of the chunk are done."""

    def finish(self, runs: int) -> None:
        """The chunk's runs are recorded."""

    def say(self, text: str) -> None:
        """A line for the user."""


class Terminal(Reporter):
    """A `Reporter` with one line for all runs; use it as a context manager.

    Args:
      console: where it is drawn.
      runs: number of runs of the whole sweep.
      done: number of runs that are there already.
    """

    def __init__(self, console: Console, runs: int, done: int = 0):
        self._progress = Progress(
            TextColumn("[bold]runs"),
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TextColumn("{task.description}"),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=console,
        )
        self._task: Any = self._progress.add_task("", total=runs, completed=done)
        self._done, self._chunk, self._rounds, self._group = done, 0, 1, ""

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self._progress.stop()
        else:  # the bar goes, and what is said of the error is the last line alone
            self._progress.live.transient = True
            self._progress.live.stop()

    def start(self, group: str, runs: int, rounds: int) -> None:
        self._chunk, self._rounds, self._group = runs, rounds, group
        self._progress.update(self._task, description=f"{group}: {runs} at once")

    def progress(self, rounds: int, loss: float) -> None:
        about = self._done + self._chunk * rounds / self._rounds
        said = f"{self._group}: {self._chunk} at once, round {rounds}, loss {loss:.3f}"
        self._progress.update(self._task, completed=about, description=said)

    def finish(self, runs: int) -> None:
        self._done += runs
        self._progress.update(self._task, completed=self._done, refresh=True)

    def say(self, text: str) -> None:
        self._progress.console.print(text, highlight=False, soft_wrap=True)

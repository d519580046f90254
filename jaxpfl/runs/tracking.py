"""Trackers of a run: receivers of its records beside ``metrics.jsonl``, such as TensorBoard's event files."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

from jaxpfl.support.errors import JaxpflError, writing


class Tracker(Protocol):
    """Receiver of a run's records, one method after the other, in the process that writes the run folder."""

    def begin(self, method: str, done: int) -> None:
        """Start or go on with a method of which ``done`` rounds stand; what was told of later ones does not."""
        ...

    def add(self, record: Mapping[str, Any]) -> None:
        """Take a record, as `jaxpfl.support.files.Records` describes it."""
        ...

    def end(self, complete: bool) -> None:
        """Write out all that the method has told; ``complete`` if all its rounds are done."""
        ...


@contextmanager
def ended(trackers: Sequence[Tracker]) -> Iterator[None]:
    """End a method in every tracker, however the block ends in which it began."""
    complete = False
    try:
        yield
        complete = True
    finally:
        for tracker in trackers:
            tracker.end(complete)


class TensorBoard:
    """Event files of each method, for ``tensorboard --logdir RUN/tensorboard``: means over the seeds by round.

    Args:
      folder: of the run; the files are in ``tensorboard/METHOD``.

    Raises:
      JaxpflError: if the package tensorboardX is not installed.
    """

    def __init__(self, folder: Path):
        try:
            from tensorboardX import SummaryWriter
        except ImportError:
            raise missing_extra("--tensorboard", "tensorboardX", "tensorboard") from None
        self._open, self._folder = SummaryWriter, folder / "tensorboard"
        self._writer: Any = None

    def begin(self, method: str, done: int) -> None:
        place = self._folder / method
        with writing(place):
            place.mkdir(parents=True, exist_ok=True)
            # Of a run that goes on from a checkpoint, readers drop what was written of later rounds.
            self._writer = self._open(str(place), purge_step=done + 1 if done else None)

    def add(self, record: Mapping[str, Any]) -> None:
        for name, value in means(record).items():
            self._writer.add_scalar(f"{record['kind']}/{name}", value, global_step=record["round"])

    def end(self, complete: bool) -> None:
        del complete
        if self._writer is not None:
            self._writer.close()
            self._writer = None


def missing_extra(flag: str, package: str, extra: str) -> JaxpflError:
    """The error for a tracker whose package is not installed."""
    return JaxpflError(f"{flag} needs the package {package}: pip install 'jaxpfl[{extra}]'")


def means(record: Mapping[str, Any]) -> dict[str, float]:
    """Mean over the seeds of every metric of a record; metrics without a finite value are left out."""
    found = {}
    for name, values in record.items():
        if isinstance(values, str) or name == "round":
            continue
        every = values if isinstance(values, Sequence) or hasattr(values, "__len__") else [values]
        own = [float(value) for value in every if value is not None and math.isfinite(value)]
        if own:
            found[name] = math.fsum(own) / len(own)
    return found

"""Common settings of an experiment's runs, and the exception for its interruption."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from jaxpfl.runs.control import Reporter
from jaxpfl.runs.sweep.execute import Data


@dataclass(frozen=True)
class Way:
    """Common settings of an experiment's runs.

    Attributes:
      folder: folder of the experiment.
      quick: whether runs are scaled down.
      data_dir: folder of the data sets; by default, the same as in `RunConfig`.
      reporter: object whose methods are called with the progress.
      stopped: function that returns True once the experiment should stop.
      saves: function that is called with False while a stop would lose no finished work, and may be immediate.
      data: cache of the data loaded last, for the next sweeps.
    """

    folder: Path
    quick: bool = False
    data_dir: str | None = None
    reporter: Reporter = field(default_factory=Reporter)
    stopped: Callable[[], bool] = lambda: False
    saves: Callable[[bool], None] = lambda on: None
    data: Data = field(default_factory=Data, compare=False)


class Interrupted(Exception):
    """The experiment was stopped; finished parts are kept."""

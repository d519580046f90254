"""Common settings of the runs of an experiment, and its interruption."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from jaxpfl.runs.control import Reporter
from jaxpfl.runs.sweep.execute import Data


@dataclass(frozen=True)
class Way:
    """Common settings of the runs of an experiment.

    Attributes:
      folder: of the experiment.
      quick: whether runs are scaled down.
      data_dir: folder of the data sets; as `RunConfig` unless given.
      reporter: of the progress.
      stopped: true once no more is to be done.
      saves: told False while a stop would lose no finished work, and may come at once.
      data: last loaded, for the sweeps that follow.
    """

    folder: Path
    quick: bool = False
    data_dir: str | None = None
    reporter: Reporter = field(default_factory=Reporter)
    stopped: Callable[[], bool] = lambda: False
    saves: Callable[[bool], None] = lambda on: None
    data: Data = field(default_factory=Data, compare=False)


class Interrupted(Exception):
    """The experiment was stopped; what is done is kept."""

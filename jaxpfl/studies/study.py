"""A study of estimation: settings, and a run that gives tables, plots, series and a JSON summary."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from jaxpfl.core import checks
from jaxpfl.support.errors import JaxpflError

Block: TypeAlias = Any
"""A printed part of the results: a rich table, or a line of plain text."""


class Options:
    """Base of a study's options: dataclasses of choices that are not settings of its simulation."""


class Results(NamedTuple):
    """Results of one run.

    Attributes:
      json: the summary; its ``study`` is the registered name, and ``settings`` those of the run.
      tables: makes the printed tables and lines, in order.
      plots: ``folder -> paths``, draws the plots into a folder, and writes other files into the folder above it.
      series: errors of every repetition by name, leaves [repetitions, ...]; repetition r does not depend on how many
        there are, so a longer run begins with the series of a shorter one. Empty if nothing is repeated.
      files: contents of the output folder, as printed.
      hint: a last line, printed where no output folder was given.
    """

    json: dict[str, Any]
    tables: Callable[[], Iterable[Block]]
    plots: Callable[[Path], list[Path]]
    series: Mapping[str, np.ndarray] = {}
    files: str = "summary.json, plots/"
    hint: str | None = None


class Read(NamedTuple):
    """Data that a study has read.

    Attributes:
      data: as the study's results take them.
      arrays: those on which its results depend; None where the settings say to draw them.
    """

    data: Any
    arrays: Any


@dataclass(frozen=True)
class Study:
    """A registered study.

    Attributes:
      settings: a frozen dataclass; its fields are the flags, with their docstrings as help, and its ``check`` raises a
        JaxpflError for values that cannot be studied.
      results: ``settings -> Results``; with `options` these follow the settings, with `reads` then the data.
      options: a frozen dataclass of `Options`, whose fields are flags too; None for a study without.
      reads: ``settings -> Read``, what its results depend on beside the settings; None for a study of drawn data.
    """

    settings: type[Any]
    results: Callable[..., Results]
    options: type[Options] | None = None
    reads: Callable[[Any], Read] | None = None

    def run(self, settings: Any = None, options: Options | None = None, read: Read | None = None) -> Results:
        """Run the study.

        Args:
          settings: the defaults unless given.
          options: the defaults unless given.
          read: the data of a study that reads some; read here unless given.

        Raises:
          JaxpflError: settings that their ``check`` refuses, a seed outside 32 bits, or options of a study that has
            none.
        """
        given = self.settings() if settings is None else settings
        if hasattr(given, "seed"):
            checks.seed("seed", given.seed)
        more: list[Any] = []
        if self.options is not None:
            more.append(self.options() if options is None else options)
        elif options is not None:
            raise JaxpflError(f"a study of {self.settings.__name__} has no options, got {options}")
        if self.reads is not None:
            more.append((self.reads(given) if read is None else read).data)
        from jaxpfl.core import full_precision  # starts jax, which settings and help do without

        return full_precision.products(self.results)(given, *more)

"""Declaration of a table or figure: its runs and the published values.

Accuracies and gains are in percent, as in the papers.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from jaxpfl.runs.records import Value

Spread = Literal["runs", "clients"]
"""Meaning of a row's ±: standard deviation over runs, or over clients (of each client's mean over runs)."""


@dataclass(frozen=True)
class Printed:
    """A published value.

    Attributes:
      value: value in the paper; None if a figure shows a curve without numbers.
      std: standard deviation in the paper; None if it states none.
    """

    value: float | None = None
    std: float | None = None


UNPRINTED = Printed()


@dataclass(frozen=True)
class Contender:
    """A trained row.

    Attributes:
      method: registered name of the method.
      label: name of the method in the paper.
      printed: published value.
      set: hyper-parameters and options, ``name=value``.
      rounds: number of rounds of this method; by default, the case's number.
      score: metric in a sweep's record, a fraction.
      search: axis -> values to search, instead of the case's search; empty if the paper states the values.
      note: note for readers of the row.
    """

    method: str
    label: str
    printed: Printed = UNPRINTED
    set: tuple[str, ...] = ()
    rounds: int | None = None
    score: str = "personalized_accuracy"
    search: Mapping[str, tuple[Value, ...]] | None = None
    note: str = ""


@dataclass(frozen=True)
class Training:
    """Trained methods in one setting.

    Attributes:
      setting: description of the setting, unique in its experiment.
      config: fields of a `RunConfig`, by name.
      contenders: rows of the table.
      search: axis -> values, chosen for each row by validation, unless the row has its own search; empty for no search.
      spread: meaning of ±.
      x: position on a figure's horizontal axis.
      note: note for readers of the rows.
      every: number of rounds between scores on test examples, which give three rows per method (see
        `jaxpfl.benchmarks.papers.board`); None for one row, after the last round.
      quick: methods of a quick run; all by default.
    """

    setting: str
    config: Mapping[str, Any]
    contenders: tuple[Contender, ...]
    search: Mapping[str, tuple[Value, ...]] = field(default_factory=dict)
    spread: Spread = "runs"
    x: float | None = None
    note: str = ""
    every: int | None = None
    quick: tuple[str, ...] = ()

    def rows(self, *, quick: bool) -> tuple[Contender, ...]:
        """Return the contenders to run."""
        if not (quick and self.quick):
            return self.contenders
        return tuple(one for one in self.contenders if one.method in self.quick)


@dataclass(frozen=True)
class Estimate:
    """A row of an estimation study.

    Attributes:
      label: name of the estimator in the paper.
      of: name of a series in the study's results, or of a number in its summary.
      printed: published value.
      against: name of another series; the row is then the percentage of its error that ``of`` avoids.
      setting: description of the row's setting, in addition to the case's description.
      note: note for readers of the row.
    """

    label: str
    of: str
    printed: Printed = UNPRINTED
    against: str | None = None
    setting: str = ""
    note: str = ""


@dataclass(frozen=True)
class Estimation:
    """An estimation study in one setting.

    Attributes:
      setting: description of the setting, unique in its experiment.
      study: registered name of the study.
      settings: fields of the study's settings, by name; ``{data}`` in a string is the folder of the data sets.
      estimates: rows of the table.
      quick: settings of a quick run that change the problem.
      repetitions: number of repetitions of a quick run; by default, the number in ``settings``.
      x: position on a figure's horizontal axis.
      note: note for readers of the rows.
    """

    setting: str
    study: str
    settings: Mapping[str, Any]
    estimates: tuple[Estimate, ...]
    quick: Mapping[str, Any] = field(default_factory=dict)
    repetitions: int | None = None
    x: float | None = None
    note: str = ""


@dataclass(frozen=True)
class Students:
    """Choices of PersFL's users in one setting: rows for T and lambda, with means over users.

    Attributes:
      setting: description of the setting, unique in its experiment.
      training: runs of a single contender.
      printed: means over users of the published values, by the row's label.
      x: position on a figure's horizontal axis.
    """

    setting: str
    training: Training
    printed: Mapping[str, Printed]
    x: float | None = None


@dataclass(frozen=True)
class Reaching:
    """Rounds until methods come close to their best score: two rows per method (`jaxpfl.benchmarks.papers.reaching`).

    Attributes:
      setting: description of the setting, unique in its experiment.
      training: runs; a contender's published value is its number of rounds.
      stops: number of times that a method is scored during training.
      x: position on a figure's horizontal axis.
    """

    setting: str
    training: Training
    stops: int = 20
    x: float | None = None


Case = Training | Estimation | Students | Reaching


@dataclass(frozen=True)
class Figure:
    """Axes of a figure, on which each case is at its ``x``."""

    xlabel: str
    ylabel: str


@dataclass(frozen=True)
class Experiment:
    """A table or figure.

    Attributes:
      name: name on the command line.
      paper: paper, and name of the table or figure in it.
      what: description in one line.
      minutes: estimated time of the full run on two cores; a result has the measured time.
      cases: settings with their rows.
      figure: axes, if the paper shows a figure.
      quick_cases: indices of the cases in a quick run; all by default.
      note: note for readers of all rows, for example about errors in the paper, or different data.
    """

    name: str
    paper: str
    what: str
    minutes: float
    cases: tuple[Case, ...]
    figure: Figure | None = None
    quick_cases: tuple[int, ...] = ()
    note: str = ""

    @property
    def scales(self) -> bool:
        """True if a quick run differs from the full run."""
        full = (isinstance(case, Estimation) and not case.quick and case.repetitions is None for case in self.cases)
        return bool(self.quick_cases) or not all(full)


def slug(text: str) -> str:
    """Return a string as a file name.

    Examples:
      >>> slug("K/m = .33, eps 4")
      'K-m-.33-eps-4'
    """
    return re.sub(r"[^\w.+]+", "-", text).strip("-")

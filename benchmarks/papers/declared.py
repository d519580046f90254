"""Declaration of a table or figure: its runs, and the values in print.

Accuracies and gains are in percent, as in print.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from jaxpfl.runs.records import Value

Spread = Literal["runs", "clients"]
"""Meaning of a row's ±: the standard deviation over runs, or over clients of each one's mean over runs."""


@dataclass(frozen=True)
class Printed:
    """A printed value.

    Attributes:
      value: as printed; None where a figure shows a curve without numbers.
      std: its standard deviation; None where print states none.
    """

    value: float | None = None
    std: float | None = None


UNPRINTED = Printed()


@dataclass(frozen=True)
class Contender:
    """A trained row.

    Attributes:
      method: the method's registered name.
      label: its name in print.
      printed: the value in print.
      set: hyper-parameters and options, ``name=value``.
      rounds: of this method alone; those of the case unless given.
      score: metric of a sweep's record, a share.
      search: axis -> values in place of its case's; empty where print states the values.
      note: for the reader of the row.
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
      setting: in words, unique in its experiment.
      config: fields of a `RunConfig`, by name.
      contenders: the rows.
      search: axis -> values, chosen on validation examples for each row alone, unless the row has its own; empty for
        none.
      spread: meaning of ±.
      x: place on a figure's horizontal axis.
      note: for the reader of its rows.
      every: rounds between scorings on test; each row is then three, as in `jaxpfl.benchmarks.papers.board`. None for
        one, after the last round.
      quick: methods of a quick run; all unless given.
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
        """The contenders that are run."""
        if not (quick and self.quick):
            return self.contenders
        return tuple(one for one in self.contenders if one.method in self.quick)


@dataclass(frozen=True)
class Estimate:
    """A row of a study of estimation.

    Attributes:
      label: the estimator's name in print.
      of: the series of the study's results, or the number in its summary.
      printed: the value in print.
      against: another series; the row is then the share of its error that is avoided, in percent.
      setting: the row's own, beside that of its case.
      note: for the reader of the row.
    """

    label: str
    of: str
    printed: Printed = UNPRINTED
    against: str | None = None
    setting: str = ""
    note: str = ""


@dataclass(frozen=True)
class Estimation:
    """A study of estimation in one setting.

    Attributes:
      setting: in words, unique in its experiment.
      study: its registered name.
      settings: fields of the study's settings, by name; ``{data}`` in a text is the folder of the data sets.
      estimates: the rows.
      quick: settings of a quick run that change the problem.
      repetitions: of a quick run; those of ``settings`` unless given.
      x: place on a figure's horizontal axis.
      note: for the reader of its rows.
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
    """PersFL's choices in one setting: rows for T and lambda, means over users.

    Attributes:
      setting: in words, unique in its experiment.
      training: the runs, of a single contender.
      printed: means over users of the values in print, by the row's label.
      x: place on a figure's horizontal axis.
    """

    setting: str
    training: Training
    printed: Mapping[str, Printed]
    x: float | None = None


@dataclass(frozen=True)
class Reaching:
    """Rounds until methods come near their best: two rows for each, as in `jaxpfl.benchmarks.papers.reaching`.

    Attributes:
      setting: in words, unique in its experiment.
      training: the runs; a contender's printed value is its rounds.
      stops: number of scorings on the way.
      x: place on a figure's horizontal axis.
    """

    setting: str
    training: Training
    stops: int = 20
    x: float | None = None


Case = Training | Estimation | Students | Reaching


@dataclass(frozen=True)
class Figure:
    """Axes of a figure; a case stands at its ``x``."""

    xlabel: str
    ylabel: str


@dataclass(frozen=True)
class Experiment:
    """A table or figure.

    Attributes:
      name: on the command line.
      paper: the paper, and the item's name in it.
      what: in a line.
      minutes: of the full run on two cores, estimated; a result has those that it took.
      cases: settings with their rows.
      figure: axes, where print has a figure.
      quick_cases: places of the cases of a quick run; all unless given.
      note: for the reader of all rows: errors of print, data in place of others.
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
        """True if a quick run differs from the full one."""
        full = (isinstance(case, Estimation) and not case.quick and case.repetitions is None for case in self.cases)
        return bool(self.quick_cases) or not all(full)


def slug(text: str) -> str:
    """A text as a file name.

    Examples:
      >>> slug("K/m = .33, eps 4")
      'K-m-.33-eps-4'
    """
    return re.sub(r"[^\w.+]+", "-", text).strip("-")

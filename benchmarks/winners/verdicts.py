"""Best method of a cell, chosen by validation, and its lead on test examples with an interval paired over splits."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from .atlas import Place, Scores

LEVEL_OF_CONFIDENCE = 0.95
BASELINES = ("local", "fedavg-ft")


@dataclass(frozen=True)
class Lead:
    """A paired difference of two methods' test accuracies.

    Attributes:
      over: name of the other method.
      points: mean difference over splits, in percentage points.
      half_width: half width of the 95 % interval by Student's t over the splits; infinite for a single split.
    """

    over: str
    points: float
    half_width: float

    @property
    def level(self) -> bool:
        """True if the interval contains zero."""
        return abs(self.points) <= self.half_width

    @property
    def words(self) -> str:
        """The lead as a string.

        Examples:
          >>> Lead("local", 2.0, 0.5).words, Lead("local", 0.1, 0.5).words
          ('+2.00 ± 0.50', 'level (+0.10 ± 0.50)')
        """
        text = f"{self.points:+.2f} ± {self.half_width:.2f}"
        return f"level ({text})" if self.level else text

    def to_json(self) -> dict[str, Any]:
        """Return the lead as JSON values."""
        return asdict(self) | {"level": self.level}


@dataclass(frozen=True)
class Verdict:
    """The best method of a cell.

    Attributes:
      best: contender with the highest mean validation accuracy; of equal contenders, the first in the cell's order.
      accuracy: mean test accuracy of the best method, in percent.
      runner_up: second-best contender by validation; None if there is only one contender.
      leads: leads of the best method over the runner-up, local and fedavg-ft, except over itself.
      level_with: contenders over which the lead is level or negative.
    """

    best: str
    accuracy: float
    runner_up: str | None
    leads: tuple[Lead, ...]
    level_with: tuple[str, ...]

    def over(self, method: str) -> Lead | None:
        """Return the lead over a method; None if the method is the best itself, or was not measured."""
        return next((lead for lead in self.leads if lead.over == method), None)

    def to_json(self) -> dict[str, Any]:
        """Return the verdict as JSON values."""
        return asdict(self) | {"leads": [lead.to_json() for lead in self.leads]}


def verdict(place: Place) -> Verdict:
    """Choose the best method by validation accuracy, and compute its leads on test examples."""
    ranked = ranking(place)
    best, others = ranked[0], ranked[1:]
    asked = dict.fromkeys([*others[:1], *(one for one in BASELINES if one in others)])
    leads = {other: lead(place, best, other) for other in others}
    return Verdict(
        best,
        100 * _mean(place.methods[best].test),
        others[0] if others else None,
        tuple(leads[other] for other in asked),
        tuple(other for other in others if leads[other].level or leads[other].points < 0),
    )


def ranking(place: Place) -> list[str]:
    """Return the contenders by mean validation accuracy, best first."""
    return sorted(place.contenders, key=lambda name: -_mean(place.methods[name].validation))


def lead(place: Place, method: str, over: str) -> Lead:
    """Return the lead of a method over another method on the same splits and seeds."""
    return Lead(over, *interval(_test(place.methods[method]) - _test(place.methods[over])))


def interval(differences: np.ndarray) -> tuple[float, float]:
    """Return the mean and the half width of the 95 % interval of differences over splits, [S].

    Splits, not clients, are the independent units, because the clients of one split share their data.
    """
    count = len(differences)
    if count < 2:
        return float(differences.mean()), math.inf
    from scipy.stats import t

    quantile = float(t.ppf((1 + LEVEL_OF_CONFIDENCE) / 2, count - 1))
    return float(differences.mean()), quantile * float(differences.std(ddof=1)) / math.sqrt(count)


def _test(scores: Scores) -> np.ndarray:
    return 100 * np.array(scores.test)


def _mean(values: tuple[float, ...]) -> float:
    return math.fsum(values) / len(values)

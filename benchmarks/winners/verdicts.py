"""Best method of a cell, chosen on validation, and its lead on test with an interval paired over splits."""

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
      over: the other method.
      points: mean over splits of the differences, in percentage points.
      half_width: of the interval at 95 percent, from Student's t over the splits; infinite for a single split.
    """

    over: str
    points: float
    half_width: float

    @property
    def level(self) -> bool:
        """True if the interval holds zero."""
        return abs(self.points) <= self.half_width

    @property
    def words(self) -> str:
        """The lead in text.

        Examples:
          >>> Lead("local", 2.0, 0.5).words, Lead("local", 0.1, 0.5).words
          ('+2.00 ± 0.50', 'level (+0.10 ± 0.50)')
        """
        text = f"{self.points:+.2f} ± {self.half_width:.2f}"
        return f"level ({text})" if self.level else text

    def to_json(self) -> dict[str, Any]:
        """The lead as JSON-able values."""
        return asdict(self) | {"level": self.level}


@dataclass(frozen=True)
class Verdict:
    """The best method of a cell.

    Attributes:
      best: the contender of the highest mean validation accuracy; of equal ones the first in the cell's order.
      accuracy: its mean test accuracy, in percent.
      runner_up: the second on validation; None where there is one contender alone.
      leads: of the best over the runner-up, over local and over fedavg-ft, those of itself left out.
      level_with: contenders over which its lead is level, or negative.
    """

    best: str
    accuracy: float
    runner_up: str | None
    leads: tuple[Lead, ...]
    level_with: tuple[str, ...]

    def over(self, method: str) -> Lead | None:
        """The lead over a method; None where it is the best itself, or was not measured."""
        return next((lead for lead in self.leads if lead.over == method), None)

    def to_json(self) -> dict[str, Any]:
        """The verdict as JSON-able values."""
        return asdict(self) | {"leads": [lead.to_json() for lead in self.leads]}


def verdict(place: Place) -> Verdict:
    """Choose on validation, and say what test shows: the winner's own test scores had no part in the choice."""
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
    """Contenders by mean validation accuracy, the best first."""
    return sorted(place.contenders, key=lambda name: -_mean(place.methods[name].validation))


def lead(place: Place, method: str, over: str) -> Lead:
    """The lead of a method over another on the same splits and seeds."""
    return Lead(over, *interval(_test(place.methods[method]) - _test(place.methods[over])))


def interval(differences: np.ndarray) -> tuple[float, float]:
    """Mean and half width of the interval at 95 percent of differences over splits, [S].

    The split is the unit: clients of one split share their data, so that their scores are not independent.
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

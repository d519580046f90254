"""Headline metrics of runs: their names in records, the direction in which they are better, and their words."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np


class Headline(NamedTuple):
    """Main metric of a task.

    Attributes:
      name: such as accuracy.
      lower: True where less is better.
      percent: True where it is a share, shown in percent.
    """

    name: str = "accuracy"
    lower: bool = False
    percent: bool = True

    @property
    def validation(self) -> str:
        """Its name in records, on validation examples."""
        return f"validation_{self.name}"

    @property
    def personalized(self) -> str:
        """Its name in records, of personalised models on test examples."""
        return f"personalized_{self.name}"

    @property
    def words(self) -> str:
        """The metric in a sentence, such as macro F1."""
        return _WORDS.get(self.name, self.name)

    @property
    def scale(self) -> float:
        """Factor of the values that are shown."""
        return 100.0 if self.percent else 1.0

    @property
    def ticks(self) -> str:
        """Format of the ticks of an axis."""
        return "{x:g} %" if self.percent else "{x:g}"

    @property
    def unit(self) -> str:
        """Words behind its name in a table's title."""
        return " in %" if self.percent else ""

    def number(self, value: float) -> str:
        """A value in a table."""
        return f"{100 * value:.2f}" if self.percent else f"{value:.4g}"

    def better(self, values: Any) -> Any:
        """Values of which more is better."""
        return -np.asarray(values) if self.lower else values


ACCURACY = Headline()
HEADLINES: Mapping[str, Headline] = {
    one.name: one
    for one in (ACCURACY, Headline("rmse", lower=True, percent=False), Headline("macro_f1"), Headline("auc"))
}
"""Headlines of the registered tasks."""
OF_TASKS: Mapping[str, str] = {
    "classification": "accuracy", "binary": "accuracy", "multilabel": "macro_f1", "regression": "rmse",
    "next-token": "accuracy",
    "ranking": "auc",
}  # fmt: skip
"""Names of the registered tasks' headlines."""
UNBOUNDED = ("r2",)
"""Metrics with no lower bound, of which tables show the median over clients in place of the mean."""
_WORDS = {
    "rmse": "RMSE",
    "mae": "MAE",
    "r2": "R^2",
    "macro_f1": "macro F1",
    "auc": "AUC",
    "calibration_error": "calibration error",
    "balanced_accuracy": "balanced accuracy",
}


def of_names(names: Iterable[str]) -> Headline:
    """Headline whose scores are the first among the names of results, which may be another's too; accuracy if none is.

    Examples:
      >>> of_names(["train_loss", "personalized_auc", "personalized_accuracy"]).name
      'auc'
    """
    by_name = {name: one for one in HEADLINES.values() for name in (one.personalized, one.validation)}
    return next((by_name[name] for name in names if name in by_name), ACCURACY)


def of_summary(summary: Mapping[str, Any]) -> Headline:
    """Headline that a stored summary names; accuracy if it names none."""
    return HEADLINES.get(summary.get("metric", ACCURACY.name), ACCURACY)

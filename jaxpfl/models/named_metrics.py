"""Metrics by name, and the tasks that each fits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from jaxpfl.models.metrics import (
    Metric,
    PerClient,
    auc_of_classes,
    auc_of_labels,
    balanced_accuracy,
    calibration_error,
    macro_f1,
    of_two_classes,
    right,
)
from jaxpfl.support.errors import JaxpflError, shown, unknown_name

_F1_OF_TWO, _BALANCED_OF_TWO = of_two_classes(macro_f1.function), of_two_classes(balanced_accuracy)
_CLASSES, _TWO, _SEVERAL, _RANKED, _TOKENS = "classification", "binary", "multilabel", "ranking", "next-token"

NAMED_METRICS: Mapping[str, Mapping[str, Metric | None]] = {
    "accuracy": {_CLASSES: None, _TWO: None, _SEVERAL: None, _RANKED: right, _TOKENS: None},
    "balanced_accuracy": {_CLASSES: PerClient(balanced_accuracy), _TWO: _BALANCED_OF_TWO, _RANKED: _BALANCED_OF_TWO},
    "macro_f1": {_CLASSES: macro_f1, _TWO: _F1_OF_TWO, _SEVERAL: None, _RANKED: _F1_OF_TWO},
    "auc": {_CLASSES: PerClient(auc_of_classes), _TWO: None, _SEVERAL: PerClient(auc_of_labels), _RANKED: None},
    "calibration_error": dict.fromkeys((_CLASSES, _SEVERAL, _RANKED), calibration_error) | {_TWO: None},
    **{name: {"regression": None} for name in ("rmse", "mae", "r2")},
    "perplexity": {_TOKENS: None},
}
"""Name -> task -> the metric; None where the task always has it."""
_NEEDS = {
    "balanced_accuracy": "one class of each example",
    **dict.fromkeys(("rmse", "mae", "r2"), "labels that are numbers"),
    "perplexity": "a label at each position",
}


def by_name(metrics: Any) -> dict[str, Any]:
    """Metrics as a setting gives them, ``"auc,macro_f1"``, a sequence of names, or a mapping of names or functions.

    Returns:
      Name -> a registered name or a function.

    Raises:
      JaxpflError: for a name that is empty or not registered.
    """
    if isinstance(metrics, Mapping):
        found = dict(metrics)
    else:
        names = metrics.split(",") if isinstance(metrics, str) else metrics or ()
        found = {name.strip(): name.strip() for name in names}
    for name in found.values():
        if name == "":
            raise JaxpflError(f"metrics are names with commas between them, got {shown(metrics)}")
        if isinstance(name, str) and name not in (*NAMED_METRICS, "loss"):
            raise unknown_name("metric", name, [*NAMED_METRICS, "loss"])
    return found


def of_task(name: str, kind: str, own: Sequence[str]) -> Metric:
    """A registered metric of a task that has it not already.

    Args:
      name: of the metric.
      kind: of the task.
      own: names of the task's own metrics.

    Raises:
      JaxpflError: for a metric that does not fit the task.
    """
    fitting = NAMED_METRICS.get(name, {})
    if (metric := fitting.get(kind)) is None:
        raise JaxpflError(
            f"the metric {name} needs {_NEEDS.get(name, 'classes, or labels 0 and 1')} (task {' or '.join(fitting)}); "
            f"this run's task is {kind}, whose metrics are {', '.join(own)}"
        )
    return metric

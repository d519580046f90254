"""Means of clients' scores weighted by their test examples, beside those in which each client counts the same."""

from __future__ import annotations

import numpy as np

from jaxpfl.core.types import ClientData
from jaxpfl.data.labels import labelled_tokens
from jaxpfl.models import PerClient, Task
from jaxpfl.models.base import NEXT_TOKEN


def example_weights(data: ClientData, kind: str | None = None) -> np.ndarray:
    """Weight of each client in means over all examples, [m]: of next-token its labelled tokens, else its examples.

    Scores of next-token are means over tokens, of which sequences hold different numbers.
    """
    return labelled_tokens(data) if kind == NEXT_TOKEN else np.asarray(data.size, np.int64)


def mean_over_examples(scores: np.ndarray, sizes: np.ndarray, *, root: bool = False) -> np.ndarray:
    """Mean of clients' scores weighted by their examples, [..., m] -> [...]; NaN where no client has a score.

    Of a mean over a client's examples (accuracy, loss, MAE), and of the root of one (RMSE), it is the score of all
    examples together. An AUC, an F1, an R^2 or a calibration error is no such mean: theirs is the weighted mean of the
    clients' own scores, and not the score of the pooled examples. Clients without a score have no weight.

    Examples:
      >>> scores, sizes = np.array([0.0, 4.0]), np.array([30, 10])
      >>> float(mean_over_examples(scores, sizes))
      1.0
      >>> float(mean_over_examples(scores, sizes, root=True))  # of (30 * 0 + 10 * 16) / 40
      2.0

    Args:
      scores: [..., m].
      sizes: each client's number of examples, or of what its score is a mean over (`example_weights`), [m].
      root: the score is the root of a mean over examples.
    """
    scores = np.asarray(scores, np.float64)
    weights = np.where(np.isnan(scores), 0.0, np.asarray(sizes, np.float64))
    values = np.square(scores) if root else scores
    total = weights.sum(axis=-1)
    sums = np.where(weights > 0, values, 0.0) * weights  # zero times an infinite score would be NaN
    means = np.where(total > 0, sums.sum(axis=-1) / np.where(total > 0, total, 1.0), np.nan)
    return np.sqrt(means) if root else means


def is_root(task: Task | None, metric: str) -> bool:
    """True for a metric that is the root of a mean over a client's examples."""
    found = None if task is None else task.metrics.get(metric)
    return isinstance(found, PerClient) and found.root

"""Summary statistics of per-client scores. S seeds, m clients; accuracies in [0, 1]."""

from __future__ import annotations

import math
from typing import Any

import numpy as np


def over_clients(accuracy: np.ndarray) -> dict[str, float | None]:
    """Statistics of an accuracy [S, m]; clients without examples (NaN) are left out.

    Returns:
      ``mean``: unweighted over clients, then over seeds; ``std``: of the seeds' means (ddof 1; None for one seed);
      ``std_clients`` (ddof 0: the clients are the whole population), ``p10``, ``worst_decile``: over clients, then
      averaged over seeds. The worst decile is the mean of the lowest ceil(m / 10) clients.
    """
    rows = [row[np.isfinite(row)] for row in np.atleast_2d(np.asarray(accuracy, float))]
    rows = [row for row in rows if len(row)]
    if not rows:
        return dict.fromkeys(("mean", "std", "std_clients", "p10", "worst_decile"))
    means = np.array([row.mean() for row in rows])
    worst = [np.sort(row)[: math.ceil(len(row) / 10)].mean() for row in rows]
    return {
        "mean": float(means.mean()),
        "std": float(means.std(ddof=1)) if len(means) > 1 else None,
        "std_clients": float(np.mean([row.std() for row in rows])),
        "p10": float(np.mean([np.quantile(row, 0.1) for row in rows])),
        "worst_decile": float(np.mean(worst)),
    }


def fraction_hurt(accuracy: np.ndarray, local: np.ndarray) -> float:
    """Fraction of clients, over all seeds, with a score below that of local training; both [S, m]."""
    both = np.isfinite(accuracy) & np.isfinite(local)
    return float((accuracy < local)[both].mean()) if both.any() else math.nan


def best_on_validation(rounds: list[int], validation: np.ndarray, test: np.ndarray) -> dict[str, Any]:
    """Test accuracy at the round of best validation accuracy, chosen in each seed (the first in a tie).

    Args:
      rounds: [E].
      validation, test: mean accuracies of the personalised models, [E, S].
    """
    best = validation.argmax(axis=0)
    chosen = test[best, np.arange(test.shape[1])]
    return {
        "rounds": [rounds[i] for i in best],
        "personalized_accuracy": {
            "mean": float(chosen.mean()),
            "std": float(chosen.std(ddof=1)) if len(chosen) > 1 else None,
        },
    }

"""An example's clients with their estimates, as the demos make and show them."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np


class Shown(NamedTuple):
    """An example's clients.

    Attributes:
      title: of its table and picture.
      unit: of the estimates.
      names: of the clients, [m].
      estimates: by estimator, [m] each; ``local`` and ``personalized`` among them.
      low, high: ends of the personalised intervals, [m].
      truth: observed later, [m]; None where nothing was.
      facts: further results, as JSON.
      notes: lines below the table.
    """

    title: str
    unit: str
    names: list[str]
    estimates: dict[str, np.ndarray]
    low: np.ndarray
    high: np.ndarray
    truth: np.ndarray | None
    facts: dict[str, Any]
    notes: list[str]

"""Priors of estimates with standard errors from private counts of cells."""

from __future__ import annotations

import math
from typing import Any

import jax
import numpy as np

from jaxpfl.errors import JaxpflError
from jaxpfl.estimators.normal_means import Cells, NormalMeans, private_ebnm
from jaxpfl.randomness import named


def fitted(x: np.ndarray, s: np.ndarray, seed: int, options: Any) -> tuple[NormalMeans, dict[str, Any]]:
    """Posteriors of all clients, and the facts of the release as JSON.

    Args:
      x, s: of the clients, [m] each.
      seed: of the noise.
      options: with ``prior``, ``components``, ``epsilon``, ``delta``, ``range`` and ``error_range``.

    Raises:
      JaxpflError: as `private_ebnm`, and without either range.
    """
    ends = {}
    for name in ("range", "error_range"):
        ends[name] = getattr(options, name)
        if len(ends[name]) != 2:
            raise JaxpflError(f"{name} must be two public numbers with epsilon, got {list(ends[name])}")
    (low, high), (least, most) = ends["range"], ends["error_range"]
    doublings = math.log2(most / least) if 0 < least < most else 1.0  # `Cells.check` refuses others
    cells = Cells(low, high, least, most, error_bins=max(1, math.ceil(doublings)))
    # Equal noise for two files that differ by one client would reveal that client, as equal noise on two grids would.
    key = named(jax.random.key(seed), x, s, cells)
    fit = private_ebnm(
        key, x, s, cells, epsilon=options.epsilon, delta=options.delta, prior=options.prior,
        components=options.components,
    )  # fmt: skip
    release = {
        "epsilon": options.epsilon,
        "delta": options.delta,
        "form": "local" if options.delta is None else "central",
        "cells": cells.number,
        **{name: list(of) for name, of in ends.items()},
    }
    return fit, {"privacy": release}


def said(privacy: dict[str, Any]) -> list[str]:
    """Lines on the guarantee of the prior, and on what is not private."""
    low, high = privacy["range"]
    least, most = privacy["error_range"]
    epsilon, delta, cells = (privacy[name] for name in ("epsilon", "delta", "cells"))
    if delta is None:
        by = f"epsilon {epsilon:g}, pure, by a randomised bit of each client for each of {cells} cells"
    else:
        by = f"adding or removing a client, epsilon {epsilon:g}, delta {delta:g}, noise on counts of {cells} cells"
    who = ", who took part" if delta is None else ""
    return [
        f"the prior alone is private: {by}",
        f"taken for public: estimates from {low:g} to {high:g}, standard errors from {least:g} to {most:g}{who}",
        "not private: all else in this summary (clients, pooled mean, kurtosis, log likelihood, tests, risks) and the "
        "rows of estimates.csv, whose robust columns and ranks are of all clients",
        "the noise follows from --seed and the file: who has the seed and all rows but one can find that row, so keep "
        "the seed to yourself",
    ]

"""Priors of estimates with standard errors, and of successes and counts, from private counts of cells."""

from __future__ import annotations

import math
from typing import Any

import jax
import numpy as np

from jaxpfl.core.randomness import named
from jaxpfl.estimators.normal_means import Cells, NormalMeans, private_ebnm
from jaxpfl.estimators.private_rates import private_ebbinomial, private_ebpoisson
from jaxpfl.studies.own_data.summary_csv import Kind
from jaxpfl.support.errors import JaxpflError


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
    # Equal noise for two files that differ by one client would reveal that client, as equal noise on two grids would,
    # or randomised bits that follow from the same draws at two epsilons.
    key = named(jax.random.key(seed), x, s, cells, options.epsilon, options.delta)
    fit = private_ebnm(
        key, x, s, cells, epsilon=options.epsilon, delta=options.delta, prior=options.prior,
        components=options.components,
    )  # fmt: skip
    return fit, {"privacy": _release(options, cells.number) | {name: list(of) for name, of in ends.items()}}


def of_counts(
    kind: Kind, z: np.ndarray, n: np.ndarray, seed: int, prior: Any, options: Any
) -> tuple[Any, dict[str, Any]]:
    """Posteriors of all clients of successes or counts, and the facts of the release as JSON.

    Args:
      kind: of the counts.
      z, n: of the clients, [m] each.
      seed: of the thinning and the noise.
      prior: a family, or None for a single Beta or Gamma distribution.
      options: with ``components``, ``epsilon``, ``delta``, ``sizes`` and ``most_events``.

    Raises:
      JaxpflError: as `private_ebbinomial` and `private_ebpoisson`; without sizes; and without the greatest count where
        there is none, or with one of successes, whose trials bound them.
    """
    if not options.sizes:
        raise JaxpflError("sizes must be public numbers of trials, or exposures, with epsilon, got none")
    most = options.most_events
    more: dict[str, Any] = {"epsilon": options.epsilon, "delta": options.delta, "components": options.components}
    # As for estimates: no two releases may share their noise.
    key = named(jax.random.key(seed), z, n, options.sizes, most, options.epsilon, options.delta)
    if kind == "successes":
        if most is not None:
            raise JaxpflError(f"most_events is of count,exposure, and successes are at most their trials, got {most}")
        sizes = [int(size) if float(size).is_integer() else size for size in options.sizes]
        fit = private_ebbinomial(key, z, n, sizes, prior=prior or "beta", **more)
        cells = sum(size + 1 for size in sizes)
    else:
        if most is None:
            raise JaxpflError("most_events, the greatest thinned count, must be a public number with epsilon, got none")
        sizes = list(options.sizes)
        fit = private_ebpoisson(key, z, n, sizes, int(most), prior=prior or "gamma", **more)
        cells = len(sizes) * (most + 1)
    release = _release(options, int(cells) + 1)  # one is of the clients below all sizes
    return fit, {"privacy": release | {"sizes": sizes, "most_events": most}}


def _release(options: Any, cells: int) -> dict[str, Any]:
    return {
        "epsilon": options.epsilon,
        "delta": options.delta,
        "form": "local" if options.delta is None else "central",
        "cells": cells,
    }


def said(privacy: dict[str, Any]) -> list[str]:
    """Lines on the guarantee of the prior, and on what is not private."""
    epsilon, delta, cells = (privacy[name] for name in ("epsilon", "delta", "cells"))
    if delta is None:
        by = f"epsilon {epsilon:g}, pure, by a randomised bit of each client for each of {cells} cells"
    else:
        by = f"adding or removing a client, epsilon {epsilon:g}, delta {delta:g}, noise on counts of {cells} cells"
    who = ", who took part" if delta is None else ""
    if "sizes" in privacy:
        sizes = ", ".join(f"{size:g}" for size in privacy["sizes"])
        most = privacy["most_events"]
        public = f"trials of {sizes}" if most is None else f"exposures of {sizes}, counts of at most {most}"
        rest, rows = "clients, tests, warnings", "ranks"
    else:
        (low, high), (least, most) = privacy["range"], privacy["error_range"]
        public = f"estimates from {low:g} to {high:g}, standard errors from {least:g} to {most:g}"
        rest, rows = "clients, pooled mean, kurtosis, log likelihood, tests, risks", "robust columns and ranks"
    return [
        f"the prior alone is private: {by}",
        f"taken for public: {public}{who}",
        f"not private: all else in this summary ({rest}) and the rows of estimates.csv, whose {rows} are of all "
        "clients",
        "the noise follows from --seed and the file: who has the seed and all rows but one can find that row, so keep "
        "the seed to yourself",
    ]

"""Plots of epsilon against rounds, and of an audit's scores."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxpfl.privacy.audit import EpsilonBound
from jaxpfl.support.console import new_axes, save_png
from jaxpfl.support.errors import JaxpflError


def plot_curve(
    rounds: Sequence[int], epsilon: Sequence[float], printed: Sequence[float], path: str | Path, title: str
) -> Path:
    """Plot epsilon against rounds to a PNG file, with the paper's formula as a dashed line.

    Args:
      rounds: numbers of rounds, increasing.
      epsilon: by a sound accountant, one per number of rounds.
      printed: by Theorem 5 as printed, likewise; empty to leave it out.
      path: the file; a missing folder is created.
      title: of the plot.

    Returns:
      The path.

    Raises:
      JaxpflError: if matplotlib is not installed, or the file cannot be written.
    """
    figure, axes = _new("rounds", "epsilon", title)
    axes.plot(rounds, epsilon, color="#2a78d6", linewidth=2, marker="o", markersize=3, label="accounted")
    if printed:
        axes.plot(rounds, printed, color="#888888", linewidth=1.4, linestyle="--", label="Theorem 5 as printed")
        axes.legend(frameon=False)
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)
    return save_png(figure, Path(path))


def plot_worlds(present: np.ndarray, absent: np.ndarray, claimed: float, bound: EpsilonBound, path: str | Path) -> Path:
    """Plot an audit's scores in the worlds with and without the audited client's data to a PNG file.

    Returns:
      The path.

    Raises:
      JaxpflError: as in `plot_curve`.
    """
    shown = f"eps >= {bound.epsilon:.3g} ({bound.confidence:.0%} confidence), claimed {claimed:.3g}"
    xlabel = "what was released in the direction of the client's gradient"
    figure, axes = _new(xlabel, "density over worlds", f"{shown}; delta = {bound.delta:g}")
    both = np.concatenate([present, absent])
    bins = np.linspace(both.min(), both.max(), 60).tolist()
    for scores, color, label in ((absent, "#888888", "without its data"), (present, "#2a78d6", "with its data")):
        axes.hist(scores, bins, density=True, histtype="stepfilled", alpha=0.55, color=color, label=label)
    axes.legend(frameon=False)
    return save_png(figure, Path(path))


def _new(xlabel: str, ylabel: str, title: str) -> tuple[Any, Any]:
    try:
        return new_axes(xlabel, ylabel, title)
    except ImportError as error:
        raise JaxpflError("pictures are drawn with matplotlib: pip install matplotlib") from error

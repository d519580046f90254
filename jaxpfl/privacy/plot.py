"""A picture of what a run costs as it goes on: epsilon against rounds."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from jaxpfl.data.plot import plain, save_png
from jaxpfl.errors import JaxpflError


def plot_curve(
    rounds: Sequence[int], epsilon: Sequence[float], printed: Sequence[float], path: str | Path, title: str
) -> Path:
    """Draws epsilon against rounds to a PNG file, and beside it, dashed, what the paper's formula says.

    Args:
      rounds: the numbers of rounds, increasing.
      epsilon: by a sound accountant, one for each.
      printed: by Theorem 5 as printed, one for each; empty to leave it out.
      path: the file; its folder is made where it is missing.
      title: a line above the picture.

    Returns:
      The path.

    Raises:
      JaxpflError: matplotlib is not installed, or the file cannot be written.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise JaxpflError("pictures are drawn with matplotlib: pip install matplotlib") from error
    figure = Figure(figsize=(7.2, 4.2), layout="constrained")
    axes = figure.subplots()
    axes.plot(rounds, epsilon, color="#2a78d6", linewidth=2, marker="o", markersize=3, label="accounted")
    if printed:
        axes.plot(rounds, printed, color="#888888", linewidth=1.4, linestyle="--", label="Theorem 5 as printed")
        axes.legend(frameon=False)
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("rounds")
    axes.set_ylabel("epsilon")
    plain(axes)
    figure.suptitle(title, x=0.01, ha="left", fontsize=11, fontweight="bold")
    return save_png(figure, Path(path))

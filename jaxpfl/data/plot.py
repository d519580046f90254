"""Plot of a federation: examples by client and class, and a histogram of the clients' sizes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from jaxpfl.data.describe import Summary
from jaxpfl.support.console import literal, plain, save_png
from jaxpfl.support.errors import JaxpflError, label

_SHADES = ("#e6effb", "#9cc2ef", "#2a78d6", "#123c73")
_SPLIT_COLORS = {"train": "#2a78d6", "validation": "#d99a00", "test": "#1baa7a"}
_EMPTY, _INK = "#fbfbfa", "#333333"
_MOST_NAMED = 60
_MOST_CLASSES = 100


def plot_split(counts: Summary, path: str | Path, title: str | None = None) -> Path:
    """Write the figure of `split_figure` to a PNG file and return the path. A missing folder is created.

    Raises:
      JaxpflError: as in `split_figure`, and if the file cannot be written.
    """
    return save_png(split_figure(counts, title), Path(path))


def split_figure(counts: Summary, title: str | None = None) -> Any:
    """Plot how the examples of a data set are divided among clients and splits (train, validation, test).

    A heat map shows the number of each client's training examples of each class; columns are clients and rows are
    classes. The bars below show the number of each client's examples in each split. The histogram on the right shows
    the clients' numbers of training examples. Up to 60 clients are shown in their order; more clients are sorted by
    their most frequent class. If there are more than 100 classes, only the 100 most frequent classes are shown.

    Args:
      counts: result of `summary`.
      title: title of the plot; by default, the numbers of clients and classes.

    Returns:
      The matplotlib figure.

    Raises:
      JaxpflError: if matplotlib is not installed, or labels are not classes.
    """
    try:
        from matplotlib.figure import Figure
        from matplotlib.ticker import MaxNLocator
    except ImportError as error:
        raise JaxpflError("plots require the package matplotlib: pip install matplotlib") from error
    if not counts.has_classes:
        raise JaxpflError("the plot of a split requires class labels: leave out --plot")
    m, num_classes = counts.class_counts.shape
    shown = np.arange(num_classes)
    if num_classes > _MOST_CLASSES:
        shown = np.sort(np.argsort(-counts.class_counts.sum(axis=0), kind="stable")[:_MOST_CLASSES])
    order = np.arange(m) if m <= _MOST_NAMED else _class_order(counts.class_counts)

    height = 2.6 + min(max(0.22 * len(shown), 1.6), 5.2)
    figure = Figure(figsize=(10, height), layout="constrained")
    grid = figure.add_gridspec(2, 2, width_ratios=(4, 1.25), height_ratios=(height - 2.4, 1.5))
    heat, bars = figure.add_subplot(grid[0, 0]), figure.add_subplot(grid[1, 0])
    bars.sharex(heat)
    image = _heat_map(heat, counts.class_counts[order][:, shown].T, shown)
    _bars(bars, counts, order)
    heat.set_xlim(-0.5, m - 0.5)
    if m <= _MOST_NAMED:
        if counts.client_names is None:
            step = 1 if m <= 30 else 5
            bars.set_xticks(np.arange(0, m, step), [str(client) for client in counts.client_ids[order][::step]])
        else:
            bars.set_xticks(np.arange(m), [literal(label(name)) for name in counts.client_names], rotation=90)
        bars.set_xlabel("client", color=_INK)
    else:
        bars.set_xlabel(f"{m} clients, sorted by their most frequent class", color=_INK)
    _histogram(figure.add_subplot(grid[0, 1]), counts.sizes["train"])
    legend = figure.add_subplot(grid[1, 1])
    legend.axis("off")
    legend.legend(*bars.get_legend_handles_labels(), loc="upper left", frameon=False, title="examples of a client")
    ticks = MaxNLocator(5, integer=True)
    figure.colorbar(image, ax=heat, pad=0.01, fraction=0.03, ticks=ticks, label="training examples")
    text = f"{m} clients, {num_classes} classes" if title is None else title
    figure.suptitle(text, x=0.01, ha="left", fontsize=12, fontweight="bold", color=_INK)
    return figure


def _class_order(class_counts: np.ndarray) -> np.ndarray:
    """Sort clients by their most frequent class; with the same class, larger proportions of it come first."""
    shares = class_counts / np.maximum(class_counts.sum(axis=1, keepdims=True), 1)
    top = shares.argmax(axis=1)
    return np.lexsort((-shares.max(axis=1), top))


def _heat_map(axes: Any, table: np.ndarray, classes: np.ndarray) -> Any:
    """Draw a table of counts [classes, m] as shades; cells with 0 are blank."""
    from matplotlib.colors import LinearSegmentedColormap, PowerNorm

    shades = LinearSegmentedColormap.from_list("shades", list(_SHADES)).with_extremes(bad=(1, 1, 1, 0))
    axes.set_facecolor(_EMPTY)
    image = axes.imshow(
        np.ma.masked_equal(table, 0),
        aspect="auto",
        origin="lower",
        interpolation="nearest",
        cmap=shades,
        norm=PowerNorm(0.5, vmin=0, vmax=max(int(table.max(initial=0)), 1)),
    )
    step = max(1, -(-len(classes) // 20))
    axes.set_yticks(np.arange(0, len(classes), step), [str(label) for label in classes[::step]])
    partial = "" if len(classes) == classes[-1] + 1 else f" (the {len(classes)} most frequent)"
    axes.set_ylabel(f"class{partial}", color=_INK)
    axes.tick_params(length=0, labelbottom=False, labelsize=9)
    for spine in axes.spines.values():
        spine.set_visible(False)
    return image


def _bars(axes: Any, counts: Summary, order: np.ndarray) -> None:
    """Draw each client's examples as a bar, with the splits stacked."""
    bottom = np.zeros(len(order))
    for split, color in _SPLIT_COLORS.items():
        sizes = counts.sizes[split][order]
        if sizes.any():  # one outline for all bars: hundreds of separate bars take seconds to draw
            edges = np.arange(len(order) + 1) - 0.5
            axes.stairs(bottom + sizes, edges, baseline=bottom, fill=True, color=color, label=split)
        bottom = bottom + sizes
    axes.set_ylabel("examples", color=_INK)
    axes.set_ylim(0, max(float(bottom.max()) * 1.05, 1))
    plain(axes)
    axes.tick_params(labelsize=9)


def _histogram(axes: Any, sizes: np.ndarray) -> None:
    """Histogram of the clients' numbers of training examples, with a line at the median."""
    from matplotlib.ticker import MaxNLocator

    low, high, median = int(sizes.min()), int(sizes.max()), float(np.median(sizes))
    width = max(1, -(-(high - low + 1) // 24))
    axes.hist(sizes, bins=np.arange(low, high + width + 1, width) - 0.5, color=_SPLIT_COLORS["train"], rwidth=0.92)
    axes.axvline(median, color=_INK, linewidth=1, linestyle="--")
    axes.set_title(f"median {median:g}, {low} to {high}", fontsize=9, color=_INK, loc="left")
    axes.set_xlabel("training examples", color=_INK)
    axes.set_ylabel("clients", color=_INK)
    axes.xaxis.set_major_locator(MaxNLocator(4, integer=True))
    axes.yaxis.set_major_locator(MaxNLocator(5, integer=True))
    plain(axes)
    axes.tick_params(labelsize=9)

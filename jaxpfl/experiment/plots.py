"""The plots of a run folder: accuracy over rounds, over clients and over what was sent, psi, private uploads, where the
time went."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from jaxpfl.presentation import COLORS, entitle, new_axes, save


def write_plots(folder: Path, records: list[dict[str, Any]], arrays: dict[str, dict[str, np.ndarray]]) -> list[Path]:
    """Draws what the records and the last per-client scores hold.

    Args:
      folder: where the PNG files go.
      records: of ``metrics.jsonl``.
      arrays: method -> the arrays of its npz file.

    Returns:
      The files written.
    """
    import matplotlib

    matplotlib.use("Agg")
    folder.mkdir(exist_ok=True)
    colors = {name: COLORS[i % len(COLORS)] for i, name in enumerate(arrays)}
    drawn = [
        _accuracy(records, colors),
        _clients(_named(arrays, "after_accuracy"), colors, "Clients after the last round"),
        _clients(_named(arrays, "unseen_after_accuracy"), colors, "Unseen clients after their adaptation"),
        _metric(records, colors, "psi", "psi at the server", "Estimated spread of the clients (psi)"),
        _uploads(records, colors),
        _by_bytes(records, colors, "evaluation", "personalized_accuracy", "test accuracy, mean over clients"),
        _by_bytes(records, colors, "round", "train_loss", "training loss, mean over the cohort"),
    ]
    names = ("accuracy", "clients", "unseen", "psi", "uploads", "accuracy-by-bytes", "loss-by-bytes")
    written = []
    for name, figure in zip(names, drawn, strict=True):
        if figure is not None:
            written.append(save(figure, folder, name))
    return written


def write_profile(folder: Path, bars: dict[str, dict[str, float]]) -> Path:
    """Draws seconds by phase, one stacked bar for each row.

    Args:
      folder: where ``profile.png`` goes.
      bars: row -> phase -> seconds; the first row on top, every row with the same phases.
    """
    from matplotlib.figure import Figure

    folder.mkdir(exist_ok=True)
    figure = Figure(figsize=(7.2, 1.9 + 0.45 * len(bars)), layout="constrained")
    axes = figure.subplots()
    left, widest = np.zeros(len(bars)), max(sum(row.values()) for row in bars.values())
    for i, phase in enumerate(next(iter(bars.values()))):
        seconds = np.array([row[phase] for row in bars.values()])
        part = axes.barh(list(bars), seconds, left=left, height=0.6, color=COLORS[i % len(COLORS)], label=phase)
        labels = [f"{s:.1f}" if s > 0.06 * widest else "" for s in seconds]
        axes.bar_label(part, labels, label_type="center", color="white", fontsize=9)
        left += seconds
    axes.set_ylim(len(bars) - 0.5, -0.5)
    axes.set_xlabel("seconds")
    entitle(axes, "Where the time went")
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(axis="y", length=0)
    axes.grid(axis="x", color="#e6e6e6", linewidth=0.8)
    axes.set_axisbelow(True)
    figure.legend(frameon=False, loc="outside lower left", ncols=7, columnspacing=1.2, handlelength=1.0, fontsize=9)
    return save(figure, folder, "profile")


def _rounds_axes(ylabel: str, title: str) -> tuple[Any, Any]:
    from matplotlib.ticker import MaxNLocator

    figure, axes = new_axes("round", ylabel, title)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    return figure, axes


def _settle(axes: Any) -> None:
    """Leaves room beside a single round."""
    low, high = axes.dataLim.intervalx
    if high - low < 1:
        middle = round((low + high) / 2)
        axes.set_xlim(middle - 1, middle + 1)
        axes.set_xticks([middle])


def _series(records: list[dict[str, Any]], method: str, kind: str, *names: str) -> tuple[np.ndarray, ...]:
    """Metrics over rounds, of the records that have all of them: rounds [T], and values [T, S] of each."""
    rows = [r for r in records if r["method"] == method and r["kind"] == kind and {*names} <= r.keys()]
    values = ([[np.nan if v is None else v for v in r[name]] for r in rows] for name in names)
    return np.array([r["round"] for r in rows]), *(np.array(v, dtype=float) for v in values)


def _marker(rounds: np.ndarray, **style: Any) -> dict[str, Any]:
    """Dots, where there are few rounds: a line of one is not seen."""
    return {"marker": "o", "markersize": 4, **style} if len(rounds) < 15 else {}


def _spread(values: np.ndarray) -> np.ndarray:
    """The standard deviation over the seeds, [T, S] -> [T]; zero for one."""
    return values.std(axis=1, ddof=1) if values.shape[1] > 1 else np.zeros(len(values))


def _line(axes: Any, rounds: np.ndarray, values: np.ndarray, color: str, label: str) -> None:
    """The mean over the seeds, with a band of one standard deviation, or a bar where there is one round only."""
    mean, spread = values.mean(axis=1), _spread(values)
    axes.plot(rounds, mean, color=color, linewidth=2, label=label, **_marker(rounds))
    if values.shape[1] == 1:
        return
    if len(rounds) == 1:
        axes.errorbar(rounds, mean, spread, color=color, alpha=0.6, capsize=4)
    else:
        axes.fill_between(rounds, mean - spread, mean + spread, color=color, alpha=0.15, linewidth=0)


def _accuracy(records: list[dict[str, Any]], colors: dict[str, str]) -> Any:
    figure, axes = _rounds_axes("test accuracy, mean over clients", "")
    shown, of_global = [], {}
    for i, (method, color) in enumerate(colors.items()):
        rounds, values = _series(records, method, "evaluation", "personalized_accuracy")
        if not len(rounds):
            continue
        shown += [100 * (values.mean(axis=1) + side * _spread(values)) for side in (-1, 1)]
        # Bars of one round stand side by side.
        at = rounds + ((i + 0.5) / len(colors) - 0.5 if len(rounds) == 1 else 0.0)
        _line(axes, at, 100 * values, color, method)
        both, own, global_values = _series(records, method, "evaluation", "personalized_accuracy", "global_accuracy")
        # Where the personalised model is the global one, one line says both.
        if len(both) and not np.allclose(own, global_values, equal_nan=True):
            of_global[method] = 100 * global_values.mean(axis=1)
            dots = _marker(rounds, markerfacecolor="white")
            axes.plot(both + (at - rounds)[0], of_global[method], color=color, linewidth=1.2, linestyle="--", **dots)
    if shown:  # the personalised models set the scale; an untrained global model may lie far below
        every = np.concatenate(shown)
        low, high = np.nanmin(every), np.nanmax(every)
        margin = max(0.05 * (high - low), 0.5)
        axes.set_ylim(low - margin, high + margin)
        _settle(axes)
    entitle(axes, _says(of_global, *axes.get_ylim()))
    axes.yaxis.set_major_formatter("{x:g} %")
    if shown:
        axes.legend(frameon=False, loc="lower right")
    return figure


def _says(of_global: dict[str, np.ndarray], low: float, high: float) -> str:
    """The title: what is dashed, and whose global model is never between the limits."""
    off = [method for method, mean in of_global.items() if np.nanmax(mean) < low or np.nanmin(mean) > high]
    parts = ["dashed: global model"] if len(of_global) > len(off) else []
    if off:
        parts.append(f"global model off the scale: {', '.join(f'{name} {of_global[name][-1]:.1f} %' for name in off)}")
    return "Personalised models" + (f" ({'; '.join(parts)})" if parts else "")


def _named(arrays: dict[str, dict[str, np.ndarray]], name: str) -> dict[str, np.ndarray]:
    """One array of every method that has it."""
    return {method: own[name] for method, own in arrays.items() if name in own}


def _clients(accuracies: dict[str, np.ndarray], colors: dict[str, str], title: str) -> Any:
    """Each client's accuracy (mean over seeds) as a dot, with the mean and the quartiles; None for no client."""
    if not accuracies:
        return None
    figure, axes = new_axes("", "test accuracy of a client, mean over seeds", title)
    jitter = np.random.default_rng(0)
    for place, (method, values) in enumerate(accuracies.items()):
        client = 100 * np.nanmean(values[:, np.isfinite(values).any(axis=0)], axis=0)
        if not len(client):
            continue
        dots = place + jitter.uniform(-0.22, 0.22, len(client))
        axes.scatter(dots, client, s=16, color=colors[method], alpha=0.45, linewidths=0)
        low, high = np.quantile(client, [0.25, 0.75])
        axes.vlines(place, low, high, color="#333333", linewidth=2)
        axes.hlines(client.mean(), place - 0.3, place + 0.3, color="#333333", linewidth=2)
        axes.annotate(
            f"{client.mean():.1f}",
            (place + 0.32, client.mean()),
            va="center",
            fontsize=9,
            color="#333333",
        )
    axes.set_xticks(range(len(accuracies)), list(accuracies))
    axes.set_xlim(-0.6, len(accuracies) - 0.2)
    axes.yaxis.set_major_formatter("{x:g} %")
    return figure


def _metric(records: list[dict[str, Any]], colors: dict[str, str], name: str, ylabel: str, title: str) -> Any:
    """A metric of the methods that have it over the rounds; None where none has."""
    methods = [m for m in colors if len(_series(records, m, "round", name)[0])]
    if not methods:
        return None
    figure, axes = _rounds_axes(ylabel, title)
    for method in methods:
        rounds, values = _series(records, method, "round", name)
        _line(axes, rounds, values, colors[method], method)
    _settle(axes)
    axes.legend(frameon=False, loc="best")
    return figure


def _uploads(records: list[dict[str, Any]], colors: dict[str, str]) -> Any:
    """The norms of private uploads before they are clipped, and dashed the norm to which they are."""
    figure = _metric(
        records, colors, "upload_norm", "L2 norm, mean over clients", "Uploads before clipping (dashed: C)"
    )
    if figure is None:
        return None
    for method, color in colors.items():
        rounds, limits = _series(records, method, "round", "clipping_norm")
        if len(rounds):
            figure.axes[0].plot(rounds, limits.mean(axis=1), color=color, linewidth=1.2, linestyle="--")
    figure.axes[0].set_ylim(bottom=0)
    return figure


def _by_bytes(records: list[dict[str, Any]], colors: dict[str, str], kind: str, name: str, ylabel: str) -> Any:
    """A metric over the bytes that all clients have uploaded, of the methods that send in a code; None where none
    does."""
    curves = {}
    for method in colors:
        _, bits, values = _series(records, method, kind, "bits_up", name)
        if len(bits):
            curves[method] = bits, values
    if not curves:
        return None
    from matplotlib.ticker import EngFormatter

    figure, axes = new_axes("uploaded so far by all clients", ylabel, "What the uploads bought")
    scale = 100 if name.endswith("accuracy") else 1
    for method, (bits, values) in curves.items():
        _line(axes, bits.mean(axis=1) / 8, scale * values, colors[method], method)
    axes.set_xlim(left=0)
    axes.xaxis.set_major_formatter(EngFormatter("B"))
    if scale == 100:
        axes.yaxis.set_major_formatter("{x:g} %")
    axes.legend(frameon=False)
    return figure

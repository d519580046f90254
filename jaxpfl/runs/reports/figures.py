"""Figures that only reports have: who gains over local training, and scores against what they cost."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from jaxpfl.runs.scores import Headline, fraction_hurt
from jaxpfl.support.console import INK, entitle, new_axes, plain, shades

_MOST_IN_AXES = 6
LOCAL = "local"


def gains(arrays: Mapping[str, Mapping[str, np.ndarray]], headline: Headline) -> Any:
    """Each client's gain over local training, clients from worst to best.

    Args:
      arrays: method -> the arrays of its npz file.
      headline: the metric of the scores.

    Returns:
      The matplotlib figure; None without local training, another method or scores.
    """
    name = f"after_{headline.name}"
    others = {method: own[name] for method, own in arrays.items() if method != LOCAL and name in own}
    local = arrays.get(LOCAL, {}).get(name)
    if local is None or not others:
        return None
    unit = " in percentage points" if headline.percent else ""
    figure, axes = new_axes("clients, from worst to best in %", f"gain in {headline.words}{unit}", "")
    entitle(axes, "Gain over local training (mean over seeds)")
    shown = False
    for (method, scores), color in zip(arrays.items(), shades(len(arrays)), strict=True):
        if method not in others:
            continue
        difference = headline.scale * (scores[name] - local) * (-1 if headline.lower else 1)
        seen = np.isfinite(difference).any(axis=0)
        if not seen.any():
            continue
        client = np.sort(np.nanmean(np.where(np.isfinite(difference), difference, np.nan)[:, seen], axis=0))
        hurt = 100 * fraction_hurt(scores[name], local, lower=headline.lower)
        at = 100 * (np.arange(len(client)) + 0.5) / len(client)
        axes.plot(at, client, color=color, linewidth=2, label=f"{method}: {hurt:.0f} % worse off")
        shown = True
    if not shown:
        return None
    axes.axhline(0, color=INK, linewidth=1)
    axes.set_xlim(0, 100)
    _legend(axes)
    return figure


def costs(summary: Mapping[str, Any], headline: Headline) -> Any:
    """Scores against gradient evaluations and bytes of a client; None where no method counts them.

    Args:
      summary: of a run.
      headline: the metric of the scores.
    """
    from matplotlib.figure import Figure
    from matplotlib.ticker import EngFormatter, MaxNLocator

    methods = summary["methods"]
    colors = dict(zip(methods, shades(len(methods)), strict=True))
    gradients = {
        name: sum(one["mean"] for one in (row["gradients"]["training"], row["gradients"]["personalization"]) if one)
        for name, row in methods.items()
        if row.get("gradients")
    }
    sent = {name: (row["bytes_up"] + row["bytes_down"]) / summary["clients"] for name, row in methods.items()}
    panels = [("gradients of a client", gradients, ""), ("bytes of a client, up and down", sent, "B")]
    panels = [panel for panel in panels if any(panel[1].values())]
    if not panels:
        return None
    figure = Figure(figsize=(4.8 * len(panels) + 1.6, 4.2), layout="constrained")
    for axes, (label, values, unit) in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
        plain(axes)
        axes.set(xlabel=label, ylabel=f"test {headline.words}, mean over clients")
        axes.xaxis.set_major_formatter(EngFormatter(unit))
        axes.xaxis.set_major_locator(MaxNLocator(5))  # bytes with their unit are long
        axes.yaxis.set_major_formatter(headline.ticks)
        for name, at in values.items():
            score = methods[name][headline.personalized]
            if score is None or score["mean"] is None or not np.isfinite(score["mean"]):
                continue
            spread = headline.scale * (score["std"] or 0.0)
            mean = headline.scale * score["mean"]
            axes.errorbar(at, mean, spread, fmt="o", color=colors[name], capsize=3, label=name)
        axes.set_xlim(left=min(0, axes.get_xlim()[0]))
    entitle(figure.axes[0], "What the scores cost")
    handles, names = figure.axes[-1].get_legend_handles_labels()
    figure.legend(handles, names, frameon=False, loc="outside right upper", fontsize=9)
    return figure


def _legend(axes: Any) -> None:
    handles = axes.get_legend_handles_labels()[0]
    if len(handles) <= _MOST_IN_AXES:
        axes.legend(frameon=False, loc="best")
        return
    axes.figure.legend(handles=handles, frameon=False, loc="outside right upper", fontsize=9)
    axes.figure.set_size_inches(9.2, 4.8)

"""Lines below the table of own clients, ``estimates.csv``, and the picture of what became of each client's estimate."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from jaxpfl.estimate import client_csv
from jaxpfl.estimate.own.common import Own
from jaxpfl.estimate.plots import color
from jaxpfl.estimate.report import beside
from jaxpfl.presentation import GRID, new_axes, save


def said_of_privacy(privacy: dict[str, Any]) -> str:
    """Facts that privacy takes for public, and results that are not private."""
    public = [f"{name} {privacy[name]:g}" for name in ("sigma_theta", "sigma_x", "radius") if name in privacy]
    known = ", ".join([*public, "the clients' numbers of samples"])
    return f"taken for public: {known}; not private: the rest, with what is learned of all and the intervals"


def learned(estimated: dict[str, Any]) -> str:
    """Estimates of what the clients share, with as many figures as the samples' spread shows."""
    spread = estimated.get("sigma_x", 0.0)
    said = {name: value if isinstance(value, list) else [value] for name, value in estimated.items()}
    texts = {name: ", ".join(beside(entry, spread) for entry in values) for name, values in said.items()}
    return ", ".join(f"{name} ({text})" if len(said[name]) > 1 else f"{name} {text}" for name, text in texts.items())


def write(folder: Path, own: Own) -> list[Path]:
    """Writes ``estimates.csv`` beside the folder of plots, and draws what became of each client's own estimate."""
    folder.mkdir(parents=True, exist_ok=True)
    client_csv.write(folder.parent / "estimates.csv", own.columns)
    local, personal, sizes = own.pairs
    figure, axes = new_axes("local estimate", "personalised estimate", f"{own.result['csv']}: {len(sizes)} clients")
    low, high = float(min(local.min(), personal.min())), float(max(local.max(), personal.max()))
    axes.plot([low, high], [low, high], color=GRID, linewidth=1.5, zorder=0, label="no shrinkage")
    axes.scatter(
        local,
        personal,
        s=12 + 60 * sizes / sizes.max(),
        color=color("personalized"),
        alpha=0.5,
        linewidths=0,
        label="a client, larger for more samples",
    )
    mean = float(np.ravel(own.result["estimated"]["mean"])[0])
    axes.axhline(mean, color=color("global"), linewidth=1, linestyle="--", label="estimated mean of all")
    axes.legend(frameon=False, fontsize=9)
    return [save(figure, folder, "shrinkage")]

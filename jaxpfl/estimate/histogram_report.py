"""The histogram study's table and plots."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from jaxpfl.estimate import histogram_convergence
from jaxpfl.estimate.histogram import EXPORTED, Study
from jaxpfl.estimate.plots import log_ticks
from jaxpfl.estimate.report import number
from jaxpfl.presentation import COLORS, INK, new_axes, save

DRAWN = ("FedAvg + FT", "IFCA + FT", "Algorithm 2 + DimRed + FT", "Algorithm 2 + FT", EXPORTED)
"""Rows that plots show, each in its colour."""
WIDTH = 118
"""Of a table with four columns of eps: narrower terminals wrap its lines rather than lose figures."""
WORDS = 12
"""Tokens shown of each cluster."""


def print_table(console: Any, result: dict[str, Any]) -> None:
    """Prints every row in every column, and what the privacy claims are."""
    from jaxpfl.presentation import new_table

    given, users = result["settings"], result["users"]
    sizes = result["tokens_per_user"]
    title = (
        f"KL(Q || estimate): {users['clients']} users of {sizes['min']:g} to {sizes['max']:g} tokens "
        f"(median {sizes['median']:g}), d = {given['tokens']}, s = {result['floor']:g}, {given['repetitions']} runs"
    )
    caption = (
        "± half of a 95 % interval over runs (start and noise, the same users)\n"
        f"unseen: without privacy, of {users['unseen']} users from their own counts alone\n"
        f"lambda and alpha tuned on {users['validation']} other users, whom no claim covers"
    )
    table = new_table(title, caption)
    table.add_column("method", style="bold", no_wrap=True)
    for column in result["rows"]:
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("unseen", justify="right", no_wrap=True)
    for name, row in result["rows"]["non-private"].items():
        cells = [_cell(part.get(name)) for part in result["rows"].values()]
        table.add_row(name, *cells, number(row["unseen"]))
    for name in dict.fromkeys(n for part in result["rows"].values() for n in part):
        if name not in result["rows"]["non-private"]:
            table.add_row(name, *[_cell(part.get(name)) for part in result["rows"].values()], "-")
    console.print(table)
    for column, said in result["privacy"].items():
        parts = ", ".join(f"{name} {_releases(own['releases'])}" for name, own in said.items() if "releases" in own)
        printed = said["Algorithm 3 (printed)"]
        console.print(
            f"{column}, delta {given['delta']:g} (add or remove one user, C = {given['radius']:g}, by PLD), "
            f"noise multipliers: {parts}; "
            f"Algorithm 3 as printed by its own theorem, sigma = {printed['stddev']:.3g}, its start not covered",
            highlight=False,
            soft_wrap=True,
        )


def _releases(multipliers: list[float]) -> str:
    first, *others = multipliers
    return f"{first:.3g}" + (f" (mean) and {len(others)} of {others[0]:.3g}" if others else "")


def _cell(row: dict[str, float | None] | None) -> str:
    if row is None:
        return "-"
    return number(row["mean"]) if row["interval"] is None else f"{row['mean']:.4f} ±{row['interval']:.3f}"


def write_plots(folder: Path, study: Study) -> list[Path]:
    """Draws the loss against eps, against users' tokens, and the tokens that are typical of each cluster."""
    folder.mkdir(parents=True, exist_ok=True)
    drawn = [_tokens_of_clusters(folder, study)]
    if len(study.result["settings"]["epsilon"]) > 1:
        drawn.append(_against_epsilon(folder, study))
    if "misclustering" in study.result:
        drawn.append(histogram_convergence.write_plot(folder, study.result["misclustering"]))
    sizes = study.result["tokens_per_user"]
    if sizes["min"] < sizes["max"]:
        drawn.append(_against_tokens(folder, study))
    return drawn


def _against_epsilon(folder: Path, study: Study) -> Path:
    rows, epsilons = study.result["rows"], sorted(study.result["settings"]["epsilon"])
    figure, axes = new_axes("epsilon of a user", "KL(Q || estimate)", _title(study))
    for name, color in zip(DRAWN, COLORS, strict=False):
        private = [rows[f"epsilon {e:g}"][name] for e in epsilons]
        errors = [row["interval"] or 0 for row in private]
        means = [row["mean"] for row in private]
        axes.errorbar(epsilons, means, yerr=errors, fmt="o-", color=color, capsize=2.5, linewidth=1.4, label=name)
        axes.axhline(rows["non-private"][name]["mean"], color=color, linewidth=0.9, linestyle="--")
    axes.set_xscale("log")
    axes.set_xticks(epsilons, [f"{e:g}" for e in epsilons])
    axes.minorticks_off()
    figure.legend(frameon=False, fontsize=9, loc="outside lower left", ncols=3, title="dashed: without privacy")
    return save(figure, folder, "kl-epsilon")


def _against_tokens(folder: Path, study: Study) -> Path:
    users = study.data.clients.users
    sizes = np.asarray(users.size)[np.asarray(users.valid)]
    edges = np.unique(np.quantile(sizes, np.linspace(0, 1, 9)))
    place = np.clip(np.searchsorted(edges, sizes, side="right") - 1, 0, len(edges) - 2)
    bins = np.unique(place)
    figure, axes = new_axes("tokens of a user", "KL(Q || estimate)", _title(study))
    x = [np.exp(np.log(sizes[place == b]).mean()) for b in bins]
    column, losses = next(iter(study.users.items()))
    for name, color in zip(("Local", *DRAWN), (INK, *COLORS), strict=False):
        axes.plot(x, [losses[name][place == b].mean() for b in bins], "o-", color=color, label=name, linewidth=1.4)
    log_ticks(axes.xaxis, x)
    log_ticks(axes.yaxis, [losses[name].mean() for name in ("Local", *DRAWN)])
    figure.legend(frameon=False, fontsize=9, loc="outside lower left", ncols=3, title=f"{column}; eighths of the users")
    return save(figure, folder, "kl-tokens")


def _tokens_of_clusters(folder: Path, study: Study) -> Path:
    """A column for each cluster: the tokens that add most to its divergence from the mean of all centers."""
    from matplotlib.figure import Figure

    centers = study.centers["non-private"]
    weights = centers * np.log(centers / centers.mean(axis=0))
    k = len(centers)
    lines, columns = -(-k // 5), min(k, 5)
    figure = Figure(figsize=(max(1.6 * columns, 5), 2.4 * lines), layout="constrained")
    axes = figure.subplots(lines, columns, squeeze=False)
    for place, own in enumerate(axes.ravel()):
        own.axis("off")
        if place >= k:
            continue
        top = np.argsort(-weights[place])[:WORDS]
        own.set_title(f"cluster {place + 1}", fontsize=9, loc="left", color=COLORS[place % len(COLORS)])
        for line, token in enumerate(top):
            text = f"{study.data.vocabulary[token]}  {100 * centers[place, token]:.2g} %"
            own.text(0, 1 - (line + 1) / (WORDS + 1), text, fontsize=7, color=INK, parse_math=False)
    figure.suptitle("Tokens that set Algorithm 2's clusters apart, and their share", fontsize=10, x=0, ha="left")
    return save(figure, folder, "cluster-tokens")


def _title(study: Study) -> str:
    given, users = study.result["settings"], study.result["users"]
    return f"{given['data'].split('/')[-1]}: {users['clients']} users, d = {given['tokens']}, s = {given['floor']:g}"

"""Table and plots of the histogram study."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from jaxpfl.studies.histogram.methods import ALGORITHM_3, BASELINE, EXACT, ORDER, Made
from jaxpfl.studies.report import number
from jaxpfl.studies.study import Block
from jaxpfl.support.console import COLORS, INK, new_axes, new_table, save

DRAWN = (BASELINE, "FedAvg, denoised + FT", "IFCA + FT", "Algorithm 2 + DimRed + FT", "Algorithm 2 + FT",
         "Algorithm 2, blended + FT", "Standardised, blended + FT")  # fmt: skip
"""Rows that plots show, each in its colour."""
WORDS = 12
"""Tokens shown of each cluster."""


def tables(result: dict[str, Any]) -> list[Block]:
    """Table of every row in every column, and lines on the privacy claims, from `study.run`'s result."""
    given, users = result["settings"], result["users"]
    sizes = result["tokens_per_user"]
    title = (
        f"KL(Q || estimate): {users['clients']} users of {sizes['min']:g} to {sizes['max']:g} tokens "
        f"(median {sizes['median']:g}), d = {given['tokens']}, s = {result['floor']:g}, {given['repetitions']} runs"
    )
    caption = (
        "± half of a 95 % interval over runs (start and noise, the same users)\n"
        f"unseen: without privacy, of {users['unseen']} users from their own counts alone\n"
        f"lambda and alpha tuned on {users['validation']} validation users, a public group, whom no claim covers"
    )
    table = new_table(title, caption)
    table.add_column("method", style="bold", no_wrap=True)
    for column in result["rows"]:
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("unseen", justify="right", no_wrap=True)
    columns = result["rows"].values()
    for name in ORDER:
        if any(name in part for part in columns):
            unseen = result["rows"][EXACT].get(name, {}).get("unseen")
            cells = [_cell(part.get(name)) for part in columns]
            table.add_row(name, *cells, "-" if unseen is None else number(unseen))
    lines = []
    if result["followed_the_data"]:
        taken = ", ".join(f"{name} {value}" for name, value in result["followed_the_data"].items())
        private = ", which no eps covers" if given["epsilon"] else ""
        lines.append(f"smaller than by default, after the data{private}: {taken}")
    for column, said in result["privacy"].items():
        noises: dict[str, list[str]] = {}
        for name, own in said.items():
            if name != ALGORITHM_3:
                noises.setdefault(f"{_releases(own['releases'])} (C = {own['clipping_norm']:g})", []).append(name)
        parts = ", ".join(f"{'; '.join(names)} {text}" for text, names in noises.items())
        lines.append(
            f"{column}, delta {given['delta']:g} (add or remove one user, by PLD), noise multipliers: {parts}; "
            f"Algorithm 3 as printed by its own theorem, sigma = {said[ALGORITHM_3]['stddev']:.3g}, its start not "
            "covered"
        )
    if result["privacy"] and given["data"] != "synthetic":
        lines.append(
            f"no epsilon covers the vocabulary, taken for public: all users' {given['tokens']} most frequent tokens"
        )
    return [table, *lines, *_comparison(result)]


def _comparison(result: dict[str, Any]) -> list[str]:
    """The best row of every column against FedAvg + FT, and the source of its settings."""
    lines, given, users = [], result["settings"], result["users"]["validation"]
    for column, name in result["best"].items():
        gap = result["rows"][column][name]["difference"]
        text = f"{column}: {name}{_setting(result, column, name)} minus {BASELINE}: {gap['mean']:+.4f}"
        if gap["over_runs"] is not None:
            text += f" ±{gap['over_runs']:.4f} over runs"
        if gap["over_users"] is not None:
            text += f" (±{gap['over_users']:.4f} over users)"
        lines.append(text)
    if not result["tuning"]:
        return [
            *lines,
            "settings as given, not chosen here: if they were chosen by looking at data, no eps covers that",
        ]
    tried = len(result["tuning"][EXACT]["tries"]["Algorithm 2"])
    private = [own for column, own in result["tuning"].items() if column != EXACT]
    if not private:
        return [*lines, f"k chosen among {tried} on the {users} validation users"]
    number = len(private[0]["tries"]["FedAvg"])
    return [
        *lines,
        f"settings chosen for every method among {number} ({tried} without privacy) on the validation users: under "
        f"privacy learned on all but one of their {given['folds']} parts and scored on that one, noise in proportion",
        f"hyper-parameter selection on validation users is not covered by epsilon: those {users} are taken for public; "
        "the users' data had no part in it",
    ]


def _setting(result: dict[str, Any], column: str, name: str) -> str:
    if column not in result["tuning"]:
        return ""
    own = result["tuning"][column]["chosen"][name.removesuffix(" + FT").removesuffix(", blended")]
    if column == EXACT:
        return f" (k = {own['clusters']})"
    if not own["rounds"]:
        return f" (C = {own['radius']:.3g})"
    return (
        f" (k = {own['clusters']}, T = {own['rounds']}, C = {own['radius']:g}, "
        f"{100 * own['mean_share']:.0f} % for the mean)"
    )


def _releases(multipliers: list[float]) -> str:
    first, *others = multipliers
    return f"{first:.3g}" + (f" (mean) and {len(others)} of {others[0]:.3g}" if others else "")


def _cell(row: dict[str, float | None] | None) -> str:
    if row is None:
        return "-"
    return number(row["mean"]) if row["interval"] is None else f"{row['mean']:.4f} ±{row['interval']:.3f}"


def write_plots(folder: Path, study: Made) -> list[Path]:
    """Plot the loss against eps, the typical tokens of each cluster, and the rates of misclustering."""
    folder.mkdir(parents=True, exist_ok=True)
    drawn = [_tokens_of_clusters(folder, study)]
    if len(study.result["settings"]["epsilon"]) > 1:
        drawn.append(_against_epsilon(folder, study))
    if "misclustering" in study.result:
        drawn.append(_misclustering(folder, study.result["misclustering"]))
    return drawn


def _against_epsilon(folder: Path, study: Made) -> Path:
    rows, epsilons = study.result["rows"], sorted(study.result["settings"]["epsilon"])
    figure, axes = new_axes("epsilon of a user", "KL(Q || estimate)", _title(study))
    for name, color in zip(DRAWN, COLORS, strict=False):
        private = [rows[f"epsilon {e:g}"][name] for e in epsilons]
        errors = [row["interval"] or 0 for row in private]
        means = [row["mean"] for row in private]
        axes.errorbar(epsilons, means, yerr=errors, fmt="o-", color=color, capsize=2.5, linewidth=1.4, label=name)
        if name in rows[EXACT]:
            axes.axhline(rows[EXACT][name]["mean"], color=color, linewidth=0.9, linestyle="--")
    axes.set_xscale("log")
    axes.set_xticks(epsilons, [f"{e:g}" for e in epsilons])
    axes.minorticks_off()
    figure.legend(frameon=False, fontsize=9, loc="outside lower left", ncols=3, title="dashed: without privacy")
    return save(figure, folder, "kl-epsilon")


def _tokens_of_clusters(folder: Path, study: Made) -> Path:
    """Plot a column per cluster: the tokens that add most to its divergence from the mean of all centers."""
    from matplotlib.figure import Figure

    centers = study.centers[EXACT]
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


def _title(study: Made) -> str:
    given, users = study.result["settings"], study.result["users"]
    return f"{given['data'].split('/')[-1]}: {users['clients']} users, d = {given['tokens']}, s = {given['floor']:g}"


def _misclustering(folder: Path, found: dict[str, Any]) -> Path:
    """Plot the rates over rounds."""
    figure, axes = new_axes("round", "share of users in a wrong cluster", "Mis-clustering, mean over runs")
    for (name, shares), color in zip(found["wrong"].items(), COLORS, strict=False):
        axes.plot(range(len(shares)), shares, "o-", color=color, markersize=3.5, label=name)
    axes.axhline(found["bound"], color=INK, linewidth=1, linestyle=":", label="exp(-Delta^2 / (8 sigma^2))")
    axes.set_ylim(bottom=0)
    axes.legend(frameon=False)
    return save(figure, folder, "misclustering")

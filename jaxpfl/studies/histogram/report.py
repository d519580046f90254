"""Table and plots of the histogram study."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from jaxpfl.studies.histogram.methods import ALGORITHM_3, BASELINE, EXACT, ORDER, Made
from jaxpfl.studies.report import FEW_ERRORS, Curve, number, write_curves
from jaxpfl.studies.study import Block
from jaxpfl.support.console import COLORS, INK, new_table, save

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
    """The row of every column that is exported against FedAvg + FT."""
    lines = []
    for column, name in result["best"].items():
        gap = result["rows"][column][name]["difference"]
        text = f"{column}: {name} minus {BASELINE}: {gap['mean']:+.4f}"
        for of in ("runs", "users"):
            if gap[f"over_{of}"] is not None:
                text += f", ±{gap[f'over_{of}']:.4f} over {of}"
        lines.append(text)
    return [*lines, "settings as given: if they were chosen by looking at data, no eps covers that"]


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
    curves = {}
    for name in DRAWN:
        private = [rows[f"epsilon {e:g}"][name] for e in epsilons]
        own = rows[EXACT].get(name)
        line = None if own is None else [own["mean"]] * len(epsilons)
        pairs = [{"mean": row["mean"], "stderr": (row["interval"] or 0) / FEW_ERRORS} for row in private]
        curves[name] = Curve.measured(epsilons, pairs, line)
    given, users = study.result["settings"], study.result["users"]
    source = given["data"].split("/")[-1]
    title = f"{source}: {users['clients']} users, d = {given['tokens']}; lines: without privacy"
    style: dict[str, Any] = {"ylabel": "KL(Q || estimate)", "logarithmic": "xy"}
    return write_curves(folder / "kl-epsilon.png", epsilons, curves, xlabel="epsilon of a user", title=title, **style)


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


def _misclustering(folder: Path, found: dict[str, Any]) -> Path:
    """Plot the rates over rounds."""
    curves = {name: Curve.measured(range(len(own)), [(x, 0) for x in own]) for name, own in found["wrong"].items()}
    rounds = range(max(map(len, found["wrong"].values())))
    curves["exp(-Delta^2 / (8 sigma^2))"] = Curve.level(found["bound"], rounds)
    style: dict[str, Any] = {"ylabel": "share of users in a wrong cluster", "title": "Mis-clustering, mean over runs"}
    return write_curves(folder / "misclustering.png", rounds, curves, xlabel="round", **style)

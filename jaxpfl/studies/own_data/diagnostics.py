"""Diagnostics of a fitted population: outlying clients, and quantiles of all beside those that it leads to expect."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxpfl.errors import printable
from jaxpfl.presentation import INK, literal, new_axes, save
from jaxpfl.studies.plots import color

FALSE_ALARMS = 0.05
"""Share of files in which a client is called outlying though the fitted population is right."""
_MOST_POINTS, _BAND_PLACES, _NAMED = 4000, 300, 6


def outlying(scores: np.ndarray, names: Sequence[str]) -> list[dict[str, Any]]:
    """Clients too far out for the fitted population, the farthest first, as JSON.

    Their two-sided p-values are below `FALSE_ALARMS` over the number of clients (Bonferroni's correction).
    """
    from scipy import special

    p_values = 2 * special.ndtr(-np.abs(scores))
    far = [int(i) for i in np.argsort(-np.abs(scores), kind="stable") if p_values[i] < FALSE_ALARMS / len(scores)]
    return [{"client": names[i], "score": float(scores[i]), "p_value": float(p_values[i])} for i in far]


def told(found: list[dict[str, Any]]) -> str:
    """A line on the outlying clients."""
    if not found:
        return "no client is outlying under the fitted prior"
    first = ", ".join(f"{printable(row['client'])} ({row['score']:+.3g})" for row in found[:_NAMED])
    more = f" and {len(found) - _NAMED} more" if len(found) > _NAMED else ""
    return f"outlying under the fitted prior, in standard deviations: {first}{more}"


def fit_told(test: dict[str, Any]) -> str:
    """A line on the test that the family of priors is right."""
    fits = "no sign that the prior is wrong" if test["p_value"] > FALSE_ALARMS else "the prior does not fit"
    return (
        f"{fits}: {test['name']} of the scores = {test['statistic']:.3g}, p = {test['p_value']:.2g} "
        f"from {test['draws']} simulated files"
    )


def quantiles(
    folder: Path, scores: np.ndarray, names: Sequence[str], title: str, test: dict[str, Any] | None = None
) -> Path:
    """Plot the ordered scores beside the expected ones, with 95 % of each place's distribution, and name the outlying.

    The band takes the fitted population for known: with few clients the points lie within it too often.
    """
    from scipy import special

    m = len(scores)
    figure, axes = new_axes("expected normal score", "score under the fitted marginal", title)
    order = np.argsort(scores, kind="stable")
    expected = special.ndtri((np.arange(m) + 0.5) / m)
    places = np.unique(np.round(m * special.ndtr(np.linspace(expected[0], expected[-1], _BAND_PLACES)) + 0.5))
    ends = [special.ndtri(special.betaincinv(places, m + 1 - places, p)) for p in (0.025, 0.975)]
    at = special.ndtri((places - 0.5) / m)
    axes.fill_between(at, *ends, color=color("local"), alpha=0.2, linewidth=0, label="95 % of files at each place")
    axes.plot(expected[[0, -1]], expected[[0, -1]], color=INK, linewidth=1, linestyle=":", label="the prior fits")
    far = {row["client"] for row in outlying(scores, names)}
    shown = np.ones(m, bool)
    if m > _MOST_POINTS:  # all of either tail
        shown = np.zeros(m, bool)
        shown[np.unique(np.round(np.linspace(0, m - 1, _MOST_POINTS // 2)).astype(int))] = True
        shown[: _MOST_POINTS // 4] = shown[-_MOST_POINTS // 4 :] = True
    outer = np.array([names[i] in far for i in order])
    for which, kind, label in ((~outer, "personalized", "a client"), (outer, "global", "an outlying client")):
        if which.any():
            axes.plot(expected[which & shown], scores[order][which & shown], ".", color=color(kind), label=label)
    by_distance = sorted(np.flatnonzero(outer), key=lambda place: -abs(scores[order[place]]))
    for place in by_distance[:_NAMED]:
        axes.annotate(
            literal(names[int(order[place])])[:20], (expected[place], scores[order[place]]), fontsize=8, color=INK,
            xytext=(-6 if expected[place] > 0 else 6, 0), textcoords="offset points", va="center",
            ha="right" if expected[place] > 0 else "left",
        )  # fmt: skip
    if test is not None:
        axes.text(
            0.98, 0.02, f"{test['name']}: p = {test['p_value']:.2g}", transform=axes.transAxes, ha="right", fontsize=9,
            color=INK,
        )  # fmt: skip
    axes.legend(frameon=False, fontsize=9, loc="upper left")
    return save(figure, folder, "quantiles")

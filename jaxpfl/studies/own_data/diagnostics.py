"""Diagnostics of a fitted population: outlying clients, and quantiles of all beside those that it leads to expect."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxpfl.estimators.pictures import draw_quantiles, far_out
from jaxpfl.support.console import new_axes, save
from jaxpfl.support.errors import printable

_NAMED = 6


def outlying(scores: np.ndarray, names: Sequence[str]) -> list[dict[str, Any]]:
    """Clients too far out for the fitted population, the farthest first, as JSON.

    See `estimators.pictures.far_out`.
    """
    from scipy import special

    p_values = 2 * special.ndtr(-np.abs(scores))
    outer = far_out(scores)
    far = [int(i) for i in np.argsort(-np.abs(scores), kind="stable") if outer[i]]
    return [{"client": names[i], "score": float(scores[i]), "p_value": float(p_values[i])} for i in far]


def told(found: list[dict[str, Any]], of: str = "client") -> str:
    """A line on the outlying clients, or groups."""
    if not found:
        return f"no {of} is outlying under the fitted prior"
    first = ", ".join(f"{printable(row['client'])} ({row['score']:+.3g})" for row in found[:_NAMED])
    more = f" and {len(found) - _NAMED} more" if len(found) > _NAMED else ""
    return f"outlying under the fitted prior, in standard deviations: {first}{more}"


def quantiles(
    folder: Path,
    scores: np.ndarray,
    names: Sequence[str],
    title: str,
    name: str = "quantiles",
) -> Path:
    """Plot the ordered scores beside the expected ones, with 95 % of each place's distribution, and name the outlying.

    The band takes the fitted population for known: with few clients the points lie within it too often.
    """
    figure, axes = new_axes("expected normal score", "score under the fitted marginal", title)
    draw_quantiles(axes, scores, names)
    return save(figure, folder, name)

"""Errors of a study against the number of clients, or of their samples, with one program per size."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from jaxpfl.studies.plots import Curve, write_curves

AXES = {"clients": "clients m", "samples": "samples of a client, n"}


def fractions(size: int, shares: Iterable[float], least: int) -> list[int]:
    """The given shares of a size, each once, and at least ``least``."""
    return sorted({max(least, round(size * share)) for share in shares})


def write_sizes(
    folder: Path, run: Callable[[Any], dict[str, Any]], given: Any, name: str, sizes: list[int], study: str
) -> Path:
    """Plot ``folder/mse-NAME.png``.

    Args:
      run: ``settings -> result`` with the rows ``mse`` by estimator.
      given: settings of the study, a dataclass with ``clients``, ``samples`` and ``dim``.
      name: the one of them that is varied.
      study: beginning of the title.
    """
    found = [run(replace(given, **{name: size}))["mse"] for size in sizes]
    curves = {
        estimator: Curve(
            sizes, [row[estimator]["mean"] for row in found], [row[estimator]["stderr"] or 0.0 for row in found]
        )
        for estimator in found[0]
    }
    setting = {"clients": f"m = {given.clients}", "samples": f"n = {given.samples}", "dim": f"d = {given.dim}"}
    return write_curves(
        folder / f"mse-{name}.png",
        sizes,
        curves,
        xlabel=AXES[name],
        ylabel="mean squared error of the coefficients",
        title=", ".join([study, *(text for key, text in setting.items() if key != name)]),
        logarithmic="xy",
    )

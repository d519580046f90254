"""Table of a study: every estimator's error, its closed form, and its gain over local estimates."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from jaxpfl.studies.study import Block
from jaxpfl.support.presentation import new_table


def estimator_table(result: dict[str, Any], title: str, notes: Iterable[str] = ()) -> list[Block]:
    """A table of the estimators' errors and gains, and lines below it.

    Args:
      result: with ``mse`` and ``gains`` by estimator.
      title: above the table.
      notes: lines below it.
    """
    exact = any(row["closed_form"] is not None for row in result["mse"].values())
    table = new_table(title, "± one standard error; gain: share of local's error avoided")
    table.add_column("estimator", style="bold", no_wrap=True)
    for name in ("MSE", *["exact"] * exact, "gain over local"):
        table.add_column(name, justify="right", no_wrap=True)
    for name, row in result["mse"].items():
        gained = result["gains"].get(name)
        theory = [number(row["closed_form"])] * exact
        table.add_row(name, with_error(row), *theory, "-" if gained is None else with_error(gained, percent=True))
    return [table, *notes]


def regression_title(study: str, given: Any, more: str) -> str:
    """The title of a study of regressions, with its sizes.

    Args:
      study: its first words.
      given: settings with ``clients``, ``dim`` and ``repetitions``.
      more: a further size or setting.
    """
    sizes = f"m = {given.clients}, d = {given.dim}, {more}"
    return f"{study}, {sizes}, {given.repetitions} repetitions; known: the prior is"


def gains_over_fedavg(result: dict[str, Any]) -> str:
    """A line of every estimator's gain over the pooled one."""
    gains = (f"{name} {with_error(row, percent=True)}" for name, row in result["gains_over_fedavg"].items())
    return f"gain over fedavg: {', '.join(gains)}"


def number(value: float | None) -> str:
    """A number with four figures; a dash for None."""
    return "-" if value is None else f"{value:.4g}"


def beside(value: float, spread: float) -> str:
    """A number with four figures, or as many as show a thousandth of ``spread``."""
    larger = math.log10(abs(value) / spread) if value and spread > 0 else 0
    return f"{value:.{max(4, math.ceil(larger) + 3)}g}"


def with_error(row: dict[str, float | None], *, percent: bool = False) -> str:
    """``mean ± stderr``, to the last significant figure of the error."""
    mean, error = row["mean"], row["stderr"]
    if mean is None or mean != mean:
        return "-"
    if percent:
        mean, error = 100 * mean, None if error is None else 100 * error
        digits = 1 if error is None or error >= 0.05 else 2
        text = f"{mean:.{digits}f}"
        return f"{text} %" if error is None else f"{text} ± {error:.{digits}f} %"
    return number(mean) if error is None else f"{mean:.4g} ± {error:.1g}"

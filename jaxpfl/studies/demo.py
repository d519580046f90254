"""Demos of personalised estimation: examples with published answers, and real elections."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from jaxpfl.data import Elections, load_elections
from jaxpfl.estimators import ebnm, inputs, learned_gaussian
from jaxpfl.estimators.normal_means import homogeneity, james_stein
from jaxpfl.studies import demo_data
from jaxpfl.studies.demo_counties import counties, polls
from jaxpfl.studies.demo_shown import Shown
from jaxpfl.studies.plots import color
from jaxpfl.studies.study import Block, Read, Results, Study
from jaxpfl.support.presentation import GRID, INK, new_axes, new_table, save

Example: TypeAlias = Literal["batting", "schools", "elections", "polls"]

_SHOWN = 30
"""Most clients that are listed each by itself."""


@dataclass(frozen=True)
class DemoSettings:
    """A data set, and the level of its intervals."""

    example: Example = field(default="batting", metadata={"by_place": True})
    """batting (18 batters, Efron and Morris), schools (eight effects of coaching, Rubin), elections (counties, the last
    from those before), or polls (of 20 voters of each county, drawn from its real votes)."""
    level: float = 0.95
    """Level of the intervals."""
    data_dir: str | None = None
    """Folder that holds elections/county_winners_2000_2020.csv; JAXPFL_DATA_DIR unless given."""

    def check(self) -> None:
        """Check the settings.

        Raises:
          JaxpflError: the name, its value, and what is allowed.
        """
        inputs.level(self.level, np.float64)


def run(given: DemoSettings, elections: Elections | None = None) -> Results:
    """Estimate an example's parameters.

    Args:
      given: the settings.
      elections: those of the data directory, unless given; of the examples elections and polls alone.

    Returns:
      Results whose summary has, where later data are known, ``total_squared_error`` by estimator; every client's
      estimates in ``clients`` (up to thirty); and the example's published figures in ``published``.

    Raises:
      JaxpflError: a level outside (0, 1), or no elections.
    """
    given.check()
    with jax.enable_x64(True):
        if given.example == "batting":
            shown = batting(given.level)
        elif given.example == "schools":
            shown = schools(given.level)
        else:
            found = load_elections(given.data_dir) if elections is None else elections
            shown = (counties if given.example == "elections" else polls)(found, given.level)
    result: dict[str, Any] = {
        "study": "demo",
        "settings": {name: value for name, value in vars(given).items() if name != "data_dir"},
        "number_of_clients": len(shown.names),
    }
    if shown.truth is not None:
        truth = shown.truth
        result["total_squared_error"] = {
            name: float(((values - truth) ** 2).sum()) for name, values in shown.estimates.items()
        }
    result |= shown.facts
    if len(shown.names) <= _SHOWN:
        result["clients"] = rows(shown)
    return Results(
        json=result, tables=lambda: tables(shown, result), plots=lambda folder: [write_plot(folder, shown, given.level)]
    )


def batting(level: float) -> Shown:
    """Eighteen batters on the arcsine scale: James and Stein's estimate of the rest of their season from 45 at bats."""
    names, early, later = demo_data.batters()
    x, truth = demo_data.arcsine(early), demo_data.arcsine(later)
    stein = james_stein(x, 1.0)
    low, high = learned_gaussian_interval(x, np.ones_like(x), level)
    estimates = {
        "local": x,
        "global": np.full_like(x, x.mean()),
        "personalized": np.asarray(stein.mean),
        "normal prior": np.asarray(ebnm(x, 1.0).mean),
    }
    on_averages = {name: float(((demo_data.average(v) - later) ** 2).sum()) for name, v in estimates.items()}
    facts = {
        "weight": float(stein.weight),
        "homogeneity": told(x, np.ones_like(x)),
        "total_squared_error_of_averages": on_averages,
        "published": {"local": 17.58, "personalized": 5.00, "weight": 0.209},
    }
    ratio = float(((x - truth) ** 2).sum() / ((estimates["personalized"] - truth) ** 2).sum())
    return Shown(
        "18 batters of 1970 after 45 at bats",
        "sqrt(45) arcsin(2 average - 1)",
        names,
        estimates,
        low,
        high,
        truth,
        facts,
        [
            f"James and Stein's weight of a batter's own average: {facts['weight']:.3f} (published .209)",
            f"each batter alone errs {ratio:.2f} times as much; on the averages themselves "
            f"{on_averages['local']:.4f} against {on_averages['personalized']:.4f}",
        ],
    )


def schools(level: float) -> Shown:
    """Eight schools: the likeliest spread is zero, and intervals must not take it for known."""
    names, x, s = demo_data.schools()
    plug_in = ebnm(x, s)
    center, _ = learned_gaussian.posterior(jnp.asarray(x)[:, None], s**2)
    low, high = learned_gaussian_interval(x, s, level)
    test = told(x, s)
    facts = {
        "pooled": {"mean": test["mean"], "stderr": test["stderr"]},
        "sigma_theta": float(plug_in.prior.sd),
        "homogeneity": test,
        "plug_in_interval": [float(end[0]) for end in plug_in.interval(level)],
        "published": {"mean": 7.69, "stderr": 4.07},
    }
    estimates = {
        "local": x,
        "global": np.full_like(x, test["mean"]),
        "personalized": np.asarray(center)[:, 0],
        "normal prior": np.asarray(plug_in.mean),
    }
    return Shown(
        "Eight schools, effects of coaching",
        "points of a test score",
        names,
        estimates,
        low,
        high,
        None,
        facts,
        [
            f"all together: {test['mean']:.2f} ± {test['stderr']:.2f} (published 7.69 ± 4.07); "
            f"Q = {test['statistic']:.2f} with {test['degrees']:.0f} degrees of freedom, p = {test['p_value']:.2f}",
            f"the likeliest spread of the effects is {facts['sigma_theta']:.2g}: with it as known all intervals have a "
            "length of zero; those of the table integrate over the spread and the mean",
        ],
    )


def learned_gaussian_interval(x: np.ndarray, s: np.ndarray, level: float) -> tuple[np.ndarray, np.ndarray]:
    """Intervals that integrate over the mean and the spread of the clients, [m] each."""
    ends = learned_gaussian.morris(jnp.asarray(x)[:, None], s**2, level)
    return np.asarray(ends[0])[:, 0], np.asarray(ends[1])[:, 0]


def told(x: np.ndarray, s: np.ndarray) -> dict[str, float]:
    """Cochran's test as JSON."""
    return {name: float(value) for name, value in homogeneity(x, s)._asdict().items()}


def rows(shown: Shown) -> list[dict[str, Any]]:
    """Every client as JSON."""
    more = {} if shown.truth is None else {"later": shown.truth}
    columns = shown.estimates | {"low": shown.low, "high": shown.high} | more
    return [{"client": n} | {k: float(v[i]) for k, v in columns.items()} for i, n in enumerate(shown.names)]


def tables(shown: Shown, result: dict[str, Any]) -> list[Block]:
    """Total errors where they are known, every client of an example of few, and the notes."""
    blocks: list[Block] = []
    if "total_squared_error" in result:
        table = new_table(f"{shown.title}: total squared error", f"of {shown.unit}")
        table.add_column("estimator", style="bold", no_wrap=True)
        for name in ("total", "share of local's"):
            table.add_column(name, justify="right", no_wrap=True)
        local = result["total_squared_error"]["local"]
        for name, error in result["total_squared_error"].items():
            table.add_row(name, f"{error:.2f}", f"{100 * error / local:.1f} %")
        blocks.append(table)
    if "clients" in result:
        percent = 100 * result["settings"]["level"]
        table = new_table(shown.title, f"{shown.unit}; intervals of {percent:g} %")
        table.add_column("client", style="bold", no_wrap=True)
        names = [name for name in ("local", "personalized", "low", "high", "later") if name in result["clients"][0]]
        for name in names:
            table.add_column(name, justify="right", no_wrap=True)
        for row in result["clients"]:
            table.add_row(row["client"], *(f"{row[name]:.2f}" for name in names))
        blocks.append(table)
    return [*blocks, *shown.notes]


def write_plot(folder: Path, shown: Shown, level: float) -> Path:
    """Plot every client's own and personalised estimate, with its interval and what was observed later."""
    local, personal = shown.estimates["local"], shown.estimates["personalized"]
    # Counties with equal numbers of wins have one estimate: each once.
    at, place, count = np.unique(local, return_index=True, return_counts=True)
    if len(shown.names) <= _SHOWN:
        place = np.arange(len(local))
        at, count = local, np.ones(len(local))
    figure, axes = new_axes(f"local estimate: {shown.unit}", f"estimate and {100 * level:g} % interval", shown.title)
    axes.axline((at.min(), at.min()), slope=1, color=GRID, linewidth=1.5, zorder=0)
    off = [personal[place] - shown.low[place], shown.high[place] - personal[place]]
    style = {"fmt": "o", "markersize": 4.5, "capsize": 2.5, "linewidth": 1.2}
    axes.errorbar(at, personal[place], yerr=off, color=color("personalized"), label="personalised", **style)
    axes.plot(at, at, ".", color=color("local"), label="local")
    if shown.truth is not None:
        several = [shown.truth[local == own].mean() for own in at]
        later = np.where(count > 1, several, shown.truth[place])
        axes.plot(at, later, "x", color=INK, label="observed")
    axes.legend(frameon=False, fontsize=9)
    folder.mkdir(parents=True, exist_ok=True)
    return save(figure, folder, "shrinkage")


def _read(given: DemoSettings) -> Read:
    given.check()
    if given.example not in ("elections", "polls"):
        return Read(None, None)
    found = load_elections(given.data_dir)
    return Read(found, (found.years, found.republican, found.votes))


STUDY = Study(DemoSettings, run, reads=_read)

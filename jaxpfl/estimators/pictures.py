"""Pictures of answers on axes of matplotlib: the estimates beside the clients' own, and the fit of the population.

`jaxpfl estimate --output` draws the same ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxpfl.estimators import inputs, rate_scores
from jaxpfl.estimators.normal_means.answer import NormalMeans
from jaxpfl.estimators.normal_means.area import AreaMeans
from jaxpfl.estimators.normal_means.groups import GroupMeans
from jaxpfl.estimators.normal_means.unit_level import UnitMeans
from jaxpfl.estimators.rate_answers import RateMixture, Rates
from jaxpfl.estimators.rate_regression import RegressedRates
from jaxpfl.support.console import COLORS, INK, literal, new_axes
from jaxpfl.support.errors import JaxpflError, shown

FALSE_ALARMS = 0.05
"""Share of files in which a client is called outlying though the fitted population is right."""

_LOCAL, _PERSONALIZED, _GLOBAL = COLORS[0], COLORS[1], COLORS[3]
_KINDS = (NormalMeans, AreaMeans, GroupMeans, UnitMeans, Rates, RateMixture, RegressedRates)
_FEW = 60
_MOST_POINTS, _BAND_PLACES, _NAMED = 4000, 300, 6


class Shrunken(NamedTuple):
    """Estimates and interval ends of all clients, [m] each, their numbers of samples [m], and the mean of all."""

    local: np.ndarray
    personalized: np.ndarray
    low: np.ndarray
    high: np.ndarray
    sizes: np.ndarray
    mean: float


def shrinkage(answer: Any, axes: Any = None, *, level: float = 0.95) -> Any:
    """Draw every client's personalised estimate over its own, with intervals and the mean of all; return the axes.

    Args:
      answer: of `ebnm`, `fay_herriot`, `ebnm_groups`, `unit_level`, `ebbinomial`, `ebpoisson`, or one of the last two
        about a regression.
      axes: of matplotlib; those of a new figure unless given.
      level: of the intervals, which are those of ``answer.interval``.

    Raises:
      JaxpflError: for another answer, one of several problems, what are no axes, or a level outside (0, 1).
    """
    known = _checked(answer)
    inputs.level(level)
    axes = _axes(axes, "local estimate", "personalised estimate", "shrinkage")
    low, high = (np.asarray(end) for end in answer.interval(level))
    draw_shrinkage(axes, Shrunken(*_estimates(known), low, high, *_sizes_and_mean(known)), level)
    axes.legend(frameon=False, fontsize=9)
    return axes


def quantiles(answer: Any, axes: Any = None) -> Any:
    """Draw the ordered normal scores of all clients beside the expected ones, and name the outlying; return the axes.

    The shaded band has 95 % of files at each place if the fitted population is right; it takes that for known, so that
    with few clients the points lie within it too often.

    Args:
      answer: as that of `shrinkage`.
      axes: of matplotlib; those of a new figure unless given.

    Raises:
      JaxpflError: for another answer, one of several problems, counts of which the scores have too many terms, and
        what are no axes.
    """
    known = _checked(answer)
    if isinstance(known, NormalMeans):
        scores = known.scores
    elif isinstance(known, AreaMeans | GroupMeans | UnitMeans):
        scores = known.residual
    else:
        scores = rate_scores.scores(known)
        if scores is None:
            raise JaxpflError(f"counts of {len(known.mean)} clients have scores of too many terms to be drawn")
    axes = _axes(axes, "expected normal score", "score under the fitted marginal", "quantiles")
    labels = getattr(known, "labels", None)
    names = [str(name) for name in (range(len(known.mean)) if labels is None else labels.index)]
    draw_quantiles(axes, np.asarray(scores), names)
    return axes


def far_out(scores: np.ndarray) -> np.ndarray:
    """Mask of the outlying clients: two-sided p-values below `FALSE_ALARMS` over their number (Bonferroni), [m]."""
    from scipy import special

    return 2 * special.ndtr(-np.abs(scores)) < FALSE_ALARMS / len(scores)


def draw_shrinkage(axes: Any, of: Shrunken, level: float) -> None:
    """Draw estimates over the clients' own, without a legend."""
    ends = [float(min(of.local.min(), of.personalized.min())), float(max(of.local.max(), of.personalized.max()))]
    axes.plot(ends, ends, color=INK, linewidth=1, linestyle=":", zorder=1, label="no shrinkage")
    few = min(1.0, _FEW / len(of.sizes))  # fainter bars and smaller points for many clients
    axes.vlines(
        of.local,
        of.low,
        of.high,
        color=_PERSONALIZED,
        alpha=0.15 + 0.4 * few,
        linewidth=0.6 + 1.0 * few,
        label=f"{100 * level:g} % interval",
    )
    axes.scatter(
        of.local,
        of.personalized,
        s=(4 + 40 * of.sizes / of.sizes.max()) * (0.3 + 0.7 * few),
        color=_PERSONALIZED,
        alpha=0.5 + 0.4 * few,
        linewidths=0,
        zorder=3,
        label="a client, larger for more samples",
    )
    axes.axhline(of.mean, color=_GLOBAL, linewidth=1, linestyle="--", zorder=2, label="estimated mean of all")


def draw_quantiles(axes: Any, scores: np.ndarray, names: Sequence[str]) -> None:
    """Draw the ordered scores [m] of named clients beside the expected ones, with a legend."""
    from scipy import special

    m = len(scores)
    order = np.argsort(scores, kind="stable")
    expected = special.ndtri((np.arange(m) + 0.5) / m)
    places = np.unique(np.round(m * special.ndtr(np.linspace(expected[0], expected[-1], _BAND_PLACES)) + 0.5))
    ends = [special.ndtri(special.betaincinv(places, m + 1 - places, p)) for p in (0.025, 0.975)]
    at = special.ndtri((places - 0.5) / m)
    axes.fill_between(at, *ends, color=_LOCAL, alpha=0.2, linewidth=0, label="95 % of files at each place")
    axes.plot(expected[[0, -1]], expected[[0, -1]], color=INK, linewidth=1, linestyle=":", label="the prior fits")
    shown_ones = np.ones(m, bool)
    if m > _MOST_POINTS:  # all of either tail
        shown_ones = np.zeros(m, bool)
        shown_ones[np.unique(np.round(np.linspace(0, m - 1, _MOST_POINTS // 2)).astype(int))] = True
        shown_ones[: _MOST_POINTS // 4] = shown_ones[-_MOST_POINTS // 4 :] = True
    outer = far_out(scores)[order]
    for which, color, label in ((~outer, _PERSONALIZED, "a client"), (outer, _GLOBAL, "an outlying client")):
        if which.any():
            drawn = which & shown_ones
            axes.plot(expected[drawn], scores[order][drawn], ".", color=color, label=label)
    by_distance = sorted(np.flatnonzero(outer), key=lambda place: -abs(scores[order[place]]))
    for place in by_distance[:_NAMED]:
        axes.annotate(
            literal(names[int(order[place])])[:20], (expected[place], scores[order[place]]), fontsize=8, color=INK,
            xytext=(-6 if expected[place] > 0 else 6, 0), textcoords="offset points", va="center",
            ha="right" if expected[place] > 0 else "left",
        )  # fmt: skip
    axes.legend(frameon=False, fontsize=9, loc="upper left")


def _checked(answer: Any) -> Any:
    """The answer in NumPy, that of rates for one about a regression.

    Raises:
      JaxpflError: for none that can be drawn.
    """
    if not isinstance(answer, _KINDS):
        raise JaxpflError(f"answer must be that of ebnm, ebbinomial or their like, got {shown(answer)}")
    if np.ndim(answer.mean) != 1:
        raise JaxpflError(f"answer must be of one problem, got means of shape {np.shape(answer.mean)}")
    if isinstance(answer, RegressedRates):
        answer = answer.rates._replace(labels=answer.labels)
    return answer if isinstance(answer, NormalMeans) else jax.tree.map(np.asarray, answer)


def _axes(axes: Any, xlabel: str, ylabel: str, title: str) -> Any:
    """The axes, labelled; new ones unless given.

    Raises:
      JaxpflError: for what are no axes, as an array of several.
    """
    if axes is None:
        return new_axes(xlabel, ylabel, title)[1]
    from matplotlib.axes import Axes

    if not isinstance(axes, Axes):
        raise JaxpflError(f"axes must be one Axes of matplotlib, got {type(axes).__name__}")
    axes.set(xlabel=xlabel, ylabel=ylabel)
    return axes


def _estimates(answer: Any) -> tuple[np.ndarray, np.ndarray]:
    """Local and personalised estimates, [m] each."""
    if isinstance(answer, Rates | RateMixture):
        own = answer.events / answer.size
    else:
        own = answer.own if isinstance(answer, UnitMeans) else answer.x
    return np.asarray(own), np.asarray(answer.mean)


def _sizes_and_mean(answer: Any) -> tuple[np.ndarray, float]:
    """Numbers of samples, [m], one each of estimates with standard errors, and the fitted mean of all."""
    sizes = getattr(answer, "size", None)
    if isinstance(answer, Rates | RateMixture):
        mean = np.mean(answer.prior_mean)
    elif isinstance(answer, GroupMeans):
        mean = answer.overall
    else:
        mean = answer.prior.mean if isinstance(answer, NormalMeans) else np.mean(answer.regression)
    return np.ones(len(answer.mean)) if sizes is None else np.asarray(sizes), float(mean)

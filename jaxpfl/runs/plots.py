"""Plots of a run folder, such as the scores over the rounds, and each client's gain over local training."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

import numpy as np

from jaxpfl.engine.evaluate import ACCURACY, Headline, client_means, fraction_hurt
from jaxpfl.support.console import INK, entitle, literal, new_axes, shades
from jaxpfl.support.errors import label

Records: TypeAlias = list[dict[str, Any]]
"""Records in ``metrics.jsonl``."""
Clients: TypeAlias = Mapping[str, np.ndarray]
"""Arrays ``client_names`` and ``unseen_client_names`` of ``clients.npz``."""
Arrays: TypeAlias = Mapping[str, Mapping[str, np.ndarray]]
"""Method -> arrays of its .npz file."""

_DEVIATION, _RANGE = "± 1 standard deviation over seeds", "from lowest to highest seed"
LOCAL = "local"
_MOST_BESIDE = 6
"""Largest number of methods for which the legend is inside the axes and the names below the axes are horizontal."""


def figures(
    records: Records, arrays: Arrays, headline: Headline = ACCURACY, who: Clients | None = None
) -> dict[str, Any]:
    """Plot the metrics over the rounds, and the clients' scores after the last round.

    Args:
      records: records of the run.
      arrays: scores of the methods.
      headline: metric of the scores.
      who: names of the clients, if they are known.

    Returns:
      Name of the plot -> matplotlib figure; figures that would be empty are left out.
    """
    colors = dict(zip(arrays, shades(len(arrays)), strict=True))
    recorded = {name for record in records for name in record}
    clients, unseen = (
        {method: own[name] for method, own in arrays.items() if name in own}
        for name in (f"after_{headline.name}", f"unseen_after_{headline.name}")
    )
    names, newcomers = ((who or {}).get(f"{which}client_names") for which in ("", "unseen_"))
    drawn = {
        headline.name: _scores(records, colors, headline),
        "clients": _clients(clients, colors, "Clients after the last round", headline, names),
        "unseen": _clients(unseen, colors, "Unseen clients after their adaptation", headline, newcomers),
    }
    if "psi" in recorded:
        title = "Estimated spread of the clients (psi)"
        drawn["psi"] = _metric(records, colors, "psi", "psi at the server", title)
    if "upload_norm" in recorded:
        drawn["uploads"] = _uploads(records, colors)
    if "bits_up" in recorded:
        score = f"test {headline.words}, mean over clients"
        drawn[f"{headline.name}-by-bytes"] = _bytes_plot(
            records, colors, "evaluation", headline.personalized, score, percent=headline.percent
        )
        loss = "training loss, mean over the cohort"
        drawn["loss-by-bytes"] = _bytes_plot(records, colors, "round", "train_loss", loss)
    return {name: figure for name, figure in drawn.items() if figure is not None}


def _rounds_axes(ylabel: str, title: str) -> tuple[Any, Any]:
    from matplotlib.ticker import MaxNLocator

    figure, axes = new_axes("round", ylabel, title)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    return figure, axes


def _series(records: Records, method: str, kind: str, *names: str) -> tuple[np.ndarray, ...]:
    """Collect the named metrics over the rounds, from the records that contain all of them.

    Returns:
      The T rounds [T], and for each metric its values [T, S] for S seeds.
    """
    rows = [r for r in records if r["method"] == method and r["kind"] == kind and {*names} <= r.keys()]
    values = ([[np.nan if v is None else v for v in r[name]] for r in rows] for name in names)
    return np.array([r["round"] for r in rows]), *(np.array(v, dtype=float) for v in values)


def _marker(rounds: np.ndarray, **style: Any) -> dict[str, Any]:
    """Return the style of a line's dots, which make few points visible; no style for 15 rounds or more."""
    return {"marker": "o", "markersize": 4, **style} if len(rounds) < 15 else {}


def _spread(values: np.ndarray) -> np.ndarray:
    """Return the standard deviation of values [T, S] over the S seeds; zero if there is one seed."""
    return values.std(axis=1, ddof=1) if values.shape[1] > 1 else np.zeros(len(values))


def _line(axes: Any, rounds: np.ndarray, values: np.ndarray, color: str, label: str, *, ranges: bool = False) -> None:
    """Plot the mean over the seeds, with a band (an error bar for a single round) of one standard deviation.

    With ``ranges``, the band extends from the lowest to the highest value over the seeds, so it stays within the
    metric's bounds.
    """
    mean = values.mean(axis=1)
    axes.plot(rounds, mean, color=color, linewidth=2, label=label, **_marker(rounds))
    if values.shape[1] == 1:
        return
    low, high = (values.min(axis=1), values.max(axis=1)) if ranges else (mean - _spread(values), mean + _spread(values))
    if len(rounds) == 1:
        axes.errorbar(rounds, mean, [mean - low, high - mean], color=color, alpha=0.6, capsize=4)
    else:
        axes.fill_between(rounds, low, high, color=color, alpha=0.15, linewidth=0)


def _legend(axes: Any, spread: str | None, *, cut: bool = False, beside: bool = False) -> None:
    """Add the legend.

    Args:
      axes: axes of the plot.
      spread: meaning of the bands or bars; None if there are none.
      cut: whether the plot has markers for values beyond the axis.
      beside: whether to place the legend outside the axes, which is always done if there are many lines.
    """
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    handles = axes.get_legend_handles_labels()[0]
    beside |= len(handles) > _MOST_BESIDE
    if spread is not None:
        handles.append(Patch(color="#888888", alpha=0.3, linewidth=0, label=spread))
    if cut:
        mark = {"color": "#888888", "marker": "v", "markersize": 5, "linestyle": "none"}
        handles.append(Line2D([], [], label="beyond the axis", **mark))
    if beside:
        axes.figure.legend(handles=handles, frameon=False, loc="outside right upper", fontsize=9)
        axes.figure.set_size_inches(9.2, 4.8)
    else:
        axes.legend(handles=handles, frameon=False, loc="best")


def _scores(records: Records, colors: dict[str, str], headline: Headline = ACCURACY) -> Any:
    """Plot the scores of the personalized models (solid) and of the global models (dashed) over the rounds."""
    scale, of_globals = headline.scale, f"global_{headline.name}"
    figure, axes = _rounds_axes(f"test {headline.words}, mean over clients", "")
    shown, of_global, several = [], {}, False
    for method, color in colors.items():
        rounds, values = _series(records, method, "evaluation", headline.personalized)
        if not len(rounds):
            continue
        several |= values.shape[1] > 1
        shown += [scale * (values.mean(axis=1) + side * _spread(values)) for side in (-1, 1)]
        _line(axes, rounds, scale * values, color, method)
        both, own, global_values = _series(records, method, "evaluation", headline.personalized, of_globals)
        # If the personalized models equal the global model, one line represents both.
        if len(both) and not np.allclose(own, global_values, equal_nan=True):
            of_global[method] = both, scale * global_values.mean(axis=1)
    entitle(axes, f"Personalized models{' (dashed: global model)' * bool(of_global)}")
    if not any(np.isfinite(part).any() for part in shown):  # all scores are NaN, because no client has test examples
        return figure
    # The axis is scaled to the personalized models only, because an untrained global model may score far lower.
    every = np.concatenate(shown)
    low, high = np.nanmin(every), np.nanmax(every)
    margin = max(0.05 * (high - low), 0.5 if headline.percent else 1e-9)
    low, high = low - margin, high + margin
    cut = False
    for method, (at, mean) in of_global.items():
        dots = _marker(at, markerfacecolor="white")
        axes.plot(at, mean, color=colors[method], linewidth=1.2, linestyle="--", **dots)
        for beyond, edge, marker in ((mean < low, low, "v"), (mean > high, high, "^")):
            axes.plot(
                at[beyond], np.full(beyond.sum(), edge), marker, color=colors[method], markersize=5, clip_on=False
            )
            cut |= bool(beyond.any())
    axes.set_ylim(low, high)
    axes.yaxis.set_major_formatter(headline.ticks)
    _legend(axes, _DEVIATION if several else None, cut=cut, beside=bool(of_global))
    return figure


def _name_worst(axes: Any, x: np.ndarray, y: np.ndarray, names: np.ndarray, *, lower: bool = False) -> None:
    """Write the names of the three clients with the worst values beside their dots, unless they would overlap."""
    worst = np.argsort(-y if lower else y, kind="stable")[:3]
    beside = {"textcoords": "offset points", "xytext": (4, -1), "va": "top"}
    for rank, i in enumerate(worst):
        if all(abs(y[i] - y[j]) > 0.03 * np.ptp(y) for j in worst[:rank]):
            axes.annotate(literal(label(str(names[i]))), (x[i], y[i]), fontsize=8, color=INK, **beside)


def _clients(
    scores: dict[str, np.ndarray], colors: dict[str, str], title: str, headline: Headline = ACCURACY, names: Any = None
) -> Any:
    """Plot each client's score (mean over seeds) as a dot, with mean and quartiles; None if no client has a score."""
    if not any(np.isfinite(values).any() for values in scores.values()):
        return None
    figure, axes = new_axes(
        "", f"test {headline.words} of a client, mean over seeds", f"{title} (bars: mean and quartiles)"
    )
    jitter = np.random.default_rng(0)
    for place, (method, values) in enumerate(scores.items()):
        client = headline.scale * client_means(values)
        shown = np.isfinite(client)
        client = client[shown]
        if not len(client):
            continue
        dots = place + jitter.uniform(-0.22, 0.22, len(client))
        axes.scatter(dots, client, s=16, color=colors[method], alpha=0.45, linewidths=0)
        if names is not None:
            _name_worst(axes, dots, client, names[shown], lower=headline.lower)
        low, high = np.quantile(client, [0.25, 0.75])
        axes.vlines(place, low, high, color=INK, linewidth=2)
        axes.hlines(client.mean(), place - 0.3, place + 0.3, color=INK, linewidth=2)
        beside = {"va": "bottom", "textcoords": "offset points", "xytext": (2, 1)}
        words = f"{client.mean():.1f}" if headline.percent else f"{client.mean():.4g}"
        axes.annotate(words, (place + 0.02, client.mean()), fontsize=9, color=INK, **beside)
    slanted = {"rotation": 35, "ha": "right", "rotation_mode": "anchor"} if len(scores) > _MOST_BESIDE else {}
    axes.set_xticks(range(len(scores)), list(scores), **slanted)
    axes.set_xlim(-0.6, len(scores) - 0.2)
    figure.set_figwidth(max(7.2, 0.8 * len(scores)))
    axes.yaxis.set_major_formatter(headline.ticks)
    return figure


def _metric(records: Records, colors: dict[str, str], name: str, ylabel: str, title: str) -> Any:
    """Plot a metric over the rounds for every method that has it; return None if no method has it."""
    found = {method: _series(records, method, "round", name) for method in colors}
    curves = {method: (rounds, values) for method, (rounds, values) in found.items() if len(rounds)}
    if not curves:
        return None
    figure, axes = _rounds_axes(ylabel, title)
    for method, (rounds, values) in curves.items():
        _line(axes, rounds, values, colors[method], method, ranges=True)
    _legend(axes, _RANGE if any(values.shape[1] > 1 for _, values in curves.values()) else None)
    return figure


def _uploads(records: Records, colors: dict[str, str]) -> Any:
    """Plot the norms of private uploads before clipping, and the clipping norm (dashed)."""
    figure = _metric(
        records, colors, "upload_norm", "L2 norm, mean over clients", "Uploads before clipping (dashed: clipping norm)"
    )
    if figure is None:
        return None
    for method, color in colors.items():
        rounds, limits = _series(records, method, "round", "clipping_norm")
        if len(rounds):
            figure.axes[0].plot(rounds, limits.mean(axis=1), color=color, linewidth=1.2, linestyle="--")
    figure.axes[0].set_ylim(bottom=0)
    return figure


def _bytes_plot(
    records: Records, colors: dict[str, str], kind: str, name: str, ylabel: str, *, percent: bool = False
) -> Any:
    """Plot a metric over the bytes that all clients uploaded, for the methods that record these bytes.

    Return None if no method records the bytes, as in a run without compressed uploads.
    """
    found = {method: _series(records, method, kind, "bits_up", name)[1:] for method in colors}
    curves = {method: (bits, values) for method, (bits, values) in found.items() if len(bits)}
    if not curves:
        return None
    from matplotlib.ticker import EngFormatter

    figure, axes = new_axes("uploaded so far by all clients", ylabel, "By uploaded bytes")
    scale = 100 if percent else 1
    for method, (bits, values) in curves.items():
        _line(axes, bits.mean(axis=1) / 8, scale * values, colors[method], method)
    axes.set_xlim(left=0)
    axes.xaxis.set_major_formatter(EngFormatter("B"))
    if scale == 100:
        axes.yaxis.set_major_formatter("{x:g} %")
    _legend(axes, _DEVIATION if any(values.shape[1] > 1 for _, values in curves.values()) else None)
    return figure


def gains(arrays: Arrays, headline: Headline, names: np.ndarray | None = None) -> Any:
    """Plot each client's gain over local training, with the clients sorted from the smallest to the largest gain.

    Args:
      arrays: method -> arrays of its .npz file.
      headline: metric of the scores.
      names: names of the clients, [m], if known.

    Returns:
      The matplotlib figure; None if there is no local training, no other method, or no score to compare.
    """
    name = f"after_{headline.name}"
    others = {method: own[name] for method, own in arrays.items() if method != LOCAL and name in own}
    local = arrays.get(LOCAL, {}).get(name)
    if local is None or not others:
        return None
    unit = " in percentage points" if headline.percent else ""
    figure, axes = new_axes("clients, from worst to best in %", f"gain in {headline.words}{unit}", "")
    entitle(axes, "Gain over local training (mean over seeds)")
    colors = dict(zip(arrays, shades(len(arrays)), strict=True))
    for method, scores in others.items():
        difference = headline.scale * headline.better(client_means(scores) - client_means(local))
        order = np.argsort(difference)[: np.isfinite(difference).sum()]  # sorting puts NaN last
        if not len(order):
            continue
        client = difference[order]
        hurt = 100 * fraction_hurt(scores, local, lower=headline.lower)
        at = 100 * (np.arange(len(client)) + 0.5) / len(client)
        axes.plot(at, client, color=colors[method], linewidth=2, label=f"{method}: {hurt:.0f} % worse off")
        if names is not None:
            _name_worst(axes, at, client, names[order])
    if not axes.lines:
        return None
    axes.axhline(0, color=INK, linewidth=1)
    axes.set_xlim(0, 100)
    _legend(axes, None)
    return figure

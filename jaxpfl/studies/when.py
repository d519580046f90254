"""Study of when collaboration helps: theoretical gain, clients and epsilon needed for a gain, and phase diagrams."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxpfl.estimators import gaussian_closed_form as when
from jaxpfl.studies import gaussian as study
from jaxpfl.studies.gaussian import GaussianPopulation
from jaxpfl.studies.report import log_ticks
from jaxpfl.studies.study import Results, Study
from jaxpfl.support.console import INK, save

_SHARES = (0.25, 0.5, 0.75)


def run(given: GaussianPopulation) -> dict[str, Any]:
    """Compute the theory for these settings, without simulation.

    Returns:
      ``gain_over_local``: gain of the personalized estimate over the local estimate, with private messages if epsilon
      is given, else quantized messages if bits are given, else exact messages. ``most_gain``: gain with infinitely many
      clients. ``global_gain``: gain of a single estimate for all clients. ``careless_gain``: gain of a personalized
      estimate whose weight ignores the messages' noise. ``needs``: a list with a dict for each of several gains.
      In it, ``gain`` is ``share_of_most`` times ``most_gain``, and ``clients`` is the number of clients with which this
      gain is reached at the settings' noise. ``one_bit_epsilon`` is the smallest epsilon at which the settings' number
      of clients reaches the gain with the one-bit mechanism.

    Raises:
      JaxpflError: as in `GaussianPopulation.check`.
    """
    given.check()
    with jax.enable_x64(True):
        m, s2, st2 = given.clients, given.s2, given.st2
        added = study.sent_variance(given)
        limit = float(when.most_gain(s2, st2))
        needs = []
        for share in _SHARES:
            target = share * limit
            clients = float(when.clients_needed(target, s2, st2, added))
            noise = float(when.most_noise(target, m, s2, st2))
            needs.append(
                {
                    "share_of_most": share,
                    "gain": target,
                    "clients": int(clients) if math.isfinite(clients) else None,
                    "one_bit_epsilon": _one_bit_epsilon(given.bound, noise) if given.dim == 1 else None,
                }
            )
        return {
            "study": "when",
            "settings": dict(vars(given)),
            "gain_over_local": float(when.gain(m, s2, st2, added)),
            "most_gain": limit,
            "global_gain": float(when.global_gain(m, s2, st2, added)),
            "careless_gain": float(when.careless_gain(m, s2, st2, added)),
            "added_variance": added,
            "needs": needs,
        }


def verdict(result: dict[str, Any]) -> list[str]:
    """Sentences that summarize the result of `run`."""
    gain, limit, m = result["gain_over_local"], result["most_gain"], result["settings"]["clients"]
    if gain < 0.05:
        what = "hardly helps"
    elif gain < 0.5 * limit:
        what = "helps, well below what more clients or less noise would give"
    else:
        what = "helps"
    lines = [f"collaboration {what}: it avoids {100 * gain:.1f} % of the local error (at most {100 * limit:.1f} %)"]
    for row in result["needs"]:
        noise = " at this noise" if result["added_variance"] else ""
        needs = "no number of clients" if row["clients"] is None else f"{row['clients']} clients{noise}"
        least = row["one_bit_epsilon"]
        private = "" if least is None else f", or {m} that send one bit each at epsilon {least:.3g}"
        lines.append(f"a gain of {100 * row['gain']:.1f} % requires {needs}{private}")
    for name, what in (("global_gain", "one estimate for all"), ("careless_gain", "a weight that ignores the noise")):
        change = "avoids" if result[name] >= 0 else "adds"
        lines.append(f"{what} {change} {100 * abs(result[name]):.1f} %")
    return lines


def _one_bit_epsilon(b: float, noise: float) -> float | None:
    """Return the epsilon at which the one-bit mechanism adds a given variance.

    With messages clipped to [-b, b], the mechanism adds the variance b^2 coth^2(epsilon / 2).

    Args:
      b: clipping bound.
      noise: variance to add.

    Returns:
      The epsilon; None if the mechanism adds a larger variance at every epsilon.
    """
    if not noise > b**2:  # the condition is also true for NaN
        return None
    return 2 * math.atanh(b / math.sqrt(noise))


def write_plots(folder: Path, given: GaussianPopulation) -> list[Path]:
    """Plot the gain by heterogeneity and number of clients (left panel), and by heterogeneity and epsilon (right)."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10.4, 4.8), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    differ = np.geomspace(0.05, 20, 160)  # sigma_theta relative to a client's standard error
    counts = np.geomspace(2, max(30 * given.clients, 1e4), 160)
    s2, st2 = given.s2, given.s2 * differ[:, None] ** 2
    added = study.sent_variance(given)
    spread = {"s2": s2, "st2": st2}
    surface = np.asarray(when.gain(counts, **spread, sq2=added))
    image = _phases(left, counts, differ, surface, np.asarray(when.careless_gain(counts, **spread, sq2=added)))
    left.set(xlabel="clients m", ylabel="sigma_theta / (sigma_x / sqrt n)")
    how = "exact messages" if not added else f"messages with an added variance of {added:.3g}"
    left.set_title(f"n = {given.samples}, {how}", loc="left", fontsize=10)
    epsilons = np.geomspace(0.05, 10, 160)
    if given.dim == 1:
        noise = (given.bound / np.tanh(epsilons / 2)) ** 2
    else:
        noise = np.array([study.strength(given, float(e)) ** 2 for e in epsilons])
    surface = np.asarray(when.gain(given.clients, **spread, sq2=noise))
    _phases(right, epsilons, differ, surface, np.asarray(when.careless_gain(given.clients, **spread, sq2=noise)))
    mechanism = "one bit" if given.dim == 1 else f"Gaussian mechanism, delta = {given.delta:g}"
    right.set_title(f"m = {given.clients}, {mechanism}", loc="left", fontsize=10)
    right.set(xlabel="epsilon of a client's message")
    for axes, here in ((left, given.clients), (right, given.epsilon)):
        if here is not None and given.sigma_theta > 0:
            axes.plot(here, math.sqrt(given.st2 / s2), "*", color="white", markeredgecolor=INK, markersize=14)
    bar = figure.colorbar(
        image, ax=[left, right], label="fraction of the local error avoided", pad=0.015, ticks=(0, 0.25, 0.5, 0.75, 1)
    )
    bar.ax.yaxis.set_major_formatter(lambda value, _: f"{100 * value:.0f} %")
    text = "When collaboration helps (star: these settings; left of the dashes, ignoring the noise does harm)"
    figure.suptitle(text, x=0.01, ha="left", fontsize=11, fontweight="bold")
    return [save(figure, folder, "phases")]


def _phases(axes: Any, x: np.ndarray, y: np.ndarray, gain: np.ndarray, careless: np.ndarray) -> Any:
    from matplotlib.patheffects import withStroke

    image = axes.contourf(x, y, gain, levels=np.linspace(0, 1, 21), cmap="Blues")
    lines = axes.contour(x, y, gain, levels=[0.05, 0.25, 0.5, 0.75, 0.95], colors=INK, linewidths=0.9)
    labels = axes.clabel(lines, fmt=lambda value: f"{100 * value:.0f} %", fontsize=8, inline=False, colors=INK)
    for label in labels:
        label.set(path_effects=[withStroke(linewidth=2.5, foreground="white")], rotation=0)
    if careless.min() < 0 < careless.max():
        axes.contour(x, y, careless, levels=[0], colors="#d8433f", linewidths=1.6, linestyles="--")
    log_ticks(axes.xaxis, x)
    log_ticks(axes.yaxis, y)
    return image


def _results(given: GaussianPopulation) -> Results:
    result = run(given)
    return Results(result, tables=lambda: verdict(result), plots=lambda folder: write_plots(folder, given))


STUDY = Study(GaussianPopulation, _results)

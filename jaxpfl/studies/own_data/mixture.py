"""The user's own clients as members of k kinds: EM on the file, and each client's probabilities of the kinds."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from scipy.special import logsumexp

from jaxpfl.core import full_precision
from jaxpfl.estimators import base, mixture
from jaxpfl.studies.mixture import MixtureSettings
from jaxpfl.studies.own_data import client_csv, output
from jaxpfl.studies.own_data.client_csv import CsvLayout, OwnFile
from jaxpfl.studies.own_data.samples import sizes_of
from jaxpfl.studies.report import beside
from jaxpfl.studies.study import Block, Results, refuse_given
from jaxpfl.support.console import COLORS, GRID, INK, literal, new_axes, new_table, save, unmarked
from jaxpfl.support.errors import JaxpflError

STEPS, STARTS = 300, 16
"""Steps of EM, and starts of k-means before it."""

_SIMULATED = ("clients", "samples", "dim", "sigma_x", "radius", "iterations", "bits", "repetitions")


class Kinds(NamedTuple):
    """Fitted kinds of a file's clients.

    Attributes:
      result: for the table and JSON: ``kinds``, by the first column of their centers, each with its ``share``,
        ``center`` [d], ``stderr`` of it [d] and number of ``clients``; ``sigma_x`` [d]; ``log_likelihood`` and ``bic``.
      columns: one for each fact of a client, for ``estimates.csv``.
      local, personalized: means, [m, d].
      kind: of each client, from 0, [m].
    """

    result: dict[str, Any]
    columns: dict[str, list]
    local: np.ndarray
    personalized: np.ndarray
    kind: np.ndarray


def run(path: Path, given: MixtureSettings, layout: CsvLayout | None = None) -> Kinds:
    r"""Fit shares p, centers mu and the samples' variances by EM.

    .. math:: X_{ij} \sim N(\mu_{z_i}, \mathrm{diag}(\sigma_1^2, \dots, \sigma_d^2)), \qquad P(z_i = l) = p_l

    Columns are scaled by the standard deviation of samples about their own client's mean, so that they may be of
    different units. A client's estimate is its posterior mean (Theorem 6).

    Raises:
      JaxpflError: for settings that do not apply to own data, a bad file, fewer clients than kinds, none with two
        samples, or a column in which no client's samples differ.
    """
    refuse_given(given, _SIMULATED, "is of simulated data, which a CSV file takes the place of")
    refuse_given(given, ("epsilon", "delta"), "is of simulated data: kinds of your own clients are not private")
    clients = client_csv.read(path, layout)
    samples = [own.reshape(len(own), -1) for own in clients.samples]
    sizes = sizes_of(path, samples)
    given.check()
    if given.components > len(sizes):
        raise JaxpflError(f"components must be at most the {len(sizes)} clients of {path}, got {given.components}")
    client_csv.check_squares(path, clients.columns, samples)
    local = np.array([own.mean(axis=0) for own in samples])
    scatter = sum(((own - mean) ** 2).sum(axis=0) for own, mean in zip(samples, local, strict=True))
    center, scale = local.mean(axis=0), np.sqrt(scatter / (sizes - 1).sum())
    for column, spread in zip(clients.columns, scale, strict=True):
        if not spread > 0:
            raise JaxpflError(f"{path}: {column}: no client's samples differ from each other: kinds have no width")
    with jax.enable_x64(True):
        data = base.stack([(own - center) / scale for own in samples])
        estimator = mixture.em(given.components, steps=STEPS, starts=STARTS)
        made = full_precision.jit(lambda key, data: base.estimate(estimator, key, data))(
            jax.random.key(given.seed), data
        )
    at: mixture.Mixture = made.shared.mixture
    order = np.lexsort(np.asarray(at.mu).T[::-1])
    p, mu, sx2 = np.asarray(at.p)[order], np.asarray(at.mu)[order], float(at.sx2)
    likely, log_likelihood = _posterior(p, mu, sx2, (local - center) / scale, sizes, float((scatter / scale**2).sum()))
    log_likelihood -= float((sizes.sum() * np.log(scale)).sum())  # in the file's own units
    kind, (m, d), k = likely.argmax(axis=1), local.shape, given.components
    weights = (likely * sizes[:, None]).sum(axis=0)
    stderr = np.sqrt(sx2 / np.maximum(weights, 1e-300))[:, None] * scale
    result = {
        "study": "mixture",
        "csv": path.name,
        "clients": m,
        "samples": {"min": int(sizes.min()), "median": float(np.median(sizes)), "max": int(sizes.max())},
        "read": clients.understood,
        "settings": {"components": k, "seed": given.seed},
        "columns": clients.columns,
        "kinds": [
            {
                "share": float(p[j]),
                "center": (center + scale * mu[j]).tolist(),
                "stderr": stderr[j].tolist() if weights[j] >= 1 else None,
                "clients": int((kind == j).sum()),
            }
            for j in range(k)
        ],
        "sigma_x": (scale * sx2**0.5).tolist(),
        "log_likelihood": log_likelihood,
        "bic": (k * d + k - 1 + d) * float(np.log(m)) - 2 * log_likelihood,
    }
    personalized = center + scale * np.asarray(made.estimates)
    table: dict[str, list] = {"client": clients.names, "samples": sizes.tolist()}
    for name, values in (("local", local), ("personalized", personalized)):
        for column, entry in zip(clients.columns, values.T, strict=True):
            table[name if d == 1 else f"{name}_{column}"] = entry.tolist()
    table |= {"kind": (kind + 1).tolist()} | {f"probability_{j + 1}": likely[:, j].tolist() for j in range(k)}
    return Kinds(result, table, local, personalized, kind)


def _posterior(
    p: np.ndarray, mu: np.ndarray, sx2: float, means: np.ndarray, sizes: np.ndarray, scatter: float
) -> tuple[np.ndarray, float]:
    """Every client's probabilities of the kinds [m, k], and the log-likelihood of all samples."""
    square = ((means[:, None] - mu) ** 2).sum(axis=-1)
    with np.errstate(divide="ignore"):
        joint = np.log(p) - sizes[:, None] * square / (2 * sx2)
    of_client = np.asarray(logsumexp(joint, axis=1))
    constant = sizes.sum() * means.shape[1] / 2 * np.log(2 * np.pi * sx2)
    return np.exp(joint - of_client[:, None]), float(of_client.sum() - scatter / (2 * sx2) - constant)


def results(path: Path, given: MixtureSettings, options: OwnFile) -> Results:
    """`run` with the options' layout, as the results of a study."""
    made = run(path, given, options)
    return Results(
        json=made.result,
        tables=lambda: [*output.how_it_was_read(made.result), *tables(made.result)],
        plots=lambda folder: write(folder, made),
        files="summary.json, estimates.csv, plots/",
        hint="estimates of every client, and its probabilities of the kinds: --output FOLDER",
    )


def tables(result: dict[str, Any]) -> list[Block]:
    """Table of the kinds, with lines on the samples' standard deviations and the likelihood."""
    table = new_table(
        unmarked(f"{result['csv']}: {result['clients']} clients of {len(result['kinds'])} kinds"), "± standard error"
    )
    several = len(result["columns"]) > 1
    for name in ("kind", "share", "clients", *(result["columns"] if several else ["center"])):
        table.add_column(unmarked(name), justify="right", no_wrap=True)
    for number, kind in enumerate(result["kinds"], start=1):
        errors = kind["stderr"] or [None] * len(kind["center"])
        cells = [
            beside(x, spread) + ("" if error is None else f" ± {error:.2g}")
            for x, error, spread in zip(kind["center"], errors, result["sigma_x"], strict=True)
        ]
        table.add_row(str(number), f"{100 * kind['share']:.1f} %", str(kind["clients"]), *cells)
    spreads = ", ".join(f"{x:.4g}" for x in result["sigma_x"])
    return [
        table,
        f"sigma_x {f'({spreads})' if several else spreads}",
        f"log likelihood {result['log_likelihood']:.6g}, BIC {result['bic']:.6g}: over --components, the least is best",
    ]


def write(folder: Path, made: Kinds) -> list[Path]:
    """Write ``estimates.csv`` beside the folder of plots, and plot the clients' estimates by kind."""
    folder.mkdir(parents=True, exist_ok=True)
    output.write_table(folder.parent / "estimates.csv", made.columns)
    names, flat = made.result["columns"], made.local.shape[1] == 1
    labels = ("local estimate", "personalised estimate") if flat else [f"local {literal(n)}" for n in names[:2]]
    xlabel, ylabel = labels
    figure, axes = new_axes(xlabel, ylabel, literal(f"{made.result['csv']}: {len(made.kind)} clients"))
    x, y = made.local[:, 0], made.personalized[:, 0] if flat else made.local[:, 1]
    for j, kind in enumerate(made.result["kinds"]):
        own, color = made.kind == j, COLORS[j % len(COLORS)]
        axes.scatter(x[own], y[own], s=22, color=color, alpha=0.6, linewidths=0, label=f"kind {j + 1}")
        at = [kind["center"][0]] * 2 if flat else kind["center"][:2]
        axes.plot(*at, "x", color=INK, markersize=9, label="centers" if j == 0 else None)
    if flat:
        ends = [float(x.min()), float(x.max())]
        axes.plot(ends, ends, color=GRID, linewidth=1.5, zorder=0, label="no shrinkage")
    axes.legend(frameon=False, fontsize=9)
    return [save(figure, folder, "kinds")]

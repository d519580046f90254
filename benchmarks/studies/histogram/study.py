"""Study that reproduces both columns of Table 1 of Setlur et al. 2023; it can also export users' histograms."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxpfl.core import full_precision
from jaxpfl.core.randomness import named
from jaxpfl.core.types import Array, Key
from jaxpfl.data.sources.npz import npz_keys
from jaxpfl.estimators.histograms import base as histogram
from jaxpfl.estimators.histograms import clusters as histogram_clusters
from jaxpfl.estimators.histograms import private as histogram_private
from jaxpfl.estimators.histograms import tuning as histogram_tuning
from jaxpfl.studies.repetitions import measure, standard_error
from jaxpfl.studies.report import FEW_ERRORS, Curve, number, write_curves
from jaxpfl.studies.study import Block, Options, Read, Results, Study
from jaxpfl.support.console import claim_file, new_table
from jaxpfl.support.errors import JaxpflError
from jaxpfl.support.output_paths import NEW_FILE, partial

from . import starts
from .methods import (
    ALGORITHM_3,
    BASELINE,
    CLUSTERING,
    EXACT,
    EXPORTED,
    METHODS,
    ORDER,
    PRINTED,
    Choice,
    Group,
    Groups,
    HistogramSettings,
    Made,
    Noise,
    Prepared,
    Scored,
    all_private_centers,
    divided,
    exact_centers,
    exported,
    follow,
    method_choices,
    noise_of,
    prepare,
    read,
    score,
    score_methods,
    score_references,
)
from .simulated_users import DirichletMixture
from .token_counts import TokenCounts


def _exact(given: HistogramSettings, population: Any) -> Any:
    @full_precision.jit
    def run(keys: Key, groups: Groups) -> tuple[dict[str, Array], dict[str, Scored]]:
        users = groups[0].users
        centers = jax.vmap(lambda key: {name: exact_centers(name, key, users, given) for name in METHODS})(keys)
        once = score_references(centers[CLUSTERING[True]][0], groups, population, given)
        local = score(histogram_tuning.local(given.floor), groups)
        rows = {"Local": (local, len(keys))} | {name: (row, 1) for name, row in once.items()}
        repeated = {
            name: jax.tree.map(lambda a, times=times: jnp.broadcast_to(a, (times, *a.shape)), row)
            for name, (row, times) in rows.items()
        }
        return centers, repeated

    return run


def _private(given: HistogramSettings, choices: dict[str, Choice]) -> Any:
    @full_precision.jit
    def run(keys: Key, noise: Noise, users: histogram.Users) -> dict[str, Array]:
        return jax.vmap(lambda key: all_private_centers(key, users, noise, choices, given))(keys)

    return run


def run(given: HistogramSettings, counts: TokenCounts | None = None) -> Made:
    """Run every method, without privacy and at every epsilon.

    The summary ``result`` has the entries

    - ``rows``: scores by column ("non-private" and "epsilon E") and row. ``mean`` is the mean loss over runs, and
      ``interval`` the half width of its 95 % confidence interval by Student's t (None for one run). ``unseen`` is the
      mean loss of unseen users, and ``chosen`` the mean tuned lambda or alpha. ``difference`` is the difference from
      the column's FedAvg + FT in the same runs: ``mean``, and the half widths of its intervals over runs and over users
      (with each user's loss averaged over runs).
    - ``best``: name of the row that `export` writes, by column.
    - ``privacy``: privacy statement of each method, by column.
    - ``floor``: floor of the estimates.
    - ``users``: numbers of users by group. ``tokens_per_user``: smallest, median and largest number of tokens of a
      client.
    - ``printed``: the paper's table.
    - ``followed_the_data``: settings that `methods.follow` reduced.
    - ``misclustering``: result of `misclustering`; only for synthetic users.

    Reference: Setlur et al. 2023, Table 1.

    Args:
      given: the settings.
      counts: real users' counts; by default read from the settings' files.

    Returns:
      The summary, and arrays for plots and export.

    Raises:
      JaxpflError: as in `HistogramSettings.check`, and if a file cannot be read.
    """
    given.check()
    noises = [noise_of(given, epsilon) for epsilon in given.epsilon]
    counts = read(given) if counts is None else counts
    given, taken = follow(given, counts)
    data = prepare(given, counts)
    groups = data.clients, data.validation, data.unseen
    key = jax.random.key(given.seed)
    # The noise's key depends on the users, because equal noise for two files that differ by one user would reveal that
    # user.
    own = named(key, *jax.tree.leaves(data.clients.users))
    keys, private_keys = (
        jax.vmap(lambda r, of=of: jax.random.fold_in(of, r))(jnp.arange(given.repetitions)) for of in (key, own)
    )
    names = [f"epsilon {epsilon:g}" for epsilon in given.epsilon]
    centers, scored = _exact(given, data.population)(keys, groups)
    columns = {EXACT: scored | score_methods(centers, groups, given)}
    arrays = {EXACT: np.asarray(centers[CLUSTERING[True]][0])}
    choices = method_choices(given)
    private = _private(given, choices)
    for column, noise in zip(names, noises, strict=True):
        centers = private(private_keys, jax.tree.map(jnp.float32, noise), data.clients.users)
        columns[column] = score_methods(centers, groups, given)
        arrays[column] = np.asarray(centers[CLUSTERING[False]][0])
    columns = {column: {name: part[name] for name in ORDER if name in part} for column, part in columns.items()}
    rows = {
        column: {name: _row(row, part[BASELINE], data) for name, row in part.items()}
        for column, part in columns.items()
    }
    result = {
        "study": "histogram",
        "settings": {k: v for k, v in vars(given).items() if k != "data_dir"},
        "followed_the_data": taken,
        "users": {name: int(group.users.number) for name, group in data._asdict().items() if isinstance(group, Group)},
        "tokens_per_user": _sizes(data.clients.users),
        "floor": given.floor,
        "rows": rows,
        "best": {column: exported(column) for column in columns},
        "privacy": {
            column: _spent(given, e, noise, choices)
            for column, e, noise in zip(names, given.epsilon, noises, strict=True)
        },
        "printed": {name: {"non-private": p[0], "epsilon 15": p[1]} for name, p in PRINTED.items()},
    }
    if data.population is not None:
        result["misclustering"] = misclustering(data, given)
    series = {
        f"{name}, {column}": np.asarray(row.loss) for column, part in columns.items() for name, row in part.items()
    }
    return Made(given, result, data, arrays, series)


def export(made: Made, path: Path, epsilon: float | None = None) -> None:
    """Write the users' personalized histograms from the first run to an ``.npz`` file.

    The function `exported` names the table row. The file's arrays are ``users`` [n], ``vocabulary`` [d], ``histograms``
    [n, d] float32, ``centers`` [k, d], ``cluster`` [n] (each user's nearest center), and ``lam``.

    With ``epsilon``, which must be one of the settings' values, the centers are private. A user's histogram is never
    private, and is for that user only.
    """
    given, column = made.given, EXACT if epsilon is None else f"epsilon {epsilon:g}"
    centers, users = jnp.asarray(made.centers[column]), made.data.clients.users
    lam = made.result["rows"][column][exported(column)]["chosen"]
    personal = histogram_tuning.blended(centers, histogram_tuning.fixed(lam), given.floor)
    estimates = full_precision.jit(lambda users: histogram_tuning.estimates(users, personal))(users)
    near = jax.lax.map(lambda block: histogram.nearest(histogram.histograms(block), centers), users)
    valid = np.asarray(users.valid).ravel()
    values = (
        made.data.names,
        made.data.vocabulary,
        np.asarray(estimates).reshape(-1, given.tokens)[valid],
        made.centers[column],
        histogram.each(near, users),
        lam,
    )
    with partial(path) as place, open(place, "wb") as file:
        np.savez(file, **dict(zip(EXPORTED, values, strict=True)))


def _row(scored: Scored, baseline: Scored, data: Prepared) -> dict[str, Any]:
    made = measure(scored.loss)
    differences = np.asarray(scored.loss, float) - np.asarray(baseline.loss, float)  # runs have the same keys
    of_users = np.asarray(scored.users, float).mean(axis=0) - np.asarray(baseline.users, float).mean(axis=0)
    return {
        "mean": made.mean,
        "interval": _interval(scored.loss),
        "unseen": measure(scored.unseen).mean,
        "chosen": measure(scored.chosen).mean,
        "difference": {
            "mean": float(differences.mean()),
            "over_runs": _interval(differences),
            "over_users": _interval(histogram.each(of_users, data.clients.users)),
        },
    }


def _interval(values: Any) -> float | None:
    """Half width of a 95 % confidence interval of the mean."""
    from scipy.special import stdtrit

    stderr = standard_error(np.asarray(values, float))
    return None if stderr is None else float(stdtrit(len(values) - 1, 0.975) * stderr)


def _sizes(users: histogram.Users) -> dict[str, float]:
    sizes = np.asarray(users.size)[np.asarray(users.valid)]
    return {"min": float(sizes.min()), "median": float(np.median(sizes)), "max": float(sizes.max())}


def _spent(given: HistogramSettings, epsilon: float, noise: Noise, choices: dict[str, Choice]) -> dict[str, Any]:
    said = {}
    for method, choice in choices.items():
        first, others, number = divided(method, noise.alone, choice)
        releases = [float(first)] + [float(others)] * int(number)
        statement = histogram_private.plan(releases, float(choice.radius)).statement(given.delta)
        said[method] = {"releases": releases} | statement._asdict()
    said["Standardized"]["clipping_norm_of_rounds"] = histogram_private.REACH
    return said | {
        ALGORITHM_3: {
            "accountant": "paper (Theorem 3.1)",
            "epsilon": epsilon,
            "delta": given.delta,
            "epsilon_of_a_part": noise.printed_epsilon,
            "stddev": noise.printed_stddev,
            "not_covered": "the start, which is users' raw histograms",
        }
    }


def wrong(labels: np.ndarray, true: np.ndarray, clusters: int) -> float:
    """Fraction of users in a wrong cluster, under the best matching of ``labels`` [n] to the clusters ``true`` [n]."""
    from scipy.optimize import linear_sum_assignment

    table = np.zeros((clusters, clusters))
    np.add.at(table, (labels, true), 1)
    return float(1 - table[linear_sum_assignment(-table)].sum() / len(true))


def rate(population: DirichletMixture, tokens: float) -> float:
    """The paper's bound ``exp(-Delta^2 / (8 sigma^2))`` on the misclustering rate, up to vanishing terms.

    Delta is the smallest distance between two centers, and sigma^2 the largest variance of an entry of a user's
    histogram. An entry with the value P at the center has the variance ``P (1 - P) (1/(alpha + 1) + (1 - 1/(alpha + 1))
    / m)``, where m is the user's number of tokens. For small P, the largest eigenvalue of the covariance is not much
    larger than sigma^2.
    """
    centers, about = population.centers, 1 / (population.alpha + 1)
    apart = ((centers[:, None] - centers) ** 2).sum(axis=-1)
    nearest = apart[~np.eye(len(centers), dtype=bool)].min() if len(centers) > 1 else np.inf
    variance = (centers * (1 - centers)).max() * (about + (1 - about) / tokens)
    return float(np.exp(-nearest / (8 * variance)))


def misclustering(data: Prepared, given: HistogramSettings) -> dict[str, Any]:
    r"""Misclustering rates after 0 ... T rounds by method, averaged over runs, and the paper's bound.

    Appendix D of the paper bounds the rate by :math:`\exp(-\Delta^2 / (8 \sigma^2))`, up to vanishing terms. Delta is
    the smallest distance between two centers, and sigma^2 is a sub-Gaussian parameter of a user's histogram about its
    center. The paper's analysis is for Lloyd's algorithm in Euclidean distance with sub-Gaussian noise, and not for the
    KL divergence, so the bound is shown only for comparison.

    If the numbers of fitted and true clusters differ, users in a cluster without a match count as wrong.

    Implements: Setlur et al. 2023, appendix D.
    """
    assert data.population is not None
    assert data.kinds is not None
    steps = {"Algorithm 2": 1.0, "IFCA": given.ifca_rate}  # step sizes toward the mean

    @full_precision.jit
    def labels(keys: Key, users: histogram.Users) -> dict[str, Array]:
        def run_labels(key: Key) -> dict[str, Array]:
            start = starts.far_apart(
                key,
                users,
                given.clusters,
                temperature=given.temperature,
                floor=given.floor,
                direction=given.direction,
            )

            def rounds(step: float) -> Array:
                def one(centers: Array, _: None) -> tuple[Array, Array]:
                    near = jax.lax.map(lambda b: histogram.nearest(histogram.histograms(b), centers), users)
                    after = histogram_clusters.cluster(users, centers, 1, floor=given.floor, rate=step).centers
                    return after, near.astype(jnp.int32)

                return jax.lax.scan(one, start, None, length=given.rounds + 1)[1]

            return {name: rounds(step) for name, step in steps.items()}

        return jax.lax.map(run_labels, keys)

    key = jax.random.key(given.seed)
    keys = jax.vmap(lambda r: jax.random.fold_in(key, r))(jnp.arange(given.repetitions))
    clusters = max(given.clusters, len(data.population.shares))
    found = {name: histogram.each(own, data.clients.users) for name, own in labels(keys, data.clients.users).items()}
    sizes = np.asarray(data.clients.users.size)[np.asarray(data.clients.users.valid)]
    return {
        "bound": rate(data.population, float(np.median(sizes))),
        "wrong": {
            name: [float(np.mean([wrong(run[t], data.kinds, clusters) for run in own])) for t in range(own.shape[1])]
            for name, own in found.items()
        },
    }


@dataclass(frozen=True)
class HistogramOptions(Options):
    """Options to export every user's estimate to an archive."""

    export: Annotated[Path | None, NEW_FILE] = None
    """Write every user's personalized histogram to this .npz file."""
    export_epsilon: float | None = None
    """Epsilon of the centers in the exported file; by default, these are not private."""

    def check(self, given: HistogramSettings) -> None:
        """Check that the study computes the centers to export, and that the file can be written.

        Raises:
          JaxpflError: if an option is not allowed; the message names the option and its value.
        """
        if self.export_epsilon is not None and self.export_epsilon not in given.epsilon:
            known = ", ".join(f"{e:g}" for e in given.epsilon)
            raise JaxpflError(f"export_epsilon must be one of --epsilon {known}, got {self.export_epsilon:g}")
        if self.export is not None and not self.export.parent.is_dir():
            raise JaxpflError(f"export: folder {self.export.parent} does not exist")
        claim_file(self.export, "--export", "jaxpfl estimate histogram", lambda p: npz_keys(p) == list(EXPORTED))


def _results(given: HistogramSettings, options: HistogramOptions, counts: TokenCounts | None) -> Results:
    options.check(given)
    made = run(given, counts)
    if options.export is not None:
        export(made, options.export, options.export_epsilon)
    return Results(
        json=made.result,
        tables=lambda: tables(made.result),
        plots=lambda folder: write_plots(folder, made),
        series=made.series,
    )


def _read(given: HistogramSettings) -> Read:
    given.check()
    found = read(given)
    return Read(found, None if found is None else (found.indptr, found.indices, found.counts))


DRAWN = (BASELINE, "FedAvg, denoised + FT", "IFCA + FT", "Algorithm 2 + DimRed + FT", "Algorithm 2 + FT",
         "Algorithm 2, blended + FT", "Standardized, blended + FT")  # fmt: skip
"""Rows that the plots show, each with its own color."""


def tables(result: dict[str, Any]) -> list[Block]:
    """Table of all rows and columns, and lines on the privacy guarantees, from the result of `run`."""
    given, users = result["settings"], result["users"]
    sizes = result["tokens_per_user"]
    title = (
        f"KL(Q || estimate): {users['clients']} users of {sizes['min']:g} to {sizes['max']:g} tokens "
        f"(median {sizes['median']:g}), d = {given['tokens']}, s = {result['floor']:g}, {given['repetitions']} runs"
    )
    caption = (
        "± half of a 95 % interval over runs (start and noise, the same users)\n"
        f"unseen: {users['unseen']} users outside the estimation, from their own counts, without privacy\n"
        f"lambda and alpha tuned on {users['validation']} validation users, a public group that no epsilon covers"
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
        private = " (no epsilon covers this)" if given["epsilon"] else ""
        lines.append(f"reduced from the defaults to fit the data{private}: {taken}")
    for column, said in result["privacy"].items():
        noises: dict[str, list[str]] = {}
        for name, own in said.items():
            if name != ALGORITHM_3:
                noises.setdefault(f"{_releases(own['releases'])} (C = {own['clipping_norm']:g})", []).append(name)
        parts = ", ".join(f"{'; '.join(names)} {text}" for text, names in noises.items())
        lines.append(
            f"{column}, delta {given['delta']:g} (add or remove one user, by PLD), noise multipliers: {parts}; "
            f"Algorithm 3 as printed: sigma = {said[ALGORITHM_3]['stddev']:.3g} by its own theorem, which does not "
            "cover its start"
        )
    if result["privacy"] and given["data"] != "synthetic":
        lines.append(
            f"no epsilon covers the vocabulary, all users' {given['tokens']} most frequent tokens: it is assumed public"
        )
    return [table, *lines, *_comparison(result)]


def _comparison(result: dict[str, Any]) -> list[str]:
    """Lines that compare each column's exported row with the row FedAvg + FT."""
    lines = []
    for column, name in result["best"].items():
        gap = result["rows"][column][name]["difference"]
        text = f"{column}: {name} minus {BASELINE}: {gap['mean']:+.4f}"
        for of in ("runs", "users"):
            if gap[f"over_{of}"] is not None:
                text += f", ±{gap[f'over_{of}']:.4f} over {of}"
        lines.append(text)
    return [*lines, "no epsilon covers settings that were chosen by looking at the data"]


def _releases(multipliers: list[float]) -> str:
    first, *others = multipliers
    return f"{first:.3g}" + (f" (mean) and {len(others)} of {others[0]:.3g}" if others else "")


def _cell(row: dict[str, float | None] | None) -> str:
    if row is None:
        return "-"
    return number(row["mean"]) if row["interval"] is None else f"{row['mean']:.4f} ±{row['interval']:.3f}"


def write_plots(folder: Path, study: Made) -> list[Path]:
    """Plot the loss against epsilon, and the misclustering rates; write the plots into ``folder``."""
    drawn = []
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


def _misclustering(folder: Path, found: dict[str, Any]) -> Path:
    """Plot the misclustering rates over rounds."""
    curves = {name: Curve.measured(range(len(own)), [(x, 0) for x in own]) for name, own in found["wrong"].items()}
    rounds = range(max(map(len, found["wrong"].values())))
    curves["exp(-Delta^2 / (8 sigma^2))"] = Curve.level(found["bound"], rounds)
    style: dict[str, Any] = {"ylabel": "share of users in a wrong cluster", "title": "Mis-clustering, mean over runs"}
    return write_curves(folder / "misclustering.png", rounds, curves, xlabel="round", **style)


STUDY = Study(HistogramSettings, _results, HistogramOptions, reads=_read)

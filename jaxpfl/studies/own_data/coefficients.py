"""Regressions of the user's own clients, from a table with a row for each example."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import NormalDist
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxpfl.core import full_precision
from jaxpfl.data.sources.tables import Columns, TableOptions, read_table
from jaxpfl.estimators.empirical_bayes import common_representation as common
from jaxpfl.estimators.empirical_bayes import dependent, differences, level_within
from jaxpfl.estimators.empirical_bayes import random_coefficients as joint
from jaxpfl.studies.own_data import output
from jaxpfl.studies.own_data.output import Own, Picture
from jaxpfl.studies.repetitions import report, standard_error
from jaxpfl.studies.report import estimator_table
from jaxpfl.studies.study import Block, Results, refuse_given
from jaxpfl.support import host_memory
from jaxpfl.support.console import new_table, unmarked
from jaxpfl.support.errors import JaxpflError, printable, shown

INTERCEPT = "intercept"
_FLOOR = 1e-8
"""Least variance of standardised labels about their regression."""
_NO_NOISE = 1e-6
"""Share of the labels' variance up to which noise counts as not told from the clients' differences."""
_FOLDS = 5
_SHOWN = 20


class _Design(NamedTuple):
    """Examples in units of their spread, and the way back: ``coefficients = turn @ found + shift``.

    Attributes:
      names: of the coefficients, [d].
      x, y: [N, d] and [N], standardised.
      users: of the examples, [N].
      turn, shift: [d, d] and [d].
      spread: of the labels, by which y was divided.
    """

    names: list[str]
    x: np.ndarray
    y: np.ndarray
    users: np.ndarray
    turn: np.ndarray
    shift: np.ndarray
    spread: float


class _Learned(NamedTuple):
    """Population and every client's coefficients, in the units of a `_Design`.

    Attributes:
      mean, covariance: of the population, [d] and [d, d].
      noise: variance of the labels about the regression.
      means, errors: of the clients' coefficients and of their errors, [m, d] and [m, d, d].
      log_marginal: log likelihood of the labels, in these units.
      converged: whether nothing raises the likelihood.
    """

    mean: np.ndarray
    covariance: np.ndarray
    noise: float
    means: np.ndarray
    errors: np.ndarray
    log_marginal: float
    converged: bool


def results(path: Path, given: Any, options: Any) -> Results:
    """Coefficients of every client of a table.

    Args:
      path: of the table; see `tables.read_table`.
      given: the settings, of which those of simulated clients must be at their defaults.
      options: ``target``, ``client``, ``ignore``, ``missing``, ``no_intercept`` and ``level``.

    Raises:
      JaxpflError: for a bad table, settings of simulated clients, a level outside (0, 1), a rank above the number of
        coefficients, features that are constant or that others determine, and labels that are all alike.
    """
    level_within(options.level, np.float64)
    names = ("clients", "samples", "dim", "noise_variance", "em_steps", "repetitions")
    refuse_given(given, names, "is of simulated data, which a CSV file takes the place of")
    columns = TableOptions(
        options.target, options.client, options.missing, options.ignore, options.missing_words, options.encoding
    )
    table = read_table(f"csv:{path.name}", path, columns, task="regression", clients=True)
    if table.y.ndim > 1:
        raise JaxpflError(f"{path}: target = {options.target}: one column of labels at a time")
    assert table.users is not None
    assert table.user_names is not None
    options = replace(options, client=table.client)
    design = _design(path, table, table.users, intercept=not options.no_intercept)
    d, m = len(design.names), len(table.user_names)
    if not 0 <= given.rank <= d:
        raise JaxpflError(f"rank must be from 0 to the {d} coefficients, got {given.rank}")
    sizes = np.bincount(design.users, minlength=m)
    _check_enough(path, sizes, d, given.rank)
    host_memory.check(
        8 * m * d * d * (_FOLDS + 8), f"{m} clients of {d} coefficients need", "fewer features, or fewer clients"
    )
    with jax.enable_x64(True):
        sent = _messages(design, m)
        found = _learn(sent, given.rank)
        scores = _held_out(design, m, given.rank, given.seed)
        pooled, local = np.asarray(joint.pooled(sent)), np.asarray(_alone(sent))
        identified = _identified(np.asarray(sent.gram), design.turn)
    test = differences.of_regressions(design.x, design.y, design.users)
    result = _summary(path, options, given, design, found, scores, pooled, sizes, test)
    own = np.where(identified, local @ design.turn.T + design.shift, np.nan)
    own = _own(result, design, found, own, [str(name) for name in table.user_names], sizes, options.level)
    return output.results(own, lambda: _said(result))


def _check_enough(path: Path, sizes: np.ndarray, d: int, rank: int) -> None:
    """Check that the table can tell a population from the noise.

    Raises:
      JaxpflError: where every client has a single example, or all have fewer than the population has numbers.
    """
    if sizes.max() < 2:
        raise JaxpflError(f"{path}: every client has a single example: noise cannot be told from clients' differences")
    numbers = d + 1 + (d * rank if rank else d * (d + 1) // 2)
    if sizes.sum() <= numbers:
        raise JaxpflError(
            f"{path}: {sizes.sum()} examples are too few for a population of {numbers} numbers: give fewer features, "
            "or a lower --rank"
        )


def _design(path: Path, table: Columns, users: np.ndarray, *, intercept: bool) -> _Design:
    kept, seen = [], set()
    for place, feature in enumerate(table.features):
        # With an intercept the first text of a column is the one that the others are compared with.
        if feature.text is None or not intercept or feature.column in seen:
            kept.append(place)
        seen.add(feature.column)
    names = [of.column if of.text is None else f"{of.column}={of.text}" for of in (table.features[i] for i in kept)]
    x, y = table.x[:, kept], table.y
    centers = x.mean(axis=0) if intercept else np.zeros(x.shape[1])
    scales = np.sqrt(((x - centers) ** 2).mean(axis=0))
    middle = y.mean() if intercept else 0.0
    spread = float(np.sqrt(((y - middle) ** 2).mean()))
    same = [name for name, of in zip(names, x.T, strict=True) if not of.any() or (intercept and np.ptp(of) == 0)]
    if same:
        raise JaxpflError(f"{path}: column {shown(same[0])} is the same in every row: leave it out with --ignore")
    if np.ptp(y) == 0:
        raise JaxpflError(f"{path}: every label is {y[0]:g}: there is nothing to learn")
    standard = (x - centers) / scales
    at = dependent(standard, intercept=intercept)
    if at is not None:
        before = "the intercept and the columns before it" if intercept else "the columns before it"
        raise JaxpflError(f"{path}: {shown(names[at])} is a linear combination of {before}: leave it out with --ignore")
    turn = np.diag(spread / scales)
    shift = np.zeros(x.shape[1])
    called = [INTERCEPT, *names] if intercept else names
    twice = next((name for name in called if called.count(name) > 1), None)
    if twice is not None:
        raise JaxpflError(f"{path}: two coefficients would be called {shown(twice)}: rename the column")
    if intercept:
        names, shift = [INTERCEPT, *names], np.append(middle, shift)
        standard = np.hstack([np.ones((len(y), 1)), standard])
        turn = np.block([[np.array([[spread]]), -(spread * centers / scales)[None]], [np.zeros((x.shape[1], 1)), turn]])
    return _Design(names, standard, (y - middle) / spread, users, turn, shift, spread)


def _messages(design: _Design, clients: int, kept: np.ndarray | None = None) -> joint.Message:
    """Sums over every client's examples, or over those that are kept, leaves [m, ...]."""
    d = design.x.shape[1]
    gram, cross = np.zeros((clients, d, d)), np.zeros((clients, d))
    order = np.argsort(design.users, kind="stable")
    order = order if kept is None else order[kept[order]]
    users = design.users[order]
    for user, rows in zip(*_runs(users, order), strict=True):
        own = design.x[rows]
        gram[user], cross[user] = own.T @ own, own.T @ design.y[rows]
    square = np.bincount(users, design.y[order] ** 2, minlength=clients)
    size = np.bincount(users, minlength=clients).astype(float)
    return joint.Message(*map(jnp.asarray, (gram, cross, square, size)))


def _runs(users: np.ndarray, order: np.ndarray) -> tuple[np.ndarray, list[np.ndarray]]:
    """Users that have examples, and the places of each one's."""
    starts = np.flatnonzero(np.diff(users, prepend=-1))
    return users[starts], np.split(order, starts[1:])


@full_precision.jit
def _alone(sent: joint.Message) -> jax.Array:
    """Least squares of least norm of every client, [m, d]."""
    return jax.vmap(partial(common.least_squares_head, jnp.eye(sent.cross.shape[1])))(sent)


def _identified(gram: np.ndarray, turn: np.ndarray) -> np.ndarray:
    """Mask of the coefficients that a client's own examples identify: rows of ``turn`` in the span of X_i, [m, d]."""
    unseen = turn - turn @ (np.linalg.pinv(gram, hermitian=True) @ gram)
    return np.linalg.norm(unseen, axis=2) <= 1e-6 * np.linalg.norm(turn, axis=1)


def _learn(sent: joint.Message, rank: int) -> _Learned:
    """Population by maximum likelihood; a subspace is one about the pooled coefficients."""
    center = joint.pooled(sent)
    if rank:
        found = joint.maximum_likelihood(sent, _FLOOR, common.start(joint.about(center, sent), rank).basis, center)
    else:
        found = joint.maximum_likelihood(sent, _FLOOR, joint.start(sent).covariance ** 0.5)
    at = found.population
    of = jax.vmap(partial(joint.posterior, at))(sent)
    errors = of.covariance if rank else joint.squared_errors(at, sent)
    mean, covariance, means, errors = map(np.asarray, (at.mean, at.covariance, of.mean, errors))
    return _Learned(mean, covariance, float(at.noise), means, errors, found.log_likelihood, found.converged)


def _held_out(design: _Design, clients: int, rank: int, seed: int) -> dict[str, np.ndarray]:
    """Mean squared errors of predictions of examples that are held out, a fifth of each client's in turn, [m]."""
    rng = np.random.default_rng(seed)
    order = np.lexsort((rng.random(len(design.y)), design.users))
    fold = np.empty(len(order), int)
    fold[order] = np.arange(len(order)) % _FOLDS  # so that clients of one example are in all folds
    squares: dict[str, np.ndarray] = {}
    for number in range(_FOLDS):
        out = fold == number
        sent = _messages(design, clients, ~out)
        who, x, y = design.users[out], design.x[out], design.y[out]
        made = {
            "local": np.asarray(_alone(sent))[who],
            "pooled": np.asarray(joint.pooled(sent))[None],
            "personalized": _learn(sent, rank).means[who],
        }
        for name, theta in made.items():
            squares.setdefault(name, np.zeros(len(fold)))[out] = ((x * theta).sum(axis=1) - y) ** 2
    sizes = np.bincount(design.users, minlength=clients)
    return {
        name: design.spread**2 * np.bincount(design.users, of, minlength=clients) / sizes
        for name, of in squares.items()
    }


def _summary(
    path: Path,
    options: Any,
    given: Any,
    design: _Design,
    found: _Learned,
    scores: dict[str, np.ndarray],
    pooled: np.ndarray,
    sizes: np.ndarray,
    test: differences.Test | None,
) -> dict[str, Any]:
    mean, covariance = design.turn @ found.mean + design.shift, design.turn @ found.covariance @ design.turn.T
    variances = np.diag(covariance)
    # Centring turns a zero spread into one of rounding.
    spreads = np.sqrt(np.where(variances > 1e-12 * np.diag(design.turn @ design.turn.T), variances, 0))
    apart = np.where(spreads > 0, spreads, 1)
    rows = zip(design.names, design.turn @ pooled + design.shift, mean, spreads, strict=True)
    held_out = report(scores, {})
    for name, of in scores.items():
        held_out["mse"][name]["stderr"] = standard_error(of)
    return {
        "study": "coefficients",
        "csv": path.name,
        "read": {"target": options.target, "client": options.client, "coefficients": design.names},
        "clients": len(sizes),
        "examples": {"min": int(sizes.min()), "median": float(np.median(sizes)), "max": int(sizes.max())},
        "level": options.level,
        "settings": {"seed": given.seed, "rank": given.rank},
        "model": f"a subspace of {given.rank} dimensions" if given.rank else "a full covariance",
        "coefficients": [
            {"name": name, "pooled": float(a), "mean": float(b), "sigma_theta": float(c)} for name, a, b, c in rows
        ],
        "correlations": (covariance / np.outer(apart, apart)).tolist(),
        "sigma": found.noise**0.5 * design.spread,
        "log_marginal": found.log_marginal - len(design.y) * float(np.log(design.spread)),
        "converged": found.converged,
        "noise_told": bool(found.noise > _NO_NOISE),
        "clients_differ": None if test is None else test._asdict(),
    } | held_out


def _own(
    result: dict[str, Any],
    design: _Design,
    found: _Learned,
    own: np.ndarray,
    names: list[str],
    sizes: np.ndarray,
    level: float,
) -> Own:
    """Coefficients of every client for ``estimates.csv``, and a picture of each coefficient."""
    reach = NormalDist().inv_cdf((1 + level) / 2)
    means = found.means @ design.turn.T + design.shift
    stderr = np.sqrt(np.einsum("ij,mjk,ik->mi", design.turn, found.errors, design.turn))
    low, high = means - reach * stderr, means + reach * stderr
    columns: dict[str, list] = {"client": names, "examples": sizes.tolist()}
    parts = {"local": own, "personalized": means, "personalized_stderr": stderr, "low": low, "high": high}
    pictures = []
    for k, name in enumerate(design.names):
        columns |= {f"{part}:{name}": values[:, k].tolist() for part, values in parts.items()}
        seen = ~np.isnan(own[:, k])
        local, personalized, lower, upper = (values[seen, k] for values in (own, means, low, high))
        middle = result["coefficients"][k]["mean"]
        if seen.any():
            pictures.append(Picture(name, local, personalized, lower, upper, sizes[seen], middle))
    return Own(result, columns, pictures)


def _said(result: dict[str, Any]) -> list[Block]:
    sizes, test, read = result["examples"], result["clients_differ"], result["read"]
    found: list[Block] = [
        f"read as: {printable(read['target'])} of {result['clients']} clients by {printable(read['client'])}, of "
        f"{sizes['min']} to {sizes['max']} examples (median {sizes['median']:g})",
        "",
    ]
    table = new_table(
        unmarked(f"{result['csv']}: coefficients, {result['model']}"),
        "pooled: one regression for all; sigma_theta: standard deviation between clients",
    )
    table.add_column("coefficient", style="bold", no_wrap=True)
    for name in ("pooled", "mean of clients", "sigma_theta"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in result["coefficients"][:_SHOWN]:
        values = (f"{row[name]:.4g}" for name in ("pooled", "mean", "sigma_theta"))
        table.add_row(unmarked(printable(row["name"])), *values)
    found.append(table)
    if len(result["coefficients"]) > _SHOWN:
        found.append(f"and {len(result['coefficients']) - _SHOWN} more, in summary.json")
    if test is None:
        said = "no test that clients differ: too few examples beside the coefficients, or labels without scatter"
    else:
        differ = "clients differ" if test["p_value"] < 0.05 else "no sign that clients differ"
        said = f"{differ}: {test['name']} = {test['statistic']:.4g}, p = {test['p_value']:.2g}"
    lines = [
        f"labels about their client's regression: sigma {result['sigma']:.4g}; log likelihood "
        f"{result['log_marginal']:.6g}",
        said,
        "intervals take the variances and correlations for known",
    ]
    alike = [printable(row["name"]) for row in result["coefficients"] if row["sigma_theta"] == 0]
    if alike:
        lines.insert(0, f"no spread between clients found: {', '.join(alike)} (the likeliest sigma_theta is 0)")
    if not result["noise_told"]:
        lines.append(
            "warning: no noise is left beside the clients' differences, which is likely too sure: standard errors and "
            "intervals are too small"
        )
    if not result["converged"]:
        lines.append("warning: the likelihood's maximum was not reached: spreads and intervals may be off")
    title = f"{unmarked(result['csv'])}: squared error of predictions, a fifth of each client's examples held out"
    return [*found, "", *estimator_table(result, title, lines)]

"""The histogram study: Table 1 of Setlur et al. 2023 in both columns, with intervals, and users' own histograms."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxpfl.estimate import histogram_convergence
from jaxpfl.estimate.histogram_data import Group, Prepared, prepare
from jaxpfl.estimate.histogram_methods import (
    HistogramSettings,
    Scored,
    exact_centers,
    exact_rows,
    noise_of,
    private_centers,
    reference_rows,
    rows_of,
    score,
)
from jaxpfl.estimate.repetitions import measure
from jaxpfl.estimators import histogram, histogram_private, histogram_tuning
from jaxpfl.types import Array, Key

EXPORTED = "Algorithm 2, blended + FT"
PRINTED = {
    "Local": (5.093, 5.093), "FedAvg": (1.054, 1.115), "IFCA": (1.036, 1.110), "Algorithm 2 + DimRed": (0.971, 0.990),
    "Algorithm 2": (0.930, 1.053), "FedAvg + FT": (0.912, 0.958), "IFCA + FT": (0.875, 0.948),
    "Algorithm 2 + DimRed + FT": (0.883, 0.904), "Algorithm 2 + FT": (0.868, 0.951),
}  # fmt: skip
"""The paper's, without and with privacy (eps 15, delta 1e-10), on Reddit."""


class Study(NamedTuple):
    """What a study found: the summary as JSON, each user's loss [n] by column and row, and arrays for plots and export.

    Attributes:
      result: see `run`.
      data: the users.
      users: losses, means over runs, by column ("" without privacy, else an eps) and row.
      centers: of Algorithm 2 in the first run by column, [k, d].
    """

    result: dict[str, Any]
    data: Prepared
    users: dict[str, dict[str, np.ndarray]]
    centers: dict[str, np.ndarray]


ORDER = (
    "Local", "FedAvg", "IFCA", "Algorithm 2 + DimRed", "Algorithm 2", "Algorithm 3 (printed)", "FedAvg + FT",
    "IFCA + FT", "Algorithm 2 + DimRed + FT", "Algorithm 2 + FT", "Algorithm 3 (printed) + FT", "FedAvg + FT by m_u",
    "Algorithm 2 + FT by m_u", "Algorithm 2, blended + FT", "Algorithm 2, a Dirichlet each", "Dirichlet mixture by EM",
    "Bayes, population known",
)  # fmt: skip


def _exact(given: HistogramSettings, population: Any) -> Any:
    @jax.jit
    def run(keys: Key, clients: Group, validation: Group, unseen: Group) -> tuple[dict[str, Scored], Array]:
        data = Prepared(clients, validation, unseen, np.array([]), np.array([]), population)
        scored = jax.vmap(lambda key: score(exact_rows(key, data, given), data))(keys)
        centers = exact_centers(keys[0], clients.users, given)["Algorithm 2"]
        once = score(reference_rows(centers, data, given), data)
        return scored | jax.tree.map(lambda a: a[None], once), centers

    return run


def _private(given: HistogramSettings) -> Any:
    @jax.jit
    def run(keys: Key, noises: Any, clients: Group, validation: Group, unseen: Group) -> Any:
        data = Prepared(clients, validation, unseen, np.array([]), np.array([]))

        def at(noise: Any) -> tuple[dict[str, Scored], Array]:
            def one(key: Key) -> tuple[dict[str, Scored], Array]:
                centers = private_centers(key, clients.users, noise, given)
                return score(rows_of(centers, data, given), data), centers["Algorithm 2"]

            scored, centers = jax.vmap(one)(keys)
            return scored, centers[0]

        return jax.lax.map(at, noises)

    return run


def run(given: HistogramSettings) -> Study:
    """Runs every method, without privacy and at every eps.

    Returns:
      With ``result``: ``rows``, for each column ("non-private" and "epsilon E") and row the mean loss over runs with
      its 95 % half-width (``interval``, by Student's t; None for one run), that of unseen users, and the mean lambda or
      alpha; ``privacy`` of each eps; ``floor``; ``users``; ``printed``: the paper's table; of
      synthetic users ``misclustering`` (`histogram_convergence.study`).

    Raises:
      JaxpflError: settings that `HistogramSettings.check` refuses, and files that cannot be read.
    """
    given.check()
    noises = [noise_of(given, epsilon) for epsilon in given.epsilon]
    data = prepare(given)
    groups = data.clients, data.validation, data.unseen
    key = jax.random.key(given.seed)
    keys = jax.vmap(lambda r: jax.random.fold_in(key, r))(jnp.arange(given.repetitions))
    scored, centers = _exact(given, data.population)(keys, *groups)
    columns: dict[str, dict[str, Scored]] = {"non-private": scored}
    arrays = {"non-private": np.asarray(centers)}
    if noises:
        stacked = jax.tree.map(lambda *z: jnp.array(z, jnp.float32), *noises)
        found, centers = _private(given)(keys, stacked, *groups)
        for i, epsilon in enumerate(given.epsilon):
            columns[f"epsilon {epsilon:g}"] = jax.tree.map(lambda a, i=i: a[i], found)
            arrays[f"epsilon {epsilon:g}"] = np.asarray(centers[i])
    columns = {column: {name: part[name] for name in ORDER if name in part} for column, part in columns.items()}
    rows = {column: {name: _row(row) for name, row in part.items()} for column, part in columns.items()}
    per_user = {
        column: {
            name: histogram.each(np.asarray(row.users).mean(axis=0), data.clients.users) for name, row in p.items()
        }
        for column, p in columns.items()
    }
    result = {
        "study": "histogram",
        "settings": {k: v for k, v in vars(given).items() if k != "data_dir"},
        "users": {name: int(group.users.number) for name, group in data._asdict().items() if isinstance(group, Group)},
        "tokens_per_user": _sizes(data.clients.users),
        "floor": given.floor,
        "rows": rows,
        "privacy": {f"epsilon {e:g}": _spent(given, e, noise) for e, noise in zip(given.epsilon, noises, strict=True)},
        "printed": {name: {"non-private": p[0], "epsilon 15": p[1]} for name, p in PRINTED.items()},
    }
    if data.population is not None:
        result["misclustering"] = histogram_convergence.study(data, given)
    return Study(result, data, per_user, arrays)


def export(study: Study, given: HistogramSettings, path: Path, epsilon: float | None = None) -> None:
    """Writes users' own histograms, `EXPORTED` of the first run, as an ``.npz`` file.

    It holds ``users`` [n], ``vocabulary`` [d], ``histograms`` [n, d] float32, ``centers`` [k, d], ``cluster`` [n], the
    nearest, and ``lam``.

    With an eps of the study the centers are private; a user's histogram is its own, and is not released.
    """
    column = "non-private" if epsilon is None else f"epsilon {epsilon:g}"
    centers, users = jnp.asarray(study.centers[column]), study.data.clients.users
    lam = study.result["rows"][column][EXPORTED]["chosen"]
    personal = histogram_tuning.blended(centers, histogram_tuning.fixed(lam), given.floor)
    estimates = jax.jit(lambda users: histogram_tuning.estimates(users, personal))(users)
    near = jax.lax.map(lambda block: histogram.nearest(histogram.histograms(block), centers), users)
    valid = np.asarray(users.valid).ravel()
    with open(path, "wb") as file:
        np.savez(
            file,
            users=study.data.names,
            vocabulary=study.data.vocabulary,
            histograms=np.asarray(estimates).reshape(-1, given.tokens)[valid],
            centers=study.centers[column],
            cluster=histogram.each(near, users),
            lam=lam,
        )


def _row(scored: Scored) -> dict[str, float | None]:
    from scipy.special import stdtrit

    made = measure(scored.loss)
    runs = len(scored.loss)
    return {
        "mean": made.mean,
        "interval": None if made.stderr is None else float(stdtrit(runs - 1, 0.975) * made.stderr),
        "unseen": measure(scored.unseen).mean,
        "chosen": measure(scored.chosen).mean,
    }


def _sizes(users: histogram.Users) -> dict[str, float]:
    sizes = np.asarray(users.size)[np.asarray(users.valid)]
    return {"min": float(sizes.min()), "median": float(np.median(sizes)), "max": float(sizes.max())}


def _spent(given: HistogramSettings, epsilon: float, noise: Any) -> dict[str, Any]:
    t = given.private_rounds
    rows = {
        "FedAvg": [noise.alone],
        "Algorithm 2, IFCA": [noise.mean] + [noise.rounds] * t,
        "Algorithm 2 + DimRed": [noise.mean] + [noise.reduced] * (t + 1),
    }
    said = {
        name: {"releases": multipliers}
        | histogram_private.plan(multipliers, given.radius).statement(given.delta)._asdict()
        for name, multipliers in rows.items()
    }
    return said | {
        "Algorithm 3 (printed)": {
            "accountant": "paper (Theorem 3.1)",
            "epsilon": epsilon,
            "delta": given.delta,
            "epsilon_of_a_part": noise.printed_epsilon,
            "stddev": noise.printed_stddev,
            "not_covered": "the start, which is users' raw histograms",
        }
    }

"""The user's own clients: estimates with intervals, and what they are worth on samples that were held out.

All of it is computed in double precision, which a file's numbers have: about a center of the data the private estimates
would not be private, and single precision about zero would lose what is small beside it.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxpfl.errors import JaxpflError
from jaxpfl.estimate import client_csv
from jaxpfl.estimate import gaussian as gaussian_study
from jaxpfl.estimate.bernoulli import BernoulliSettings
from jaxpfl.estimate.gaussian import GaussianSettings
from jaxpfl.estimate.plots import color
from jaxpfl.estimate.repetitions import report
from jaxpfl.estimate.settings import refuse_given
from jaxpfl.estimators import base, bernoulli, bernoulli_private, gaussian, intervals
from jaxpfl.estimators import gaussian_closed_form as closed_form
from jaxpfl.estimators.base import Estimated, Estimator, Samples
from jaxpfl.presentation import GRID, new_axes, save
from jaxpfl.types import Array, Key

FOLDS = 5
LEVEL = 0.95


class Own(NamedTuple):
    """What was made of a file.

    Attributes:
      result: for the table and JSON.
      columns: one for each fact of a client, for ``estimates.csv``.
      pairs: local and personalised estimates of the first entry, [m] each, and numbers of samples [m], for the plot.
    """

    result: dict[str, Any]
    columns: dict[str, list]
    pairs: tuple[np.ndarray, np.ndarray, np.ndarray]


def run_gaussian(path: Path, given: GaussianSettings) -> Own:
    """Means of the file's clients, their variances estimated from the file.

    With eps, messages are private by the settings' mechanism; then sigma_theta, sigma_x and radius are what is publicly
    known, and the samples' numbers are public too.

    Raises:
      JaxpflError: settings that own data do not have, a bad file, less than two clients, none with two samples, or none
        whose samples differ.
    """
    _refuse_simulated(given, ("dim", "mean"))
    if given.epsilon is None:
        public = ("sigma_theta", "sigma_x", "radius")
        refuse_given(given, public, "needs epsilon, without which all is learned from the file")
    if given.epsilon is None or given.mechanism != "discrete":
        refuse_given(given, ("bits",), "needs epsilon and mechanism discrete where data are your own")
    clients = client_csv.read(path)
    samples = [own.reshape(len(own), -1) for own in clients.samples]
    sizes = _sizes(path, samples)
    known = _public(given, sizes, samples[0].shape[1])
    if not any(np.ptp(own, axis=0).any() for own in samples):
        raise JaxpflError(f"{path}: every client's samples are all alike: its own mean makes no error to avoid")
    estimators = {
        "local": gaussian.local(),
        "global": gaussian.global_mean(),
        "personalized": gaussian.personalized(),
    }
    with jax.enable_x64(True):
        data = base.stack(samples)
        if given.epsilon is not None:
            sent = gaussian_study.private_release(known, gaussian_study.strength(known, given.epsilon))
            estimators["private"] = gaussian_study.personalized(known, sent)
        key = jax.random.key(given.seed)
        made = {name: base.estimate(estimator, key, data) for name, estimator in estimators.items()}
        told: gaussian.Told = made["personalized"].shared
        around = _gaussian_intervals(told, made, sizes)
        learned = {
            "mean": np.asarray(told.mean).tolist(),
            "sigma_theta": float(told.st2) ** 0.5,
            "sigma_x": float(told.sx2) ** 0.5,
        }
        return _own("gaussian", path, clients.names, data, estimators, made, key, around, learned)


def run_bernoulli(path: Path, given: BernoulliSettings) -> Own:
    """Probabilities of the file's clients, whose samples are zeros and ones.

    Raises:
      JaxpflError: settings that own data do not have, a bad file, samples that are neither 0 nor 1, less than two
        clients, or none with two samples.
    """
    _refuse_simulated(given, ("prior",))
    given.check()
    clients = client_csv.read(path)
    for name, own in zip(clients.names, clients.samples, strict=True):
        if own.ndim > 1 or not np.isin(own, (0, 1)).all():
            raise JaxpflError(f"{path}: client {name!r}: samples must be 0 or 1, one number each")
    sizes = _sizes(path, clients.samples)
    estimators = {
        "local": bernoulli.local(),
        "global": bernoulli.global_mean(),
        "personalized": bernoulli.personalized(),
        "printed": bernoulli.personalized(printed=True),
    }
    if given.epsilon is not None:
        estimators["private"] = bernoulli_private.split(given.epsilon)
    with jax.enable_x64(True):
        data = base.stack(clients.samples)
        key = jax.random.key(given.seed)
        made = {name: base.estimate(estimator, key, data) for name, estimator in estimators.items()}
        told: bernoulli.Told = made["personalized"].shared
        mu = told.shares.mean
        v = jnp.clip(bernoulli.moment_variance(mu, told.shares.variance, told.inverse_sizes.mean), 0, mu * (1 - mu))
        around = intervals.beta(mu, v, made["local"].estimates, jnp.asarray(sizes), LEVEL)
        learned = {"mean": float(mu), "variance": float(v)}
        return _own("bernoulli", path, clients.names, data, estimators, made, key, around, learned)


def held_out_errors(estimators: dict[str, Estimator], key: Key, data: Samples) -> dict[str, np.ndarray]:
    """Each client's mean squared error on its own held-out samples, [clients with two samples or more].

    Sample j is held out in fold j mod `FOLDS`. A client that has no training samples in a fold neither sends nor is
    scored in it.
    """

    @jax.jit
    def errors(data: Samples) -> tuple[dict[str, Array], Array]:
        fold_of = jnp.cumsum(data.mask, axis=1) - 1

        def fold(f: Array) -> tuple[dict[str, Array], Array]:
            held = data.mask & (fold_of % FOLDS == f)
            train = Samples(data.x, data.mask & ~held)
            scored = held & train.mask.any(axis=1, keepdims=True)

            def score(estimator: Estimator) -> Array:
                made = base.estimate(estimator, jax.random.fold_in(key, f), train, sent=train.mask.any(axis=1))
                square = (data.x - made.estimates[:, None]) ** 2
                square = square.sum(axis=-1) if square.ndim > 2 else square
                return jnp.where(scored, square, 0).sum(axis=1)

            return {name: score(estimator) for name, estimator in estimators.items()}, scored.sum(axis=1)

        sums, counts = jax.lax.map(fold, jnp.arange(FOLDS))
        return jax.tree.map(lambda a: a.sum(axis=0), sums), counts.sum(axis=0)

    sums, counts = jax.tree.map(np.asarray, errors(data))
    scored = counts > 0
    return {name: sums[name][scored] / counts[scored] for name in estimators}


def _own(
    study: str,
    path: Path,
    names: list[str],
    data: Samples,
    estimators: dict[str, Estimator],
    made: dict[str, Estimated],
    key: Key,
    around: tuple[Any, Any],
    learned: dict[str, Any],
) -> Own:
    sizes = np.asarray(data.mask.sum(axis=1))
    result = {
        "study": study,
        "csv": path.name,
        "clients": len(names),
        "samples": {"min": int(sizes.min()), "median": float(np.median(sizes)), "max": int(sizes.max())},
        "of": "held-out samples",
    } | report(held_out_errors(estimators, key, data), {})
    result["estimated"] = learned
    columns: dict[str, list] = {"client": names, "samples": sizes.tolist()}
    parts = {name: made[name].estimates for name in made if name != "global"} | {"low": around[0], "high": around[1]}
    for name, values in parts.items():
        values = np.asarray(values).reshape(len(names), -1)
        for entry, column in enumerate(values.T):
            label = name if values.shape[1] == 1 else f"{name}{entry + 1}"
            columns[label] = column.tolist()
    first = [np.asarray(made[name].estimates).reshape(len(names), -1)[:, 0] for name in ("local", "personalized")]
    return Own(result, columns, (first[0], first[1], sizes))


def _refuse_simulated(given: GaussianSettings | BernoulliSettings, more: tuple[str, ...]) -> None:
    names = ("clients", "samples", "uploads", "repetitions", *more)
    refuse_given(given, names, "is of simulated data, which a CSV file takes the place of")


def _sizes(path: Path, samples: list[np.ndarray]) -> np.ndarray:
    sizes = np.array([len(own) for own in samples])
    if len(sizes) < 2:
        raise JaxpflError(f"{path}: needs at least two clients, got {len(sizes)}")
    if sizes.max() < 2:
        raise JaxpflError(f"{path}: every client has a single sample: nothing can be learned of the clients' variance")
    return sizes


def _public(given: GaussianSettings, sizes: np.ndarray, dim: int) -> GaussianSettings:
    # The clipping radius must hold for the client with fewest samples.
    public = replace(given, clients=len(sizes), samples=int(sizes.min()), dim=dim)
    public.check()
    return public


def _gaussian_intervals(told: gaussian.Told, made: dict[str, Estimated], sizes: np.ndarray) -> tuple[Any, Any]:
    """Morris's where all sizes are alike; else those of known variances, which are a little short for few clients."""
    m = len(sizes)
    if m >= 4 and sizes.min() == sizes.max():
        return intervals.morris(made["local"].estimates, told.sx2 / sizes[0], LEVEL)

    def error(size: Array) -> Array:
        terms = gaussian.error_terms(told, size, jnp.ones((), bool))
        return closed_form.error(closed_form.best_weight(*terms), *terms)

    mse = jax.vmap(error)(jnp.asarray(sizes, float))[:, None]
    return intervals.known(made["personalized"].estimates, mse, LEVEL)


def write(folder: Path, own: Own) -> list[Path]:
    """Writes ``estimates.csv`` beside the folder of plots, and draws what became of each client's own estimate."""
    folder.mkdir(parents=True, exist_ok=True)
    client_csv.write(folder.parent / "estimates.csv", own.columns)
    local, personal, sizes = own.pairs
    figure, axes = new_axes("local estimate", "personalised estimate", f"{own.result['csv']}: {len(sizes)} clients")
    low, high = float(min(local.min(), personal.min())), float(max(local.max(), personal.max()))
    axes.plot([low, high], [low, high], color=GRID, linewidth=1.5, zorder=0, label="no shrinkage")
    axes.scatter(
        local,
        personal,
        s=12 + 60 * sizes / sizes.max(),
        color=color("personalized"),
        alpha=0.5,
        linewidths=0,
        label="a client, larger for more samples",
    )
    mean = float(np.ravel(own.result["estimated"]["mean"])[0])
    axes.axhline(mean, color=color("global"), linewidth=1, linestyle="--", label="estimated mean of all")
    axes.legend(frameon=False, fontsize=9)
    return [save(figure, folder, "shrinkage")]

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
from jaxpfl.estimators.base import Estimated, Estimator, Samples
from jaxpfl.presentation import GRID, new_axes, save
from jaxpfl.types import Array, Key

FOLDS = 5
LEVEL = 0.95
LEAST = 3
"""Samples of some client, for scores on held-out ones: of pairs, what is not held out tells nothing of a variance."""

_SIMULATED = ("clients", "samples", "uploads", "repetitions")
_PUBLIC = ("sigma_theta", "sigma_x", "radius")


class Own(NamedTuple):
    """What was made of a file.

    Attributes:
      result: for the table and JSON.
      columns: one for each fact of a client, for ``estimates.csv``.
      pairs: local and personalised estimates of the first entry, [m] each, and numbers of samples [m], for the plot.
      public: of private Gaussian messages, the settings that they are clipped and reckoned with.
    """

    result: dict[str, Any]
    columns: dict[str, list]
    pairs: tuple[np.ndarray, np.ndarray, np.ndarray]
    public: GaussianSettings | None = None


def run_gaussian(path: Path, given: GaussianSettings) -> Own:
    """Means of the file's clients, their variances estimated from the file.

    With eps, messages are private by the settings' mechanism; then sigma_theta, sigma_x and radius are what is publicly
    known, and the samples' numbers are public too.

    Raises:
      JaxpflError: settings that own data do not have, a bad file, less than two clients, none with two samples, or none
        whose samples differ.
    """
    ignored = (*_SIMULATED, "dim", "mean")
    _refuse_simulated(given, ignored)
    if given.epsilon is None:
        refuse_given(given, _PUBLIC, "needs epsilon, without which all is learned from the file")
        ignored += (*_PUBLIC, "mechanism", "delta")
    if given.epsilon is None or given.mechanism != "discrete":
        refuse_given(given, ("bits",), "needs epsilon and mechanism discrete where data are your own")
        ignored += ("bits",)
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
        degrees = float((sizes - 1).sum() * known.dim)
        around = intervals.morris(made["local"].estimates, told.sx2 / sizes, LEVEL, degrees=degrees)
        facts: dict[str, Any] = {"settings": _without(given, ignored)}
        if given.epsilon is not None:
            facts["privacy"] = {
                "epsilon": given.epsilon,
                "delta": 0.0 if given.mechanism == "one-bit" else given.delta,
                "mechanism": given.mechanism,
                "clipped_to": known.bound,
            } | {name: getattr(given, name) for name in _PUBLIC}
        facts["estimated"] = {
            "mean": np.asarray(told.mean).tolist(),
            "sigma_theta": float(told.st2) ** 0.5,
            "sigma_x": float(told.sx2) ** 0.5,
        }
        own = _own("gaussian", path, clients.names, data, estimators, made, key, around, facts)
        return own._replace(public=known if given.epsilon is not None else None)


def run_bernoulli(path: Path, given: BernoulliSettings) -> Own:
    """Probabilities of the file's clients, whose samples are zeros and ones.

    Raises:
      JaxpflError: settings that own data do not have, a bad file, samples that are neither 0 nor 1, less than two
        clients, or none with two samples.
    """
    ignored = (*_SIMULATED, "prior")
    _refuse_simulated(given, ignored)
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
        ones = np.array([own.sum() for own in clients.samples])
        around = intervals.beta_learned(ones, sizes, LEVEL)
        facts: dict[str, Any] = {"settings": _without(given, ignored)}
        if given.epsilon is not None:
            facts["privacy"] = {"epsilon": given.epsilon, "delta": 0.0, "mechanism": "one-bit"}
        facts["estimated"] = {"mean": float(mu), "variance": float(v)}
        return _own("bernoulli", path, clients.names, data, estimators, made, key, around, facts)


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
    facts: dict[str, Any],
) -> Own:
    sizes = np.asarray(data.mask.sum(axis=1))
    result: dict[str, Any] = {
        "study": study,
        "csv": path.name,
        "clients": len(names),
        "samples": {"min": int(sizes.min()), "median": float(np.median(sizes)), "max": int(sizes.max())},
    } | facts
    if sizes.max() < LEAST:
        why = f"no client has {LEAST} samples: of what is not held out, the clients' variance cannot be learned"
        result["not_scored"] = why
    else:
        result |= {"of": "held-out samples"} | report(held_out_errors(estimators, key, data), {})
    columns: dict[str, list] = {"client": names, "samples": sizes.tolist()}
    # An estimate is at the variance that the moments say, its interval about the mean over all that are likely: where
    # few clients leave the two far apart, the interval reaches to the estimate.
    low, high = (np.asarray(end) for end in around)
    at = np.asarray(made["personalized"].estimates)
    ends = {"low": np.minimum(low, at), "high": np.maximum(high, at)}
    parts = {name: made[name].estimates for name in made if name != "global"} | ends
    for name, values in parts.items():
        values = np.asarray(values).reshape(len(names), -1)
        for entry, column in enumerate(values.T):
            label = name if values.shape[1] == 1 else f"{name}{entry + 1}"
            columns[label] = column.tolist()
    first = [np.asarray(made[name].estimates).reshape(len(names), -1)[:, 0] for name in ("local", "personalized")]
    return Own(result, columns, (first[0], first[1], sizes))


def _refuse_simulated(given: GaussianSettings | BernoulliSettings, names: tuple[str, ...]) -> None:
    refuse_given(given, names, "is of simulated data, which a CSV file takes the place of")


def _without(given: GaussianSettings | BernoulliSettings, ignored: tuple[str, ...]) -> dict[str, Any]:
    """The settings that own data have."""
    return {name: value for name, value in vars(given).items() if name not in ignored}


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

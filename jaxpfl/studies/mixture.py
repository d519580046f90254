"""The mixture study: parameters are one of k centers, known, fitted, private, or alternated as printed."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxpfl.core import checks
from jaxpfl.core.types import Array, Key
from jaxpfl.estimators import base, gaussian, mixture, private_clustering, radius, release
from jaxpfl.estimators.base import Estimator
from jaxpfl.estimators.release import Release
from jaxpfl.priors.discrete import Discrete
from jaxpfl.privacy import local_dp as local
from jaxpfl.studies.own_data.options import OwnFile, own_or_simulated
from jaxpfl.studies.plots import Curve, write_curves
from jaxpfl.studies.repetitions import gain, mean_square, measure, repeat
from jaxpfl.studies.report import estimator_table
from jaxpfl.studies.settings import NOT_PRIVATE, at_least, check_privacy, refuse_given
from jaxpfl.studies.study import Results, Study
from jaxpfl.support.errors import JaxpflError
from jaxpfl.uploads.compression import quantizers


@dataclass(frozen=True)
class MixtureSettings:
    """X_ij ~ N(theta_i, sx2 I), theta_i one of k centers, drawn anew from a sphere in each repetition."""

    clients: int = 1_000
    """m."""
    samples: int = 5
    """n, of each client."""
    components: int = 3
    """k."""
    dim: int = 2
    """d."""
    sigma_x: float = 0.5
    """Standard deviation of a sample about its client's center."""
    radius: float = 0.5
    """r: norm of the centers, publicly known."""
    iterations: int = 10
    """T: steps of private k-means, and maximum rounds of the alternation (Algorithm 3)."""
    epsilon: float | None = None
    """Epsilon of a client, for private k-means (central) and for a message (local); none unless given."""
    delta: float = 1e-5
    """delta of both."""
    bits: int | None = None
    """Bits to which each entry of a message is quantised."""
    repetitions: int = 60
    """Independent repetitions, for the standard errors."""
    seed: int = 0
    """Seed of every random draw."""

    def check(self) -> None:
        """Check the settings.

        Raises:
          JaxpflError: the name, its value, and what is allowed.
        """
        for name in ("clients", "samples", "components", "dim", "iterations", "repetitions"):
            checks.count(name, getattr(self, name))
        if self.components > self.clients:
            raise JaxpflError(f"components must be at most the {self.clients} clients, got {self.components}")
        at_least("radius", self.radius, 0)
        checks.positive("sigma_x", self.sigma_x)
        check_privacy(self.epsilon, self.delta)
        if self.epsilon is None:
            refuse_given(self, ("delta",), NOT_PRIVATE)
        if self.bits is not None:
            quantizers.check_bits(self.bits)

    @property
    def s2(self) -> float:
        """Variance of an entry of a client's mean about its center."""
        return self.sigma_x**2 / self.samples

    @property
    def clip(self) -> float:
        """Clipping norm of the messages."""
        with jax.ensure_compile_time_eval():
            return float(radius.norm(self.radius, self.s2, self.dim, self.clients, self.samples))


def contenders(given: MixtureSettings) -> dict[str, Estimator]:
    """One-round estimators that the settings call for, except the one with known centers."""
    k, sx2 = given.components, given.sigma_x**2
    found = {
        "local": gaussian.local(),
        "global": gaussian.global_mean(),
        "personalized": mixture.em(k, sx2=sx2),
        "variance fitted": mixture.em(k),
    }
    if given.bits is not None:
        found["quantized"] = mixture.em(
            k, sx2=sx2, release=release.quantized(given.clip, given.bits), reach=given.radius
        )
    if given.epsilon is not None:
        noise = private_clustering.noise_multiplier(given.epsilon, given.delta, given.iterations)
        for name, soft in (("private", False), ("private, soft", True)):
            found[name] = mixture.private(
                k, sx2, radius=given.clip, noise=noise, steps=given.iterations, reach=given.radius, soft=soft
            )
        sent = local_release(given, given.epsilon)
        found["local privacy"] = mixture.em(k, sx2=sx2, release=sent, reach=given.radius)
    return found


def local_release(given: MixtureSettings, epsilon: float) -> Release:
    """Locally private release of a client's mean, all its entries together."""
    stddev = local.analytic_gaussian_stddev(epsilon, given.delta, 2 * given.clip)
    return release.gaussian_vector(given.clip, stddev)


def draw(key: Key, given: MixtureSettings) -> tuple[Discrete, Array, base.Samples]:
    """Draw the population (equal shares), parameters [m, d], and samples [m, n, d]."""
    of_centers, of_member, of_x = jax.random.split(key, 3)
    m, n, k, d = given.clients, given.samples, given.components, given.dim
    centers = jax.random.normal(of_centers, (k, d))
    centers *= given.radius / jnp.linalg.norm(centers, axis=1, keepdims=True)
    theta = centers[jax.random.randint(of_member, (m,), 0, k)]
    x = theta[:, None] + given.sigma_x * jax.random.normal(of_x, (m, n, d))
    return Discrete(jnp.full(k, 1 / k), centers), theta, base.every(x)


def simulate(given: MixtureSettings) -> dict[str, np.ndarray]:
    """Mean squared errors in each repetition, [repetitions]; for ``alternating`` after 1 ... T rounds, [repetitions,
    T].
    """
    estimators, sx2 = contenders(given), given.sigma_x**2
    alternating = mixture.alternating(given.components, given.dim, sx2)

    def study(key: Key) -> dict[str, Array]:
        of_data, of_run = jax.random.split(key)
        prior, theta, clients = draw(of_data, given)
        every = {"known": mixture.known(prior, sx2)} | estimators
        found = {n: mean_square(base.estimate(e, of_run, clients).estimates, theta) for n, e in every.items()}

        def after_one_more(round: Array, at: tuple[Any, Array]) -> tuple[Any, Array]:
            shared, errors = at
            made = base.estimate(alternating._replace(start=shared), jax.random.fold_in(of_run, round), clients)
            return made.shared, errors.at[round].set(mean_square(made.estimates, theta))

        start = alternating.start, jnp.zeros(given.iterations)
        found["alternating"] = jax.lax.fori_loop(0, given.iterations, after_one_more, start)[1]
        return found

    errors = repeat(study, given.seed, given.repetitions, given.clients * given.samples * given.dim)
    order = ["local", "known", *[name for name in estimators if name != "local"], "alternating"]
    return {name: errors[name] for name in order}


def run(given: MixtureSettings) -> dict[str, Any]:
    """Summary of `simulated`.

    Returns:
      ``mse`` and ``gains`` by estimator (``alternating``: after its last round), ``gain_over_local`` of the
      personalised one, which is EM,
      ``alternation``: mean and standard error after each round, and ``privacy``: what was spent, where eps is given.
    """
    return simulated(given).json


def simulated(given: MixtureSettings) -> Results:
    """Run the simulation.

    Raises:
      JaxpflError: for settings that `MixtureSettings.check` refuses.
    """
    given.check()
    series = simulate(given)
    rounds = [measure(column)._asdict() for column in series["alternating"].T]
    errors = series | {"alternating": series["alternating"][:, -1]}
    mse = {name: measure(values, exact(given) if name == "local" else None) for name, values in errors.items()}
    gained = {name: gain(values, errors["local"])._asdict() for name, values in errors.items() if name != "local"}
    result = {
        "study": "mixture",
        "settings": dict(vars(given)),
        "mse": {name: row._asdict() for name, row in mse.items()},
        "gain_over_local": gained["personalized"]["mean"],
        "gains": gained,
        "alternation": rounds,
    }
    if given.epsilon is not None:
        result["privacy"] = _spent(given, given.epsilon)
    sizes = f"{given.clients} clients of {given.samples} samples at {given.components} centers, d = {given.dim}"
    title = f"{sizes}, {given.repetitions} repetitions"
    return Results(
        json=result,
        tables=lambda: estimator_table(result, title, _notes(given, result)),
        plots=lambda folder: write_plots(folder, result),
        series=series,
    )


def _notes(given: MixtureSettings, result: dict[str, Any]) -> list[str]:
    first, last = result["alternation"][0]["mean"], result["alternation"][-1]["mean"]
    notes = [f"Algorithm 3 as printed: {first:.4g} after one round, {last:.4g} after {given.iterations}"]
    if given.epsilon is None:
        return notes
    spent = result["privacy"]
    return [
        *notes,
        f"privacy of a client: epsilon {given.epsilon:g}, delta {given.delta:g}, means clipped to a norm of "
        f"{spent['clip']:.3g}",
        f"private: central, add or remove one; {given.iterations} Gaussian steps of noise multiplier "
        f"{spent['central']['noise_multiplier']:.3g}, from a start that knows no data",
        f"local privacy: one message with noise of standard deviation {spent['local']['stddev']:.3g}",
    ]


def exact(given: MixtureSettings) -> float:
    """Exact error of the local estimate."""
    return given.dim * given.s2


def _spent(given: MixtureSettings, epsilon: float) -> dict[str, Any]:
    noise = private_clustering.noise_multiplier(epsilon, given.delta, given.iterations)
    return {
        "unit": "client",
        "epsilon": epsilon,
        "delta": given.delta,
        "clip": given.clip,
        "central": {
            "relation": "add_or_remove_one",
            "noise_multiplier": noise,
            "iterations": given.iterations,
            "event": str(private_clustering.event(noise, given.iterations)),
            "start": "independent of the data",
        },
        "local": {"stddev": local.analytic_gaussian_stddev(epsilon, given.delta, 2 * given.clip)},
    }


def write_plots(folder: Path, result: dict[str, Any]) -> list[Path]:
    """Plot the alternation's error over its rounds, with those of local estimates and of known centers."""
    folder.mkdir(parents=True, exist_ok=True)
    rounds = range(1, len(result["alternation"]) + 1)
    flat = [rounds[0], rounds[-1]]
    curves = {
        name: Curve((), (), (), [row["mean"]] * 2)
        for name, row in result["mse"].items()
        if name not in ("alternating", "variance fitted", "global")
    }
    rows = result["alternation"]
    curves["alternating, Algorithm 3"] = Curve(
        list(rounds), [r["mean"] for r in rows], [r["stderr"] or 0 for r in rows]
    )
    given = result["settings"]
    title = f"{given['components']} centers of norm {given['radius']:g}, m = {given['clients']}, n = {given['samples']}"
    path = folder / "mse-rounds.png"
    return [write_curves(path, flat, curves, xlabel="rounds of the alternation", title=f"{title}, d = {given['dim']}")]


@dataclass(frozen=True)
class MixtureOptions(OwnFile):
    """The user's own clients instead of simulated ones."""

    csv: Path | None = None
    """Clients of your own: one row per client, or per sample; the reading of the file is reported. --components is the
    number of kinds that EM fits."""


STUDY = Study(MixtureSettings, own_or_simulated("mixture", simulated), MixtureOptions)

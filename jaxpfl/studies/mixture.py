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
from jaxpfl.estimators import base, clustering, gaussian, mixture, release
from jaxpfl.estimators.base import Estimator
from jaxpfl.estimators.release import Release
from jaxpfl.priors.discrete import Discrete
from jaxpfl.privacy import local_dp as local
from jaxpfl.studies.own_data.client_csv import OwnFile, own_or_simulated
from jaxpfl.studies.repetitions import mean_square, measure, repeat, report
from jaxpfl.studies.report import Curve, estimator_table, write_curves
from jaxpfl.studies.study import NOT_PRIVATE, Results, Settings, Study, at_least, refuse_given, within
from jaxpfl.support.errors import JaxpflError
from jaxpfl.uploads.compression import quantizers


@dataclass(frozen=True)
class MixtureSettings(Settings):
    """X_ij ~ N(theta_i, sx2 I), theta_i one of k centers, drawn anew from a sphere in each repetition."""

    clients: int = within(1_000, checks.count)
    """m."""
    samples: int = within(5, checks.count)
    """n, of each client."""
    components: int = within(3, checks.count)
    """k."""
    dim: int = within(2, checks.count)
    """d."""
    sigma_x: float = within(0.5, checks.positive)
    """Standard deviation of a sample about its client's center."""
    radius: float = within(0.5, at_least(0))
    """r: norm of the centers, publicly known."""
    iterations: int = within(10, checks.count)
    """T: steps of private k-means, and maximum rounds of the alternation (Algorithm 3)."""
    epsilon: float | None = within(None, checks.positive)
    """Epsilon of a client, for private k-means (central) and for a message (local); none unless given."""
    delta: float = within(1e-5, checks.probability)
    """delta of both."""
    bits: int | None = within(None, lambda name, bits: quantizers.check_bits(bits))
    """Bits to which each entry of a message is quantised."""
    repetitions: int = within(60, checks.count)
    """Independent repetitions, for the standard errors."""
    seed: int = 0
    """Seed of every random draw."""

    def check(self) -> None:
        """Check the settings.

        Raises:
          JaxpflError: the name, its value, and what is allowed.
        """
        super().check()
        if self.components > self.clients:
            raise JaxpflError(f"components must be at most the {self.clients} clients, got {self.components}")
        if self.epsilon is None:
            refuse_given(self, ("delta",), NOT_PRIVATE)

    @property
    def s2(self) -> float:
        """Variance of an entry of a client's mean about its center."""
        return self.sigma_x**2 / self.samples

    @property
    def clip(self) -> float:
        """Clipping norm of the messages."""
        with jax.ensure_compile_time_eval():
            return float(release.norm_radius(self.radius, self.s2, self.dim, self.clients, self.samples))


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
        noise = clustering.noise_multiplier(given.epsilon, given.delta, given.iterations)
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


def simulated(given: MixtureSettings) -> Results:
    """Run the simulation.

    The summary has ``mse`` and ``gains`` by estimator (``alternating``: after its last round), ``gain_over_local`` of
    the personalised one, which is EM, ``alternation``: mean and standard error after each round, and ``privacy``: what
    was spent, where eps is given.

    Raises:
      JaxpflError: for settings that `MixtureSettings.check` refuses.
    """
    given.check()
    series = simulate(given)
    rounds = [measure(column)._asdict() for column in series["alternating"].T]
    errors = series | {"alternating": series["alternating"][:, -1]}
    result = {"study": "mixture", "settings": dict(vars(given))}
    result |= report(errors, {"local": given.dim * given.s2}) | {"alternation": rounds}
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


def _spent(given: MixtureSettings, epsilon: float) -> dict[str, Any]:
    noise = clustering.noise_multiplier(epsilon, given.delta, given.iterations)
    return {
        "unit": "client",
        "epsilon": epsilon,
        "delta": given.delta,
        "clip": given.clip,
        "central": {
            "relation": "add_or_remove_one",
            "noise_multiplier": noise,
            "iterations": given.iterations,
            "event": str(clustering.event(noise, given.iterations)),
            "start": "independent of the data",
        },
        "local": {"stddev": local.analytic_gaussian_stddev(epsilon, given.delta, 2 * given.clip)},
    }


def write_plots(folder: Path, result: dict[str, Any]) -> list[Path]:
    """Plot the alternation's error over its rounds, with those of local estimates and of known centers."""
    folder.mkdir(parents=True, exist_ok=True)
    rounds = range(1, len(result["alternation"]) + 1)
    curves = {
        name: Curve.level(row["mean"], rounds)
        for name, row in result["mse"].items()
        if name not in ("alternating", "variance fitted", "global")
    }
    curves["alternating, Algorithm 3"] = Curve.measured(rounds, result["alternation"])
    given = result["settings"]
    title = f"{given['components']} centers of norm {given['radius']:g}, m = {given['clients']}, n = {given['samples']}"
    path = folder / "mse-rounds.png"
    return [
        write_curves(path, rounds, curves, xlabel="rounds of the alternation", title=f"{title}, d = {given['dim']}")
    ]


@dataclass(frozen=True)
class MixtureOptions(OwnFile):
    """The user's own clients instead of simulated ones."""

    csv: Path | None = None
    """Clients of your own: one row per client, or per sample; the reading of the file is reported. --components is the
    number of kinds that EM fits."""


STUDY = Study(MixtureSettings, own_or_simulated("mixture", simulated), MixtureOptions)

"""The Bernoulli study over eps and over populations: the paper's four priors, and private bits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from jaxpfl.estimators import base, bernoulli, bernoulli_private
from jaxpfl.estimators import bernoulli_closed_form as closed_form
from jaxpfl.estimators.base import Estimator
from jaxpfl.presentation import INK, new_axes, save
from jaxpfl.studies import bernoulli as study
from jaxpfl.studies.bernoulli import BernoulliSettings
from jaxpfl.studies.plots import Curve, color, write_curves
from jaxpfl.studies.repetitions import gain, mean_square, repeat
from jaxpfl.studies.settings import senders
from jaxpfl.types import Array, Key

EPSILONS = (0.25, 0.5, 1.0, 2.0, 4.0, 8.0)
PRINTED_GAINS = {
    "truncnorm:.5,.15": (0.371, 0.039),
    "uniform": (0.120, 0.016),
    "spikes": (0.243, 0.028),
    "beta:4.25,4.25": (0.340, 0.037),
}
"""The paper's gains with their spreads; the parameters of its Beta prior are unstated, these reproduce it."""


def over_epsilon(given: BernoulliSettings, epsilons: tuple[float, ...] = EPSILONS) -> dict[str, np.ndarray]:
    """Errors of the private designs, [repetitions, len(epsilons)] each, and of ``local``, [repetitions], on the same
    data.
    """
    prior = given.check()
    designs: dict[str, Callable[[Array], Estimator]] = {
        "private": bernoulli_private.split,
        "private, plus one error": lambda epsilon: bernoulli_private.split(epsilon, plus_error=True),
        "printed private": bernoulli_private.printed,
    }

    def errors(key: Key) -> dict[str, Array]:
        of_data, of_run = jax.random.split(key)
        p, clients = study.draw(of_data, given, prior)
        sent = senders(given.clients, given.uploads)

        def error(estimator: Estimator) -> Array:
            return mean_square(base.estimate(estimator, of_run, clients, sent=sent).estimates, p)

        private = {
            name: jax.vmap(lambda e, build=build: error(build(e)))(jnp.array(epsilons))
            for name, build in designs.items()
        }
        return private | {"local": error(bernoulli.local()), "personalized": error(bernoulli.personalized())}

    numbers = given.clients * (given.samples + len(designs) * len(epsilons))
    return repeat(errors, given.seed, given.repetitions, numbers)


def write_plots(folder: Path, given: BernoulliSettings) -> list[Path]:
    """Plot the gain against eps at the settings, and the gains under the paper's populations with the printed ones."""
    folder.mkdir(parents=True, exist_ok=True)
    return [_epsilon_plot(folder, given), _priors_plot(folder, given)]


def _epsilon_plot(folder: Path, given: BernoulliSettings) -> Path:
    errors = over_epsilon(given)
    local = errors.pop("local")
    best = gain(errors.pop("personalized"), local)
    curves = {"personalized": Curve((), (), (), [100 * best.mean] * 2)}
    for name, values in errors.items():
        found = [gain(column, local) for column in values.T]
        curves[name] = Curve(EPSILONS, [100 * g.mean for g in found], [100 * (g.stderr or 0) for g in found])
    return write_curves(
        folder / "gain-epsilon.png",
        [EPSILONS[0], EPSILONS[-1]],
        curves,
        xlabel="epsilon of a client's bit",
        ylabel="gain over the local estimate, %",
        title=f"Private bits, m = {given.clients}, n = {given.samples}, {given.prior}",
        logarithmic="x",
        from_zero=False,
    )


def _priors_plot(folder: Path, given: BernoulliSettings) -> Path:
    """Measured gains with two standard errors, exact ones as strokes, and the printed with their spread."""
    title = f"Gain by population, m = {given.clients}, n = {given.samples}"
    figure, axes = new_axes("", "gain over the local estimate, %", title)
    names = list(dict.fromkeys([*PRINTED_GAINS, given.prior]))
    for place, name in enumerate(names):
        own = replace(given, prior=name, epsilon=None)
        prior, result = own.check(), study.run(own)
        local, n = closed_form.local(prior.population, own.samples), own.samples
        exact = {"personalized": closed_form.weight(prior.population, n)}
        exact["printed"] = closed_form.printed_weight(prior.population, n)
        for shift, estimator in ((-0.2, "personalized"), (0.0, "printed")):
            row = result["gains"][estimator]
            label = {"personalized": "corrected", "printed": "as printed"}[estimator] if place == 0 else None
            bar = 200 * (row["stderr"] or 0)
            axes.errorbar(place + shift, 100 * row["mean"], yerr=bar, fmt="o", color=color(estimator), label=label)
            mse = study.theory(own, prior.population, exact[estimator])
            level = 100 * (1 - mse / float(local))
            axes.hlines(level, place + shift - 0.08, place + shift + 0.08, color=color(estimator), linewidth=1.5)
        if name in PRINTED_GAINS:
            mean, spread = PRINTED_GAINS[name]
            label = "the paper's figure" if place == 0 else None
            axes.errorbar(place + 0.2, 100 * mean, yerr=100 * spread, fmt="s", color=INK, capsize=3, label=label)
    axes.set_xticks(range(len(names)), names)
    axes.set_ylim(bottom=0)
    axes.legend(frameon=False, fontsize=9)
    return save(figure, folder, "gain-priors")

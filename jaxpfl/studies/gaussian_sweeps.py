"""The Gaussian study over eps, over the number of clients and over their samples: the paper's Figures 1a, 3a and 3b."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from jaxpfl.estimators import base
from jaxpfl.estimators import gaussian_closed_form as closed_form
from jaxpfl.studies import gaussian as study
from jaxpfl.studies.gaussian import GaussianSettings
from jaxpfl.studies.plots import Curve, write_curves
from jaxpfl.studies.repetitions import mean_square, measure, repeat
from jaxpfl.studies.settings import senders
from jaxpfl.types import Array, Key

EPSILONS = tuple(round(0.1 * i, 1) for i in range(1, 9))
"""Those of the paper's figures."""

MECHANISMS = {"analytic": "private", "printed": "printed", "one-bit": "one-bit"}
"""Mechanism -> the name of its curve."""


def over_epsilon(given: GaussianSettings, epsilons: tuple[float, ...] = EPSILONS) -> dict[str, np.ndarray]:
    """Errors of the local mechanisms, [repetitions, len(epsilons)] each, on the same data, in one program.

    Reference: Ozkara et al. 2023, Figure 1a; Ozkara et al. 2023, Figure 3a; Ozkara et al. 2023, Figure 3b;
      Ozkara et al. 2022, Figure 4.
    """
    kinds = {kind: replace(given, mechanism=kind) for kind in (MECHANISMS if given.dim == 1 else ("analytic",))}
    strengths = {kind: jnp.array([study.strength(own, e) for e in epsilons]) for kind, own in kinds.items()}

    def errors(key: Key) -> dict[str, Array]:
        of_data, of_run = jax.random.split(key)
        theta, clients = study.draw(of_data, given)
        sent = senders(given.clients, given.uploads)

        def error(own: GaussianSettings, strength: Array) -> Array:
            estimator = study.personalized(own, study.private_release(own, strength))
            return mean_square(base.estimate(estimator, of_run, clients, sent=sent).estimates, theta)

        return {kind: jax.vmap(lambda at, own=own: error(own, at))(strengths[kind]) for kind, own in kinds.items()}

    return repeat(errors, given.seed, given.repetitions, given.clients * (given.samples + len(epsilons)) * given.dim)


def write_plots(folder: Path, given: GaussianSettings) -> list[Path]:
    """Plot the error against eps, m and n into ``folder``, measured and exact."""
    given.check()
    folder.mkdir(parents=True, exist_ok=True)
    m, n = given.clients, given.samples
    of_m = sorted({max(given.uploads or 2, round(m * f)) for f in (0.003, 0.01, 0.03, 0.1, 0.3, 1.0)})
    of_n = sorted({max(1, round(n * f)) for f in (0.2, 0.5, 1.0, 2.0, 4.0)})
    return [
        _epsilon_plot(folder, given),
        _size_plot(folder, given, "clients", of_m, "clients m"),
        _size_plot(folder, given, "samples", of_n, "samples of a client, n"),
    ]


def _epsilon_plot(folder: Path, given: GaussianSettings) -> Path:
    epsilons = EPSILONS if given.epsilon is None else tuple(given.epsilon * e for e in (0.25, 0.5, 1, 1.5, 2, 3, 4))
    fine = np.linspace(epsilons[0], epsilons[-1], 60)
    curves = {
        name: Curve((), (), (), [value] * len(fine))
        for name, value in (("local", given.dim * given.s2), ("personalized", study.theory(given)))
    }
    for kind, errors in over_epsilon(given, epsilons).items():
        own = replace(given, mechanism=kind)
        measured = [measure(column) for column in errors.T]
        line = []
        for epsilon in fine:
            sent = study.private_release(own, study.strength(own, float(epsilon)))
            line.append(study.theory(own, sent.variance, study.added_variance(own, sent)))
        curves[_label(kind, given)] = Curve(
            epsilons, [v.mean for v in measured], [v.stderr or 0 for v in measured], line
        )
    title = f"Private messages, {_setting(given)}"
    return write_curves(folder / "mse-epsilon.png", fine, curves, xlabel="epsilon of a client's message", title=title)


def _label(kind: str, given: GaussianSettings) -> str:
    return (
        MECHANISMS[kind]
        + {
            "analytic": f", analytic Gaussian, delta = {given.delta:g}",
            "printed": f", the paper's Gaussian, delta = {given.delta:g}",
            "one-bit": ", pure epsilon",
        }[kind]
    )


def _size_plot(folder: Path, given: GaussianSettings, name: str, sizes: list[int], xlabel: str) -> Path:
    """The error against a size: each size is a program of its own, the lines are exact."""
    fine = np.unique(np.geomspace(sizes[0], sizes[-1], 60).round().astype(int))
    measured = [study.run(replace(given, **{name: size}))["mse"] for size in sizes]
    with jax.enable_x64(True):
        exact = [study.contenders(replace(given, **{name: int(size)})) for size in fine]
    curves = {}
    for estimator in ("local", "global", "personalized", "quantized", "private"):
        if estimator in measured[0]:
            rows = [at[estimator] for at in measured]
            line = [np.nan if (mse := at[estimator].mse) is None else mse for at in exact]
            curves[estimator] = Curve(sizes, [r["mean"] for r in rows], [r["stderr"] or 0 for r in rows], line)
    s2 = given.sigma_x**2 / (fine if name == "samples" else np.full(len(fine), given.samples))
    floor = given.dim * np.asarray(closed_form.bound_known_mean(s2, given.st2))
    return write_curves(
        folder / f"mse-{name}.png",
        fine,
        curves,
        xlabel=xlabel,
        title=f"Gaussian clients, {_setting(given, but=name)}",
        floor=floor,
        logarithmic="xy",
    )


def _setting(given: GaussianSettings, but: str = "") -> str:
    sizes = {"clients": f"m = {given.clients}", "samples": f"n = {given.samples}", "dim": f"d = {given.dim}"}
    shown = [text for name, text in sizes.items() if name != but and (name != "dim" or given.dim > 1)]
    return ", ".join([*shown, f"sigma_theta = {given.sigma_theta:g}", f"sigma_x = {given.sigma_x:g}"])

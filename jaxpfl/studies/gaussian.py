"""The Gaussian study: local, global, personalised and private estimates of simulated clients' means."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxpfl.core.types import Array, Key, Scalar
from jaxpfl.estimators import base, gaussian, gaussian_private, radius, release
from jaxpfl.estimators import gaussian_closed_form as closed_form
from jaxpfl.estimators.base import Estimator
from jaxpfl.estimators.normal_means.area_fit import Likelihood
from jaxpfl.estimators.release import EXACT, Release
from jaxpfl.privacy import discrete_gaussian
from jaxpfl.privacy import local_dp as local
from jaxpfl.studies.gaussian_settings import GaussianPopulation, GaussianSettings
from jaxpfl.studies.own_data.options import OwnClients, own_or_simulated
from jaxpfl.studies.plots import Curve, write_curves
from jaxpfl.studies.repetitions import mean_square, measure, repeat, report
from jaxpfl.studies.report import estimator_table
from jaxpfl.studies.settings import refuse_given, senders
from jaxpfl.studies.study import Results, Study
from jaxpfl.uploads.compression import quantizers


class Contender(NamedTuple):
    """An estimator and its exact mean squared error over all d entries (None if unknown)."""

    estimator: Estimator
    mse: float | None


def contenders(given: GaussianSettings) -> dict[str, Contender]:
    """Estimators that the settings call for, by name.

    ``estimated`` is the personalised one with the variances also learned from the clients.
    """
    found = {
        "local": Contender(gaussian.local(), given.dim * float(closed_form.local(given.s2))),
        "global": Contender(gaussian.global_mean(), theory(given, a=0.0)),
        "personalized": Contender(personalized(given), theory(given)),
        "estimated": Contender(gaussian.personalized(), None),
        "james-stein": Contender(gaussian.james_stein(given.sigma_x**2), None),
    }
    for name, (sent, added) in releases(given).items():
        found[name] = Contender(personalized(given, sent), theory(given, sent.variance, added))
    if given.epsilon is not None and given.mechanism == "one-bit":
        split = gaussian_private.split(given.bound, given.epsilon, given.sigma_x**2)
        found["private, variance learned"] = Contender(split, None)
    return found


def personalized(given: GaussianSettings, sent: Release = EXACT) -> Estimator:
    """The estimator with the settings' variances known."""
    return gaussian.personalized(st2=given.st2, sx2=given.sigma_x**2, release=sent)


def theory(given: GaussianSettings, sq2: Scalar = 0.0, added: Scalar | None = None, a: Scalar | None = None) -> float:
    """Exact error of `personalized` over all entries, averaged over clients that send and those that do not.

    The weight assumes the release variance sq2 (unless ``a`` is given), while releases add ``added`` to an entry's
    variance (sq2 unless given).
    """
    uploads = given.uploads or given.clients
    share, total = uploads / given.clients, 0.0
    for part, sent in ((share, True), (1 - share, False)):
        own = closed_form.weight(uploads, given.s2, given.st2, sq2, sent=sent) if a is None else a
        noise = sq2 if added is None else added
        total += part * float(closed_form.personalized(uploads, given.s2, given.st2, noise, own, sent=sent))
    return given.dim * total


def releases(given: GaussianSettings) -> dict[str, tuple[Release, float]]:
    """Releases of the settings with their exact variance per entry, neglecting clipping."""
    spread, found = given.st2 + given.s2, {}
    if given.bits is not None:
        b = _quantized_to(given)
        added = float(quantizers.normal_variance(given.mean, spread, b, given.bits))
        found["quantized"] = (release.quantized(b, given.bits), added)
    if given.epsilon is not None:
        sent = private_release(given, strength(given, given.epsilon))
        found["private"] = (sent, added_variance(given, sent))
    return found


def sent_variance(given: GaussianPopulation) -> float:
    """Bound on the variance that a release adds to an entry: of privacy, else of quantisation, else zero."""
    if given.epsilon is not None:
        return float(private_release(given, strength(given, given.epsilon)).variance)
    return 0.0 if given.bits is None else float(release.quantized(_quantized_to(given), given.bits).variance)


def _quantized_to(given: GaussianPopulation) -> float:
    return float(radius.gaussian(given.radius, given.st2 + given.s2, given.clients, given.samples))


def strength(given: GaussianPopulation, epsilon: float) -> float:
    """Noise of the settings' mechanism: the standard deviation of Gaussian noise (in steps if discrete); eps for
    one-bit.
    """
    if given.mechanism == "one-bit":
        return epsilon
    if given.mechanism == "discrete":
        return discrete_gaussian.stddev(epsilon, given.delta, 2**given.levels_bits - 1)
    if given.mechanism == "printed":
        return local.printed_gaussian_stddev(epsilon, given.delta, given.bound)
    return local.analytic_gaussian_stddev(epsilon, given.delta, 2 * given.bound)


def private_release(given: GaussianPopulation, strength: Scalar) -> Release:
    """Local mechanism of the settings; its strength may be traced, except for discrete noise."""
    if given.mechanism == "discrete":
        with jax.ensure_compile_time_eval():
            noise = discrete_gaussian.table(float(strength))
        return release.discrete_gaussian(given.bound, given.levels_bits, noise)
    if given.mechanism == "one-bit":
        return release.one_bit(given.bound, strength)
    return (release.gaussian if given.dim == 1 else release.gaussian_vector)(given.bound, strength)


def added_variance(given: GaussianSettings, sent: Release) -> Scalar:
    """Exact variance that a private release adds to an entry; for one bit it decreases with the square of the mean."""
    spread = given.st2 + given.s2
    if given.mechanism == "one-bit":
        return sent.variance - (given.mean**2 + spread)
    if given.mechanism == "discrete":  # rounding adds less than its bound
        most = quantizers.variance_bound(given.bound, given.levels_bits)
        rounding = quantizers.normal_variance(given.mean, spread, given.bound, given.levels_bits)
        return sent.variance - most + rounding
    return sent.variance


def draw(key: Key, given: GaussianSettings) -> tuple[Array, base.Samples]:
    """Draw parameters [m, d] and samples [m, n, d]."""
    of_theta, of_x = jax.random.split(key)
    m, n, d = given.clients, given.samples, given.dim
    theta = given.mean + given.sigma_theta * jax.random.normal(of_theta, (m, d))
    return theta, base.every(theta[:, None] + given.sigma_x * jax.random.normal(of_x, (m, n, d)))


def repetition(given: GaussianSettings, estimators: dict[str, Estimator]) -> Callable[[Key], dict[str, Array]]:
    """One repetition, a pure function of its key, that returns each estimator's mean squared error on new data, []
    each.
    """

    def study(key: Key) -> dict[str, Array]:
        of_data, of_run = jax.random.split(key)
        theta, clients = draw(of_data, given)
        sent = senders(given.clients, given.uploads)
        return {
            name: mean_square(base.estimate(estimator, of_run, clients, sent=sent).estimates, theta)
            for name, estimator in estimators.items()
        }

    return study


def simulate(given: GaussianSettings, estimators: dict[str, Estimator]) -> dict[str, Any]:
    """Mean squared error of each estimator in each repetition, [repetitions], on the same data for all."""
    numbers = given.clients * given.samples * given.dim
    errors = repeat(repetition(given, estimators), given.seed, given.repetitions, numbers)
    return {name: errors[name] for name in estimators}


@dataclass(frozen=True)
class GaussianOptions(OwnClients):
    """The user's own clients instead of simulated ones."""

    csv: Path | None = None
    """Clients of your own, by the names of its columns: --client, and --value or --values. With --epsilon,
    --sigma-theta, --sigma-x and --radius must be publicly known: subtract a public center first."""
    covariates: tuple[str, ...] = ()
    """Columns of numbers beside the samples of a long file, on which these are regressed; clients are then normal about
    the regression (the nested-error model of Battese, Harter and Fuller 1988)."""
    fit: Likelihood = "reml"
    """Likelihood by which the variances about the covariates' regression are fitted: reml, or ml, which makes them too
    small with few clients."""

    def refuse_without_file(self) -> None:
        """Refuse the other options without a file.

        Raises:
          JaxpflError.
        """
        super().refuse_without_file()
        refuse_given(self, ("covariates", "fit"), "is of --csv, and there is none")


def run(given: GaussianSettings) -> dict[str, Any]:
    """Summary of `simulated`: each estimator's error and closed form, and the lower bounds."""
    return simulated(given).json


def simulated(given: GaussianSettings) -> Results:
    """Run the simulation.

    Raises:
      JaxpflError: for settings that `GaussianSettings.check` refuses, or a sigma_x that single precision does not show
        beside the means.
    """
    given.check()
    base.check_digits(abs(given.mean) + given.sigma_theta, given.sigma_x)
    with jax.enable_x64(True):  # closed forms to all digits
        found = contenders(given)
    errors = simulate(given, {name: each.estimator for name, each in found.items()})
    exact = {name: each.mse for name, each in found.items()}
    m, s2, st2, d = given.clients, given.s2, given.st2, given.dim
    bounds = {
        "known mean": d * float(closed_form.bound_known_mean(s2, st2)),
        "unknown mean": d * float(closed_form.bound_unknown_mean(m, s2, st2)),
    }
    result = {"study": "gaussian", "settings": dict(vars(given))} | report(errors, exact) | {"bounds": bounds}
    title = f"{m} Gaussian clients of {given.samples} samples, d = {d}, {given.repetitions} repetitions"
    notes = [f"no estimator does better than {bounds['unknown mean']:.4g} (mu unknown)"]
    if given.epsilon is not None:
        notes.append(privacy_note(given, given.epsilon))
    return Results(
        json=result,
        tables=lambda: estimator_table(result, title, notes),
        plots=lambda folder: write_plots(folder, given),
        series=errors,
    )


def privacy_note(given: GaussianSettings, epsilon: float) -> str:
    """A line on the guarantee of a client's message, with its clipping and its size."""
    delta = "pure" if given.mechanism == "one-bit" else f"delta {given.delta:g}"
    clipped = "each entry" if given.dim == 1 else "the norm"
    bits = private_release(given, strength(given, epsilon)).bits
    return (
        f"private: every client's message by itself, epsilon {epsilon:g}, {delta}, mechanism {given.mechanism}, "
        f"{clipped} clipped to {given.bound:.3g}, {bits} bit{'s' if bits > 1 else ''} an entry"
    )


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
    strengths = {kind: jnp.array([strength(own, e) for e in epsilons]) for kind, own in kinds.items()}

    def errors(key: Key) -> dict[str, Array]:
        of_data, of_run = jax.random.split(key)
        theta, clients = draw(of_data, given)
        sent = senders(given.clients, given.uploads)

        def error(own: GaussianSettings, strength: Array) -> Array:
            estimator = personalized(own, private_release(own, strength))
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
        for name, value in (("local", given.dim * given.s2), ("personalized", theory(given)))
    }
    for kind, errors in over_epsilon(given, epsilons).items():
        own = replace(given, mechanism=kind)
        measured = [measure(column) for column in errors.T]
        line = []
        for epsilon in fine:
            sent = private_release(own, strength(own, float(epsilon)))
            line.append(theory(own, sent.variance, added_variance(own, sent)))
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
    measured = [run(replace(given, **{name: size}))["mse"] for size in sizes]
    with jax.enable_x64(True):
        exact = [contenders(replace(given, **{name: int(size)})) for size in fine]
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


STUDY = Study(GaussianSettings, own_or_simulated("gaussian", simulated), GaussianOptions)

"""Study of clients whose means are one of k centers: EM, the paper's Algorithm 3, and private k-means."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from scipy.special import logsumexp

from jaxpfl.core import checks, full_precision
from jaxpfl.core.types import Array, Key
from jaxpfl.estimators import base, clustering, gaussian, mixture, release
from jaxpfl.estimators.base import Estimator
from jaxpfl.priors.discrete import Discrete
from jaxpfl.privacy import local_dp as local
from jaxpfl.studies import own_clients
from jaxpfl.studies.own_clients import CsvLayout, own_or_simulated, sizes_of
from jaxpfl.studies.repetitions import mean_square, measure, repeat, report
from jaxpfl.studies.report import Curve, beside, estimator_table, write_curves
from jaxpfl.studies.study import NOT_PRIVATE, Block, Results, Settings, Study, minimum, refuse_given, within
from jaxpfl.support.console import COLORS, GRID, INK, literal, new_axes, new_table, save, unmarked
from jaxpfl.support.errors import JaxpflError
from jaxpfl.uploads.compression import quantizers


@dataclass(frozen=True)
class MixtureSettings(Settings):
    """Settings of the study.

    Sample j of client i is X_ij ~ N(theta_i, sigma_x^2 I), where theta_i is one of k centers. Each repetition draws new
    centers from a sphere.
    """

    clients: int = within(1_000, checks.count)
    """Number of clients, m."""
    samples: int = within(5, checks.count)
    """Samples per client, n."""
    components: int = within(3, checks.count)
    """Number of centers, k."""
    dim: int = within(2, checks.count)
    """Dimension, d."""
    sigma_x: float = within(0.5, checks.positive)
    """Standard deviation of a sample about its client's center."""
    radius: float = within(0.5, minimum(0))
    """Norm r of the centers, publicly known."""
    iterations: int = within(10, checks.count)
    """Number T of steps of private k-means, and of rounds of the paper's alternating Algorithm 3."""
    epsilon: float | None = within(None, checks.positive)
    """Epsilon of private k-means (central privacy, per client) and of each message (local privacy); by default, there
    are no private estimators."""
    delta: float = within(1e-5, checks.probability)
    """Delta of private k-means and of a message."""
    bits: int | None = within(None, lambda name, bits: quantizers.check_bits(bits))
    """Bits to which each entry of a message is quantized; by default no quantization."""
    repetitions: int = within(60, checks.count)
    """Number of independent repetitions, for the standard errors."""
    seed: int = 0
    """Seed of every random draw."""

    def check(self) -> None:
        """Check the settings.

        Raises:
          JaxpflError: if a setting is out of range; the message names the setting, its value and the allowed values.
        """
        super().check()
        if self.components > self.clients:
            raise JaxpflError(f"components must be <= {self.clients} (the number of clients), got {self.components}")
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
    """Estimators for these settings by name, except ``known`` (which uses the true centers) and ``alternating``."""
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
        # Locally private release of the whole vector of a client's mean.
        stddev = local.analytic_gaussian_stddev(given.epsilon, given.delta, 2 * given.clip)
        sent = release.gaussian_vector(given.clip, stddev)
        found["local privacy"] = mixture.em(k, sx2=sx2, release=sent, reach=given.radius)
    return found


def draw(key: Key, given: MixtureSettings) -> tuple[Discrete, Array, base.Samples]:
    """Draw k equally probable centers, parameters [m, d], and samples [m, n, d]."""
    of_centers, of_member, of_x = jax.random.split(key, 3)
    m, n, k, d = given.clients, given.samples, given.components, given.dim
    centers = jax.random.normal(of_centers, (k, d))
    centers *= given.radius / jnp.linalg.norm(centers, axis=1, keepdims=True)
    theta = centers[jax.random.randint(of_member, (m,), 0, k)]
    x = theta[:, None] + given.sigma_x * jax.random.normal(of_x, (m, n, d))
    return Discrete(jnp.full(k, 1 / k), centers), theta, base.every(x)


def simulate(given: MixtureSettings) -> dict[str, np.ndarray]:
    """Mean squared errors [repetitions] by estimator; for ``alternating``, [repetitions, T] after each of T rounds."""
    estimators, sx2 = contenders(given), given.sigma_x**2
    alternating = mixture.alternating(given.components, given.dim, sx2)

    def study(key: Key) -> dict[str, Array]:
        of_data, of_run = jax.random.split(key)
        prior, theta, clients = draw(of_data, given)
        every = {"known": mixture.discrete_posterior(prior, sx2)} | estimators
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

    In the summary, ``mse`` and ``gains`` have an entry for each estimator (``alternating`` after its last round), and
    ``gain_over_local`` is the gain of the personalized estimator, EM. ``alternation`` has the mean error and its
    standard error after each round of ``alternating``. ``privacy`` is the privacy spent, if epsilon is given.

    Raises:
      JaxpflError: as in `MixtureSettings.check`.
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
    notes = [f"the paper's Algorithm 3: {first:.4g} after one round, {last:.4g} after {given.iterations}"]
    if given.epsilon is None:
        return notes
    spent = result["privacy"]
    return [
        *notes,
        f"privacy of a client: epsilon {given.epsilon:g}, delta {given.delta:g}, means clipped to a norm of "
        f"{spent['clip']:.3g}",
        f"private: central, add or remove one client; {given.iterations} Gaussian steps of noise multiplier "
        f"{spent['central']['noise_multiplier']:.3g}, from a start independent of the data",
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
    """Plot the alternation's error over its rounds, with the errors of other estimators as horizontal lines."""
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
class MixtureOptions(CsvLayout):
    """Options for estimating the user's own clients instead of simulated clients."""

    csv: Path | None = None
    """CSV file of your own clients, with a row per client or per sample; the output says how the file was read.
    --components is then the number of kinds (mixture components) that EM fits."""


STEPS, STARTS = 300, 16
"""Number of EM steps, and number of k-means starts before EM."""

_SIMULATED = ("clients", "samples", "dim", "sigma_x", "radius", "iterations", "bits", "repetitions")


class Kinds(NamedTuple):
    """Kinds (mixture components) fitted to the clients of a file.

    Attributes:
      result: summary for the table and JSON. ``kinds`` is a list, ordered by the first column of the centers; each
        entry has a ``share``, a ``center`` [d], the center's standard error ``stderr`` [d] (None if the kind is
        expected to have less than one sample), and a number of ``clients``. Further entries of the summary are
        ``sigma_x`` [d], ``log_likelihood`` and ``bic``.
      columns: columns of ``estimates.csv``, with an entry for each client.
      local, personalized: local and personalized means, [m, d].
      kind: index (from 0) of each client's most probable kind, [m].
    """

    result: dict[str, Any]
    columns: dict[str, list]
    local: np.ndarray
    personalized: np.ndarray
    kind: np.ndarray


def fit_kinds(path: Path, given: MixtureSettings, layout: CsvLayout | None = None) -> Kinds:
    r"""Fit the mixture to a file by EM: the kinds' probabilities p and centers mu, and the samples' variances.

    .. math:: X_{ij} \sim N(\mu_{z_i}, \mathrm{diag}(\sigma_1^2, \dots, \sigma_d^2)), \qquad P(z_i = l) = p_l

    Client i has the kind z_i. Columns may have different units: each is scaled by the standard deviation of the samples
    about their client's mean. A client's estimate is its posterior mean (Ozkara et al. 2023, Theorem 6).

    Raises:
      JaxpflError: if a setting does not apply to the user's own data; if the file cannot be read; if there are fewer
        clients than kinds; if no client has two samples; or if every client's samples are identical in a column.
    """
    refuse_given(given, _SIMULATED, own_clients.NOT_OWN)
    refuse_given(given, ("epsilon", "delta"), "is not available with --csv, as its estimates are not private")
    clients = own_clients.read(path, layout)
    samples = [own.reshape(len(own), -1) for own in clients.samples]
    sizes = sizes_of(path, samples)
    given.check()
    if given.components > len(sizes):
        raise JaxpflError(f"{path}: components must be <= {len(sizes)} (the number of clients), got {given.components}")
    own_clients.check_squares(path, clients.columns, samples)
    local = np.array([own.mean(axis=0) for own in samples])
    scatter = sum(((own - mean) ** 2).sum(axis=0) for own, mean in zip(samples, local, strict=True))
    center, scale = local.mean(axis=0), np.sqrt(scatter / (sizes - 1).sum())
    for column, spread in zip(clients.columns, scale, strict=True):
        if not spread > 0:
            raise JaxpflError(f"{path}: column {column} must vary within at least one client")
    with jax.enable_x64(True):
        data = base.stack([(own - center) / scale for own in samples])
        estimator = mixture.em(given.components, steps=STEPS, starts=STARTS)
        made = full_precision.jit(lambda key, data: base.estimate(estimator, key, data))(
            jax.random.key(given.seed), data
        )
    at: mixture.Mixture = made.shared.mixture
    order = np.lexsort(np.asarray(at.mu).T[::-1])
    p, mu, sx2 = np.asarray(at.p)[order], np.asarray(at.mu)[order], float(at.sx2)
    likely, log_likelihood = _posterior(p, mu, sx2, (local - center) / scale, sizes, float((scatter / scale**2).sum()))
    log_likelihood -= float((sizes.sum() * np.log(scale)).sum())  # density in the file's units
    kind, (m, d), k = likely.argmax(axis=1), local.shape, given.components
    weights = (likely * sizes[:, None]).sum(axis=0)
    stderr = np.sqrt(sx2 / np.maximum(weights, 1e-300))[:, None] * scale
    result = {
        "study": "mixture",
        "csv": path.name,
        "clients": m,
        "samples": {"min": int(sizes.min()), "median": float(np.median(sizes)), "max": int(sizes.max())},
        "read": clients.understood,
        "settings": {"components": k, "seed": given.seed},
        "columns": clients.columns,
        "kinds": [
            {
                "share": float(p[j]),
                "center": (center + scale * mu[j]).tolist(),
                "stderr": stderr[j].tolist() if weights[j] >= 1 else None,
                "clients": int((kind == j).sum()),
            }
            for j in range(k)
        ],
        "sigma_x": (scale * sx2**0.5).tolist(),
        "log_likelihood": log_likelihood,
        "bic": (k * d + k - 1 + d) * float(np.log(m)) - 2 * log_likelihood,
    }
    personalized = center + scale * np.asarray(made.estimates)
    table: dict[str, list] = {"client": clients.names, "samples": sizes.tolist()}
    for name, values in (("local", local), ("personalized", personalized)):
        for column, entry in zip(clients.columns, values.T, strict=True):
            table[name if d == 1 else f"{name}_{column}"] = entry.tolist()
    table |= {"kind": (kind + 1).tolist()} | {f"probability_{j + 1}": likely[:, j].tolist() for j in range(k)}
    return Kinds(result, table, local, personalized, kind)


def _posterior(
    p: np.ndarray, mu: np.ndarray, sx2: float, means: np.ndarray, sizes: np.ndarray, scatter: float
) -> tuple[np.ndarray, float]:
    """Return two results: the posterior probability of each kind for each client, [m, k], and the log-likelihood."""
    square = ((means[:, None] - mu) ** 2).sum(axis=-1)
    with np.errstate(divide="ignore"):
        joint = np.log(p) - sizes[:, None] * square / (2 * sx2)
    of_client = np.asarray(logsumexp(joint, axis=1))
    constant = sizes.sum() * means.shape[1] / 2 * np.log(2 * np.pi * sx2)
    return np.exp(joint - of_client[:, None]), float(of_client.sum() - scatter / (2 * sx2) - constant)


def own_results(path: Path, given: MixtureSettings, options: MixtureOptions) -> Results:
    """Results of `fit_kinds` with the options' layout."""
    made = fit_kinds(path, given, options)
    return Results(
        json=made.result,
        tables=lambda: [*own_clients.how_it_was_read(made.result), *kind_tables(made.result)],
        plots=lambda folder: write_kinds(folder, made),
        files="summary.json, estimates.csv, plots/",
        hint="estimates of every client, and its probabilities of the kinds: --output FOLDER",
    )


def kind_tables(result: dict[str, Any]) -> list[Block]:
    """Table of the kinds, followed by lines with the samples' standard deviations and the likelihood."""
    table = new_table(
        unmarked(f"{result['csv']}: {result['clients']} clients of {len(result['kinds'])} kinds"), "± standard error"
    )
    several = len(result["columns"]) > 1
    for name in ("kind", "share", "clients", *(result["columns"] if several else ["center"])):
        table.add_column(unmarked(name), justify="right", no_wrap=True)
    for number, kind in enumerate(result["kinds"], start=1):
        errors = kind["stderr"] or [None] * len(kind["center"])
        cells = [
            beside(x, spread) + ("" if error is None else f" ± {error:.2g}")
            for x, error, spread in zip(kind["center"], errors, result["sigma_x"], strict=True)
        ]
        table.add_row(str(number), f"{100 * kind['share']:.1f} %", str(kind["clients"]), *cells)
    spreads = ", ".join(f"{x:.4g}" for x in result["sigma_x"])
    return [
        table,
        f"sigma_x {f'({spreads})' if several else spreads}",
        f"log likelihood {result['log_likelihood']:.6g}, BIC {result['bic']:.6g} (lower is better)",
    ]


def write_kinds(folder: Path, made: Kinds) -> list[Path]:
    """Write ``estimates.csv`` into the parent of the plots' folder, and plot the clients' estimates.

    Each kind (mixture component) has its own color.
    """
    own_clients.write_table(folder.parent / "estimates.csv", made.columns)
    names, flat = made.result["columns"], made.local.shape[1] == 1
    labels = ("local estimate", "personalized estimate") if flat else [f"local {literal(n)}" for n in names[:2]]
    xlabel, ylabel = labels
    figure, axes = new_axes(xlabel, ylabel, literal(f"{made.result['csv']}: {len(made.kind)} clients"))
    x, y = made.local[:, 0], made.personalized[:, 0] if flat else made.local[:, 1]
    for j, kind in enumerate(made.result["kinds"]):
        own, color = made.kind == j, COLORS[j % len(COLORS)]
        axes.scatter(x[own], y[own], s=22, color=color, alpha=0.6, linewidths=0, label=f"kind {j + 1}")
        at = [kind["center"][0]] * 2 if flat else kind["center"][:2]
        axes.plot(*at, "x", color=INK, markersize=9, label="centers" if j == 0 else None)
    if flat:
        ends = [float(x.min()), float(x.max())]
        axes.plot(ends, ends, color=GRID, linewidth=1.5, zorder=0, label="no shrinkage")
    axes.legend(frameon=False, fontsize=9)
    return [save(figure, folder, "kinds")]


STUDY = Study(MixtureSettings, own_or_simulated(own_results, simulated), MixtureOptions)

"""The Gaussian study: local, global, personalized and private estimates of simulated clients' means."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from jaxpfl.core import checks, full_precision
from jaxpfl.core.randomness import named
from jaxpfl.core.types import Array, Key, Scalar
from jaxpfl.estimators import base, gaussian, gaussian_columns, release
from jaxpfl.estimators import gaussian_closed_form as closed_form
from jaxpfl.estimators.base import Estimator
from jaxpfl.estimators.empirical_bayes import differences, learned_gaussian, level_within, unit_level
from jaxpfl.estimators.gaussian_columns import Variances
from jaxpfl.estimators.release import EXACT, Release
from jaxpfl.privacy import discrete_gaussian
from jaxpfl.privacy import local_dp as local
from jaxpfl.privacy.claim import check_delta
from jaxpfl.studies import own_clients
from jaxpfl.studies.own_clients import LEVEL, CsvLayout, Learned, Own, OwnClients, own_or_simulated
from jaxpfl.studies.repetitions import Swept, measure, repeat, repetition, report
from jaxpfl.studies.report import Curve, estimator_table, write_curves
from jaxpfl.studies.study import NOT_PRIVATE, Results, Settings, Study, check_uploads, minimum, refuse_given, within
from jaxpfl.support.errors import JaxpflError, warn
from jaxpfl.uploads.compression import quantizers

LocalMechanism: TypeAlias = Literal["analytic", "printed", "one-bit", "discrete"]
"""Local mechanism. Gaussian noise with the analytic calibration is available in every dimension. Gaussian noise with
the paper's calibration, a randomized bit, and discrete Gaussian noise are available in one dimension.
"""


@dataclass(frozen=True)
class GaussianPopulation(Settings):
    """Settings of the clients and of the messages that they send, on which the theoretical errors depend.

    The defaults match the paper's Figure 1a.
    """

    clients: int = within(10_000, minimum(2))
    """Number of clients, m."""
    samples: int = within(15, checks.count)
    """Samples per client, n."""
    sigma_theta: float = within(0.1, minimum(0))
    """Standard deviation of the clients' parameters, in each dimension."""
    sigma_x: float = within(0.5, checks.positive)
    """Standard deviation of a sample about its client's parameter."""
    dim: int = within(1, checks.count)
    """Dimension, d."""
    radius: float = within(1.0, checks.positive)
    """Public bound r on |mu| in each dimension, which determines how messages are clipped."""
    epsilon: float | None = within(None, checks.positive)
    """Epsilon of local differential privacy for each client's message; by default, messages are not private."""
    delta: float = within(1e-5, checks.probability)
    """Delta of local privacy, for the Gaussian mechanisms."""
    mechanism: LocalMechanism = "analytic"
    """Mechanism of the messages: analytic (Balle and Wang 2018); for one dimension also printed (the paper's
    calibration), one-bit (with delta 0), or discrete (Canonne et al. 2020: integer noise on a quantizer's levels)."""
    bits: int | None = within(None, lambda name, bits: quantizers.check_bits(bits))
    """Bits to which each entry of a message is quantized; by default 8 for discrete noise, else no quantization."""

    def check(self) -> None:
        """Check the settings.

        Raises:
          JaxpflError: if a setting is out of range; the message names the setting, its value and the allowed values.
        """
        super().check()
        if self.dim > 1 and self.mechanism != "analytic":
            raise JaxpflError(f"mechanism {self.mechanism} requires dim 1, got {self.dim}: use analytic")
        if self.epsilon is None:
            refuse_given(self, ("mechanism", "delta"), NOT_PRIVATE)
        if self.mechanism == "printed" and self.epsilon is not None and self.epsilon >= 1:
            warn(f"mechanism printed is proven private for epsilon < 1 only, got {self.epsilon:g}: use analytic")

    @property
    def s2(self) -> float:
        """Variance of a client's sample mean about the client's parameter."""
        return self.sigma_x**2 / self.samples

    @property
    def st2(self) -> float:
        return self.sigma_theta**2

    @property
    def levels_bits(self) -> int:
        """Bits of the quantizer to whose levels discrete noise is added."""
        return 8 if self.bits is None else self.bits

    @property
    def bound(self) -> float:
        """Clipping bound: on the message's norm if d > 1, and on its only entry if d = 1."""
        spread = self.st2 + self.s2
        with jax.ensure_compile_time_eval():
            if self.dim == 1:
                return float(release.gaussian_radius(self.radius, spread, self.clients, self.samples))
            reach = self.radius * self.dim**0.5
            return float(release.norm_radius(reach, spread, self.dim, self.clients, self.samples))


@dataclass(frozen=True)
class GaussianSettings(GaussianPopulation):
    """Settings of the study.

    The model is X_ij ~ N(theta_i, sigma_x^2 I), theta_i ~ N(mu, sigma_theta^2 I).
    """

    mean: float = 0.0
    """Population mean mu, in each dimension."""
    uploads: int | None = None
    """Number K of clients that send a message; the others are estimated too. By default, all clients send one."""
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
        if not abs(self.mean) <= self.radius:
            raise JaxpflError(f"mean must be within the radius of {self.radius:g}, got {self.mean}")
        check_uploads(self.uploads, self.clients)


def contenders(given: GaussianSettings) -> dict[str, tuple[Estimator, float | None]]:
    """Estimators for these settings, by name, each with its exact squared error summed over entries (None if unknown).

    ``estimated`` is the personalized estimator with variances learned from the clients.
    """
    found: dict[str, tuple[Estimator, float | None]] = {
        "local": (gaussian.local(), given.dim * given.s2),
        "global": (gaussian.global_mean(), theory(given, a=0.0)),
        "personalized": (personalized(given), theory(given)),
        "estimated": (gaussian.personalized(), None),
        "james-stein": (gaussian.james_stein(given.sigma_x**2), None),
    }
    for name, (sent, added) in releases(given).items():
        found[name] = personalized(given, sent), theory(given, sent.variance, added)
    if given.epsilon is not None and given.mechanism == "one-bit":
        found["private, variance learned"] = gaussian.split(given.bound, given.epsilon, given.sigma_x**2), None
    return found


def personalized(given: GaussianSettings, sent: Release = EXACT) -> Estimator:
    """Personalized estimator that uses the true variances from the settings."""
    return gaussian.personalized(st2=given.st2, sx2=given.sigma_x**2, release=sent)


def theory(given: GaussianSettings, sq2: Scalar = 0.0, added: Scalar | None = None, a: Scalar | None = None) -> float:
    """Exact squared error of `personalized`, summed over entries and averaged over all clients.

    The average includes clients that do not upload.

    Args:
      given: the settings.
      sq2: variance that a release adds to an entry, according to the estimator.
      added: variance that the release actually adds; ``sq2`` by default.
      a: weight of a client's own mean; by default, the weight that is optimal for ``sq2``.
    """
    uploads = given.uploads or given.clients
    share, total = uploads / given.clients, 0.0
    for part, sent in ((share, True), (1 - share, False)):
        own = closed_form.weight(uploads, given.s2, given.st2, sq2, sent=sent) if a is None else a
        noise = sq2 if added is None else added
        total += part * float(closed_form.personalized(uploads, given.s2, given.st2, noise, own, sent=sent))
    return given.dim * total


def releases(given: GaussianSettings) -> dict[str, tuple[Release, float]]:
    """Ways of sending a client's mean, by name, each with the variance that it adds to an entry (without clipping)."""
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
    """Upper bound on the variance that the settings' release adds to an entry; zero for exact messages."""
    if given.epsilon is not None:
        return float(private_release(given, strength(given, given.epsilon)).variance)
    return 0.0 if given.bits is None else float(release.quantized(_quantized_to(given), given.bits).variance)


def _quantized_to(given: GaussianPopulation) -> float:
    return float(release.gaussian_radius(given.radius, given.st2 + given.s2, given.clients, given.samples))


def strength(given: GaussianPopulation, epsilon: float) -> float:
    """Strength of the mechanism: epsilon for one-bit, otherwise the standard deviation of Gaussian noise.

    The unit of discrete noise is the distance between neighboring levels of the quantizer.
    """
    if given.mechanism == "one-bit":
        return epsilon
    if given.mechanism == "discrete":
        return discrete_gaussian.stddev(epsilon, given.delta, 2**given.levels_bits - 1)
    if given.mechanism == "printed":
        return local.printed_gaussian_stddev(epsilon, given.delta, given.bound)
    return local.analytic_gaussian_stddev(epsilon, given.delta, 2 * given.bound)


def private_release(given: GaussianPopulation, strength: Scalar) -> Release:
    """Local mechanism of these settings; ``strength`` may be traced, except for discrete noise."""
    if given.mechanism == "discrete":
        with jax.ensure_compile_time_eval():
            noise = discrete_gaussian.table(float(strength))
        return release.discrete_gaussian(given.bound, given.levels_bits, noise)
    if given.mechanism == "one-bit":
        return release.one_bit(given.bound, strength)
    return (release.gaussian if given.dim == 1 else release.gaussian_vector)(given.bound, strength)


def added_variance(given: GaussianSettings, sent: Release) -> Scalar:
    """Exact variance that a private release adds to an entry, if nothing is clipped."""
    spread = given.st2 + given.s2
    if given.mechanism == "one-bit":
        return sent.variance - (given.mean**2 + spread)
    if given.mechanism == "discrete":  # the exact variance of the rounding replaces its bound
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


@dataclass(frozen=True)
class GaussianOptions(OwnClients):
    """Options for estimating the user's own clients instead of simulated clients."""

    csv: Path | None = None
    """CSV file of your own clients; --client, and --value or --values, name its columns. If --epsilon is given,
    --sigma-theta, --sigma-x and --radius must be publicly known; subtract a public center from the samples first."""
    covariates: tuple[str, ...] = ()
    """Numeric columns of a long file on which the samples are regressed; the clients' means are then normally
    distributed about the regression (the nested-error model of Battese, Harter and Fuller 1988)."""


def _errors(given: GaussianSettings, estimators: Mapping[str, Estimator | Swept], numbers: int) -> dict[str, Any]:
    """Mean squared errors in each repetition, [repetitions, ...]; all estimators see the same data."""
    study = repetition(lambda key: draw(key, given), estimators, given.uploads)
    errors = repeat(study, given.seed, given.repetitions, given.clients * numbers * given.dim)
    return {name: errors[name] for name in estimators}


def simulated(given: GaussianSettings) -> Results:
    """Run the simulation.

    Raises:
      JaxpflError: as in `GaussianSettings.check`; or if sigma_x is too small relative to the means for single
        precision.
    """
    given.check()
    full_precision.check_digits(abs(given.mean) + given.sigma_theta, given.sigma_x)
    with jax.enable_x64(True):  # closed forms in double precision
        found = contenders(given)
    errors = _errors(given, {name: estimator for name, (estimator, _) in found.items()}, given.samples)
    exact = {name: mse for name, (_, mse) in found.items()}
    m, s2, st2, d = given.clients, given.s2, given.st2, given.dim
    bounds = {
        "known mean": d * float(closed_form.bound_known_mean(s2, st2)),
        "unknown mean": d * float(closed_form.bound_unknown_mean(m, s2, st2)),
    }
    result = {"study": "gaussian", "settings": dict(vars(given))} | report(errors, exact) | {"bounds": bounds}
    title = f"{m} Gaussian clients of {given.samples} samples, d = {d}, {given.repetitions} repetitions"
    notes = [f"lower bound on the error (mu unknown): {bounds['unknown mean']:.4g}"]
    if given.epsilon is not None:
        notes.append(privacy_note(given, given.epsilon))
    return Results(
        json=result,
        tables=lambda: estimator_table(result, title, notes),
        plots=lambda folder: write_plots(folder, given),
        series=errors,
    )


def privacy_note(given: GaussianSettings, epsilon: float) -> str:
    """Line that states the privacy guarantee, the clipping and the size of a client's message."""
    delta = "pure" if given.mechanism == "one-bit" else f"delta {given.delta:g}"
    clipped = "each entry" if given.dim == 1 else "the norm"
    bits = private_release(given, strength(given, epsilon)).bits
    return (
        f"private: each client's message, epsilon {epsilon:g}, {delta}, mechanism {given.mechanism}, "
        f"{clipped} clipped to {given.bound:.3g}, {bits} bit{'s' if bits > 1 else ''} per entry"
    )


EPSILONS = tuple(round(0.1 * i, 1) for i in range(1, 9))
"""Values of epsilon in the paper's figures."""

MECHANISMS = ("analytic", "printed", "one-bit")
"""One-dimensional mechanisms for which `strength` may be a traced value."""


def over_epsilon(given: GaussianSettings, epsilons: tuple[float, ...] = EPSILONS) -> dict[str, np.ndarray]:
    """Mean squared errors of the local mechanisms at each epsilon, [repetitions, len(epsilons)], on the same data.

    Reference: Ozkara et al. 2023, Figure 1a; Ozkara et al. 2023, Figure 3a; Ozkara et al. 2023, Figure 3b;
      Ozkara et al. 2022, Figure 4.
    """
    kinds = {kind: replace(given, mechanism=kind) for kind in (MECHANISMS if given.dim == 1 else ("analytic",))}
    swept = {
        kind: Swept(
            lambda noise, own=own: personalized(own, private_release(own, noise)),
            jnp.array([strength(own, e) for e in epsilons]),
        )
        for kind, own in kinds.items()
    }
    return _errors(given, swept, given.samples + len(epsilons))


def write_plots(folder: Path, given: GaussianSettings) -> list[Path]:
    """Plot the measured and exact errors of the local mechanisms against epsilon; write the plot into ``folder``."""
    epsilons = EPSILONS if given.epsilon is None else tuple(given.epsilon * e for e in (0.25, 0.5, 1, 1.5, 2, 3, 4))
    fine = np.linspace(epsilons[0], epsilons[-1], 60)
    curves = {
        "local": Curve.level(given.dim * given.s2, fine),
        "personalized": Curve.level(theory(given), fine),
    }
    delta = f"delta = {given.delta:g}"
    labels = {
        "analytic": f"private, analytic Gaussian, {delta}",
        "printed": f"printed, the paper's Gaussian, {delta}",
        "one-bit": "one-bit, pure epsilon",
    }
    for kind, errors in over_epsilon(given, epsilons).items():
        own = replace(given, mechanism=kind)
        line = []
        for epsilon in fine:
            sent = private_release(own, strength(own, float(epsilon)))
            line.append(theory(own, sent.variance, added_variance(own, sent)))
        curves[labels[kind]] = Curve.measured(epsilons, map(measure, errors.T), line)
    title = f"Private messages, m = {given.clients}, n = {given.samples}, {_spread(given)}"
    path = folder / "mse-epsilon.png"
    return [write_curves(path, fine, curves, xlabel="epsilon of a client's message", title=title)]


def _spread(given: GaussianSettings) -> str:
    return f"sigma_theta = {given.sigma_theta:g}, sigma_x = {given.sigma_x:g}"


_PUBLIC = ("sigma_theta", "sigma_x", "radius")


def estimate_file(path: Path, given: GaussianSettings, layout: CsvLayout | None = None, *, level: float = LEVEL) -> Own:
    """Estimate the means of the clients in a file, column by column, with variances estimated from the file.

    If epsilon is set, there is also an estimate from messages that the settings' mechanism makes private. This estimate
    uses sigma_theta, sigma_x and the radius from the settings, and the clients' numbers of samples. All of these must
    be public knowledge.

    Args:
      path: file to read.
      given: settings of the study; fields that apply only to simulated clients must have their default values.
      layout: layout of the file.
      level: level of the intervals.

    Raises:
      JaxpflError: if the level is out of range; if a setting is out of range or does not apply to the user's own data;
        if the file cannot be read; if there are fewer than two clients, or no client has two samples; or if every
        client's samples are identical in a column.
    """
    level_within(level, np.float64)
    ignored = (*own_clients.SIMULATED, "dim", "mean")
    refuse_given(given, ignored, own_clients.NOT_OWN)
    if given.epsilon is None:
        refuse_given(given, _PUBLIC, "requires epsilon, because without epsilon it is estimated from the file")
        ignored += (*_PUBLIC, "mechanism", "delta")
    if given.epsilon is None or given.mechanism != "discrete":
        refuse_given(given, ("bits",), "requires epsilon and mechanism = discrete with --csv")
        ignored += ("bits",)
    clients = own_clients.read(path, layout)
    samples = [own.reshape(len(own), -1) for own in clients.samples]
    sizes = own_clients.sizes_of(path, samples)
    # The clipping radius must also suit the client with the fewest samples, whose mean varies most.
    known = replace(given, clients=len(sizes), samples=int(sizes.min()), dim=samples[0].shape[1])
    known.check()
    own_clients.check_squares(path, clients.columns, samples)
    notes = own_clients.alike(clients.columns, samples)
    for number, column in enumerate(clients.columns):
        if not any(np.ptp(own[:, number]) for own in samples):
            which = f"column {column!r}: " if known.dim > 1 else ""
            what = notes[0] if len(notes) == len(clients.columns) else f"{which}samples are equal within every client"
            raise JaxpflError(f"{path}: {what}, so each client's own mean is exact and leaves no error to reduce")
    estimators = {
        "local": gaussian.local(),
        "global": gaussian.global_mean(),
        "personalized": gaussian_columns.personalized(),
    }
    with jax.enable_x64(True):
        data = base.stack(samples)
        if given.epsilon is not None:
            sent = private_release(known, strength(known, given.epsilon))
            estimators["private"] = personalized(known, sent)
        # The key depends on the data, because equal noise for two files that differ by one client would reveal that
        # client.
        key = named(jax.random.key(given.seed), *data)
        made = own_clients.estimates(estimators, key, data)
        settings = {name: value for name, value in vars(given).items() if name not in ignored}
        facts: dict[str, Any] = {"read": clients.understood, "notes": notes, "settings": settings, "level": level}
        if given.epsilon is not None:
            clipped = int((np.linalg.norm(made["local"].estimates, axis=1) > known.bound).sum())
            if clipped:
                where = f"outside ±{known.bound:.3g}" if known.dim == 1 else f"beyond the norm {known.bound:.3g}"
                notes.append(
                    f"warning: {clipped} of {known.clients} clients' means lie {where} and were clipped: subtract a "
                    "public center, or increase --radius"
                )
            delta = 0.0 if given.mechanism == "one-bit" else given.delta
            check_delta(delta, len(samples))
            facts["privacy"] = {
                "epsilon": given.epsilon,
                "delta": delta,
                "mechanism": given.mechanism,
                "clipped_to": known.bound,
                "clients_clipped": clipped,
            } | {name: getattr(given, name) for name in _PUBLIC}
        told: gaussian_columns.Broadcast = made["personalized"].shared
        own, scatter = made["local"].estimates, jax.vmap(gaussian_columns.scatter)(data)
        learned = [
            _column_posterior(jax.tree.map(lambda of, k=k: of[k], told), own[:, k], scatter[:, k], sizes, level)
            for k in range(known.dim)
        ]
        found = own_clients.summary("gaussian", path, clients, data, estimators, made, key, learned, facts)
        return found._replace(public=known if given.epsilon is not None else None)


def own_results(path: Path, given: GaussianSettings, options: GaussianOptions) -> Results:
    """Results for a file: `regressed_results` if the options name covariates, otherwise `estimate_file`."""
    if options.covariates:
        return regressed_results(path, given, options)
    made = estimate_file(path, given, options, level=options.level)
    notes = []
    if made.public is not None and given.epsilon is not None:
        privacy = own_clients.privacy_line(made.result["privacy"])
        notes = [privacy_note(made.public, given.epsilon), privacy]
    return own_clients.file_results(made, lambda: own_clients.file_tables(made.result, notes))


def _column_posterior(
    told: gaussian_columns.Broadcast, own: Array, scatter: Array, sizes: np.ndarray, level: float
) -> Learned:
    """Posterior of one column, from the clients' means ``own`` [m] and sums of squared deviations ``scatter`` [m]."""
    variances: Variances = told.variances
    free = jnp.asarray(sizes - 1.0)
    sx2 = np.asarray(variances.client_variance(scatter, free))
    s2 = sx2 / sizes
    alike, pooled_degrees = bool(np.isinf(variances.degrees)), float(free.sum())
    unit = float(variances.pooled) ** 0.5  # unit in which squared variances do not underflow
    center, scale = (
        unit * np.asarray(each)[:, 0]
        for each in learned_gaussian.posterior(
            own[:, None] / unit, jnp.asarray(s2 / unit**2), pooled_degrees if alike else np.inf
        )
    )
    degrees = (
        np.full(len(sizes), learned_gaussian.degrees_left(len(sizes), 1, pooled_degrees))
        if alike
        else np.asarray(variances.client_degrees(scatter, free))
    )
    reach = learned_gaussian.student(level, degrees) * scale
    of_error = pooled_degrees if alike else degrees
    test = differences.compare_means(np.asarray(own), s2, of_error, pooled=alike)
    facts: dict[str, Any] = {
        "estimated": {
            "mean": float(told.mean),
            "sigma_theta": float(told.st2) ** 0.5,
            "sigma_theta_interval": differences.spread(np.asarray(own), s2, of_error, level, pooled=alike),
            "sigma_x": float(variances.pooled) ** 0.5,
        },
        "clients_differ": test._asdict(),
        "noise": {
            "test": "Bartlett",
            "p_value": float(variances.p_value),
            "one_for_all": alike,
            "prior_degrees": None if alike else float(variances.degrees),
            "prior_sigma_x": None if alike else float(variances.scale) ** 0.5,
        },
    }
    more = {} if alike else {"sigma_x": sx2**0.5}
    return own_clients.Learned(facts, center - reach, center + reach, scale, s2**0.5, more)


_PRIVATE = ("epsilon", "mechanism", "delta", "bits", "sigma_theta", "sigma_x", "radius")


def regressed_results(path: Path, given: GaussianSettings, options: Any) -> Results:
    """Fit a regression on covariates to a file, and estimate each client's value at the mean of its own covariates.

    Args:
      path: file to read, with a row per sample.
      given: settings of the study; fields for simulated clients and for privacy must have their default values.
      options: a `GaussianOptions`: the file's layout, ``covariates`` and ``level``.

    Raises:
      JaxpflError: if the file cannot be read, if a covariate is not a column of the file, or if there is more than one
        column of values; or under the conditions of `unit_level`.
    """
    level_within(options.level, np.float64)
    refuse_given(given, (*own_clients.SIMULATED, "dim", "mean"), own_clients.NOT_OWN)
    refuse_given(given, _PRIVATE, "is not available with --covariates, because regressions have no private messages")
    if options.values is not None:
        raise JaxpflError("covariates require a row for each sample: give --value COLUMN, not --values")
    value = own_clients.VALUE if options.value is None else options.value
    clients = own_clients.read(path, replace(options, value=",".join((value, *options.covariates))))
    target, *covariates = clients.columns
    if len(covariates) != len(options.covariates):
        raise JaxpflError(f"value and covariates must be different columns, got {value} and {options.covariates}")
    index = np.repeat(np.arange(len(clients.names)), [len(own) for own in clients.samples])
    rows = np.concatenate(clients.samples)
    places = [clients.columns.index(name) for name in covariates]
    try:
        with jax.enable_x64(True):
            found = unit_level(rows[:, clients.columns.index(target)], rows[:, places], index)
            low, high = (np.asarray(of) for of in found.interval(options.level))
    except JaxpflError as error:
        raise JaxpflError(f"{path}: {error}") from None
    found = jax.tree.map(np.asarray, found)
    result: dict[str, Any] = {
        "study": "gaussian",
        "csv": path.name,
        "read": clients.understood,
        "clients": len(clients.names),
        "level": options.level,
        "target": target,
        "estimated": {
            "mean": float(found.regression.mean()),
            "sigma_theta": float(found.between) ** 0.5,
            "sigma_x": float(found.within) ** 0.5,
        },
        "coefficients": own_clients.coefficients(covariates, found.beta, found.beta_covariance),
        "log_likelihood": float(found.log_likelihood),
        "clients_differ": {
            "name": "likelihood ratio",
            "statistic": float(found.ratio),
            "p_value": float(found.p_value),
        },
    }
    columns: dict[str, Any] = {
        "client": clients.names, "samples": found.size.astype(int), "local": found.own,
        "local_stderr": np.sqrt(found.within / found.size), "personalized": found.mean,
        "personalized_stderr": np.sqrt(found.mse), "low": low, "high": high, "regression": found.regression,
        "effect": found.effect, "shrinkage": found.shrinkage, "residual": found.residual,
    }  # fmt: skip
    picture = own_clients.Picture("", found.own, found.mean, low, high, found.size, float(found.regression.mean()))
    own = Own(result, {name: np.asarray(of).tolist() for name, of in columns.items()}, [picture])

    return own_clients.file_results(own, lambda: _regression_lines(result))


def _regression_lines(result: dict[str, Any]) -> list[str]:
    of = result["estimated"]
    return [
        *own_clients.how_it_was_read(result),
        own_clients.coefficients_line(result),
        f"spread about the regression: sigma_theta {of['sigma_theta']:.4g}, sigma_x {of['sigma_x']:.4g}",
        own_clients.test_line(result["clients_differ"], "clients"),
    ]


STUDY = Study(GaussianSettings, own_or_simulated(own_results, simulated), GaussianOptions)

"""Means of the user's own clients."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxpfl.core.randomness import named
from jaxpfl.core.types import Array
from jaxpfl.estimators import base, gaussian, gaussian_columns
from jaxpfl.estimators.empirical_bayes import differences, learned_gaussian, level_within
from jaxpfl.estimators.gaussian_columns import Variances
from jaxpfl.privacy.claim import check_delta
from jaxpfl.studies import gaussian as gaussian_study
from jaxpfl.studies.gaussian import GaussianOptions, GaussianSettings
from jaxpfl.studies.own_data import client_csv, output, unit_level
from jaxpfl.studies.own_data.client_csv import LEVEL, CsvLayout
from jaxpfl.studies.own_data.output import Own
from jaxpfl.studies.own_data.samples import (
    SIMULATED,
    Learned,
    estimates,
    refuse_simulated,
    sizes_of,
    summary,
    without,
)
from jaxpfl.studies.study import Results, refuse_given
from jaxpfl.support.errors import JaxpflError

_PUBLIC = ("sigma_theta", "sigma_x", "radius")


def run(path: Path, given: GaussianSettings, layout: CsvLayout | None = None, *, level: float = LEVEL) -> Own:
    """Estimate the means of the file's clients, column by column, with variances estimated from the file.

    With eps, messages are private by the settings' mechanism; then sigma_theta, sigma_x and radius must be publicly
    known, and the numbers of samples are public too.

    Args:
      path: of the file.
      given: the settings that apply to own data.
      layout: of the file.
      level: of the intervals.

    Raises:
      JaxpflError: for settings that do not apply to own data, a bad file, less than two clients, none with two
        samples, or a column in which no client's samples differ.
    """
    level_within(level, np.float64)
    ignored = (*SIMULATED, "dim", "mean")
    refuse_simulated(given, ignored)
    if given.epsilon is None:
        refuse_given(given, _PUBLIC, "needs epsilon, without which all is learned from the file")
        ignored += (*_PUBLIC, "mechanism", "delta")
    if given.epsilon is None or given.mechanism != "discrete":
        refuse_given(given, ("bits",), "needs epsilon and mechanism discrete where data are your own")
        ignored += ("bits",)
    clients = client_csv.read(path, layout)
    samples = [own.reshape(len(own), -1) for own in clients.samples]
    sizes = sizes_of(path, samples)
    known = _public(given, sizes, samples[0].shape[1])
    client_csv.check_squares(path, clients.columns, samples)
    notes = client_csv.alike(clients.columns, samples)
    for number, column in enumerate(clients.columns):
        if not any(np.ptp(own[:, number]) for own in samples):
            which = f"column {column!r}: " if known.dim > 1 else ""
            what = notes[0] if len(notes) == len(clients.columns) else f"{which}every client's samples are all alike"
            raise JaxpflError(f"{path}: {what}: a client's own mean makes no error to avoid")
    estimators = {
        "local": gaussian.local(),
        "global": gaussian.global_mean(),
        "personalized": gaussian_columns.personalized(),
    }
    with jax.enable_x64(True):
        data = base.stack(samples)
        if given.epsilon is not None:
            sent = gaussian_study.private_release(known, gaussian_study.strength(known, given.epsilon))
            estimators["private"] = gaussian_study.personalized(known, sent)
        # Equal noise for two files that differ by one client would reveal that client.
        key = named(jax.random.key(given.seed), *data)
        made = estimates(estimators, key, data)
        facts: dict[str, Any] = {"read": clients.understood, "notes": notes, "settings": without(given, ignored)}
        if given.epsilon is not None:
            clipped = int((np.linalg.norm(made["local"].estimates, axis=1) > known.bound).sum())
            if clipped:
                notes.append(_said_of_clipping(clipped, known))
            delta = 0.0 if given.mechanism == "one-bit" else given.delta
            check_delta(delta, len(samples))
            facts["privacy"] = {
                "epsilon": given.epsilon,
                "delta": delta,
                "mechanism": given.mechanism,
                "clipped_to": known.bound,
                "clients_clipped": clipped,
            } | {name: getattr(given, name) for name in _PUBLIC}
        told: gaussian_columns.Told = made["personalized"].shared
        own, scatter = made["local"].estimates, jax.vmap(gaussian_columns.scatter)(data)
        learned = [
            _learned(jax.tree.map(lambda of, k=k: of[k], told), own[:, k], scatter[:, k], sizes, level)
            for k in range(known.dim)
        ]
        found = summary("gaussian", path, clients, data, estimators, made, key, learned, facts | {"level": level})
        return found._replace(public=known if given.epsilon is not None else None)


def results(path: Path, given: GaussianSettings, options: GaussianOptions) -> Results:
    """`run` with the options' layout and level, as the results of a study; with covariates, `unit_level.results`."""
    if options.covariates:
        return unit_level.results(path, given, options)
    made = run(path, given, options, level=options.level)
    notes = []
    if made.public is not None and given.epsilon is not None:
        privacy = output.said_of_privacy(made.result["privacy"])
        notes = [gaussian_study.privacy_note(made.public, given.epsilon), privacy]
    return output.results(made, lambda: output.tables(made.result, notes))


def _said_of_clipping(clipped: int, known: GaussianSettings) -> str:
    what = f"outside ±{known.bound:.3g}" if known.dim == 1 else f"beyond the norm {known.bound:.3g}"
    return (
        f"warning: {clipped} of {known.clients} clients' means lie {what} and were clipped: take a public center off, "
        "or give --radius"
    )


def _learned(told: gaussian_columns.Told, own: Array, scatter: Array, sizes: np.ndarray, level: float) -> Learned:
    """Posterior of one column, from the clients' means and summed squared deviations, [m] each."""
    variances: Variances = told.variances
    free = jnp.asarray(sizes - 1.0)
    sx2 = np.asarray(variances.of_client(scatter, free))
    s2 = sx2 / sizes
    alike, pooled_degrees = bool(np.isinf(variances.degrees)), float(free.sum())
    unit = float(variances.pooled) ** 0.5  # scale at which the squares of variances do not underflow
    center, scale = (
        unit * np.asarray(each)[:, 0]
        for each in learned_gaussian.posterior(
            own[:, None] / unit, jnp.asarray(s2 / unit**2), pooled_degrees if alike else np.inf
        )
    )
    degrees = (
        np.full(len(sizes), learned_gaussian.degrees_left(len(sizes), 1, pooled_degrees))
        if alike
        else np.asarray(variances.degrees_of(scatter, free))
    )
    reach = learned_gaussian.student(level, degrees) * scale
    of_error = pooled_degrees if alike else degrees
    test = differences.of_means(np.asarray(own), s2, of_error, pooled=alike)
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
    return Learned(facts, center - reach, center + reach, scale, s2**0.5, more)


def _public(given: GaussianSettings, sizes: np.ndarray, dim: int) -> GaussianSettings:
    # The clipping radius must hold for the client with fewest samples.
    public = replace(given, clients=len(sizes), samples=int(sizes.min()), dim=dim)
    public.check()
    return public

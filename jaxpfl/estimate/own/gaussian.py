"""Means of the user's own clients."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxpfl.errors import JaxpflError
from jaxpfl.estimate import client_csv
from jaxpfl.estimate import gaussian as gaussian_study
from jaxpfl.estimate.csv_columns import CsvLayout
from jaxpfl.estimate.gaussian import GaussianSettings
from jaxpfl.estimate.own import ranges
from jaxpfl.estimate.own.common import LEVEL, SIMULATED, Own, refuse_simulated, sizes_of, summary, without
from jaxpfl.estimate.settings import refuse_given
from jaxpfl.estimators import base, gaussian, intervals
from jaxpfl.randomness import named

_PUBLIC = ("sigma_theta", "sigma_x", "radius")


def run(path: Path, given: GaussianSettings, layout: CsvLayout | None = None) -> Own:
    """Means of the file's clients, their variances estimated from the file.

    With eps, messages are private by the settings' mechanism; then sigma_theta, sigma_x and radius are what is publicly
    known, and the samples' numbers are public too.

    Raises:
      JaxpflError: settings that own data do not have, a bad file, less than two clients, none with two samples, or none
        whose samples differ.
    """
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
    ranges.check_squares(path, clients.columns, samples)
    notes = ranges.alike(clients.columns, samples)
    if not any(np.ptp(own, axis=0).any() for own in samples):
        what = notes[0] if len(notes) == len(clients.columns) else "every client's samples are all alike"
        raise JaxpflError(f"{path}: {what}: a client's own mean makes no error to avoid")
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
        # Of two files that differ by one client, the same noise would tell that client.
        key = named(jax.random.key(given.seed), *data)
        made = {name: base.estimate(estimator, key, data) for name, estimator in estimators.items()}
        told: gaussian.Told = made["personalized"].shared
        degrees = float((sizes - 1).sum() * known.dim)
        around = intervals.morris(made["local"].estimates, told.sx2 / sizes, LEVEL, degrees=degrees)
        facts: dict[str, Any] = {"read": clients.understood, "notes": notes, "settings": without(given, ignored)}
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
        own = summary("gaussian", path, clients.names, data, estimators, made, key, around, facts)
        return own._replace(public=known if given.epsilon is not None else None)


def _public(given: GaussianSettings, sizes: np.ndarray, dim: int) -> GaussianSettings:
    # The clipping radius must hold for the client with fewest samples.
    public = replace(given, clients=len(sizes), samples=int(sizes.min()), dim=dim)
    public.check()
    return public

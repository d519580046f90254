"""Many repetitions of a study in one program, and what they show: a mean with its standard error."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxpfl.errors import JaxpflError
from jaxpfl.types import Array, Key, PyTree

MOST_NUMBERS = 2**24
"""Samples that repetitions side by side may hold together; more repetitions take turns."""


class Measured(NamedTuple):
    """A mean over repetitions, its standard error (None for one repetition), and the exact value where one is known."""

    mean: float
    stderr: float | None
    closed_form: float | None = None

    def as_json(self) -> dict[str, float | None]:
        return self._asdict()


def repeat(study: Callable[[Key], PyTree], seed: int, repetitions: int, numbers: int) -> PyTree:
    """``study(key)`` for one key of each repetition, in one compiled program.

    Args:
      study: pure; returns a tree of arrays, the same shapes for every key.
      seed: repetition r has the key ``fold_in(key(seed), r)``, whatever the number of repetitions.
      repetitions: how many.
      numbers: samples of one repetition; decides how many run side by side.

    Returns:
      The results as NumPy arrays, leaves [repetitions, ...].
    """
    if repetitions < 1:
        raise JaxpflError(f"repetitions must be at least 1, got {repetitions}")
    side_by_side = max(1, min(repetitions, MOST_NUMBERS // max(numbers, 1)))

    @jax.jit
    def run(key: Key) -> PyTree:
        keys = jax.vmap(lambda r: jax.random.fold_in(key, r))(jnp.arange(repetitions))
        return jax.lax.map(study, keys, batch_size=side_by_side)

    return jax.tree.map(np.asarray, run(jax.random.key(seed)))


def measure(errors: Mapping[str, Any], closed_form: Mapping[str, float]) -> dict[str, Measured]:
    """The mean squared errors of each estimator, [repetitions] each, beside their closed forms."""
    return {name: _measured(np.asarray(values, float), closed_form.get(name)) for name, values in errors.items()}


def gains(errors: Mapping[str, Any], reference: str = "local") -> dict[str, Measured]:
    """``1 - MSE / MSE of local``, of the mean errors, with its standard error: from the repetitions, in which both
    errors belong to the same data (the delta method)."""
    base = np.asarray(errors[reference], float)
    found = {}
    for name, values in errors.items():
        if name == reference:
            continue
        values = np.asarray(values, float)
        ratio = values.mean() / base.mean() if base.mean() > 0 else float("nan")
        residual = (values - ratio * base) / base.mean() if base.mean() > 0 else values * float("nan")
        found[name] = Measured(1 - ratio, _measured(residual, None).stderr)
    return found


def mean_square(estimates: Array, truth: Array) -> Array:
    """``mean_i |estimate_i - theta_i|^2``, [m, d] or [m] -> []."""
    square = (estimates - truth) ** 2
    return (square.sum(axis=-1) if square.ndim > 1 else square).mean()


def _measured(values: np.ndarray, exact: float | None) -> Measured:
    spread = values.std(ddof=1) / np.sqrt(len(values)) if len(values) > 1 else None
    return Measured(float(values.mean()), None if spread is None else float(spread), exact)

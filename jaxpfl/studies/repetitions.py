"""Repetitions of a study in one compiled program, and means over repetitions with standard errors."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxpfl.core import full_precision
from jaxpfl.core.types import Array, Key, PyTree
from jaxpfl.engine.placement import program_bytes, too_little
from jaxpfl.estimators import base
from jaxpfl.estimators.base import Estimator, Samples
from jaxpfl.support import host_memory
from jaxpfl.support.errors import JaxpflError
from jaxpfl.support.host_memory import readable

MOST_NUMBERS = 2**24
"""Largest number of random numbers in repetitions that are vmapped together; more repetitions run in batches."""

LEAST = 3
"""Smallest number of repetitions (or clients) for a standard error; with two, the standard error may be zero by
chance.
"""


class Measured(NamedTuple):
    """A mean over repetitions, its standard error (None for fewer than `LEAST` repetitions), and the exact value.

    The exact value ``closed_form`` is None if it is unknown.
    """

    mean: float
    stderr: float | None
    closed_form: float | None = None


class Swept(NamedTuple):
    """Estimators ``build(value)``, one for each of the ``values`` [k], which run in one program."""

    build: Callable[[Array], Estimator]
    values: Array


def repetition(
    draw: Callable[[Key], tuple[Array, Samples]],
    estimators: Mapping[str, Estimator | Swept],
    uploads: int | None = None,
) -> Callable[[Key], dict[str, Array]]:
    """Return a pure function of a random key that draws new data, and returns all estimators' mean squared errors.

    Args:
      draw: function ``key -> (parameters [m, ...], samples)`` that draws the data.
      estimators: estimators by name.
      uploads: number of clients that upload, K; by default all.

    Returns:
      A function from the key to the errors by estimator; the errors of a `Swept` estimator have a leading axis [k].
    """

    def study(key: Key) -> dict[str, Array]:
        of_data, of_run = jax.random.split(key)
        truth, clients = draw(of_data)
        # The first K clients upload. The choice does not matter, because all clients have the same distribution.
        sent = jnp.arange(len(truth)) < (len(truth) if uploads is None else uploads)

        def one(estimator: Estimator) -> Array:
            return mean_square(base.estimate(estimator, of_run, clients, sent=sent).estimates, truth)

        return {
            name: jax.vmap(lambda value, build=own.build: one(build(value)))(own.values)
            if isinstance(own, Swept)
            else one(own)
            for name, own in estimators.items()
        }

    return study


def repeat(study: Callable[[Key], PyTree], seed: int, repetitions: int, numbers: int) -> PyTree:
    """Run ``study(key)`` for one key per repetition, in one compiled program.

    Args:
      study: pure function that returns a pytree of arrays, with the same shapes for every key.
      seed: seed of the keys; repetition r has the key ``fold_in(key(seed), r)``, for any number of repetitions.
      repetitions: number of repetitions.
      numbers: number of random numbers in one repetition, which determines how many repetitions are vmapped together.

    Returns:
      The results as NumPy arrays, leaves [repetitions, ...].

    Raises:
      JaxpflError: if the program does not fit in memory; raised before anything is drawn.
    """
    most = max(1, min(repetitions, MOST_NUMBERS // max(numbers, 1)))
    batches = math.ceil(repetitions / most)
    side_by_side = math.ceil(repetitions / batches)

    @full_precision.jit
    def run(key: Key) -> PyTree:
        # A last batch of another size would compile the study twice, so it is filled and its excess dropped.
        keys = jax.vmap(lambda r: jax.random.fold_in(key, r))(jnp.arange(batches * side_by_side))
        results = jax.lax.map(study, keys, batch_size=side_by_side)
        return jax.tree.map(lambda leaf: leaf[:repetitions], results)

    host_memory.check(  # lower bound, checked before the slow compilation of a large program
        4 * (max(numbers, 1) * side_by_side + repetitions), *_too_large(repetitions, numbers)
    )
    program, devices = run.lower(jax.random.key(seed)).compile(), jax.devices()[:1]
    need = program_bytes(program, devices)
    if (free := too_little(need, devices)) is not None:
        needs, advice = _too_large(repetitions, numbers)
        raise JaxpflError(f"{needs} {readable(need)} of memory, but {readable(free)} is free: {advice}")
    return jax.tree.map(np.asarray, program(jax.random.key(seed)))


def _too_large(repetitions: int, numbers: int) -> tuple[str, str]:
    return f"{repetitions} repetitions of {numbers} numbers need", "reduce repetitions, clients, samples or dimensions"


def report(errors: Mapping[str, Any], closed_form: Mapping[str, float | None]) -> dict[str, Any]:
    """Errors and gains of a study as JSON.

    Args:
      errors: mean squared errors [repetitions] by estimator, including ``local`` and ``personalized``.
      closed_form: exact errors by estimator, if known.

    Returns:
      ``mse``: mean, stderr and closed_form by estimator. ``gain_over_local``: the fraction of the local estimator's
      error that the personalized estimator avoids. ``gains``: this fraction and its standard error for every estimator
      except ``local``.
    """
    mse = {name: measure(values, closed_form.get(name))._asdict() for name, values in errors.items()}
    gained = {name: gain(values, errors["local"])._asdict() for name, values in errors.items() if name != "local"}
    return {"mse": mse, "gain_over_local": gained["personalized"]["mean"], "gains": gained}


def measure(values: Any, exact: float | None = None) -> Measured:
    """Mean of ``values`` [repetitions] with its standard error, and the exact value."""
    values = np.asarray(values, float)
    return Measured(float(values.mean()), standard_error(values) if len(values) >= LEAST else None, exact)


def standard_error(values: np.ndarray) -> float | None:
    """Standard error of the mean of values [repetitions]; None for a single value."""
    return float(values.std(ddof=1) / np.sqrt(len(values))) if len(values) > 1 else None


def gain(values: Any, reference: Any) -> Measured:
    """Gain ``1 - mean(values) / mean(reference)``, from errors [repetitions] of two estimators on the same data.

    The standard error is by the delta method. The gain is NaN if the reference's error is zero.
    """
    values, reference = np.asarray(values, float), np.asarray(reference, float)
    base = reference.mean() if reference.mean() > 0 else np.nan
    ratio = values.mean() / base
    return Measured(float(1 - ratio), measure((values - ratio * reference) / base).stderr)


def mean_square(estimates: Array, truth: Array) -> Array:
    """Mean squared error ``mean_i |estimate_i - truth_i|^2``, for arrays [m, d] or [m]."""
    square = (estimates - truth) ** 2
    return (square.sum(axis=-1) if square.ndim > 1 else square).mean()

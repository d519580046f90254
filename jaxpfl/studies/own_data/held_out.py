"""Errors on held-out samples, without the samples' own noise.

A held-out sample differs from the estimate by its own noise and by the estimate's error about the client's true mean.
The variance :math:`s_i^2` of a client's samples is an unbiased estimate of the former, so the mean squared difference
minus :math:`s_i^2` is one of the latter; gains are computed from it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxpfl.core import full_precision
from jaxpfl.core.types import Array, Key
from jaxpfl.estimators import base
from jaxpfl.estimators.base import Estimator, Samples
from jaxpfl.studies.repetitions import measure, report

MOST_FOLDS = 20
"""With fewer samples of every client, each sample is a fold."""

LEAST = 3
"""Least number of samples of some client for held-out scores: one of a pair gives no variance."""


class HeldOut(NamedTuple):
    """Held-out errors of the k clients with two samples or more, for each of d columns.

    Attributes:
      errors: mean squared differences of held-out samples from the estimates, by estimator, [k, d].
      noise: the samples' variances s_i^2, [k, d].
    """

    errors: dict[str, np.ndarray]
    noise: np.ndarray


def errors(estimators: dict[str, Estimator], key: Key, data: Samples) -> HeldOut:
    """Cross-validate the estimators.

    Sample j is held out in fold j mod the number of folds. A client without training samples in a fold neither sends
    nor is scored in it.
    """
    m, n = data.mask.shape
    folds = min(n, MOST_FOLDS)

    @full_precision.jit
    def totals(data: Samples) -> tuple[dict[str, Array], Array, Array]:
        fold_of = jnp.cumsum(data.mask, axis=1) - 1

        def fold(f: Array) -> tuple[dict[str, Array], Array]:
            held = data.mask & (fold_of % folds == f)
            train = Samples(data.x, data.mask & ~held)
            scored = held & train.mask.any(axis=1, keepdims=True)

            def score(estimator: Estimator) -> Array:
                made = base.estimate(estimator, jax.random.fold_in(key, f), train, sent=train.mask.any(axis=1))
                square = ((data.x - made.estimates[:, None]) ** 2).reshape(m, n, -1)
                return jnp.where(scored[:, :, None], square, 0).sum(axis=1)

            return {name: score(estimator) for name, estimator in estimators.items()}, scored.sum(axis=1)

        sums, counts = jax.lax.map(fold, jnp.arange(folds))
        scatter = jax.vmap(lambda own: own.scatter)(data).reshape(m, -1)
        return jax.tree.map(lambda a: a.sum(axis=0), sums), counts.sum(axis=0), scatter

    sums, counts, scatter = jax.tree.map(np.asarray, totals(data))
    scored = counts > 0
    of_all = counts[scored, None]
    return HeldOut({name: sums[name][scored] / of_all for name in estimators}, scatter[scored] / (of_all - 1))


def scores(found: HeldOut, column: int) -> dict[str, Any]:
    """Scores of one column, as JSON: ``mse`` about the clients' true means, ``gains`` over local, and
    ``held_out_errors``.

    Standard errors are over clients; ``held_out_errors`` include the samples' noise.
    """
    raw = {name: values[:, column] for name, values in found.errors.items()}
    noise = found.noise[:, column]
    held_out = {name: {"mean": of.mean, "stderr": of.stderr} for name, of in ((k, measure(v)) for k, v in raw.items())}
    return report({name: values - noise for name, values in raw.items()}, {}) | {"held_out_errors": held_out}

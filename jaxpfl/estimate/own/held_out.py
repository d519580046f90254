"""Errors on samples that were held out of every estimate."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from jaxpfl.estimators import base
from jaxpfl.estimators.base import Estimator, Samples
from jaxpfl.types import Array, Key

FOLDS = 5
LEAST = 3
"""Samples of some client, for scores on held-out ones: of pairs, what is not held out tells nothing of a variance."""


def errors(estimators: dict[str, Estimator], key: Key, data: Samples) -> dict[str, np.ndarray]:
    """Each client's mean squared error on its own held-out samples, [clients with two samples or more].

    Sample j is held out in fold j mod `FOLDS`. A client that has no training samples in a fold neither sends nor is
    scored in it.
    """

    @jax.jit
    def totals(data: Samples) -> tuple[dict[str, Array], Array]:
        fold_of = jnp.cumsum(data.mask, axis=1) - 1

        def fold(f: Array) -> tuple[dict[str, Array], Array]:
            held = data.mask & (fold_of % FOLDS == f)
            train = Samples(data.x, data.mask & ~held)
            scored = held & train.mask.any(axis=1, keepdims=True)

            def score(estimator: Estimator) -> Array:
                made = base.estimate(estimator, jax.random.fold_in(key, f), train, sent=train.mask.any(axis=1))
                square = (data.x - made.estimates[:, None]) ** 2
                square = square.sum(axis=-1) if square.ndim > 2 else square
                return jnp.where(scored, square, 0).sum(axis=1)

            return {name: score(estimator) for name, estimator in estimators.items()}, scored.sum(axis=1)

        sums, counts = jax.lax.map(fold, jnp.arange(FOLDS))
        return jax.tree.map(lambda a: a.sum(axis=0), sums), counts.sum(axis=0)

    sums, counts = jax.tree.map(np.asarray, totals(data))
    scored = counts > 0
    return {name: sums[name][scored] / counts[scored] for name in estimators}

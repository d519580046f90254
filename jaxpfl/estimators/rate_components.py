"""The number of Beta components of a mixture, by the likelihood of clients that were held out.

Client i is in fold i modulo the number of folds, and is scored by the log probability of its counts under the mixture
fitted to all other folds. Without folds the likelihood never falls with the number of components.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from jaxpfl import checks
from jaxpfl.errors import JaxpflError
from jaxpfl.estimators.rate_mixtures import distinct, fit_betas, log_orders, mean_log_likelihood
from jaxpfl.estimators.rates import checked_trials
from jaxpfl.types import Array

MOST, FOLDS = 4, 5


class ComponentScores(NamedTuple):
    """Scores of a number of components.

    Attributes:
      log_marginal: log likelihood of all counts under the prior fitted to all, [].
      log_densities: of every client's counts, under the prior fitted to the other folds, [m].
    """

    log_marginal: Array
    log_densities: Array


def compare_components(
    successes: Any, trials: Any, most: int = MOST, *, folds: int = FOLDS
) -> dict[int, ComponentScores]:
    """Score mixtures of 1 ... ``most`` Beta components on the same clients and folds, by their number.

    Runs on the host, on the distinct pairs of counts. Clients whose order has a period should be shuffled first.

    Args:
      successes, trials: as those of `ebbinomial`.
      most: the greatest number of components.
      folds: their number, from 2 to that of the clients.

    Raises:
      JaxpflError: as `ebbinomial`; folds out of range; and under a transformation.
    """
    if isinstance(successes, Tracer) or isinstance(trials, Tracer):
        raise JaxpflError("compare_components runs on the host: call it outside jit and vmap")
    checks.count("most", most)
    checks.count("folds", folds)
    z, n = checked_trials(successes, trials)
    m = len(z)
    if not 2 <= folds <= m:
        raise JaxpflError(f"folds must be from 2 to the number of clients, {m}, got {folds}")
    pairs, place, counts = distinct(z, n)
    fold = np.arange(m) % folds
    weights = np.stack([counts - np.bincount(place[fold == k], minlength=len(counts)) for k in range(folds)] + [counts])
    kind = jnp.result_type(float)
    own, size = (jnp.asarray(of, kind) for of in pairs)
    given = jnp.asarray(weights / weights.sum(axis=1, keepdims=True), kind)
    found = {}
    for components in range(1, most + 1):
        densities = _densities(own, size, given, components=components)
        found[components] = ComponentScores(densities[-1] @ jnp.asarray(counts, kind), densities[fold, place])
    return found


def best_components(scores: Mapping[int, ComponentScores]) -> int:
    """The number of components of the greatest mean log density of held-out clients; the first of equals."""
    return max(scores, key=lambda components: float(scores[components].log_densities.mean()))


@partial(jax.jit, static_argnames="components")
def _densities(z: Array, n: Array, weights: Array, *, components: int) -> Array:
    """Log probabilities of all pairs of counts under the prior fitted with each row of weights, [rows, pairs]."""

    def under(w: Array) -> Array:
        prior = fit_betas(z, n, w, components=components)
        one = jnp.ones(1, z.dtype)
        each = jax.vmap(lambda z, n: mean_log_likelihood(prior, z[None], n[None], one))
        return each(z, n) + log_orders(z, n)

    return jax.lax.map(under, weights)

"""Scores of clients' counts that were held out, by their log probability under a prior fitted to the other clients.

Client i is in fold i modulo the number of folds. It runs on the host, in double precision, and on the distinct pairs of
counts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from jaxpfl.core import full_precision
from jaxpfl.core.types import Array
from jaxpfl.estimators import inputs
from jaxpfl.estimators.normal_means.answer import in_blocks
from jaxpfl.estimators.normal_means.compare import check_folds
from jaxpfl.estimators.rate_answers import Mixture, log_marginal
from jaxpfl.estimators.rate_mixtures import distinct
from jaxpfl.support.errors import JaxpflError


class CountScores(NamedTuple):
    """Scores of a prior of counts.

    Attributes:
      log_marginal: log likelihood of all counts under the prior fitted to all, [].
      log_densities: of every client's counts, under the prior fitted to the other folds, [m].
    """

    log_marginal: Array
    log_densities: Array


class Folds(NamedTuple):
    """Clients by their distinct pairs of counts.

    Attributes:
      z, n: the pairs, [d] each.
      clients: numbers of clients of each pair outside every fold, and in the last row of all, [folds + 1, d].
      fold: of every client, [m].
      place: of its pair, [m].
    """

    z: np.ndarray
    n: np.ndarray
    clients: np.ndarray
    fold: np.ndarray
    place: np.ndarray


def split(name: str, checked: Callable[..., tuple[Any, Any]], first: Any, second: Any, folds: int) -> Folds:
    """Check counts with and without each fold, and count their distinct pairs.

    Args:
      name: of the function that is called, for messages.
      checked: `rates.checked_trials` or `rates.checked_events`.
      first, second: the counts, [m], and their sizes.
      folds: their number, from 2 to that of the clients.

    Raises:
      JaxpflError: as ``checked``, also for what is left without a fold; folds out of range; under a transformation.
    """
    if isinstance(first, Tracer) or isinstance(second, Tracer):
        raise JaxpflError(f"{name} runs on the host: call it outside jit and vmap")
    z, n = checked(first, second)
    check_folds(folds, len(z))
    fold = np.arange(len(z)) % folds
    for k in range(folds):
        try:
            checked(z, n, fold != k)
        except JaxpflError as error:
            raise JaxpflError(f"without clients {k}, {k + folds}, ... (fold {k} of {folds}): {error}") from None
    pairs, place, counts = distinct(z, n)
    inside = [np.bincount(place[fold == k], minlength=len(counts)) for k in range(folds)]
    return Folds(pairs[0], pairs[1], np.stack([*(counts - of for of in inside), counts]), fold, place)


def scores(of: Folds, fit: Callable[[Array, Array, Array], Mixture]) -> CountScores:
    """Score a family of priors.

    Args:
      of: the clients.
      fit: pairs of counts with weights that sum to one, [d] each, to the fitted prior.
    """

    def run(z: Array, n: Array) -> CountScores:
        rows = []
        for clients in of.clients:
            # A pair of clients in the fold alone may not set where a grid of atoms begins: another stands for it.
            some = int(np.argmax(clients > 0))
            own, size = (jnp.where(clients > 0, each, each[some]) for each in (z, n))
            prior = fit(own, size, jnp.asarray(clients / clients.sum(), z.dtype))
            rows.append(_log_densities(prior, z, n))
        densities = jnp.stack(rows)
        return CountScores(densities[-1] @ jnp.asarray(of.clients[-1], z.dtype), densities[of.fold, of.place])

    return inputs.in_double(run, of.z, of.n)


@full_precision.jit
def _log_densities(prior: Any, z: Array, n: Array) -> Array:
    return in_blocks(lambda z, n: log_marginal(prior, z, n), z, n)

"""Normal scores of counts under their fitted Beta or Gamma prior: N(0, 1) if the prior holds.

A count's distribution has steps, and its probability up to the count is drawn evenly within that step (the randomised
quantile residuals of Dunn and Smyth 1996). It runs on the host, in SciPy; both tails are summed by themselves, as one
less the other rounds a far one away.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from jaxpfl.estimators.rate_answers import Rates

MOST_TERMS = 50_000_000
"""Terms of Beta-binomial sums beyond which there are no scores."""


def scores(found: Rates, seed: int = 0) -> np.ndarray | None:
    """Scores of all clients, [m]; None of successes for which too many terms would have to be summed.

    Args:
      found: the answer of `ebbinomial` or `ebpoisson` with a single Beta or Gamma prior.
      seed: of the draws within a count's step.
    """
    from scipy import special

    z, size = (np.asarray(of, np.float64) for of in (found.events, found.size))
    mean, prior_size = float(found.prior_mean), float(found.prior_size)
    tails = _binomial(z, size, mean, prior_size) if bool(found.bounded) else _poisson(z, size, mean, prior_size)
    if tails is None:
        return None
    below, own, above = tails
    share = np.random.default_rng(seed).random(len(z))
    tiny = np.finfo(float).tiny
    lower, upper = (np.clip(of, tiny, 1) for of in (below + share * own, above + (1 - share) * own))
    return np.where(lower < upper, special.ndtri(lower), -special.ndtri(upper))


def _poisson(z: np.ndarray, e: np.ndarray, mean: float, size: float) -> tuple[np.ndarray, ...]:
    """Probabilities of fewer events, of as many, and of more, [m] each."""
    from scipy import stats

    of: Any = stats.poisson(mean * e) if np.isinf(size) else stats.nbinom(mean * size, size / (size + e))
    return of.cdf(z - 1), of.pmf(z), of.sf(z)


def _binomial(z: np.ndarray, n: np.ndarray, mean: float, size: float) -> tuple[np.ndarray, ...] | None:
    from scipy import stats

    if np.isinf(size):
        of: Any = stats.binom(n, mean)
        return of.cdf(z - 1), of.pmf(z), of.sf(z)
    trials, place = np.unique(n, return_inverse=True)
    if trials.sum() > MOST_TERMS:
        return None
    found = np.empty((3, len(z)))
    for i, number in enumerate(trials):
        p = stats.betabinom.pmf(np.arange(number + 1), number, mean * size, (1 - mean) * size)
        up_to, from_on = (np.concatenate([[0], np.cumsum(of)]) for of in (p, p[::-1]))
        here = np.flatnonzero(place == i)
        k = z[here].astype(int)
        found[:, here] = up_to[k], p[k], from_on[int(number) - k]
    return tuple(found)

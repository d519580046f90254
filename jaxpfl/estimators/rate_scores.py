r"""Normal scores of counts under their fitted prior: nearly N(0, 1) if the prior holds.

A count's distribution has steps; its score is taken at the middle of its step (the mid-p-value), so that it depends on
no random draw. Scores scatter a little less than N(0, 1) where there are few events, and a test for outliers is then
conservative. About a regression each client's distribution has the fitted
mean, and coefficients count as known.

Under a mixture of Beta or Gamma distributions, or atoms, a count's probabilities are the components' in their shares. A
mixture that was fitted to few clients follows one far out, which is then outlying under none.

It runs on the host, in SciPy; both tails are summed by themselves, as one less the other rounds a far one away. The
Beta-binomial probabilities follow from their ratios,

.. math:: \frac{p_{k + 1}}{p_k} = \frac{n - k}{k + 1} \, \frac{k + n_0 \mu}{n - k - 1 + n_0 (1 - \mu)},

in which nothing cancels, however many pseudo-trials there are.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from jaxpfl.estimators.poisson_mixtures import Gammas
from jaxpfl.estimators.rate_answers import RateMixture, Rates
from jaxpfl.estimators.rate_mixtures import Betas

MOST_TERMS = 50_000_000
"""Terms of Beta-binomial sums, or of mixtures, beyond which there are no scores."""
_AT_ONCE = 2_000_000


def scores(found: Rates | RateMixture) -> np.ndarray | None:
    """Scores of all clients, [m]; None where too many terms would have to be summed.

    Args:
      found: answer of `ebbinomial` or `ebpoisson`, or ``rates`` of a fit about a regression.
    """
    z, size = (np.asarray(of, np.float64) for of in (found.events, found.size))
    if isinstance(found, Rates):
        mean, prior_size = (np.asarray(of, np.float64) for of in (found.prior_mean, found.prior_size))
        tails = (_binomial if found.bounded else _poisson)(z, size, mean, prior_size)
    else:
        tails = _mixed(found.prior, z, size)
    return None if tails is None else _normal(tails)


def _mixed(prior: Any, z: np.ndarray, size: np.ndarray) -> np.ndarray | None:
    """Probabilities of less than a count, of it, and of more, [3, m], under a mixture; None for too many terms."""
    (z, size), place = np.unique(np.stack([z, size]), axis=1, return_inverse=True)
    sizes = prior.sizes if isinstance(prior, Betas | Gammas) else np.full(len(prior.means), np.inf)
    weights, means, sizes = (np.asarray(of, np.float64)[np.asarray(prior.weights) > 0] for of in (*prior[:2], sizes))
    of_one = _terms(size, means[:1], sizes[:1]) if prior.bounded and np.isfinite(sizes).all() else len(z)
    if of_one * len(weights) > MOST_TERMS:
        return None
    tails = np.zeros((3, len(z)))
    for weight, mean, own in zip(weights, means, sizes, strict=True):
        found = (_binomial if prior.bounded else _poisson)(z, size, mean, own)
        assert found is not None  # fewer terms than all components'
        tails += weight * np.stack(found)
    return tails[:, place.ravel()]


def _normal(tails: Sequence[np.ndarray] | np.ndarray) -> np.ndarray:
    """Scores from the probabilities of less than a count, of it, and of more, [m] each."""
    from scipy import special

    below, own, above = tails
    tiny = np.finfo(float).tiny
    lower, upper = (np.clip(of, tiny, 1) for of in (below + own / 2, above + own / 2))
    return np.where(lower < upper, special.ndtri(lower), -special.ndtri(upper))


def _terms(n: np.ndarray, mean: np.ndarray, size: np.ndarray) -> int:
    """Number of terms that are summed for scores of successes of n trials [m]."""
    return int((_distinct(n, mean, size)[0][0] + 1).sum())


def _distinct(n: np.ndarray, mean: np.ndarray, size: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Distinct distributions, [3, number] by increasing n, and which one each client has, [m]."""
    found, place = np.unique(np.stack(np.broadcast_arrays(n, mean, size)), axis=1, return_inverse=True)
    return found, place.ravel()


def _poisson(z: np.ndarray, e: np.ndarray, mean: np.ndarray, size: np.ndarray) -> tuple[np.ndarray, ...]:
    """Probabilities of fewer events, of as many, and of more, [m] each."""
    from scipy import stats

    of: Any = stats.poisson(mean * e) if np.isinf(size).all() else stats.nbinom(mean * size, size / (size + e))
    return of.cdf(z - 1), of.pmf(z), of.sf(z)


def _binomial(z: np.ndarray, n: np.ndarray, mean: np.ndarray, size: np.ndarray) -> tuple[np.ndarray, ...] | None:
    from scipy import stats

    if np.isinf(size).all():
        of: Any = stats.binom(n, mean)
        return of.cdf(z - 1), of.pmf(z), of.sf(z)
    laws, place = _distinct(n, mean, size)
    if (laws[0] + 1).sum() > MOST_TERMS:
        return None
    found = np.empty((3, len(z)))
    for start, end in _slices(laws[0]):
        p = _beta_binomial(*laws[:, start:end])
        zero = np.zeros((len(p), 1))
        up_to, from_on = (np.concatenate([zero, np.cumsum(of, axis=1)], axis=1) for of in (p, p[:, ::-1]))
        here = np.flatnonzero((place >= start) & (place < end))
        row, k, last = place[here] - start, z[here].astype(int), p.shape[1] - 1
        found[:, here] = up_to[row, k], p[row, k], from_on[row, last - k]
    return tuple(found)


def _slices(n: np.ndarray) -> Iterator[tuple[int, int]]:
    """Ends of parts of ascending n that are summed together, with as many bits, so that less than half is padding."""
    bits = np.frexp(n)[1]
    for some in np.unique(bits):
        start, end = (int(np.searchsorted(bits, some, side)) for side in ("left", "right"))
        rows = max(1, _AT_ONCE >> int(some))
        yield from ((at, min(at + rows, end)) for at in range(start, end, rows))


def _beta_binomial(n: np.ndarray, mean: np.ndarray, size: np.ndarray) -> np.ndarray:
    """Probabilities of 0 ... max n successes under each distribution, [number, max n + 1]."""
    first, rest, n = (of[:, None] for of in (mean * size, (1 - mean) * size, n))
    k = np.arange(int(n.max()))
    with np.errstate(divide="ignore", invalid="ignore"):  # beyond a client's own n
        ratio = np.where(k < n, np.log((n - k) / (k + 1)) + np.log((k + first) / (n - k - 1 + rest)), -np.inf)
    logs = np.concatenate([np.zeros_like(first), np.cumsum(ratio, axis=1)], axis=1)
    p = np.exp(logs - logs.max(axis=1, keepdims=True))
    return p / p.sum(axis=1, keepdims=True)

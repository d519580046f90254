r"""Credible intervals for Bernoulli clients with a population learned from the same clients, for rare events too.

The counterpart of `learned_gaussian`. It runs on the host, in SciPy.

p_i ~ Beta with mean mu and variance :math:`\rho\, \mu (1 - \mu)`. Each (mu, rho) is weighted by its prior and by the
likelihood of all clients' counts. The posterior of p_i is a mixture of Beta distributions, and the ends of the interval
are its quantiles.

- The prior of rho given mu is :math:`\kappa (1 + \kappa) / (\kappa + \rho)^2` with :math:`\kappa = 4 \mu (1 - \mu)`. It
  is almost flat for mu near a half. For rare events, whose squared coefficient of variation is :math:`\rho / \mu`, it
  is proper on that scale. (A prior flat in rho would put nearly all mass on populations in which nearly all p_i are
  zero.)
- The prior of mu is :math:`1 / \mu` for the lower end and :math:`1 / (1 - \mu)` for the upper: for rho = 0 these give
  the interval of Clopper and Pearson for all counts together, whose coverage is at least nominal.

References: Christiansen and Morris 1997, "Hierarchical Poisson regression modeling", for such a prior of the shrinkage;
Clopper and Pearson 1934.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

_CELLS = 24
_ZOOMS = 8
_NEGLIGIBLE = 16.0  # in units of the log density, below its maximum
_UNLIKELY = 1e-5  # of a cell, beside the likeliest
_MARGIN = 14.0  # of log odds, beyond those of one among all samples
_HALVINGS = 45
_SPREAD = 4.0
_LARGE = 1e3
_AT_ONCE = 256


class Believed(NamedTuple):
    """Ends of the intervals, and posterior standard deviations of p_i, [m] each.

    Without any ones the posterior has nearly all its mass next to zero and a long tail: its standard deviation may then
    exceed the interval's upper end.
    """

    low: np.ndarray
    high: np.ndarray
    stddev: np.ndarray


def believed(ones: np.ndarray, size: np.ndarray, level: float) -> Believed:
    """Every client's credible interval for p_i, of probability ``level``.

    Args:
      ones: number of ones Z of each client, [m].
      size: n, [m].
      level: within (0, 1).
    """
    from scipy import special

    ones, size = np.asarray(ones, float), np.broadcast_to(np.asarray(size, float), np.shape(ones))
    pairs, of_client = np.unique(np.stack([ones, size]), axis=1, return_inverse=True)
    odds, alpha, beta, log_p = _posterior(ones, size)
    # Without any ones the lower end is 0 and its prior improper; likewise the upper end without any zeros.
    shares = {}
    for sign, possible in ((-1, ones.any()), (1, (ones < size).any())):
        log_q = log_p + special.log_expit(sign * odds)
        shares[sign] = np.exp(log_q - log_q.max()) if possible else None
    both = [share / share.sum() for share in shares.values() if share is not None]
    middle = np.mean(both, axis=0)

    def of_some(pair: np.ndarray) -> np.ndarray:
        z, n = pair
        low, high = np.zeros(len(z)), np.ones(len(z))
        if shares[-1] is not None:
            low = _quantile(alpha, beta, shares[-1], z, n, (1 - level) / 2)
        if shares[1] is not None:
            high = _quantile(alpha, beta, shares[1], z, n, (1 + level) / 2)
        total = alpha + beta + n[:, None]
        first = (alpha + z[:, None]) / total
        center = first @ middle
        variance = (first * (1 - first) / (total + 1) + (first - center[:, None]) ** 2) @ middle
        return np.stack([low, high, np.sqrt(variance)])

    parts = np.array_split(pairs, -(-pairs.shape[1] // _AT_ONCE), axis=1)
    return Believed(*np.concatenate([of_some(part) for part in parts], axis=1)[:, of_client.ravel()])


def _posterior(ones: np.ndarray, size: np.ndarray) -> tuple[np.ndarray, ...]:
    """Log odds of mu, alpha, beta and the log density, flat in the log odds, over a grid, [cells] each."""
    from scipy import special

    # Few distinct numbers of ones, of zeros and of samples, many clients.
    counted = [np.unique(each, return_counts=True) for each in (ones, size - ones, size)]

    def grid(ends: np.ndarray) -> tuple[np.ndarray, ...]:
        width = (ends[:, 1:] - ends[:, :1]) / _CELLS
        axes = ends[:, :1] + width * (np.arange(_CELLS) + 0.5)
        odds, share = (axis.ravel() for axis in np.meshgrid(*axes, indexing="ij"))
        mu, rest = special.expit(odds), special.expit(-odds)
        kappa = _SPREAD * mu * rest
        rho = share * kappa / (1 + kappa - share)  # its prior is flat in ``share``
        total = (1 - rho) / rho
        alpha, beta = mu * total, rest * total
        log_p = sum(_log_rise(a, *count) for a, count in zip((alpha, beta), counted[:2], strict=True))
        return odds, share, alpha, beta, log_p - _log_rise(total, *counted[2])

    reach = np.log(size.sum()) + _MARGIN
    ends = np.array([[-reach, reach], [0.0, 1.0]])
    priors = [sign for sign, possible in ((-1, ones.any()), (1, (ones < size).any())) if possible]
    for _ in range(_ZOOMS):
        odds, share, *_, log_p = grid(ends)
        each = [log_p + special.log_expit(sign * odds) for sign in priors]
        likely = np.stack([odds, share])[:, np.any([of > of.max() - _NEGLIGIBLE for of in each], axis=0)]
        width = (ends[:, 1] - ends[:, 0]) / _CELLS
        low, high = likely.min(axis=1) - width, likely.max(axis=1) + width
        ends = np.stack([np.maximum(low, ends[:, 0]), np.minimum(high, ends[:, 1])], axis=1)
    odds, _, alpha, beta, log_p = grid(ends)
    return odds, alpha, beta, log_p


def _log_rise(start: np.ndarray, counts: np.ndarray, clients: np.ndarray) -> np.ndarray:
    """Sum over clients of log Gamma(start + count) - log Gamma(start), [cells].

    Stirling's series where the difference of large numbers would cancel.
    """
    from scipy import special

    a = start[:, None]
    exact = special.gammaln(a + counts) - special.gammaln(a)
    far = (a + counts - 0.5) * np.log1p(counts / a) + counts * (np.log(a) - 1) + (1 / (a + counts) - 1 / a) / 12
    return np.where(a > _LARGE, far, exact) @ clients


def _quantile(
    alpha: np.ndarray, beta: np.ndarray, weights: np.ndarray, z: np.ndarray, n: np.ndarray, q: float
) -> np.ndarray:
    """Quantile of the mixture of Beta(alpha + z, beta + n - z), by bisection in the log odds, [pairs]."""
    from scipy import special

    kept = weights > _UNLIKELY * weights.max()
    a, b = alpha[kept] + z[:, None], beta[kept] + (n - z)[:, None]
    p = weights[kept] / weights[kept].sum()
    low, high = np.full(len(z), -_HALVINGS, float), np.full(len(z), _HALVINGS, float)
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        below = special.betainc(a, b, special.expit(middle)[:, None]) @ p < q
        low, high = np.where(below, middle, low), np.where(below, high, middle)
        if (high - low).max() < 1e-4:
            break
    return special.expit((low + high) / 2)

r"""Credible intervals for probabilities and rates, which account for the uncertainty of the learned population.

This module is the counterpart of `learned_gaussian` for counts, including counts of rare events. All functions run on
the host, with SciPy. The population's two parameters are discretized on a grid. Each grid point is weighted by its
prior and by the likelihood of all clients' counts. A client's posterior is then a mixture of conjugate distributions,
and the interval's endpoints are quantiles of the mixture.

**Probabilities**: p_i is Beta with mean mu and variance :math:`\rho\, \mu (1 - \mu)`.

- The prior of rho given mu has the density :math:`\kappa (1 + \kappa) / (\kappa + \rho)^2` with :math:`\kappa = 4 \mu
  (1 - \mu)`. At mu = 1/2 this density falls only by a factor of four from rho = 0 to rho = 1. For rare events (small
  mu), :math:`c = \rho / \mu` is the squared coefficient of variation of the p_i, and the prior density of c is about
  :math:`4 / (4 + c)^2`, as for rates below. (A prior flat in rho would put nearly all mass on populations in which
  nearly all p_i are zero.)
- The prior of mu is :math:`1 / \mu` for the lower endpoint and :math:`1 / (1 - \mu)` for the upper endpoint. For rho =
  0 these priors give the interval of Clopper and Pearson for all counts together. The coverage of that interval is at
  least nominal.

**Rates** are the limit of probabilities for rare events. A rate is Gamma with mean mu and squared coefficient of
variation c.

- c has the prior density :math:`4 / (4 + c)^2`. Thus :math:`c / (4 + c)` is uniform in (0, 1), and the prior is almost
  flat for c below about 1.
- mu has the prior :math:`1 / \mu` for the lower endpoint. For the upper endpoint, the prior is flat if c = 0. Both
  endpoints then agree with Garwood's interval for all counts together, which has at least nominal coverage. For other c
  the prior for the upper endpoint is

  .. math:: \frac{1 + c \bar e \hat\mu}{1 + c \bar e \mu},

  with the clients' mean exposure :math:`\bar e` and the pooled rate :math:`\hat\mu` (all events divided by the sum of
  all exposures). At :math:`\mu = \hat\mu` this fraction is 1 for every c, because of the numerator, so that it favors
  no c there. Without the denominator the posterior would be improper for c above the number of clients.

References: Christiansen and Morris 1997, "Hierarchical Poisson regression modeling", for a similar prior;
Clopper and Pearson 1934; Garwood 1936, "Fiducial limits for the Poisson distribution".
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

_CELLS = 24  # cells along each parameter of probabilities
_RATE_CELLS = 40  # cells for rates: for few clients, the posterior has a long tail toward large mu
_MARGIN = 14.0  # margin of the grid in log odds or log rates, beyond one event among all clients
_SPREAD = 4.0  # the constant 4 in the priors of rho and c
_ZOOMS = 8  # number of times that the grid is narrowed to the region of high density
_NEGLIGIBLE = 16.0  # cells whose log density is this far below the maximum are left out
_UNLIKELY = 1e-5  # cells below this fraction of the largest probability are left out
_HALVINGS = 45  # largest number of bisections; also the half width of the searched range
_ENOUGH = 1e-4  # largest error of a quantile in log odds or log rates
_OF_STDDEV = 1e-3  # largest error of a quantile in standard deviations
_LARGE = 1e3  # parameter above which a difference of log Gamma values would lose its digits
_AT_ONCE = 256  # clients whose quantiles are computed together
_TERMS = 4096  # values summed together, which bounds the memory


class Intervals(NamedTuple):
    """Endpoints [m] of the intervals, and posterior standard deviations [m].

    If no client has any ones, the posteriors have nearly all their mass near zero, and long tails. The posterior
    standard deviations may then exceed the upper endpoints.
    """

    low: np.ndarray
    high: np.ndarray
    stddev: np.ndarray


def probabilities(ones: np.ndarray, size: np.ndarray, level: float) -> Intervals:
    """Credible interval of every client's probability.

    Args:
      ones: number of ones Z_i of each client, [m].
      size: number of samples n_i of each client, [m].
      level: coverage probability, in (0, 1).
    """
    from scipy import special

    ones, size = np.asarray(ones, float), np.broadcast_to(np.asarray(size, float), np.shape(ones))
    odds, alpha, beta, log_p = _betas(ones, size)
    # Without any ones, the lower endpoint is 0, because its posterior is improper; without any zeros, the upper
    # endpoint is 1.
    lower = _shares(log_p + special.log_expit(-odds)) if ones.any() else None
    upper = _shares(log_p + special.log_expit(odds)) if (ones < size).any() else None
    middle = np.mean([end for end in (lower, upper) if end is not None], axis=0)

    def answer(pair: np.ndarray) -> np.ndarray:
        z, n = pair

        def below(at: np.ndarray, kept: np.ndarray) -> np.ndarray:
            return special.betainc(alpha[kept] + z[:, None], beta[kept] + (n - z)[:, None], special.expit(at))

        total = alpha + beta + n[:, None]
        first = (alpha + z[:, None]) / total
        center = first @ middle
        variance = (first * (1 - first) / (total + 1) + (first - center[:, None]) ** 2) @ middle
        stddev = np.sqrt(variance)
        odds_stddev = stddev / (center * (1 - center))
        low, high = np.zeros(len(z)), np.ones(len(z))
        if lower is not None:
            low = special.expit(_quantile(below, lower, odds_stddev, (1 - level) / 2))
        if upper is not None:
            high = special.expit(_quantile(below, upper, odds_stddev, (1 + level) / 2))
        return np.stack([low, high, stddev])

    return Intervals(*_each(answer, ones, size))


def rates(count: np.ndarray, exposure: np.ndarray | float, level: float) -> Intervals:
    """Credible interval of every client's rate.

    Args:
      count: number of events Z_i of each client, [m]: integers, of which at least one is positive.
      exposure: positive exposures e_i, [m], or one number for all.
      level: coverage probability, in (0, 1).
    """
    from scipy import special

    z = np.asarray(count, float)
    unit = float(z.sum() / np.broadcast_to(exposure, z.shape).sum())
    # Rates are in units of the pooled rate, so an exposure is an expected number of events.
    e = unit * np.broadcast_to(np.asarray(exposure, float), z.shape)
    log_mu, c, log_p = _gammas(z, e)
    shape, size = 1 / c, np.exp(-log_mu) / c
    lower, upper = _shares(log_p), _shares(log_p + _upper_prior(log_mu, c, e.mean()))
    middle = (lower + upper) / 2

    def answer(pair: np.ndarray) -> np.ndarray:
        own, exposed = pair

        def below(at: np.ndarray, kept: np.ndarray) -> np.ndarray:
            return special.gammainc(shape[kept] + own[:, None], np.exp(at) * (size[kept] + exposed[:, None]))

        rate = size + exposed[:, None]
        mean = (shape + own[:, None]) / rate
        center = mean @ middle
        stddev = np.sqrt((mean / rate + (mean - center[:, None]) ** 2) @ middle)
        low = np.exp(_quantile(below, lower, stddev / center, (1 - level) / 2))
        high = np.exp(_quantile(below, upper, stddev / center, (1 + level) / 2))
        return unit * np.stack([low, high, stddev])

    return Intervals(*_each(answer, z, e))


def _betas(ones: np.ndarray, size: np.ndarray) -> tuple[np.ndarray, ...]:
    """Grid of Beta distributions: log odds of mu, parameters alpha and beta, and log likelihood, [cells^2] each.

    The second axis of the grid is a function of rho in which rho's prior is flat.
    """
    from scipy import special

    # Likelihoods are computed once per distinct number of ones, zeros and samples, which many clients share.
    counted = [np.unique(each, return_counts=True) for each in (ones, size - ones, size)]

    def grid(places: np.ndarray) -> tuple[np.ndarray, ...]:
        odds, share = places
        mu, rest = special.expit(odds), special.expit(-odds)
        kappa = _SPREAD * mu * rest
        rho = share * kappa / (1 + kappa - share)  # makes the prior of rho flat in ``share``
        total = (1 - rho) / rho
        alpha, beta = mu * total, rest * total
        log_p = sum(_log_rise(a, *count) for a, count in zip((alpha, beta), counted[:2], strict=True))
        return odds, alpha, beta, log_p - _log_rise(total, *counted[2])

    def log_densities(places: np.ndarray) -> list[np.ndarray]:
        odds, *_, log_p = grid(places)
        return [log_p + special.log_expit(sign * odds) for sign in priors]

    reach = np.log(size.sum()) + _MARGIN
    priors = [sign for sign, possible in ((-1, ones.any()), (1, (ones < size).any())) if possible]
    return grid(_zoomed(log_densities, np.array([[-reach, reach], [0.0, 1.0]]), _CELLS))


def _upper_prior(log_mu: np.ndarray, c: np.ndarray, expected: float) -> np.ndarray:
    """Logarithm of mu's prior for the upper endpoint divided by mu's prior for the lower endpoint, [cells^2].

    mu is in units of the pooled rate, and ``expected`` is the pooled rate times the mean exposure.
    """
    return log_mu + np.log1p(c * expected) - np.log1p(c * expected * np.exp(log_mu))


def _gammas(z: np.ndarray, e: np.ndarray) -> tuple[np.ndarray, ...]:
    """Evaluate a grid of Gamma distributions, each with mean mu and squared coefficient of variation c.

    The result is log mu, c, and the log likelihood up to a constant, [cells^2] each.

    Rates are in units of the pooled rate. The second axis of the grid is c / (4 + c), in which c's prior is flat.
    """
    counts = np.unique(z, return_counts=True)
    exposures = np.unique(e, return_counts=True)
    # Only clients with events contribute the term z log(e_0 + e).
    at = np.unique(e[z > 0], return_inverse=True)
    events = at[0], np.bincount(at[1], weights=z[z > 0])

    def grid(places: np.ndarray) -> tuple[np.ndarray, ...]:
        log_mu, share = places
        c = _SPREAD * share / (1 - share)
        shape, size = 1 / c, np.exp(-log_mu) / c
        log_p = _log_rise(shape, *counts) - shape * _total(lambda e: np.log1p(e / size[:, None]), *exposures)
        return log_mu, c, log_p - _total(lambda e: np.log(size[:, None] + e), *events)

    def log_densities(places: np.ndarray) -> list[np.ndarray]:
        log_mu, c, log_p = grid(places)
        return [log_p, log_p + _upper_prior(log_mu, c, e.mean())]

    low, high = -np.log(z.sum()) - _MARGIN, np.log(((z + 1) / e).max()) + _MARGIN
    return grid(_zoomed(log_densities, np.array([[low, high], [0.0, 1.0]]), _RATE_CELLS))


def _zoomed(log_densities: Callable[[np.ndarray], Sequence[np.ndarray]], ends: np.ndarray, cells: int) -> np.ndarray:
    """Midpoints [2, cells^2] of a grid over the part of a box where at least one density is not negligible.

    Args:
      log_densities: function from points [2, cells^2] to logarithms [cells^2] of one or several densities.
      ends: lower and upper end of the box for each parameter, [2, 2].
      cells: number of cells along each parameter.
    """
    for _ in range(_ZOOMS):
        places = _midpoints(ends, cells)
        likely = places[:, np.any([of > of.max() - _NEGLIGIBLE for of in log_densities(places)], axis=0)]
        width = (ends[:, 1] - ends[:, 0]) / cells
        low, high = likely.min(axis=1) - width, likely.max(axis=1) + width
        ends = np.stack([np.maximum(low, ends[:, 0]), np.minimum(high, ends[:, 1])], axis=1)
    return _midpoints(ends, cells)


def _midpoints(ends: np.ndarray, cells: int) -> np.ndarray:
    width = (ends[:, 1:] - ends[:, :1]) / cells
    axes = ends[:, :1] + width * (np.arange(cells) + 0.5)
    return np.stack([axis.ravel() for axis in np.meshgrid(*axes, indexing="ij")])


def _shares(log_density: np.ndarray) -> np.ndarray:
    """Probabilities proportional to a density, [cells]."""
    p = np.exp(log_density - log_density.max())
    return p / p.sum()


def _quantile(
    below: Callable[[np.ndarray, np.ndarray], np.ndarray], p: np.ndarray, stddev: np.ndarray, q: float
) -> np.ndarray:
    """Posterior quantiles of n clients, [n], as log odds or log rates, by bisection.

    The errors are at most 1e-4, and at most a thousandth of a posterior standard deviation.

    Args:
      below: function of points [n, 1] and of a mask of the cells to keep. It returns P(parameter <= point) under the
        posterior that each kept cell gives each client, [n, number of kept cells].
      p: probabilities of the cells.
      stddev: approximate posterior standard deviation of each client's log odds or log rate, [n].
      q: probability of the quantile.
    """
    kept = p > _UNLIKELY * p.max()
    weights = p[kept] / p[kept].sum()
    enough = np.minimum(_ENOUGH, _OF_STDDEV * stddev)
    number = len(stddev)
    low, high = np.full(number, -_HALVINGS, float), np.full(number, _HALVINGS, float)
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        left = below(middle[:, None], kept) @ weights < q
        low, high = np.where(left, middle, low), np.where(left, high, middle)
        if (high - low < enough).all():
            break
    return (low + high) / 2


def _each(answer: Callable[[np.ndarray], np.ndarray], first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """Apply ``answer`` once to each distinct pair of numbers, in batches; return the results of all clients, [k, m].

    Args:
      answer: function from n pairs, [2, n], to k numbers per pair, [k, n].
      first, second: numbers of each client, [m].
    """
    pairs, place = np.unique(np.stack([first, second]), axis=1, return_inverse=True)
    parts = np.array_split(pairs, -(-pairs.shape[1] // _AT_ONCE), axis=1)
    return np.concatenate([answer(part) for part in parts], axis=1)[:, place.ravel()]


def _log_rise(start: np.ndarray, counts: np.ndarray, clients: np.ndarray) -> np.ndarray:
    """Sum over clients of log Gamma(start + count) - log Gamma(start), for each entry of ``start``.

    Stirling's series is used where the difference between large numbers would lose its digits.
    """
    from scipy import special

    def each(counts: np.ndarray) -> np.ndarray:
        a = start[:, None]
        exact = special.gammaln(a + counts) - special.gammaln(a)
        far = (a + counts - 0.5) * np.log1p(counts / a) + counts * (np.log(a) - 1) + (1 / (a + counts) - 1 / a) / 12
        return np.where(a > _LARGE, far, exact)

    return _total(each, counts, clients)


def _total(of: Callable[[np.ndarray], np.ndarray], values: np.ndarray, clients: np.ndarray) -> np.ndarray:
    """Weighted sum of the columns of ``of(values)``. Each value's weight is the number of clients that have it."""
    parts = range(0, len(values), _TERMS)
    return np.sum([of(values[at : at + _TERMS]) @ clients[at : at + _TERMS] for at in parts], axis=0)

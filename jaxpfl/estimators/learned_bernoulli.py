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

import numpy as np

from jaxpfl.estimators.learned_grid import Believed, Population, log_rise, of_each, quantile, shares, zoomed

_MARGIN = 14.0  # of log odds, beyond those of one among all samples
_SPREAD = 4.0


def population(ones: np.ndarray, size: np.ndarray) -> Population:
    """Posterior of the Beta distribution of all clients.

    Args:
      ones: number of ones Z of each client, [m].
      size: n, [m].
    """
    from scipy import special

    ones, size = np.asarray(ones, float), np.broadcast_to(np.asarray(size, float), np.shape(ones))
    odds, alpha, beta, log_p = _posterior(ones, size)
    # Without any ones the lower end is 0 and its prior improper; likewise the upper end without any zeros.
    lower = shares(log_p + special.log_expit(-odds)) if ones.any() else None
    upper = shares(log_p + special.log_expit(odds)) if (ones < size).any() else None
    return Population(alpha, beta, lower, upper, bounded=True)


def believed(ones: np.ndarray, size: np.ndarray, level: float, of: Population | None = None) -> Believed:
    """Every client's credible interval for p_i, of probability ``level``.

    Args:
      ones, size: as those of `population`.
      level: within (0, 1).
      of: the population learned of these clients, where it is known.
    """
    from scipy import special

    ones, size = np.asarray(ones, float), np.broadcast_to(np.asarray(size, float), np.shape(ones))
    found = population(ones, size) if of is None else of
    alpha, beta, lower, upper, _ = found
    middle = found.middle

    def of_some(pair: np.ndarray) -> np.ndarray:
        z, n = pair

        def below(at: np.ndarray, kept: np.ndarray) -> np.ndarray:
            first, rest = alpha[kept] + z[:, None], beta[kept] + (n - z)[:, None]
            return special.betainc(first, rest, special.expit(at))

        total = alpha + beta + n[:, None]
        first = (alpha + z[:, None]) / total
        center = first @ middle
        variance = (first * (1 - first) / (total + 1) + (first - center[:, None]) ** 2) @ middle
        stddev = np.sqrt(variance)
        of_odds = stddev / (center * (1 - center))
        low, high = np.zeros(len(z)), np.ones(len(z))
        if lower is not None:
            low = special.expit(quantile(below, lower, of_odds, (1 - level) / 2))
        if upper is not None:
            high = special.expit(quantile(below, upper, of_odds, (1 + level) / 2))
        return np.stack([low, high, stddev])

    return Believed(*of_each(of_some, ones, size))


def _posterior(ones: np.ndarray, size: np.ndarray) -> tuple[np.ndarray, ...]:
    """Log odds of mu, alpha, beta and the log density, flat in the log odds, over a grid, [cells] each."""
    from scipy import special

    # Few distinct numbers of ones, of zeros and of samples, many clients.
    counted = [np.unique(each, return_counts=True) for each in (ones, size - ones, size)]

    def grid(places: np.ndarray) -> tuple[np.ndarray, ...]:
        odds, share = places
        mu, rest = special.expit(odds), special.expit(-odds)
        kappa = _SPREAD * mu * rest
        rho = share * kappa / (1 + kappa - share)  # its prior is flat in ``share``
        total = (1 - rho) / rho
        alpha, beta = mu * total, rest * total
        log_p = sum(log_rise(a, *count) for a, count in zip((alpha, beta), counted[:2], strict=True))
        return odds, alpha, beta, log_p - log_rise(total, *counted[2])

    def log_densities(places: np.ndarray) -> list[np.ndarray]:
        odds, *_, log_p = grid(places)
        return [log_p + special.log_expit(sign * odds) for sign in priors]

    reach = np.log(size.sum()) + _MARGIN
    priors = [sign for sign, possible in ((-1, ones.any()), (1, (ones < size).any())) if possible]
    return grid(zoomed(log_densities, np.array([[-reach, reach], [0.0, 1.0]])))

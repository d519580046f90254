r"""Credible intervals for rates of events with a population learned from the same clients.

The counterpart of `learned_bernoulli`, of which it is the limit for rare events, and of `learned_gaussian`. It runs on
the host, in SciPy.

Rates are Gamma with mean mu and squared coefficient of variation c. Each (mu, c) is weighted by its prior and by the
likelihood of all clients' counts. The posterior of a client's rate is a mixture of Gamma distributions, and the ends of
the interval are its quantiles.

- c has the prior density :math:`4 / (4 + c)^2`: flat in :math:`c / (4 + c)`, and almost flat in c where clients
  are not much more different than their mean.
- mu has the prior :math:`1 / \mu` for the lower end. For the upper it is flat where c = 0, so that both ends are then
  those of Garwood for all counts together, whose coverage is at least nominal; in general it is

  .. math:: \frac{1 + c \bar e \hat\mu}{1 + c \bar e \mu},

  with the clients' mean exposure and the pooled rate, of which the first factor keeps the prior of c at the pooled rate
  as it is, and without the second the posterior would be improper where c exceeds the number of clients.

References: Christiansen and Morris 1997, "Hierarchical Poisson regression modeling"; Garwood 1936, "Fiducial limits for
the Poisson distribution".
"""

from __future__ import annotations

import numpy as np

from jaxpfl.estimators.learned_grid import Believed, Population, log_rise, of_each, quantile, shares, total, zoomed

_MARGIN = 14.0  # of the logarithm of mu, beyond one event in all and beyond the largest rate
_SPREAD = 4.0
_CELLS = 40  # the posterior of few clients has a long tail towards large mu


def population(count: np.ndarray, exposure: np.ndarray | float) -> Population:
    """Posterior of the Gamma distribution of all clients.

    Args:
      count: Z_i, whole numbers, of which one is above zero, [m].
      exposure: e_i, above zero, [m], or one for all.
    """
    z, e, unit = _in_units(count, exposure)
    log_mu, c, log_p = _posterior(z, unit * e)
    upper = shares(log_p + _for_upper(log_mu, c, (unit * e).mean()))
    return Population(1 / c, np.exp(-log_mu) / c / unit, shares(log_p), upper, bounded=False)


def believed(count: np.ndarray, exposure: np.ndarray | float, level: float, of: Population | None = None) -> Believed:
    """Every client's credible interval for its rate, of probability ``level``.

    Args:
      count, exposure: as those of `population`.
      level: within (0, 1).
      of: the population learned of these clients, where it is known.
    """
    from scipy import special

    z, e, unit = _in_units(count, exposure)
    found = population(z, e) if of is None else of
    shape, size, lower, upper, _ = found
    assert lower is not None
    assert upper is not None
    middle = found.middle

    def of_some(pair: np.ndarray) -> np.ndarray:
        own, exposed = pair

        def below(at: np.ndarray, kept: np.ndarray) -> np.ndarray:
            return special.gammainc(shape[kept] + own[:, None], unit * np.exp(at) * (size[kept] + exposed[:, None]))

        rate = size + exposed[:, None]
        mean = (shape + own[:, None]) / rate
        center = mean @ middle
        stddev = np.sqrt((mean / rate + (mean - center[:, None]) ** 2) @ middle)
        low = np.exp(quantile(below, lower, stddev / center, (1 - level) / 2))
        high = np.exp(quantile(below, upper, stddev / center, (1 + level) / 2))
        return np.stack([unit * low, unit * high, stddev])

    return Believed(*of_each(of_some, z, e))


def _in_units(count: np.ndarray, exposure: np.ndarray | float) -> tuple[np.ndarray, np.ndarray, float]:
    """Counts and exposures, [m] each, and the pooled rate: rates are in it, and exposures in expected events."""
    z = np.asarray(count, float)
    e = np.broadcast_to(np.asarray(exposure, float), z.shape)
    return z, e, float(z.sum() / e.sum())


def _for_upper(log_mu: np.ndarray, c: np.ndarray, expected: float) -> np.ndarray:
    """Log prior of the upper end over that of the lower, for mu in units of the pooled rate, [cells]."""
    return log_mu + np.log1p(c * expected) - np.log1p(c * expected * np.exp(log_mu))


def _posterior(z: np.ndarray, e: np.ndarray) -> tuple[np.ndarray, ...]:
    """Log of mu, c and the log density, flat in log mu, over a grid, [cells] each; the pooled rate is one."""
    counts = np.unique(z, return_counts=True)
    exposures = np.unique(e, return_counts=True)
    # Clients with events have z log(e_0 + e) too.
    at = np.unique(e[z > 0], return_inverse=True)
    events = at[0], np.bincount(at[1], weights=z[z > 0])

    def grid(places: np.ndarray) -> tuple[np.ndarray, ...]:
        log_mu, share = places
        c = _SPREAD * share / (1 - share)
        shape, size = 1 / c, np.exp(-log_mu) / c
        log_p = log_rise(shape, *counts) - shape * total(lambda e: np.log1p(e / size[:, None]), *exposures)
        return log_mu, c, log_p - total(lambda e: np.log(size[:, None] + e), *events)

    def log_densities(places: np.ndarray) -> list[np.ndarray]:
        log_mu, c, log_p = grid(places)
        return [log_p, log_p + _for_upper(log_mu, c, e.mean())]

    low, high = -np.log(z.sum()) - _MARGIN, np.log(((z + 1) / e).max()) + _MARGIN
    return grid(zoomed(log_densities, np.array([[low, high], [0.0, 1.0]]), _CELLS))

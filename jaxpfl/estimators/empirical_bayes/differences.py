r"""Tests of whether clients' parameters are equal, and a confidence interval for their spread.

All functions run on the host, with SciPy. Gaussian client i has the mean :math:`\bar X_i`, with the estimated variance
s_i^2. Let :math:`w_i(\lambda) = 1 / (s_i^2 + \lambda)` and :math:`Q(\lambda) = \sum_i w_i (\bar X_i - M)^2`, where M is
the mean of all :math:`\bar X_i` with the weights w_i. Suppose that all s_i^2 are proportional to one variance, pooled
with nu degrees of freedom. The true variances are then :math:`\varphi s_i^2` with a common factor :math:`\varphi`. At
:math:`\lambda = \sigma_\theta^2 / \varphi`, where sigma_theta^2 is the variance of the clients' parameters, Q / (m - 1)
has the F distribution with m - 1 and nu degrees of freedom, exactly and for any sizes (Wald 1940). The test for lambda
= 0 is the analysis of variance. If the clients' variances differ, Welch's test is used.

To find an endpoint of the interval for sigma_theta^2, first solve for the lambda at which Q / (m - 1) equals a quantile
of F. Then multiply this lambda by the ratio of that quantile to the same quantile of chi-square / (m - 1). Without this
ratio, the interval for a large sigma_theta^2 would be too wide, because it would include the uncertainty of the pooled
variance, which hardly affects a large sigma_theta^2. For equal sizes this is the interval of Williams 1962. Its
coverage is at least the nominal level, and close to it.

References: Wald 1940, "A note on the analysis of variance with unequal class frequencies"; Williams 1962, "A confidence
interval for variance components"; Welch 1951, "On the comparison of several mean values"; Viechtbauer 2007, "Confidence
intervals for the amount of heterogeneity in meta-analysis".
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

_LEAST_EXPECTED = 5.0  # Cochran's rule for the chi-square approximation
_MOST_DEGREES = 1e9  # SciPy's F distribution does not accept infinite degrees of freedom
# Largest and smallest number of draws for a simulated p-value, and a limit on the random numbers, to save time.
_MOST_DRAWS, _FEWEST_DRAWS, _MOST_NUMBERS = 9999, 199, 5_000_000


class Test(NamedTuple):
    """Result of a test of the hypothesis that all clients' parameters are equal.

    Attributes:
      name: name of the test.
      statistic: value of the test statistic.
      p_value: probability of a statistic at least as large if the parameters are equal.
    """

    name: str
    statistic: float
    p_value: float


def compare_means(mean: np.ndarray, s2: np.ndarray, degrees: np.ndarray | float, *, pooled: bool) -> Test:
    """Test whether clients of any sizes have equal means, by an analysis of variance or by Welch's test.

    Args:
      mean: the clients' means, [m].
      s2: positive estimated variances of these means, [m].
      degrees: degrees of freedom: one number for the pooled variance, or one for each client's variance, [m].
      pooled: whether all ``s2`` are proportional to one pooled estimate; otherwise Welch's test is used.
    """
    from scipy import special

    m = len(mean)
    statistic = _generalised_q(mean, s2, 0.0) / (m - 1)
    if not pooled:
        correction, degrees = _welch(s2, degrees)
        statistic /= correction
    p_value = special.fdtrc(m - 1, np.minimum(degrees, _MOST_DEGREES), statistic)
    return Test("analysis of variance" if pooled else "Welch's analysis of variance", float(statistic), float(p_value))


def spread(
    mean: np.ndarray, s2: np.ndarray, degrees: np.ndarray | float, level: float, *, pooled: bool
) -> tuple[float, float]:
    """Confidence interval for sigma_theta, the standard deviation of the clients' parameters.

    Args:
      mean, s2, degrees, pooled: arguments as in `compare_means`.
      level: coverage probability.
    """
    from scipy import special

    free = len(mean) - 1
    scale = 1.0 if pooled else _welch(s2, degrees)[0]
    degrees = np.minimum(degrees if pooled else _welch(s2, degrees)[1], _MOST_DEGREES)
    ends = []
    for tail in ((1 + level) / 2, (1 - level) / 2):
        f, chi = special.fdtri(free, degrees, tail), special.chdtri(free, 1 - tail) / free
        ends.append((_between(mean, s2, free * scale * f) * f / chi) ** 0.5)
    return ends[0], ends[1]


def compare_shares(ones: np.ndarray, size: np.ndarray, seed: int) -> Test:
    r"""Pearson's chi-square test of whether Bernoulli clients have equal probabilities, with the statistic

    .. math:: \sum_i n_i (\bar X_i - \bar X)^2 / (\bar X (1 - \bar X))

    where :math:`\bar X` is the share of ones among all samples. If a client's expected number of ones or of zeros is
    below five, the p-value is simulated: the total number of ones is dealt to the clients at random, 199 to 9999 times.
    A simulated p-value is valid for any counts.

    Args:
      ones: number of ones of each client, [m].
      size: number of samples n_i of each client, [m].
      seed: seed of the simulation.
    """
    from scipy import special

    ones, size = np.asarray(ones, np.int64), np.asarray(size, np.int64)
    share = ones.sum() / size.sum()
    if not 0 < share < 1:
        return Test("chi-square", 0.0, 1.0)

    def chi_square(z: np.ndarray) -> np.ndarray:
        return ((z - size * share) ** 2 / size).sum(axis=-1) / (share * (1 - share))

    statistic = float(chi_square(ones))
    if size.min() * min(share, 1 - share) >= _LEAST_EXPECTED:
        return Test("chi-square", statistic, float(special.chdtrc(len(ones) - 1, statistic)))
    rng = np.random.default_rng(seed)
    draws = int(np.clip(_MOST_NUMBERS // len(ones), _FEWEST_DRAWS, _MOST_DRAWS))
    below = statistic * (1 - 1e-9)  # tolerance, as equal statistics differ by rounding errors
    deals = (rng.multivariate_hypergeometric(size, int(ones.sum()), method="marginals") for _ in range(draws))
    as_much = sum(chi_square(deal) >= below for deal in deals)
    return Test("chi-square, simulated", statistic, float((1 + as_much) / (1 + draws)))


def compare_rates(count: np.ndarray, exposure: np.ndarray) -> Test:
    """Pearson's chi-square test of whether clients have equal rates of events.

    Args:
      count: number of events of each client, [m].
      exposure: exposure of each client, [m]; a rate is the number of events per unit of exposure.
    """
    from scipy import special

    expected = exposure * count.sum() / exposure.sum()
    statistic = float(((count - expected) ** 2 / expected).sum())
    return Test("chi-square", statistic, float(special.chdtrc(len(count) - 1, statistic)))


def _generalised_q(mean: np.ndarray, s2: np.ndarray, ratio: float) -> float:
    w = 1 / (s2 + ratio)
    y = mean - mean.mean()
    return float(w @ (y - w @ y / w.sum()) ** 2)


def _between(mean: np.ndarray, s2: np.ndarray, value: float) -> float:
    """Value of lambda at which Q equals ``value``; zero if Q(0) is smaller than ``value``."""
    from scipy import optimize

    if _generalised_q(mean, s2, 0.0) <= value:
        return 0.0
    most = float(((mean - mean.mean()) ** 2).sum() / value)
    found: Any = optimize.brentq(lambda at: _generalised_q(mean, s2, at) - value, 0.0, most, xtol=most * 1e-12)
    return float(found)


def _welch(s2: np.ndarray, degrees: np.ndarray | float) -> tuple[float, float]:
    """Return the divisor of Q / (m - 1) in Welch's test, and the degrees of freedom in F's denominator."""
    m, w = len(s2), 1 / s2
    off = float(((1 - w / w.sum()) ** 2 / degrees).sum()) / (m**2 - 1)
    return 1 + 2 * (m - 2) * off, 1 / (3 * off)

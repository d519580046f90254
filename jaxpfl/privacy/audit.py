r"""What an experiment can say of a privacy claim: a lower bound on epsilon from worlds with and without a canary.

A canary is a client whose upload is chosen to be seen: of norm C, in a direction c. Its score in a world is what the
released sums have in that direction, :math:`\langle S, c \rangle / (C \|c\|)`: without it noise, with it 1 more for
each round that it took part in. Whoever reads the release can compute it, so its distributions in both worlds are as
hard to tell apart as the claim says; where they are not, the claim is wrong. A bound below the claim proves nothing.

With K worlds of each kind, no bound above about log K can be shown, and little at a delta as small as a claim's.
A claim holds at every delta: audit it at one of 0.01 ... 0.2, against ``plan.epsilon`` of that delta.

Reference: Jagielski, Ullman and Oprea 2020, "Auditing Differentially Private Machine Learning".
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from jaxpfl import checks
from jaxpfl.errors import JaxpflError


class EpsilonBound(NamedTuple):
    """A lower bound on epsilon.

    Attributes:
      epsilon: the bound; 0 where nothing was shown.
      delta: at which.
      confidence: the probability, over the worlds' randomness, that a true epsilon is not below it.
      ceiling: the largest bound that so many worlds could have shown.
      statistic: of several scores of a world, the one that gave the bound.
    """

    epsilon: float
    delta: float
    confidence: float
    ceiling: float
    statistic: int = 0


def epsilon_lower_bound(
    with_canary: ArrayLike, without_canary: ArrayLike, *, delta: float, confidence: float = 0.95
) -> EpsilonBound:
    r"""A lower bound on epsilon that holds with the stated confidence, whatever the scores' distributions.

    (eps, delta)-DP bounds every test of the two worlds: P(score > t | with) <= e^eps P(score > t | without) + delta,
    and the same with the worlds exchanged and the test turned round. Half of the worlds chooses the threshold, which of
    the two is tested and, where a world has several scores, by which of them; the other half, which the choice has not
    seen, gives Clopper-Pearson bounds of the two probabilities, each at half of the error:

    .. math:: \hat\epsilon = \log \frac{\underline p - \delta}{\bar f}

    Args:
      with_canary, without_canary: scores of independent worlds, [K] or, for J scores of each, [K, J].
      delta: of the claim that is audited.
      confidence: of the bound.

    Raises:
      JaxpflError: for fewer than 4 worlds of a kind, scores that are not finite, a delta outside [0, 1), or a
        confidence outside (0, 1).
    """
    present, absent = _scores("with_canary", with_canary, 2), _scores("without_canary", without_canary, 2)
    if present.shape[1] != absent.shape[1]:
        raise JaxpflError(f"each world must have as many scores, got {present.shape[1]} and {absent.shape[1]}")
    if not 0 <= delta < 1:
        raise JaxpflError(f"delta must be >= 0 and < 1, got {delta}")
    checks.probability("confidence", confidence)

    choosing, held = (
        _Odds(len(present[half]), len(absent[half]), delta, confidence)
        for half in (slice(0, None, 2), slice(1, None, 2))
    )
    choices = [_best(choosing, present[::2, j], absent[::2, j]) for j in range(present.shape[1])]
    statistic = int(np.argmax([odds for odds, _, _ in choices]))
    _, side, threshold = choices[statistic]
    hits = (_above(np.sort(kind[1::2, statistic]), np.array([threshold])) for kind in (present, absent))
    bound = float(held.log(*hits)[side, 0])
    best = float(held.log(np.array([held.present]), np.array([0])).max())
    return EpsilonBound(max(0.0, bound), delta, confidence, max(0.0, best), statistic)


def gaussian_estimate(
    with_canary: ArrayLike, without_canary: ArrayLike, *, delta: float, confidence: float = 0.95
) -> float:
    r"""An estimate of epsilon from the scores' means and standard deviations; NOT a rigorous bound.

    It takes the scores for two normal distributions of one variance, as under full participation with fixed clipping,
    for which it is far sharper than `epsilon_lower_bound`; where that is wrong (sampling, rare failures) it may be too
    high or too low. With :math:`\hat\mu` the difference of the means over the pooled standard deviation, the result is
    epsilon of :math:`\mu`-Gaussian DP at :math:`\hat\mu - z_{confidence}` standard errors:

    .. math:: s_\mu^2 = \frac1{K_1} + \frac1{K_0} + \frac{\hat\mu^2}{2 (K_1 + K_0 - 2)}

    Args:
      with_canary, without_canary: scores of independent worlds, [K] each.
      delta: of the claim that is audited, in (0, 1).
      confidence: one-sided, if the scores are normal.

    Raises:
      JaxpflError: as `epsilon_lower_bound`.
    """
    from dp_accounting import get_epsilon_gaussian
    from scipy.special import ndtri

    present, absent = _scores("with_canary", with_canary), _scores("without_canary", without_canary)
    checks.probability("delta", delta)
    checks.probability("confidence", confidence)
    k1, k0 = len(present), len(absent)
    variance = ((k1 - 1) * present.var(ddof=1) + (k0 - 1) * absent.var(ddof=1)) / (k1 + k0 - 2)
    if variance == 0:
        raise JaxpflError("the scores have no variance: there is no noise to estimate")
    mu = (present.mean() - absent.mean()) / math.sqrt(variance)
    mu -= ndtri(confidence) * math.sqrt(1 / k1 + 1 / k0 + mu**2 / (2 * (k1 + k0 - 2)))
    return float(get_epsilon_gaussian(1 / mu, delta)) if mu > 0 else 0.0


def _scores(name: str, scores: ArrayLike, most: int = 1) -> np.ndarray:
    """The scores in float64; as columns where several of a world are allowed."""
    scores = np.asarray(scores, np.float64)
    if not 1 <= scores.ndim <= most or len(scores) < 4:
        raise JaxpflError(f"{name} must be a vector of at least 4 scores, got shape {scores.shape}")
    if not np.isfinite(scores).all():
        raise JaxpflError(f"{name} must be finite, got {np.count_nonzero(~np.isfinite(scores))} scores that are not")
    return scores.reshape(len(scores), -1) if most == 2 else scores


def _above(scores: np.ndarray, thresholds: np.ndarray) -> np.ndarray:
    """How many of the sorted scores lie above each threshold, [T]."""
    return len(scores) - np.searchsorted(scores, thresholds, side="right")


class _Odds:
    """Bounds of log-odds for so many worlds with and without the canary."""

    def __init__(self, present: int, absent: int, delta: float, confidence: float):
        self.present, self._delta = present, delta
        error = (1 - confidence) / 2
        self._of_present, self._of_absent = _lowest(present, error), _lowest(absent, error)

    def log(self, tp: np.ndarray, fp: np.ndarray) -> np.ndarray:
        """The bound for both tests, [2, T]: scores above the threshold speak for the canary; those below against it.

        Args:
          tp, fp: how many of the worlds with and without it have a score above, [T].
        """
        k0 = len(self._of_absent) - 1
        likely = np.stack([self._of_present[tp], self._of_absent[k0 - fp]])
        # An upper bound of a probability is one minus the lower bound of its complement's.
        rare = 1 - np.stack([self._of_absent[k0 - fp], self._of_present[tp]])
        with np.errstate(divide="ignore"):
            return np.log(np.maximum(likely - self._delta, 0) / rare)


def _best(odds: _Odds, present: np.ndarray, absent: np.ndarray) -> tuple[float, int, float]:
    """The best bound of one score, [K1] and [K0]; of which test, and at which threshold."""
    present, absent = np.sort(present), np.sort(absent)
    thresholds = np.unique(np.concatenate([present, absent]))
    bounds = odds.log(_above(present, thresholds), _above(absent, thresholds))
    side, place = np.unravel_index(np.argmax(bounds), bounds.shape)
    return float(bounds[side, place]), int(side), float(thresholds[place])


def _lowest(trials: int, error: float) -> np.ndarray:
    """Clopper-Pearson's lower bounds of a probability, for 0 ... trials hits."""
    from scipy.special import betaincinv

    hits = np.arange(1, trials + 1)
    return np.concatenate([[0.0], betaincinv(hits, trials - hits + 1, error)])

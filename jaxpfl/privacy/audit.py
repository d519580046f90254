r"""Empirical lower bounds on epsilon, from worlds with and without a canary.

A canary is a client whose upload is chosen to be detectable: of norm C, in a direction c. Its score in a world is the
component of the released sums in that direction, :math:`\langle S, c \rangle / (C \|c\|)`: noise without the canary,
and 1 more for each round in which it took part. Anyone who sees the release can compute the score, so its distributions
in the two worlds must be as hard to tell apart as claimed; otherwise the claim is wrong. A bound below the claim proves
nothing.

K worlds of each kind can show no bound above about log K, and little at a delta as small as a typical claim's. A claim
holds at every delta: audit it at one of 0.01 ... 0.2, against ``plan.epsilon`` of that delta.

Reference: Jagielski, Ullman and Oprea 2020, "Auditing Differentially Private Machine Learning".
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from jaxpfl.core import checks
from jaxpfl.support.errors import JaxpflError


class EpsilonBound(NamedTuple):
    """A lower bound on epsilon.

    Attributes:
      epsilon: the bound; 0 if nothing was shown.
      delta: of the bound.
      confidence: probability, over the worlds' randomness, that the true epsilon is not below the bound.
      ceiling: largest bound possible with this number of worlds.
      statistic: index of the score that gave the bound, if a world has several.
    """

    epsilon: float
    delta: float
    confidence: float
    ceiling: float
    statistic: int = 0


def epsilon_lower_bound(
    with_canary: ArrayLike, without_canary: ArrayLike, *, delta: float, confidence: float = 0.95
) -> EpsilonBound:
    r"""Lower bound on epsilon at the given confidence, for scores of any distribution.

    (eps, delta)-DP bounds every test of the two worlds: P(score > t | with) <= e^eps P(score > t | without) + delta,
    and the same with the worlds exchanged and the test reversed. Half of the worlds selects the threshold, the
    direction and, if a world has several scores, the score; the other half, unseen by the selection, gives
    Clopper-Pearson bounds on the two probabilities, each at half of the error:

    .. math:: \hat\epsilon = \log \frac{\underline p - \delta}{\bar f}

    Args:
      with_canary, without_canary: scores of independent worlds, [K] or, for J scores of each, [K, J].
      delta: of the claim that is audited.
      confidence: of the bound.

    Raises:
      JaxpflError: for fewer than 4 worlds of a kind, scores that are not finite, a delta outside [0, 1), or a
        confidence outside (0, 1).
    """
    present, absent = _scores("with_canary", with_canary), _scores("without_canary", without_canary)
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


def _scores(name: str, scores: ArrayLike) -> np.ndarray:
    """The scores in float64, a column for each statistic of a world."""
    scores = np.asarray(scores, np.float64)
    if not 1 <= scores.ndim <= 2 or len(scores) < 4:
        raise JaxpflError(f"{name} must be a vector of at least 4 scores, got shape {scores.shape}")
    if not np.isfinite(scores).all():
        raise JaxpflError(f"{name} must be finite, got {np.count_nonzero(~np.isfinite(scores))} scores that are not")
    return scores.reshape(len(scores), -1)


def _above(scores: np.ndarray, thresholds: np.ndarray) -> np.ndarray:
    """Number of sorted scores above each threshold, [T]."""
    return len(scores) - np.searchsorted(scores, thresholds, side="right")


class _Odds:
    """Bounds on log odds for a number of worlds with and without the canary."""

    def __init__(self, present: int, absent: int, delta: float, confidence: float):
        self.present, self._delta = present, delta
        error = (1 - confidence) / 2
        self._of_present, self._of_absent = _lowest(present, error), _lowest(absent, error)

    def log(self, tp: np.ndarray, fp: np.ndarray) -> np.ndarray:
        """Bound for both tests, [2, T]: the canary is inferred from scores above the threshold, or from those below.

        Args:
          tp, fp: number of worlds with and without it whose score is above, [T].
        """
        k0 = len(self._of_absent) - 1
        likely = np.stack([self._of_present[tp], self._of_absent[k0 - fp]])
        # An upper bound on a probability is one minus the lower bound on its complement.
        rare = 1 - np.stack([self._of_absent[k0 - fp], self._of_present[tp]])
        with np.errstate(divide="ignore"):
            return np.log(np.maximum(likely - self._delta, 0) / rare)


def _best(odds: _Odds, present: np.ndarray, absent: np.ndarray) -> tuple[float, int, float]:
    """The best bound from one score, [K1] and [K0], with its test and threshold."""
    present, absent = np.sort(present), np.sort(absent)
    thresholds = np.unique(np.concatenate([present, absent]))
    bounds = odds.log(_above(present, thresholds), _above(absent, thresholds))
    side, place = np.unravel_index(np.argmax(bounds), bounds.shape)
    return float(bounds[side, place]), int(side), float(thresholds[place])


def _lowest(trials: int, error: float) -> np.ndarray:
    """Clopper-Pearson lower bounds on a probability, for 0 ... trials hits."""
    from scipy.special import betaincinv

    hits = np.arange(1, trials + 1)
    return np.concatenate([[0.0], betaincinv(hits, trials - hits + 1, error)])

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

from jaxpfl.errors import JaxpflError
from jaxpfl.privacy import checks

_Rates = tuple[np.ndarray, np.ndarray]


class EpsilonBound(NamedTuple):
    """A lower bound on epsilon.

    Attributes:
      epsilon: the bound; 0 where nothing was shown.
      delta: at which.
      confidence: the probability, over the worlds' randomness, that a true epsilon is not below it.
      ceiling: the largest bound that so many worlds could have shown.
    """

    epsilon: float
    delta: float
    confidence: float
    ceiling: float


def epsilon_lower_bound(
    with_canary: ArrayLike, without_canary: ArrayLike, *, delta: float, confidence: float = 0.95
) -> EpsilonBound:
    r"""A lower bound on epsilon that holds with the stated confidence, whatever the scores' distributions.

    (eps, delta)-DP bounds every test of the two worlds: P(score > t | with) <= e^eps P(score > t | without) + delta,
    and the same with the worlds exchanged and the test turned round. Half of the worlds chooses the threshold and which
    of the two is tested; the other half, which the choice has not seen, gives Clopper-Pearson bounds of the two
    probabilities, each at half of the error:

    .. math:: \hat\epsilon = \log \frac{\underline p - \delta}{\bar f}

    Args:
      with_canary, without_canary: scores of independent worlds, [K] each; larger with the canary.
      delta: of the claim that is audited.
      confidence: of the bound.

    Raises:
      JaxpflError: for fewer than 4 worlds of a kind, scores that are not finite, a delta outside [0, 1), or a
        confidence outside (0, 1).
    """
    present, absent = _scores("with_canary", with_canary), _scores("without_canary", without_canary)
    if not 0 <= delta < 1:
        raise JaxpflError(f"delta must be >= 0 and < 1, got {delta}")
    checks.probability("confidence", confidence)

    chosen_present, chosen_absent = np.sort(present[::2]), np.sort(absent[::2])
    thresholds = np.unique(np.concatenate([chosen_present, chosen_absent]))
    bounds = _log_odds(_above(chosen_present, thresholds), _above(chosen_absent, thresholds), delta, confidence)
    side, place = np.unravel_index(np.argmax(bounds), bounds.shape)

    held_present, held_absent = np.sort(present[1::2]), np.sort(absent[1::2])
    at = thresholds[place : place + 1]
    bound = _log_odds(_above(held_present, at), _above(held_absent, at), delta, confidence)[side, 0]
    best = _log_odds(
        (np.array([len(held_present)]), np.array([len(held_present)])),
        (np.array([0]), np.array([len(held_absent)])),
        delta,
        confidence,
    )
    return EpsilonBound(max(0.0, float(bound)), delta, confidence, max(0.0, float(best.max())))


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


def _scores(name: str, scores: ArrayLike) -> np.ndarray:
    scores = np.asarray(scores, np.float64)
    if scores.ndim != 1 or len(scores) < 4:
        raise JaxpflError(f"{name} must be a vector of at least 4 scores, got shape {scores.shape}")
    if not np.isfinite(scores).all():
        raise JaxpflError(f"{name} must be finite, got {np.count_nonzero(~np.isfinite(scores))} scores that are not")
    return scores


def _above(scores: np.ndarray, thresholds: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """How many of the sorted scores lie above each threshold, [T], and of how many."""
    above = len(scores) - np.searchsorted(scores, thresholds, side="right")
    return above, np.full_like(above, len(scores))


def _log_odds(present: _Rates, absent: _Rates, delta: float, confidence: float) -> np.ndarray:
    """The bound for both tests, [2, T]: scores above the threshold speak for the canary; those below against it."""
    (tp, k1), (fp, k0) = present, absent
    error = (1 - confidence) / 2
    likely = np.stack([_lowest(tp, k1, error), _lowest(k0 - fp, k0, error)])
    rare = np.stack([_highest(fp, k0, error), _highest(k1 - tp, k1, error)])
    with np.errstate(divide="ignore"):
        return np.log(np.maximum(likely - delta, 0) / rare)


def _lowest(hits: np.ndarray, trials: np.ndarray, error: float) -> np.ndarray:
    """Clopper-Pearson's lower bound of a probability."""
    from scipy.special import betaincinv

    return np.where(hits > 0, betaincinv(np.maximum(hits, 1), trials - hits + 1, error), 0)


def _highest(hits: np.ndarray, trials: np.ndarray, error: float) -> np.ndarray:
    """Clopper-Pearson's upper bound of a probability."""
    return 1 - _lowest(trials - hits, trials, error)

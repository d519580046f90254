r"""Lower bound on epsilon from one run with many canaries, each included by a fair coin.

The auditor scores every canary, guesses that those with the highest scores were included and those with the lowest were
not, and abstains from the rest. For an (eps, delta)-DP mechanism the number W of correct guesses among r is hardly
larger than that of randomised response (Steinke et al. 2023, Theorem 5.2): with :math:`\check W \sim
\operatorname{Binomial}(r, e^\epsilon / (1 + e^\epsilon))` and n canaries,

.. math:: P(W \ge v) \le P(\check W \ge v)
   + 2 n \delta \max_{1 \le i \le n} \frac{P(v > \check W \ge v - i)}{i}

It holds for any pair of data sets between which each coin chooses: a client present or absent, its data or none, its
data or their opposite. Canaries of several independent runs count as those of one. Because of the term in delta it
requires a delta far below 1 / n, such as that of a typical claim.

Reference: Steinke, Nasr and Jagielski 2023, "Privacy Auditing with One (1) Training Run", arXiv:2305.08846.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from jaxpfl.core import checks
from jaxpfl.support.errors import JaxpflError

_SHARES = (0.125, 0.25, 0.5, 1.0)
"""Shares of the canaries that are guessed; each is tried at its part of the error."""
_STEPS = 30
_LARGEST = 100.0


class OneRunBound(NamedTuple):
    """A lower bound on epsilon from one run.

    Attributes:
      epsilon: the bound; 0 if nothing was shown.
      delta: of the bound.
      confidence: probability, over the coins and the run, that the true epsilon is not below the bound.
      ceiling: largest bound possible with this number of canaries.
      canaries, guesses, correct: n; and r and W for the share of the canaries that gave the bound.
    """

    epsilon: float
    delta: float
    confidence: float
    ceiling: float
    canaries: int
    guesses: int
    correct: int


def p_value(canaries: int, guesses: int, correct: int, *, epsilon: float, delta: float) -> float:
    """Largest probability of at least ``correct`` correct guesses under (epsilon, delta)-DP (Theorem 5.2).

    Args:
      canaries: n.
      guesses: r, at most n.
      correct: W, at most r.
    """
    from scipy.special import betainc, gammaln, log_expit

    right = 1 / (1 + np.exp(-epsilon))
    if not correct:
        return 1.0
    beta = float(betainc(correct, guesses - correct + 1, right))
    if not delta:
        return beta
    k = np.arange(correct - 1, -1, -1)
    choices = gammaln(guesses + 1) - gammaln(k + 1) - gammaln(guesses - k + 1)
    below = np.cumsum(np.exp(choices + k * log_expit(epsilon) + (guesses - k) * log_expit(-epsilon)))
    alpha = float((below / np.arange(1, correct + 1)).max())
    return min(beta + 2 * canaries * delta * alpha, 1.0)


def one_run_lower_bound(
    scores: ArrayLike, included: ArrayLike, *, delta: float, confidence: float = 0.95
) -> OneRunBound:
    """Lower bound on epsilon at the given confidence, for any scores.

    An eighth, a quarter, half and all of the canaries are guessed, each at a quarter of the error; the best is
    reported.

    Args:
      scores: of the canaries, [n]; larger if included.
      included: outcome of each coin, [n] bool.
      delta: of the claim that is audited.
      confidence: of the bound.

    Raises:
      JaxpflError: for fewer than 2 canaries, scores that are not finite, or a delta or confidence out of range.
    """
    scores, included = np.asarray(scores, np.float64), np.asarray(included, bool)
    if scores.ndim != 1 or len(scores) < 2 or included.shape != scores.shape:
        raise JaxpflError(f"scores must be a vector of at least 2, with as many coins, got shape {scores.shape}")
    if not np.isfinite(scores).all():
        raise JaxpflError(f"scores must be finite, got {np.count_nonzero(~np.isfinite(scores))} that are not")
    if not 0 <= delta < 1:
        raise JaxpflError(f"delta must be >= 0 and < 1, got {delta}")
    checks.probability("confidence", confidence)
    n, error = len(scores), (1 - confidence) / len(_SHARES)
    # Ties, as of canaries that never took part, are broken at random: their order might reveal the coins.
    order = np.lexsort((np.random.default_rng(n).random(n), scores))
    tried = []
    for share in _SHARES:
        half = max(1, round(share * n / 2))
        low, high = order[:half], order[max(n - half, half) :]
        correct, guesses = int((~included[low]).sum() + included[high].sum()), len(low) + len(high)
        tried.append((_largest_refuted(n, guesses, correct, delta, error), guesses, correct))
    best, guesses, correct = max(tried)
    ceiling = _largest_refuted(n, n, n, delta, error)
    return OneRunBound(best, delta, confidence, max(ceiling, best), n, guesses, correct)


def _largest_refuted(canaries: int, guesses: int, correct: int, delta: float, error: float) -> float:
    """Largest epsilon under which so many correct guesses are less probable than the error; 0 if there is none."""

    def refuted(epsilon: float) -> bool:
        return p_value(canaries, guesses, correct, epsilon=epsilon, delta=delta) < error

    if not refuted(0.0):
        return 0.0
    low, high = 0.0, 1.0
    while refuted(high) and high < _LARGEST:
        low, high = high, 2 * high
    for _ in range(_STEPS):
        middle = (low + high) / 2
        low, high = (middle, high) if refuted(middle) else (low, middle)
    return low

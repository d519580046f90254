"""Calibration of noise to an epsilon: the inverse of `PrivacyPlan.epsilon`."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import lru_cache

from jaxpfl.core import checks
from jaxpfl.privacy.accounting import Accountant, PrivacyPlan
from jaxpfl.privacy.descriptions import CentralNoise
from jaxpfl.support.errors import JaxpflError

LARGEST_EPSILON = 200.0
"""Largest budget that noise is calibrated to."""
_RELATIVE_TOLERANCE = 5e-5
_LEAST, _MOST = 1e-2, 1e7


@lru_cache(maxsize=64)
def calibrate(plan: PrivacyPlan, epsilon: float, delta: float, accountant: Accountant = "pld") -> PrivacyPlan:
    """The plan with the least noise whose epsilon at this delta is at most the target.

    Args:
      plan: its noise is scaled; the initial amount is irrelevant (per-step noise keeps the ratio of its stddevs, and
        adaptive clipping the noise on its count).
      epsilon, delta: the target.
      accountant: the accountant; ``paper`` inverts Theorem 5, which is not a valid bound.

    Returns:
      The plan with a noise multiplier that is never below the required one, and usually within a relative 1e-4 of it.

    Raises:
      JaxpflError: if the target is not in (0, 200] or needs a noise multiplier outside 0.01 ... 1e7, and as in
        `PrivacyPlan.epsilon`.

    Examples:
      >>> from jaxpfl.privacy import CentralNoise, Full
      >>> plan = calibrate(PrivacyPlan(CentralNoise(1.0), Full(), rounds=300), epsilon=3.35, delta=1e-4)
      >>> round(plan.noise_multiplier, 2)
      19.29
    """
    checks.positive("epsilon", epsilon)
    checks.probability("delta", delta)
    if epsilon > LARGEST_EPSILON:
        raise JaxpflError(
            f"epsilon must be at most {LARGEST_EPSILON:g}, got {epsilon:g}: a larger one guarantees nothing"
        )
    # The count's noise limits z only for the result: the search may try any z.
    fixed = isinstance(plan.noise, CentralNoise) and accountant != "paper"
    free = replace(plan, noise=replace(plan.noise, count_stddev=None)) if fixed else plan
    multiplier = _solve(free, epsilon, delta, accountant)
    while (found := plan.with_noise_multiplier(multiplier)).epsilon(delta, accountant) > epsilon:
        multiplier *= 1 + _RELATIVE_TOLERANCE
    return found


def _bracket(plan: PrivacyPlan, epsilon: float, delta: float, accountant: Accountant) -> tuple[float, float]:
    """Noise multipliers a factor of 2 apart, with epsilons above and at most the target."""
    # Many rounds of a sampled Gaussian are nearly one with mu = sqrt(R) q / z, whose epsilon is below
    # mu^2/2 + mu sqrt(2 log(1/delta)); and epsilon is at least the cost of one round with the user in it.
    log = -math.log(delta)
    # 1 / mu of mu = sqrt(2 (log + epsilon)) - sqrt(2 log), a difference that rounds to zero.
    inverse = (math.sqrt(2 * (log + epsilon)) + math.sqrt(2 * log)) / (2 * epsilon)
    upper = min(max(math.sqrt(plan.rounds) * plan.sampling.rate, 1.0) * inverse, _MOST)

    def enough(multiplier: float) -> bool:
        return plan.with_noise_multiplier(multiplier).epsilon(delta, accountant) <= epsilon

    while not enough(upper):
        upper *= 2
        if upper > _MOST:
            raise JaxpflError(f"epsilon {epsilon:g} at delta {delta:g} needs a noise multiplier above {_MOST:g}")
    while enough(upper / 2):
        upper /= 2
        if upper < _LEAST:
            raise JaxpflError(f"epsilon {epsilon:g} at delta {delta:g} needs a noise multiplier below {_LEAST:g}")
    return upper / 2, upper


def _solve(plan: PrivacyPlan, epsilon: float, delta: float, accountant: Accountant) -> float:
    """The noise multiplier for just less than epsilon, by a search over 1/z, in which epsilon is nearly linear."""
    from scipy.optimize import root_scalar

    lower, upper = _bracket(plan, epsilon, delta, accountant)
    target = epsilon * (1 - _RELATIVE_TOLERANCE)

    # The very epsilon that is claimed: on one grid for all z, its error is that of the least noise.
    def gap(inverse: float) -> float:
        return plan.with_noise_multiplier(1 / inverse).epsilon(delta, accountant) - target

    if gap(1 / upper) >= 0:
        return upper
    return 1 / root_scalar(gap, bracket=(1 / upper, 1 / lower), xtol=_RELATIVE_TOLERANCE / 2 / upper).root

r"""Theorem 5 of Ozkara et al. 2023, as printed: for comparison, not for claims.

.. math:: \epsilon(\alpha) = \Bigl(\frac{K}{m}\Bigr)^2 \frac{6 T}{\tau} \alpha
   \Bigl(\frac{C_1^2}{K s_1^2} + \frac{C_2^2}{K s_2^2}\Bigr)

converted to (eps, delta) at the best order by its Lemma 1 (Canonne et al. 2020).
"""

from __future__ import annotations

import math

from jaxpfl.privacy.descriptions import Cyclic, Noise, PerStepNoise, Sampling

CAVEAT = (
    "Theorem 5 is no valid bound: its sensitivity sqrt(tau) C/K of a round is tau C/K (2 tau C/K when a user is "
    "replaced), the average's noise tau sigma^2/K can be cancelled by later local steps, and 6 alpha q^2/z^2 bounds "
    "the sampled Gaussian at every order only for q >= 1/sqrt(12)"
)


def rdp_slope(noise: Noise, sampling: Sampling, rounds: int) -> float | None:
    """Slope eps(alpha)/alpha of Theorem 5; None for what the paper does not have (adaptive clipping, turns).

    For noise on the sum, C^2/(K s^2) is 1/z^2: the theorem then reads as per-step noise with the paper's z.

    Implements: Ozkara et al. 2023, Theorem 5; Ozkara et al. 2023, equations (58) to (61).
    """
    if isinstance(noise, PerStepNoise):
        per_round = 1 / (noise.step_multiplier**2 * noise.min_uploads)
    elif isinstance(sampling, Cyclic) or getattr(noise, "count_stddev", None) is not None:
        return None
    else:
        per_round = noise.multiplier**-2
    return 6 * rounds * sampling.rate**2 * per_round


def epsilon(slope: float, delta: float) -> float:
    r"""Epsilon at delta by Lemma 1 for eps(alpha) = slope alpha:

    .. math:: \min_{\alpha > 1} \; a \alpha + \log(1 - 1/\alpha) - \frac{\log(\delta \alpha)}{\alpha - 1}

    floored at 0.

    Implements: Ozkara et al. 2023, Lemma 1.
    """
    from scipy.optimize import minimize_scalar

    def at(log_excess: float) -> float:
        excess = math.exp(log_excess)
        order = 1 + excess
        return slope * order + math.log(excess / order) - math.log(delta * order) / excess

    # Without the two small terms the best order is 1 + sqrt(log(1/delta) / slope).
    start = math.log(math.log(1 / delta) / slope) / 2
    best = minimize_scalar(at, bounds=(start - 5, start + 5), method="bounded", options={"xatol": 1e-9})
    return max(0.0, float(best.fun))

r"""Maximum-likelihood fit of Beta(alpha, beta) to the clients' counts: an independent check of the moment estimators.

The probability that client i has Z_i ones among its n_i samples is :math:`\binom{n_i}{Z_i} B(\alpha + Z_i, \beta + n_i
- Z_i) / B(\alpha, \beta)`. The fit runs on the host, in SciPy, and needs the counts of all clients.
"""

from __future__ import annotations

import numpy as np


def fit(ones: np.ndarray, sizes: np.ndarray) -> tuple[float, float]:
    """Fit (alpha, beta) by maximum likelihood.

    Args:
      ones: numbers Z_i of ones, integers in 0 ... n_i, [m].
      sizes: numbers n_i of samples, integers, [m].

    Returns:
      alpha and beta, both in [1e-4, 1e6]. If the likelihood has no maximum (as for equal counts), at least one of them
      is at an end of this range.
    """
    from scipy import optimize, special

    # Many clients share few distinct pairs of counts, so the likelihood is evaluated once per pair.
    pairs, weights = np.unique(np.stack([ones, sizes]), axis=1, return_counts=True)
    z, n = pairs

    def negative(logs: np.ndarray) -> float:
        alpha, beta = np.exp(logs)
        return -float(weights @ (special.betaln(alpha + z, beta + n - z) - special.betaln(alpha, beta)))

    limits = [(np.log(1e-4), np.log(1e6))] * 2
    mean = np.clip(ones.sum() / max(sizes.sum(), 1), 0.01, 0.99)
    starts = [np.log([mean * total, (1 - mean) * total]) for total in (0.5, 5.0, 50.0)]
    best = min((optimize.minimize(negative, s, bounds=limits, method="L-BFGS-B") for s in starts), key=lambda r: r.fun)
    alpha, beta = np.exp(best.x)
    return float(alpha), float(beta)

r"""White-box tests of the noise: the difference of a release and the exact sum that it should hide.

With the clipped uploads known, the residual of round t, over the claimed standard deviation, is

.. math:: r_t = \bigl( S_t - \sum_i \operatorname{clip}(\Delta_i) \bigr) / (z C)

If the claim is correct, its entries are independent N(0, 1), also between rounds, runs and leaves. Each test below has
an exact distribution under that hypothesis; a residual of another scale, noise shared by two releases, leaves without
noise, and a sum other than that of the clipped uploads are each rejected by one of them.
"""

from __future__ import annotations

from itertools import combinations
from typing import NamedTuple

import numpy as np

_MOST = 100_000
"""Largest sample of the Kolmogorov-Smirnov test."""


class Finding(NamedTuple):
    """Result of one test.

    Attributes:
      test: its name, and the leaf, rounds or runs with the least p-value.
      p_value: probability of a statistic at least as extreme if the claim is correct; for several tests of one name,
        the least one times their number.
    """

    test: str
    p_value: float


def check_noise(residuals: dict[str, np.ndarray], sums: dict[str, np.ndarray]) -> list[Finding]:
    """Test residuals for being independent N(0, 1).

    Args:
      residuals: by leaf, [S runs, R rounds, entries of the leaf]; NaN in rounds that released nothing.
      sums: the sums without noise, of the same shapes.

    Returns:
      A finding for each test: ``scale`` (unit variance), ``leaves`` (the same for each leaf), ``shape``
      (Kolmogorov-Smirnov), ``rounds``, ``runs`` and ``between leaves`` (no shared noise), ``sum`` (no correlation with
      the uploads).
    """
    names, whole = list(residuals), np.concatenate(list(residuals.values()), axis=2)
    released = np.isfinite(whole).all(axis=2)
    rounds = whole[:, released.all(axis=0)]  # those that every run released
    found = [
        _named("scale", {"all": _variance(whole[released])}),
        _named("leaves", {name: _variance(part[released]) for name, part in residuals.items()}),
        _named("shape", {"all": _normal(whole[released].ravel())}),
        _named("rounds", _related(rounds.swapaxes(0, 1), "{} and {}")),
        _named("runs", _related(rounds, "{} and {}")),
    ]
    pairs = {}
    for a, b in combinations(names, 2):
        n = min(residuals[a].shape[2], residuals[b].shape[2])
        firsts = np.stack([residuals[leaf][released][:, :n] for leaf in (a, b)])
        pairs |= _related(firsts, f"{a} and {b}")
    found.append(_named("between leaves", pairs))
    everything = {"all": np.concatenate([sums[name] for name in names], axis=2)[released]}
    of_sum = everything | {name: sums[name][released] for name in names}
    noise = {"all": whole[released]} | {name: residuals[name][released] for name in names}
    found.append(_named("sum", {name: _along(noise[name], of_sum[name]) for name in of_sum}))
    return [finding for finding in found if finding is not None]


def _named(test: str, p_values: dict[str, float]) -> Finding | None:
    """The least p-value times their number; None without tests."""
    if not p_values:
        return None
    least = min(p_values, key=lambda name: p_values[name])
    return Finding(test if len(p_values) == 1 else f"{test}: {least}", min(1.0, p_values[least] * len(p_values)))


def _variance(values: np.ndarray) -> float:
    """Two-sided p-value of the sum of squares, which is chi-squared."""
    from scipy.stats import chi2

    total, n = float((values**2).sum()), values.size
    return min(1.0, 2 * float(min(chi2.cdf(total, n), chi2.sf(total, n)))) if n else 1.0


def _normal(values: np.ndarray) -> float:
    from scipy.stats import kstest

    return float(kstest(values[:: max(1, -(-values.size // _MOST))], "norm").pvalue) if values.size else 1.0


def _related(parts: np.ndarray, name: str) -> dict[str, float]:
    """p-values for a correlation of any two of the parts, [n, ...]: <a, b> / |b| is N(0, 1) for b independent of a."""
    from scipy.stats import norm

    if not parts.size:
        return {}
    flat = parts.reshape(len(parts), -1)
    lengths = np.linalg.norm(flat, axis=1)
    if not lengths.all():  # no noise at all, which the test of the scale reports
        return {}
    products = flat @ flat.T
    return {
        name.format(i, j): 2 * float(norm.sf(abs(products[i, j]) / lengths[j]))
        for i, j in combinations(range(len(flat)), 2)
    }


def _along(noise: np.ndarray, sums: np.ndarray) -> float:
    """p-value for a correlation of the releases' noise, [n, entries], with their sums: each product is N(0, 1)."""
    from scipy.stats import norm

    lengths = np.linalg.norm(sums, axis=1)
    some = lengths > 0
    if not some.any():
        return 1.0
    products = (noise[some] * sums[some]).sum(axis=1) / lengths[some]
    return 2 * float(norm.sf(abs(products.sum()) / np.sqrt(some.sum())))

"""Capacity of Poisson cohorts."""

from __future__ import annotations

from jaxpfl.core import checks


def poisson_cap(num_clients: int, rate: float, overflow: float = 1e-6) -> int:
    """Least cap on a Poisson cohort that a round exceeds with probability below ``overflow``; at most m.

    Args:
      num_clients: m.
      rate: q, the probability of each client; the number in a round is Binomial(m, q).
      overflow: the probability.

    Raises:
      JaxpflError: for m < 1, a rate outside (0, 1], or an overflow outside (0, 1).
    """
    from scipy.stats import binom

    checks.count("clients", num_clients)
    checks.rate("sampling_rate", rate)
    checks.probability("overflow", overflow)
    cap = max(int(binom.isf(overflow, num_clients, rate)) - 1, 1)  # one below, in case the quantile was rounded up
    while cap < num_clients and binom.sf(cap, num_clients, rate) >= overflow:
        cap += 1
    return cap

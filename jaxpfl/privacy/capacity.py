"""How many slots a Poisson cohort needs."""

from __future__ import annotations

from jaxpfl import checks


def poisson_cap(num_clients: int, rate: float, overflow: float = 1e-6) -> int:
    """The least cap on a cohort that a round exceeds with a probability below ``overflow``; at most m.

    Args:
      num_clients: m.
      rate: q, the chance of each client; its number in a round is Binomial(m, q).
      overflow: the probability.

    Raises:
      JaxpflError: for m < 1, a rate outside (0, 1], or an overflow outside (0, 1).
    """
    from scipy.stats import binom

    checks.count("clients", num_clients)
    checks.rate("sampling_rate", rate)
    checks.probability("overflow", overflow)
    cap = max(int(binom.isf(overflow, num_clients, rate)) - 1, 1)  # one below, should the quantile be rounded
    while cap < num_clients and binom.sf(cap, num_clients, rate) >= overflow:
        cap += 1
    return cap

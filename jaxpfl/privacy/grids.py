"""Discretisation of dp-accounting's accountants: the PLD accountant's grid and the RDP accountant's orders."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

from jaxpfl.support.errors import JaxpflError

SMALLEST_DELTA = 1e-12
"""Least delta of the PLD accountant: its convolutions truncate tails of 1e-15, which is also their rounding error."""
FINE, SETTLED = 2e-3, 3e-4
"""Step below which no halving is needed, and relative change of epsilon at which halving stops."""
_HARDLY_EVER = 1e-15
_FEWEST_POINTS, _MOST_POINTS, _MOST_REACH = 10_000, 400_000, 1e6


def rdp_orders() -> list[float]:
    """Orders of Renyi divergence: dense near 1 for large eps, and up to orders for eps of a few thousandths.

    RDP is loose at any orders: it gives 15.63 for a single Gaussian release of eps 15.00 at delta 1e-10.
    """
    near = [1 + 0.05 * i for i in range(1, 80)]
    fractional = [5 + 0.1 * i for i in range(60)]
    far = [round(64 * 1.25**i) for i in range(20)]
    return near + fractional + list(range(11, 64)) + far


def pld_step(noise_multiplier: float, rate: float, rounds: int) -> float:
    """Step of the PLD grid: small relative to the losses' range and to one round's spread, within 400,000 points.

    The accountant is pessimistic at any step; at this one the relative error of epsilon is at most 3e-3, and usually
    much smaller; `PrivacyPlan.epsilon` halves steps above `FINE` until epsilon changes by less than `SETTLED`, for a
    relative error of 1e-3.

    Args:
      noise_multiplier: z relative to the change by one client under the relation.
      rate: q.
      rounds: R.

    Raises:
      JaxpflError: if losses are so large that epsilon would be meaningless.
    """
    z, times = (noise_multiplier, rounds) if rate < 1 else (noise_multiplier / math.sqrt(rounds), 1)
    reach = max(_reach(z, 1), min(_reach(z, _rounds_at_most(times, rate)), _rdp_reach(z, rate, times)))
    if reach > _MOST_REACH:
        raise JaxpflError(
            f"noise_multiplier {noise_multiplier:g} is too small for {rounds} rounds: epsilon would be of the order "
            f"of {reach:.0e}"
        )
    spread = rate * math.sqrt(math.expm1(min(z**-2, 100.0)))
    return max(reach / _MOST_POINTS, min(reach / _FEWEST_POINTS, spread / 25))


def _reach(z: float, rounds: int) -> float:
    """Privacy loss of so many rounds, all with the user, plus ten standard deviations: hardly ever exceeded."""
    return rounds / (2 * z**2) + 10 * math.sqrt(rounds) / z


def _rounds_at_most(rounds: int, rate: float) -> int:
    """Number of rounds with a user in them that is hardly ever exceeded."""
    from scipy.stats import binom

    return int(binom.isf(_HARDLY_EVER, rounds, rate))


def _rdp_reach(z: float, rate: float, rounds: int) -> float:
    """The same reach by Renyi DP of the sampled rounds: smaller if there are many."""
    import dp_accounting as dp

    orders = [*range(2, 64), *(2**i for i in range(6, 12))]
    one = dp.PoissonSampledDpEvent(rate, dp.GaussianDpEvent(z))
    return float(dp.rdp.RdpAccountant(orders).compose(one, rounds).get_epsilon(_HARDLY_EVER))


@contextmanager
def quiet() -> Iterator[None]:
    """Suppress dp-accounting's warnings.

    They concern orders whose series did not converge, which it leaves out, and overflow to an infinity that it
    compares.
    """
    from absl import logging

    before = logging.get_verbosity()
    logging.set_verbosity(logging.ERROR)
    try:
        with np.errstate(over="ignore", divide="ignore"):
            yield
    finally:
        logging.set_verbosity(before)

"""What dp-accounting's accountants are set to: the PLD accountant's grid, and the orders of the RDP accountant."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

from jaxpfl.errors import JaxpflError

SMALLEST_DELTA = 1e-12
"""Of the PLD accountant: its convolutions cut tails of 1e-15 and round at about that."""
FINE, SETTLED = 2e-3, 3e-4
"""A step that need not be halved, and a relative change of epsilon that says that halving has done its work."""
_HARDLY_EVER = 1e-15
_FEWEST_POINTS, _MOST_POINTS, _MOST_REACH = 10_000, 400_000, 1e6


def rdp_orders() -> list[float]:
    """Orders of Renyi divergence: fine where eps is large (near 1), and far enough out for eps of a few thousandths.

    RDP stays loose whatever the orders: one Gaussian release of eps 15.00 at delta 1e-10 is 15.63 by it.
    """
    near = [1 + 0.05 * i for i in range(1, 80)]
    fractional = [5 + 0.1 * i for i in range(60)]
    far = [round(64 * 1.25**i) for i in range(20)]
    return near + fractional + list(range(11, 64)) + far


def pld_step(noise_multiplier: float, rate: float, rounds: int) -> float:
    """PLD's step: small beside the losses' range and beside the spread of one round's, within 400,000 points.

    The accountant is pessimistic at any step; at this one its epsilon is right to three in a thousand, and mostly far
    better; `PrivacyPlan.epsilon` halves steps above `FINE` until that changes epsilon by less than `SETTLED`, and is
    right to one in a thousand.

    Args:
      noise_multiplier: z, of what one client can change under the relation.
      rate: q.
      rounds: R.

    Raises:
      JaxpflError: where the losses reach so far that an epsilon would mean nothing.
    """
    z, times = (noise_multiplier, rounds) if rate < 1 else (noise_multiplier / math.sqrt(rounds), 1)
    reach = max(_reach(z, 1), min(_reach(z, _rounds_at_most(times, rate)), _rdp_reach(z, rate, times)))
    if reach > _MOST_REACH:
        raise JaxpflError(
            f"noise_multiplier {noise_multiplier:g} is too little for {rounds} rounds: epsilon would be of the order "
            f"of {reach:.0e}"
        )
    spread = rate * math.sqrt(math.expm1(min(z**-2, 100.0)))
    return max(reach / _MOST_POINTS, min(reach / _FEWEST_POINTS, spread / 25))


def _reach(z: float, rounds: int) -> float:
    """What the privacy loss of so many rounds, all with the user, hardly ever exceeds: by ten standard deviations."""
    return rounds / (2 * z**2) + 10 * math.sqrt(rounds) / z


def _rounds_at_most(rounds: int, rate: float) -> int:
    """How many rounds a user hardly ever exceeds."""
    from scipy.stats import binom

    return int(binom.isf(_HARDLY_EVER, rounds, rate))


def _rdp_reach(z: float, rate: float, rounds: int) -> float:
    """The same by Renyi DP of the sampled rounds: less where there are many."""
    import dp_accounting as dp

    orders = [*range(2, 64), *(2**i for i in range(6, 12))]
    one = dp.PoissonSampledDpEvent(rate, dp.GaussianDpEvent(z))
    return float(dp.rdp.RdpAccountant(orders).compose(one, rounds).get_epsilon(_HARDLY_EVER))


@contextmanager
def quiet() -> Iterator[None]:
    """Without dp-accounting's warnings: of orders whose series did not converge, which it leaves out, and of overflow
    to an infinity that it then compares."""
    from absl import logging

    before = logging.get_verbosity()
    logging.set_verbosity(logging.ERROR)
    try:
        with np.errstate(over="ignore", divide="ignore"):
            yield
    finally:
        logging.set_verbosity(before)

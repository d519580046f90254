"""`PrivacyPlan`: noise, sampling, rounds and relation, and the epsilon that they cost."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from jaxpfl.errors import JaxpflError, unknown_name
from jaxpfl.privacy import checks, events, paper
from jaxpfl.privacy.descriptions import Full, Noise, Sampling
from jaxpfl.privacy.events import Relation, SoundAccountant
from jaxpfl.privacy.refusals import Refusal
from jaxpfl.privacy.statement import Statement

if TYPE_CHECKING:
    from dp_accounting import DpEvent

Accountant: TypeAlias = Literal["pld", "rdp", "paper"]
"""Privacy loss distributions (the default, tight), Renyi DP, and Theorem 5 as printed (`paper.CAVEAT`)."""
ACCOUNTANTS = ("pld", "rdp", "paper")

SMALLEST_DELTA = 1e-12
"""Of the PLD accountant: its convolutions cut tails of 1e-15 and round at about that."""
_FEWEST_POINTS, _MOST_POINTS = 10_000, 400_000


@dataclass(frozen=True)
class PrivacyPlan:
    """What a run releases about its users: one user's whole data are the unit.

    Attributes:
      noise: of every round's release.
      sampling: of every round's cohort.
      rounds: R.
      relation: which data sets must be hard to tell apart; None for the one that the combination supports:
        add-or-remove-one with central noise and full or Poisson participation, zero-out where the clients add the noise
        and all take part, replace-one for cohorts of a fixed size.

    Raises:
      JaxpflError: for a combination that cannot be accounted.
    """

    noise: Noise
    sampling: Sampling
    rounds: int
    relation: Relation | None = None

    def __post_init__(self) -> None:
        checks.count("rounds", self.rounds)
        object.__setattr__(self, "relation", events.relation_of(self.noise, self.sampling, self.relation))

    @property
    def noise_multiplier(self) -> float:
        """z of everything that one round releases."""
        return self.noise.multiplier

    def with_noise_multiplier(self, multiplier: float) -> PrivacyPlan:
        """The same plan with the noise scaled to another z."""
        return replace(self, noise=self.noise.with_multiplier(multiplier))

    def event(self, accountant: SoundAccountant = "pld") -> DpEvent:
        """The run as dp-accounting's event (see `events.event`: it depends on who accounts)."""
        return events.event(self.noise, self.sampling, self.rounds, self._relation, accountant)

    def epsilon(self, delta: float, accountant: Accountant = "pld") -> float:
        """eps of the whole run at this delta.

        Raises:
          JaxpflError: for a delta outside (0, 1), a noise multiplier of 0, an accountant that does not take the
            sampling, and where no finite eps results.
        """
        checks.probability("delta", delta)
        if self.noise_multiplier == 0:
            raise Refusal.NO_NOISE.error()
        if accountant == "paper":
            slope = paper.rdp_slope(self.noise, self.sampling, self.rounds)
            if slope is None:
                raise JaxpflError("accountant paper has no adaptive clipping: take pld or rdp")
            return paper.epsilon(slope, delta)
        if accountant not in ACCOUNTANTS:
            raise unknown_name("accountant", accountant, ACCOUNTANTS)
        if accountant == "pld" and delta < SMALLEST_DELTA:
            raise JaxpflError(f"the pld accountant resolves no delta below {SMALLEST_DELTA:g}, got {delta:g}: take rdp")
        with quiet():
            epsilon = float(self.accountant(accountant).compose(self.event(accountant)).get_epsilon(delta))
        if not math.isfinite(epsilon):
            raise JaxpflError(f"the accountant {accountant} finds no finite epsilon at delta {delta:g}")
        return epsilon

    def accountant(self, kind: SoundAccountant) -> Any:
        """A fresh accountant of dp-accounting for this plan's relation. PLD's grid suits the plan; see `_step`."""
        import dp_accounting as dp

        relation = events.neighbouring(self._relation)
        if kind == "rdp":
            return dp.rdp.RdpAccountant(rdp_orders(), relation)
        return dp.pld.PLDAccountant(relation, _step(self))

    def statement(self, delta: float, accountant: Accountant = "pld") -> Statement:
        """All that has to be said with an epsilon.

        Raises:
          JaxpflError: as `epsilon`.
        """
        epsilon = self.epsilon(delta, accountant)
        slope = paper.rdp_slope(self.noise, self.sampling, self.rounds)
        return Statement(
            relation=self._relation,
            unit="user",
            participation=self.sampling.name,
            sampling_rate=self.sampling.rate,
            noise_multiplier=self.noise_multiplier,
            clipping_norm=self.noise.clipping_norm,
            rounds=self.rounds,
            delta=delta,
            epsilon=epsilon,
            accountant=accountant,
            paper_epsilon=None if slope is None else paper.epsilon(slope, delta),
        )

    @property
    def _relation(self) -> Relation:
        assert self.relation is not None
        return self.relation


def rdp_orders() -> list[float]:
    """Orders of Renyi divergence: fine where eps is large (near 1), and far enough out for eps of a few thousandths.

    RDP stays loose whatever the orders: one Gaussian release of eps 15.00 at delta 1e-10 is 15.63 by it.
    """
    near = [1 + 0.05 * i for i in range(1, 80)]
    fractional = [5 + 0.1 * i for i in range(60)]
    far = [round(64 * 1.25**i) for i in range(20)]
    return near + fractional + list(range(11, 64)) + far


def _step(plan: PrivacyPlan) -> float:
    """PLD's step: small beside the losses' range and beside the spread of one round's, within 400,000 points.

    The accountant is pessimistic at any step; at this one its epsilon is right to about one in ten thousand.
    """
    import dp_accounting as dp

    z, rounds = plan.noise_multiplier / (2 if plan.relation == "replace-one" else 1), plan.rounds
    if isinstance(plan.sampling, Full):  # exactly one Gaussian
        z, rounds = z / math.sqrt(rounds), 1
    rate = plan.sampling.rate
    orders = [*range(2, 64), *(2**i for i in range(6, 12))]
    run = dp.rdp.RdpAccountant(orders).compose(dp.PoissonSampledDpEvent(rate, dp.GaussianDpEvent(z)), rounds)
    reach = max(1 / (2 * z**2) + 10 / z, run.get_epsilon(1e-15))
    spread = rate * math.sqrt(math.expm1(min(z**-2, 100.0)))
    return max(reach / _MOST_POINTS, min(reach / _FEWEST_POINTS, spread / 50))


@contextmanager
def quiet() -> Iterator[None]:
    """Without dp-accounting's warnings of orders whose series did not converge: it leaves them out, which is safe."""
    from absl import logging

    before = logging.get_verbosity()
    logging.set_verbosity(logging.ERROR)
    try:
        yield
    finally:
        logging.set_verbosity(before)

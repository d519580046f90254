"""Privacy accounting: the epsilon of a `PrivacyPlan`, that is of a run's noise, sampling, rounds and relation."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, get_args

from jaxpfl.core import checks
from jaxpfl.privacy import banded, events, grids, paper
from jaxpfl.privacy.descriptions import DistributedNoise, FixedSize, Noise, Poisson, Sampling
from jaxpfl.privacy.events import Relation, SoundAccountant
from jaxpfl.privacy.refusals import Refusal
from jaxpfl.privacy.statement import Statement
from jaxpfl.support.errors import JaxpflError, unknown_name

if TYPE_CHECKING:
    from dp_accounting import DpEvent

Accountant: TypeAlias = Literal["pld", "rdp", "paper"]
"""Privacy loss distributions (the default, tight), Renyi DP, and Theorem 5 as printed (`paper.CAVEAT`)."""


def accountant_named(name: str) -> Accountant:
    """The accountant of that name, checked.

    Raises:
      JaxpflError: for a name other than pld, rdp and paper.
    """
    for known in get_args(Accountant):
        if name == known:
            return known
    raise unknown_name("accountant", name, get_args(Accountant))


@dataclass(frozen=True)
class PrivacyPlan:
    """Releases of a run, as seen by an accountant; the unit is one user with all its data.

    Implements: Ozkara et al. 2023, Definition 2; Ozkara et al. 2023, Definition 3.

    Attributes:
      noise: of every round's release.
      sampling: of every round's cohort.
      rounds: R.
      relation: the neighbouring relation of data sets; None for the one that the combination supports:
        add-or-remove-one with central noise and full or Poisson participation, zero-out if the clients add the noise
        and all take part, replace-one for cohorts of a fixed size.

    Raises:
      JaxpflError: for a combination that cannot be accounted.

    Examples:
      >>> from jaxpfl.privacy import CentralNoise, Poisson
      >>> plan = PrivacyPlan(CentralNoise(2.0), Poisson(0.1), rounds=100)
      >>> round(plan.epsilon(delta=1e-4), 3)
      1.966
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
        """z of all releases of a round together."""
        return self.noise.multiplier

    @property
    def releases_about_one(self) -> int:
        """Rounds that can be about one client: R, or its turns."""
        return events.releases_about_one(self.sampling, self.rounds)

    @property
    def noise_ratio(self) -> float:
        """Error of the prefix sums over that of independent noise of the same epsilon and cohorts (`banded.ratio`)."""
        return banded.ratio(getattr(self.noise, "coefficients", (1.0,)), self.rounds)

    def with_noise_multiplier(self, multiplier: float) -> PrivacyPlan:
        """The same plan with its noise scaled to another z.

        Raises:
          JaxpflError: unless it is positive and finite, or if the noise cannot be scaled to it.
        """
        checks.positive("noise_multiplier", multiplier)
        return replace(self, noise=self.noise.with_multiplier(multiplier))

    @property
    def default_accountant(self) -> SoundAccountant:
        """PLD, the tightest, except for cohorts of a fixed size, for which it has no event."""
        return "rdp" if isinstance(self.sampling, FixedSize) else "pld"

    def event(self, accountant: SoundAccountant = "pld") -> DpEvent:
        """The run as an event of dp-accounting, which depends on the accountant (see `events.event`)."""
        return events.event(self.noise, self.sampling, self.rounds, self._relation, accountant)

    def epsilon(self, delta: float, accountant: Accountant = "pld") -> float:
        """eps of the whole run at this delta.

        Raises:
          JaxpflError: if delta is outside (0, 1), the noise multiplier is 0, the accountant does not support the
            sampling, or eps is not finite.
        """
        checks.probability("delta", delta)
        if self.noise_multiplier == 0:
            raise Refusal.NO_NOISE.error()
        accountant = accountant_named(accountant)
        if accountant == "paper":
            slope = paper.rdp_slope(self.noise, self.sampling, self.rounds)
            if slope is None:
                raise JaxpflError("accountant paper has no adaptive clipping and no turns: take pld or rdp")
            return paper.epsilon(slope, delta)
        if accountant == "pld" and delta < grids.SMALLEST_DELTA:
            raise JaxpflError(f"pld resolves no delta below {grids.SMALLEST_DELTA:g}, got {delta:g}: take rdp")
        return _epsilon(self, delta, accountant)

    def accountant(self, kind: SoundAccountant, step: float | None = None) -> Any:
        """A new accountant of dp-accounting for this plan's relation.

        For PLD ``step`` is that of its grid; by default one that suits the plan.
        """
        import dp_accounting as dp

        relation = events.neighbouring(self._relation, self.sampling)
        if kind == "rdp":
            return dp.rdp.RdpAccountant(grids.rdp_orders(), relation)
        return dp.pld.PLDAccountant(relation, step or self._pld_step)

    @property
    def _pld_step(self) -> float:
        distance = 2 if self.relation == "replace-one" else 1
        return grids.pld_step(self.noise_multiplier / distance, self.sampling.rate, self.releases_about_one)

    def statement(self, delta: float, accountant: Accountant = "pld") -> Statement:
        """The (eps, delta) guarantee at this delta, with its assumptions.

        Raises:
          JaxpflError: as in `epsilon`.
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
            own_share=isinstance(self.noise, DistributedNoise) and self.noise.alone,
            cut=isinstance(self.sampling, Poisson) and self.sampling.truncated,
            cycle=getattr(self.sampling, "cycle", None),
            bands=getattr(self.noise, "bands", 1),
            noise_ratio=self.noise_ratio,
        )

    @property
    def _relation(self) -> Relation:
        assert self.relation is not None
        return self.relation


@lru_cache(maxsize=1024)
def _epsilon(plan: PrivacyPlan, delta: float, accountant: SoundAccountant) -> float:
    """Epsilon by dp-accounting, cached: a run asks for the same plan when it is checked, stored and reported."""
    event = plan.event(accountant)

    def at(step: float | None) -> float:
        return float(plan.accountant(accountant, step).compose(event).get_epsilon(delta))

    with grids.quiet():
        step = plan._pld_step if accountant == "pld" and plan.sampling.rate < 1 else None
        epsilon = at(step)
        # The accountant is pessimistic by an amount proportional to the step.
        while step is not None and (step := step / 2) > grids.FINE:
            coarse, epsilon = epsilon, at(step)
            if coarse <= epsilon * (1 + grids.SETTLED):
                break
    if not math.isfinite(epsilon):
        raise JaxpflError(f"the accountant {accountant} finds no finite epsilon at delta {delta:g}")
    return epsilon

r"""Privacy accounting: compute a run's epsilon from its noise, sampling, rounds and relation, or calibrate the noise.

Uploads are clipped to norm C, and the noise multiplier is the noise's standard deviation divided by C. Under the
relation replace-one (`Relation`), a client changes the sum by up to 2 C. The PLD accountant of the package
dp-accounting 0.6 doubles the sensitivity itself. The package's RDP accountant does not, and therefore receives half the
noise multiplier.

The accountant ``paper`` evaluates Theorem 5 of Ozkara et al. 2023, which is not a valid bound (`CAVEAT`):

.. math:: \epsilon(\alpha) = \Bigl(\frac{K}{m}\Bigr)^2 \frac{6 T}{\tau} \alpha
   \Bigl(\frac{C_1^2}{K s_1^2} + \frac{C_2^2}{K s_2^2}\Bigr)

Here K of m clients take part in a round, T is the total number of local steps, and tau the number of local steps per
round. In a local step, the gradient of the global model mu has the clipping norm C_1 and noise of standard deviation
s_1; C_2 and s_2 are the same numbers for the scale psi. The paper's Lemma 1 (Canonne et al. 2020) converts
:math:`\epsilon(\alpha)` to (eps, delta) at the best order alpha.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, cast, get_args

import numpy as np

from jaxpfl.core import checks, exclusions
from jaxpfl.privacy import descriptions
from jaxpfl.privacy.descriptions import (
    CentralNoise,
    Cyclic,
    DistributedNoise,
    FixedSize,
    Full,
    Noise,
    PerStepNoise,
    Poisson,
    Sampling,
)
from jaxpfl.privacy.statement import Statement
from jaxpfl.support.errors import JaxpflError, unknown_name

if TYPE_CHECKING:
    from dp_accounting import DpEvent

Relation: TypeAlias = Literal["add-or-remove-one", "zero-out", "replace-one"]
"""Neighboring relation: the two data sets that a guarantee compares.

``add-or-remove-one``: with and without a user. ``zero-out``: with a user's data and without them, while the user still
takes part and adds its noise. ``replace-one``: with one user's data and with another user's data.
"""
SoundAccountant: TypeAlias = Literal["pld", "rdp"]
RELATIONS = ("add-or-remove-one", "zero-out", "replace-one")


def relation_of(noise: Noise, sampling: Sampling, asked: str | None = None) -> Relation:
    """Return the neighboring relation ``asked``, or else the default relation for this noise and sampling.

    Raises:
      JaxpflError: if no accountant supports the noise with the sampling, or none does so under the relation ``asked``.
    """
    by_clients = not isinstance(noise, CentralNoise)
    bands = noise.bands if isinstance(noise, CentralNoise) else 1
    cycle = sampling.cycle if isinstance(sampling, Cyclic) else None
    exclusions.check(
        {
            "client-side noise": by_clients,
            "participation": sampling.name,
            "noise": "banded" if bands > 1 else None,
            "participation other than cyclic": cycle is None,
        }
    )
    if cycle is not None and bands > cycle:
        raise JaxpflError(
            f"bands must be at most {cycle} (the number of rounds from one turn of a client to the next), got {bands}"
        )
    if isinstance(noise, DistributedNoise | PerStepNoise) and isinstance(sampling, Full | FixedSize):
        cohort = sampling.cohort
        if cohort is not None and noise.min_uploads > cohort:
            raise JaxpflError(f"min_uploads must be at most {cohort}, got {noise.min_uploads}")
    if isinstance(sampling, FixedSize):
        supported: tuple[Relation, ...] = ("replace-one",)
    elif isinstance(sampling, Poisson):
        supported = ("add-or-remove-one",)
    elif isinstance(sampling, Cyclic):
        # Because block sizes differ by at most one, adding or removing a user would move other users to other blocks.
        supported = ("zero-out",)
    else:
        supported = ("zero-out" if by_clients else "add-or-remove-one", "replace-one")
    if asked is None:
        return supported[0]
    if asked not in RELATIONS:
        raise unknown_name("relation", asked, RELATIONS)
    if asked in supported:
        return cast(Relation, asked)
    who = "the clients'" if by_clients else "central"
    raise JaxpflError(
        f"relation must be {' or '.join(supported)} for {sampling.name} participation with {who} noise, got {asked}"
    )


_NEIGHBOURING = {
    "add-or-remove-one": "ADD_OR_REMOVE_ONE",
    "zero-out": "REPLACE_SPECIAL",
    "replace-one": "REPLACE_ONE",
}
"""dp-accounting's names for the relations."""
SMALLEST_DELTA = 1e-12
"""Smallest delta that the PLD accountant can resolve, because its convolutions truncate tails of 1e-15 and have
rounding errors of the same size.
"""
FINE, SETTLED = 2e-3, 3e-4
"""Smallest step to which `PrivacyPlan.epsilon` halves the grid's, and relative change of epsilon at which it stops.
"""
# Probability treated as negligible when the range of the privacy loss is bounded.
_HARDLY_EVER = 1e-15
_FEWEST_POINTS, _MOST_POINTS, _MOST_REACH = 10_000, 400_000, 1e6


def rdp_orders() -> list[float]:
    """Choose orders of Renyi divergence. For a large eps they are dense near 1; for an eps of a few thousandths some
    are high.

    RDP bounds are loose for any choice of orders. For example, a single Gaussian release whose eps at delta 1e-10 is
    15.00 has the RDP bound 15.63.
    """
    near = [1 + 0.05 * i for i in range(1, 80)]
    fractional = [5 + 0.1 * i for i in range(60)]
    far = [round(64 * 1.25**i) for i in range(20)]
    return near + fractional + list(range(11, 64)) + far


def pld_step(noise_multiplier: float, rate: float, rounds: int) -> float:
    """Step of the grid on which the PLD accountant represents privacy losses.

    The step is small relative to the range of the privacy losses and to their spread in one round, but not so small
    that the grid has more than 400,000 points. With any step, the accountant's epsilon is an upper bound. With this
    step, the relative error of epsilon is at most 3e-3, and usually much smaller. For sampled cohorts,
    `PrivacyPlan.epsilon` halves the step until epsilon changes by less than `SETTLED` or the step would fall below
    `FINE`. This reduces the relative error to 1e-3.

    Args:
      noise_multiplier: standard deviation z of the noise, relative to the largest change that one client causes under
        the relation.
      rate: sampling rate q.
      rounds: number of rounds R.

    Raises:
      JaxpflError: if the losses are so large that epsilon would be meaningless.
    """
    from scipy.stats import binom

    # Without sampling, R Gaussian releases are equivalent to one with z / sqrt(R).
    z, times = (noise_multiplier, rounds) if rate < 1 else (noise_multiplier / math.sqrt(rounds), 1)
    # A given user takes part in more rounds than this only with negligible probability.
    most = int(binom.isf(_HARDLY_EVER, times, rate))
    reach = max(_reach(z, 1), min(_reach(z, most), _rdp_reach(z, rate, times)))
    if reach > _MOST_REACH:
        raise JaxpflError(
            f"noise_multiplier {noise_multiplier:g} is too small for {rounds} rounds: epsilon would be "
            f"about {reach:.0e}"
        )
    spread = rate * math.sqrt(math.expm1(min(z**-2, 100.0)))
    return max(reach / _MOST_POINTS, min(reach / _FEWEST_POINTS, spread / 25))


def _reach(z: float, rounds: int) -> float:
    """Mean plus ten standard deviations of the privacy loss of ``rounds`` rounds in which the user takes part.

    Larger losses are very improbable.
    """
    return rounds / (2 * z**2) + 10 * math.sqrt(rounds) / z


def _rdp_reach(z: float, rate: float, rounds: int) -> float:
    """Bound on the privacy loss of all sampled rounds, from Renyi DP; tighter than `_reach` for many rounds."""
    import dp_accounting as dp

    orders = [*range(2, 64), *(2**i for i in range(6, 12))]
    one = dp.PoissonSampledDpEvent(rate, dp.GaussianDpEvent(z))
    return float(dp.rdp.RdpAccountant(orders).compose(one, rounds).get_epsilon(_HARDLY_EVER))


@contextmanager
def quiet() -> Iterator[None]:
    """Suppress harmless warnings from dp-accounting.

    dp-accounting warns about orders for which a series did not converge, although it leaves these orders out. It also
    warns about overflows to infinity, although it compares infinities correctly.
    """
    from absl import logging

    before = logging.get_verbosity()
    logging.set_verbosity(logging.ERROR)
    try:
        with np.errstate(over="ignore", divide="ignore"):
            yield
    finally:
        logging.set_verbosity(before)


CAVEAT = (
    "Theorem 5 is not a valid bound: the sensitivity of a round is tau C/K (2 tau C/K when a user is replaced), not "
    "sqrt(tau) C/K; later local steps can cancel the average's noise tau sigma^2/K; and 6 alpha q^2/z^2 bounds "
    "the sampled Gaussian at every order only for q >= 1/sqrt(12)"
)


def theorem5_slope(noise: Noise, sampling: Sampling, rounds: int) -> float | None:
    """Slope eps(alpha)/alpha of the paper's Theorem 5.

    The result is None for adaptive clipping and for cyclic cohorts, which the theorem does not cover.

    If the noise is added to the sum, with noise multiplier z, the terms C^2/(K s^2) are replaced by 1/z^2.

    Implements: Ozkara et al. 2023, Theorem 5; Ozkara et al. 2023, equations (58) to (61).
    """
    if isinstance(noise, PerStepNoise):
        per_round = 1 / (noise.step_multiplier**2 * noise.min_uploads)
    elif isinstance(sampling, Cyclic) or getattr(noise, "count_stddev", None) is not None:
        return None
    else:
        per_round = noise.multiplier**-2
    return 6 * rounds * sampling.rate**2 * per_round


def theorem5_epsilon(slope: float, delta: float) -> float:
    r"""Convert eps(alpha) = a alpha, where a is the slope, to epsilon at delta by the paper's Lemma 1:

    .. math:: \max\Bigl(0, \; \min_{\alpha > 1} \; a \alpha + \log(1 - 1/\alpha)
       - \frac{\log(\delta \alpha)}{\alpha - 1}\Bigr)

    Implements: Ozkara et al. 2023, Lemma 1.
    """
    from scipy.optimize import minimize_scalar

    def bound(log_excess: float) -> float:
        excess = math.exp(log_excess)
        order = 1 + excess
        return slope * order + math.log(excess / order) - math.log(delta * order) / excess

    # Without log(1 - 1/alpha) and log(alpha), the best order is 1 + sqrt(log(1/delta) / slope).
    start = math.log(math.log(1 / delta) / slope) / 2
    best = minimize_scalar(bound, bounds=(start - 5, start + 5), method="bounded", options={"xatol": 1e-9})
    return max(0.0, float(best.fun))


Accountant: TypeAlias = Literal["pld", "rdp", "paper"]
"""Method of accounting: privacy loss distributions (tight; the default), Renyi DP, or the paper's Theorem 5 (`CAVEAT`).
"""


def accountant_named(name: str) -> Accountant:
    """Check the name of an accountant and return it.

    Raises:
      JaxpflError: for a name other than pld, rdp or paper.
    """
    if name not in get_args(Accountant):
        raise unknown_name("accountant", name, get_args(Accountant))
    return cast(Accountant, name)


@dataclass(frozen=True)
class PrivacyPlan:
    """Description of a run's releases for an accountant.

    The guarantee protects one user with all its data or, in a plan from `SiloMechanism.plan`, one example of a silo.

    Implements: Ozkara et al. 2023, Definition 2; Ozkara et al. 2023, Definition 3.

    Attributes:
      noise: noise on every round's release.
      sampling: sampling scheme for every round's cohort.
      rounds: number of rounds R.
      relation: neighboring relation. None selects the default: add-or-remove-one for Poisson participation; zero-out
        for cyclic cohorts; replace-one for cohorts of a fixed size. For full participation, the default is
        add-or-remove-one with central noise, and zero-out with noise that the clients add.

    Raises:
      JaxpflError: if ``rounds`` is below 1, or if no accountant supports this noise with this sampling and relation.

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
        object.__setattr__(self, "relation", relation_of(self.noise, self.sampling, self.relation))

    @property
    def noise_multiplier(self) -> float:
        """Noise multiplier z of a round, for all its releases together."""
        return self.noise.multiplier

    @property
    def releases_about_one(self) -> int:
        """Largest number of rounds in which one client can take part.

        This is R or, with cyclic cohorts, the client's number of turns.

        For banded noise with the strategy matrix C, whose columns have norm at most 1, a client's turns are at least as
        many rounds apart as there are bands. The columns of C for these turns then have no non-zero row in common, so
        each turn counts as a separate release (Choquette-Choo et al. 2023, Theorems 2 and 4).
        """
        return self.sampling.turns(self.rounds) if isinstance(self.sampling, Cyclic) else self.rounds

    @property
    def noise_ratio(self) -> float:
        """Error of the server's models due to noise, relative to independent noise; see
        `descriptions.prefix_error_ratio`.
        """
        return descriptions.prefix_error_ratio(getattr(self.noise, "coefficients", (1.0,)), self.rounds)

    def scale_noise(self, multiplier: float) -> PrivacyPlan:
        """Return the plan with its noise scaled to this noise multiplier.

        Raises:
          JaxpflError: if ``multiplier`` is not positive and finite, or if the noise cannot be scaled to it.
        """
        checks.positive("noise_multiplier", multiplier)
        return replace(self, noise=self.noise.scale_to(multiplier))

    @property
    def default_accountant(self) -> SoundAccountant:
        """``rdp`` for cohorts of a fixed size, which PLD does not support; otherwise ``pld``, which is the tightest."""
        return "rdp" if isinstance(self.sampling, FixedSize) else "pld"

    def event(self, accountant: SoundAccountant = "pld") -> DpEvent:
        """Represent the run's releases as an event for one of dp-accounting's accountants.

        Implements: Ozkara et al. 2023, Lemma 2.

        Raises:
          JaxpflError: if the noise multiplier is 0, or if the accountant does not support the sampling.
        """
        import dp_accounting as dp

        sampling, multiplier = self.sampling, self.noise_multiplier
        cut = isinstance(sampling, Poisson) and sampling.truncated
        exclusions.check({"accountant": accountant, "participation": sampling.name, "capped cohorts": cut})
        if multiplier == 0:
            raise JaxpflError(exclusions.NO_NOISE)
        if self.relation == "replace-one" and accountant == "rdp":
            multiplier /= 2
        gaussian = dp.GaussianDpEvent(multiplier)
        one_round: DpEvent = gaussian
        if isinstance(sampling, FixedSize):
            one_round = dp.SampledWithoutReplacementDpEvent(sampling.num_clients, sampling.cohort, gaussian)
        elif isinstance(sampling, Poisson) and cut:
            assert sampling.num_clients is not None
            assert sampling.cap is not None
            clients, cap = sampling.num_clients, sampling.cap
            one_round = dp.TruncatedSubsampledGaussianDpEvent(clients, sampling.rate, cap, multiplier)
        elif sampling.rate != 1:
            one_round = dp.PoissonSampledDpEvent(sampling.rate, gaussian)
        return dp.SelfComposedDpEvent(one_round, self.releases_about_one)

    def epsilon(self, delta: float, accountant: Accountant = "pld") -> float:
        """Compute epsilon at this delta for the whole run.

        Raises:
          JaxpflError: if delta is outside (0, 1) or too small for PLD, the noise multiplier is 0, the accountant is
            unknown or does not support the noise or the sampling, or epsilon is not finite.
        """
        checks.probability("delta", delta)
        if self.noise_multiplier == 0:
            raise JaxpflError(exclusions.NO_NOISE)
        accountant = accountant_named(accountant)
        if accountant == "paper":
            slope = theorem5_slope(self.noise, self.sampling, self.rounds)
            exclusions.check({"accountant": accountant, "adaptive clipping or cyclic participation": slope is None})
            assert slope is not None
            return theorem5_epsilon(slope, delta)
        if accountant == "pld" and delta < SMALLEST_DELTA:
            raise JaxpflError(f"delta must be at least {SMALLEST_DELTA:g} for pld, got {delta:g}: use rdp")
        plan = self
        if isinstance(self.noise, CentralNoise):  # epsilon is computed once for all clipping norms
            plan = replace(self, noise=replace(self.noise, clipping_norm=None))
        return _epsilon(plan, delta, accountant)

    def accountant(self, kind: SoundAccountant, step: float | None = None) -> Any:
        """Create an accountant of the package dp-accounting for this plan's relation.

        Args:
          kind: accountant to create.
          step: grid step for PLD; None uses `pld_step`.
        """
        import dp_accounting as dp

        # Cyclic blocks do not depend on the data, so zeroing a user's data has the same effect on the sums as removing
        # the user. dp-accounting supports Poisson sampling only under add-or-remove-one.
        same = "add-or-remove-one" if isinstance(self.sampling, Cyclic) else self._relation
        relation = dp.NeighboringRelation[_NEIGHBOURING[same]]
        if kind == "rdp":
            return dp.rdp.RdpAccountant(rdp_orders(), relation)
        return dp.pld.PLDAccountant(relation, step or self._pld_step)

    @property
    def _pld_step(self) -> float:
        distance = 2 if self.relation == "replace-one" else 1
        return pld_step(self.noise_multiplier / distance, self.sampling.rate, self.releases_about_one)

    def statement(self, delta: float, accountant: Accountant = "pld") -> Statement:
        """State the (eps, delta) guarantee at this delta with its assumptions.

        Raises:
          JaxpflError: as in `epsilon`.
        """
        epsilon = self.epsilon(delta, accountant)
        slope = theorem5_slope(self.noise, self.sampling, self.rounds)
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
            paper_epsilon=None if slope is None else theorem5_epsilon(slope, delta),
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
    """Compute epsilon by dp-accounting. Cached, because a run's checks, files and reports need the same epsilon."""
    event = plan.event(accountant)

    def epsilon_at(step: float | None) -> float:
        return float(plan.accountant(accountant, step).compose(event).get_epsilon(delta))

    with quiet():
        step = plan._pld_step if accountant == "pld" and plan.sampling.rate < 1 else None
        epsilon = epsilon_at(step)
        # The accountant overstates epsilon by an amount proportional to the step.
        while step is not None and (step := step / 2) > FINE:
            coarse, epsilon = epsilon, epsilon_at(step)
            if coarse <= epsilon * (1 + SETTLED):
                break
    if not math.isfinite(epsilon):
        raise JaxpflError(f"epsilon is not finite at delta {delta:g} with accountant {accountant}: use more noise")
    return epsilon


LARGEST_EPSILON = 200.0
"""Largest budget for which noise can be calibrated."""
_RELATIVE_TOLERANCE = 5e-5
_LEAST, _MOST = 1e-2, 1e7


@lru_cache(maxsize=64)
def calibrate(plan: PrivacyPlan, epsilon: float, delta: float, accountant: Accountant = "pld") -> PrivacyPlan:
    """Scale a plan's noise to the smallest amount for which epsilon at this delta is at most the target.

    Args:
      plan: plan whose noise is scaled. The amount of noise in this plan does not affect the result, with two
        exceptions. With `PerStepNoise`, the ratio of the plan's standard deviations is kept. With adaptive clipping,
        the noise on the count of uploads with norm at most C (``count_stddev``) is kept.
      epsilon, delta: privacy target.
      accountant: accountant whose epsilon must be at most the target. ``paper`` uses Theorem 5 of Ozkara et al. 2023,
        which is not a valid bound.

    Returns:
      The plan with a sufficient noise multiplier, which is usually less than 0.01 % above the smallest sufficient
      value.

    Raises:
      JaxpflError: if the target epsilon is not in (0, 200], or requires a noise multiplier outside 0.01 ... 1e7; or as
        in `PrivacyPlan.epsilon`.

    Examples:
      >>> from jaxpfl.privacy import CentralNoise, Full
      >>> plan = calibrate(PrivacyPlan(CentralNoise(1.0), Full(), rounds=300), epsilon=3.35, delta=1e-4)
      >>> round(plan.noise_multiplier, 2)
      19.29
    """
    from scipy.optimize import root_scalar

    checks.positive("epsilon", epsilon)
    checks.probability("delta", delta)
    if epsilon > LARGEST_EPSILON:
        raise JaxpflError(f"epsilon must be at most {LARGEST_EPSILON:g}, got {epsilon:g}, which guarantees nothing")
    # In adaptive clipping, the noise on the count of small uploads limits z. Only the result must respect this limit;
    # the search ignores it.
    fixed = isinstance(plan.noise, CentralNoise) and accountant != "paper"
    free = replace(plan, noise=replace(plan.noise, count_stddev=None)) if fixed else plan
    lower, upper = _bracket(free, epsilon, delta, accountant)
    target = epsilon * (1 - _RELATIVE_TOLERANCE)

    # `PrivacyPlan.epsilon` chooses a grid for each z: a common grid would have to be as coarse as the smallest z needs.
    def gap(inverse: float) -> float:
        return free.scale_noise(1 / inverse).epsilon(delta, accountant) - target

    multiplier = upper
    if gap(1 / upper) < 0:  # a search over 1/z, in which epsilon is nearly linear
        ends, tolerance = (1 / upper, 1 / lower), _RELATIVE_TOLERANCE / 2 / upper
        multiplier = 1 / root_scalar(gap, bracket=ends, xtol=tolerance).root
    # The root is approximate: raise z until the claim holds.
    while (found := plan.scale_noise(multiplier)).epsilon(delta, accountant) > epsilon:
        multiplier *= 1 + _RELATIVE_TOLERANCE
    return found


def _bracket(plan: PrivacyPlan, epsilon: float, delta: float, accountant: Accountant) -> tuple[float, float]:
    """Find noise multipliers z and 2 z such that epsilon is above the target at z, and at most the target at 2 z."""
    # Initial guess: many rounds of a sampled Gaussian are nearly one Gaussian release with mu = sqrt(R) q / z, whose
    # epsilon is below mu^2/2 + mu sqrt(2 log(1/delta)). Epsilon is also at least the cost of one round in which the
    # user takes part.
    log = -math.log(delta)
    # 1 / mu, where mu = sqrt(2 (log + epsilon)) - sqrt(2 log): for a small epsilon this difference would round to zero.
    inverse = (math.sqrt(2 * (log + epsilon)) + math.sqrt(2 * log)) / (2 * epsilon)
    upper = min(max(math.sqrt(plan.rounds) * plan.sampling.rate, 1.0) * inverse, _MOST)

    def enough(multiplier: float) -> bool:
        return plan.scale_noise(multiplier).epsilon(delta, accountant) <= epsilon

    while not enough(upper):
        upper *= 2
        if upper > _MOST:
            raise JaxpflError(f"epsilon {epsilon:g} at delta {delta:g} requires a noise multiplier above {_MOST:g}")
    while enough(upper / 2):
        upper /= 2
        if upper < _LEAST:
            raise JaxpflError(f"epsilon {epsilon:g} at delta {delta:g} requires a noise multiplier below {_LEAST:g}")
    return upper / 2, upper

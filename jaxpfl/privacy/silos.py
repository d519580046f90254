r"""Example-level privacy of silos: the sampling, noise and accounting of each silo's DP-SGD.

A silo is a client whose single examples are protected, against everyone outside it. With :math:`n_i` examples it draws
a batch B for each gradient, every example with probability :math:`q_i = \min(b / n_i, 1)`, and steps along

.. math:: \frac{1}{q_i n_i} \Bigl( \sum_{j \in B} g_j \min(1, C / \|g_j\|_2) + N(0, z_i^2 C^2 I) \Bigr)

Each silo has its own rate, hence its own noise or its own epsilon. All that leaves a silo, and its personalised model,
is made of such gradients and of what the server sent.

References: Abadi et al. 2016, "Deep Learning with Differential Privacy"; Liu et al. 2022, "On Privacy and
Personalization in Cross-Silo Federated Learning", https://arxiv.org/abs/2206.07902, section 3.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from jaxpfl.core import checks, exclusions
from jaxpfl.privacy.accounting import Accountant, PrivacyPlan, accountant_named, calibrate
from jaxpfl.privacy.descriptions import CentralNoise, Full, Poisson, poisson_cap
from jaxpfl.privacy.statement import Statement
from jaxpfl.support.errors import JaxpflError

WORD = 2**31
"""Scores of a draw are whole numbers below this one, so that rates are exact multiples of its inverse."""
_CLOSE, _TRIES = 0.997, 6
"""Least share of the target that a silo's epsilon must reach, and number of tries to reach it from a neighbour's."""


@dataclass(frozen=True)
class Silo:
    """Silos with the same number of examples.

    Attributes:
      examples: n_i.
      clients: the number of such silos.
      threshold: an example is in a batch if its score is below; `WORD` for all examples.
      per_round: batches in a round.
      once: batches beside the rounds, for the personalised model.
      noise_multiplier: z_i.
    """

    examples: int
    clients: int
    threshold: int
    per_round: int
    once: int
    noise_multiplier: float

    @property
    def rate(self) -> float:
        """q_i."""
        return self.threshold / WORD

    @property
    def expected(self) -> float:
        """Expected number of examples in a batch, the public divisor ``q_i n_i``."""
        return self.rate * self.examples


@dataclass(frozen=True)
class SiloMechanism:
    """Clipping and noise of every gradient in every silo, and their accounting over R rounds.

    The neighbouring relation is add-or-remove-one: a silo's data set with one example or without it. The silo's size,
    rate and number of steps are public settings. A silo is counted as part of every round.

    Attributes:
      silos: silos by number of examples, ascending.
      clipping_norm: C, of each example's gradient.
      slots: examples that a batch has room for. A larger draw is cut to a random subset, which is accounted.
      releases: gradients of one batch.
      rounds: R.
      noise_seed: ``run`` or ``secret``.
    """

    silos: tuple[Silo, ...]
    clipping_norm: float
    slots: int
    releases: int
    rounds: int
    noise_seed: str = "run"

    @property
    def noise_multiplier(self) -> float:
        """The largest z_i."""
        return max(silo.noise_multiplier for silo in self.silos)

    @property
    def default_accountant(self) -> Accountant:
        """PLD: batches may be cut, for which RDP has no event."""
        return "pld"

    def plan(self, silo: Silo) -> PrivacyPlan:
        """The releases about one example of a silo in the whole run."""
        noise = CentralNoise(silo.noise_multiplier, self.clipping_norm, releases=self.releases)
        whole = silo.threshold == WORD
        cap = self.slots if self.slots < silo.examples else None
        sampling = Full() if whole else Poisson(silo.rate, silo.examples, cap)
        return PrivacyPlan(noise, sampling, silo.per_round * self.rounds + silo.once)

    def epsilons(self, delta: float, accountant: Accountant = "pld") -> tuple[float, ...]:
        """Epsilon of each of `silos` at this delta.

        Raises:
          JaxpflError: as `PrivacyPlan.epsilon`.
        """
        exclusions.check({"accountant": accountant_named(accountant), "unit": "example"})
        return _epsilons(self, delta, accountant)

    def statement(self, delta: float, accountant: Accountant = "pld") -> Statement:
        """Guarantee of the silo with the largest epsilon, and the epsilons of all.

        Raises:
          JaxpflError: as `epsilons`.
        """
        found = self.epsilons(delta, accountant)
        worst = int(np.argmax(found))
        silo, plan = self.silos[worst], self.plan(self.silos[worst])
        assert plan.relation is not None
        return Statement(
            relation=plan.relation,
            unit="example",
            participation="full",
            sampling_rate=silo.rate,
            noise_multiplier=silo.noise_multiplier,
            clipping_norm=self.clipping_norm,
            rounds=self.rounds,
            delta=delta,
            epsilon=found[worst],
            accountant=accountant,
            paper_epsilon=None,
            silos=tuple(
                {
                    "examples": each.examples,
                    "clients": each.clients,
                    "sampling_rate": each.rate,
                    "noise_multiplier": each.noise_multiplier,
                    "batches": self.plan(each).rounds,
                    "gradients_of_a_batch": self.releases,
                    "epsilon": epsilon,
                }
                for each, epsilon in zip(self.silos, found, strict=True)
            ),
        )

    def calibrated(self, epsilon: float, delta: float, accountant: Accountant = "pld") -> SiloMechanism:
        """The same with noise in each silo by which its epsilon over the run is at most the target.

        Raises:
          JaxpflError: for a target out of range, and as `PrivacyPlan.epsilon`.
        """
        return _calibrated(self, epsilon, delta, accountant)


def mechanism_of(
    sizes: np.ndarray,
    *,
    batch_size: int,
    per_round: Callable[[int], int],
    once: Callable[[int], int],
    releases: int,
    rounds: int,
    clipping_norm: float,
    noise_multiplier: float = 1.0,
    noise_seed: str = "run",
    cuts: bool = True,
) -> SiloMechanism:
    """Mechanism of silos with these numbers of examples.

    Args:
      sizes: [m]; a silo without examples has nothing to protect.
      batch_size: b, the expected number of examples in a batch.
      per_round, once: ``n_i -> number of batches``.
      releases: gradients of one batch.
      rounds: R.
      clipping_norm: C.
      noise_multiplier: z of all silos; 0 clips only.
      noise_seed: ``run`` or ``secret``.
      cuts: whether a batch may be cut, at most once in 10^6 draws, for which RDP has no event.

    Raises:
      JaxpflError: for values out of range, and where no silo has an example.
    """
    checks.count("rounds", rounds)
    checks.count("batch size", batch_size)
    checks.positive("clipping_norm", clipping_norm)
    checks.not_negative("noise_multiplier", noise_multiplier)
    counts = dict(zip(*np.unique(np.asarray(sizes)[np.asarray(sizes) > 0], return_counts=True), strict=True))
    if not counts:
        raise JaxpflError("no client has training examples to protect")
    silos = tuple(
        Silo(int(n), int(m), _threshold(int(n), batch_size), per_round(int(n)), once(int(n)), noise_multiplier)
        for n, m in counts.items()
    )
    largest = max(silo.examples for silo in silos)
    slots = largest
    if cuts:
        slots = max(min(silo.examples, batch_size, largest) for silo in silos)
        slots = max(slots, *(poisson_cap(silo.examples, silo.rate) for silo in silos), 1)
    return SiloMechanism(silos, clipping_norm, min(slots, largest), releases, rounds, noise_seed)


def _threshold(examples: int, batch_size: int) -> int:
    return WORD if examples <= batch_size else math.floor(WORD * batch_size / examples)


@lru_cache(maxsize=64)
def _epsilons(mechanism: SiloMechanism, delta: float, accountant: Accountant) -> tuple[float, ...]:
    if mechanism.noise_multiplier == 0:
        raise JaxpflError(exclusions.NO_NOISE)
    return tuple(mechanism.plan(silo).epsilon(delta, accountant) for silo in mechanism.silos)


@lru_cache(maxsize=64)
def _calibrated(mechanism: SiloMechanism, epsilon: float, delta: float, accountant: Accountant) -> SiloMechanism:
    found: list[Silo] = []
    for silo in mechanism.silos:
        z = _near(mechanism, silo, found[-1], epsilon, delta, accountant) if found else None
        if z is None:
            noise = calibrate(mechanism.plan(replace(silo, noise_multiplier=1.0)), epsilon, delta, accountant).noise
            assert isinstance(noise, CentralNoise)
            z = noise.noise_multiplier
        found.append(replace(silo, noise_multiplier=z))
    return replace(mechanism, silos=tuple(found))


def _near(
    mechanism: SiloMechanism, silo: Silo, like: Silo, epsilon: float, delta: float, accountant: Accountant
) -> float | None:
    """Noise multiplier for a silo, with an epsilon just below the target, from a silo of nearly the same size.

    Silos have many sizes, and a separate calibration for each would take minutes. None where a few tries fail.
    """

    def demand(of: Silo) -> float:
        return of.rate * math.sqrt(mechanism.plan(of).rounds)

    z = like.noise_multiplier * demand(silo) / demand(like)
    for _ in range(_TRIES):
        got = mechanism.plan(replace(silo, noise_multiplier=z)).epsilon(delta, accountant)
        if epsilon * _CLOSE <= got <= epsilon:
            return z
        z *= got / (epsilon * (1 + _CLOSE) / 2)
    return None

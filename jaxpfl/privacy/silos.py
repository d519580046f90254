r"""Example-level privacy of silos: sampling, noise and accounting for DP-SGD in each silo.

A silo is a client whose individual examples are protected against everyone outside the silo. A silo with :math:`n_i`
examples draws mini-batches B that contain each example with probability :math:`q_i = \min(b / n_i, 1)`, where b is the
expected size of a mini-batch. With the gradient g_j of example j, the silo uses the noisy gradient

.. math:: \frac{1}{q_i n_i} \Bigl( \sum_{j \in B} g_j \min(1, C / \|g_j\|_2) + N(0, z_i^2 C^2 I) \Bigr)

The sampling rate differs between silos, so either the noise or epsilon differs too. A silo's uploads and its
personalized model depend on its examples only through such gradients.

If the persons of the examples are known, all examples of a person in a silo are protected together. B then contains
each person with probability q_i, and g_j is the sum of the gradients of person j's examples, clipped as one. A
mini-batch still contains b examples in expectation.

References: Abadi et al. 2016, "Deep Learning with Differential Privacy"; Liu et al. 2022, "On Privacy and
Personalization in Cross-Silo Federated Learning", https://arxiv.org/abs/2206.07902, section 3.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import lru_cache

import numpy as np

from jaxpfl.core import checks, exclusions
from jaxpfl.privacy.accounting import Accountant, PrivacyPlan, accountant_named, calibrate
from jaxpfl.privacy.descriptions import CentralNoise, Full, Poisson, poisson_cap
from jaxpfl.privacy.statement import Statement
from jaxpfl.support.errors import JaxpflError

WORD = 2**31
"""Number of possible integer scores by which examples are selected; sampling rates are exact multiples of 1 /
`WORD`.
"""
_CLOSE, _TRIES = 0.997, 6
"""Smallest accepted ratio of a silo's epsilon to the target, and number of attempts to reach it from a similar silo's
noise."""


@dataclass(frozen=True)
class Silo:
    """Silos with the same number of examples and, if persons are protected, the same number of persons.

    All silos with the same number of examples have the same sampling rate and the same noise.

    Attributes:
      examples: number of examples n_i in each silo.
      clients: number of silos with this number of examples.
      threshold: bound on the random scores: an example (or person) is in a batch if its score is below this number;
        `WORD` to include all examples.
      per_round: number of mini-batches per round.
      once: number of mini-batches that train the personalized model outside the rounds.
      noise_multiplier: noise multiplier z_i.
      persons: number of persons in each silo; None if examples are protected.
    """

    examples: int
    clients: int
    threshold: int
    per_round: int
    once: int
    noise_multiplier: float
    persons: int | None = field(default=None, repr=False)  # the representation names noise streams

    @property
    def units(self) -> int:
        """Number of protected units: persons, or examples."""
        return self.examples if self.persons is None else self.persons

    @property
    def rate(self) -> float:
        """Sampling rate q_i."""
        return self.threshold / WORD

    @property
    def expected(self) -> float:
        """Expected number of examples ``q_i n_i`` in a mini-batch, the public divisor."""
        return self.rate * self.examples


@dataclass(frozen=True)
class SiloMechanism:
    """Clipping and noise for every gradient in every silo, and their accounting over R rounds.

    The neighboring relation is add-or-remove-one: a silo's data set with or without one example, or with or without all
    examples of one person. A silo's numbers of examples and persons, sampling rate and number of steps are considered
    public, and so is ``person_examples``. The accounting assumes that a silo takes part in every round.

    Attributes:
      silos: groups of silos with the same number of examples, in ascending order of this number.
      clipping_norm: clipping norm C for the gradient of each example, or of each person's examples together.
      slots: largest number of examples (or persons) in a mini-batch. A larger draw is cut to a random subset; the
        accounting takes this into account.
      releases: number of gradients per mini-batch.
      rounds: number of rounds R.
      noise_seed: source of the noise: ``run`` (the run's seed) or ``secret`` (the operating system).
      person_examples: largest number of examples of a person at a silo; None if examples are protected.
    """

    silos: tuple[Silo, ...]
    clipping_norm: float
    slots: int
    releases: int
    rounds: int
    noise_seed: str = "run"
    person_examples: int | None = None

    @property
    def noise_multiplier(self) -> float:
        """Largest noise multiplier z_i of any silo."""
        return max(silo.noise_multiplier for silo in self.silos)

    @property
    def default_accountant(self) -> Accountant:
        """``pld``, because RDP does not support mini-batches that may be cut to ``slots`` examples."""
        return "pld"

    def plan(self, silo: Silo) -> PrivacyPlan:
        """Privacy plan for one example (or person) of a silo over the whole run."""
        noise = CentralNoise(silo.noise_multiplier, self.clipping_norm, releases=self.releases)
        whole = silo.threshold == WORD
        cap = self.slots if self.slots < silo.units else None
        sampling = Full() if whole else Poisson(silo.rate, silo.units, cap)
        return PrivacyPlan(noise, sampling, silo.per_round * self.rounds + silo.once)

    def epsilons(self, delta: float, accountant: Accountant = "pld") -> tuple[float, ...]:
        """Epsilon at this delta for each entry of `silos`.

        Raises:
          JaxpflError: if the accountant does not support examples, or under the conditions of `PrivacyPlan.epsilon`.
        """
        exclusions.check({"accountant": accountant_named(accountant), "unit": "example"})
        return _epsilons(self, delta, accountant)

    def statement(self, delta: float, accountant: Accountant = "pld") -> Statement:
        """State the guarantee for the silos with the largest epsilon, and list the epsilons of all silos.

        Raises:
          JaxpflError: as in `epsilons`.
        """
        found = self.epsilons(delta, accountant)
        worst = int(np.argmax(found))
        silo, plan = self.silos[worst], self.plan(self.silos[worst])
        assert plan.relation is not None
        return Statement(
            relation=plan.relation,
            unit="example" if self.person_examples is None else "person",
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
                    **({} if each.persons is None else {"persons": each.persons}),
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
        """Set each silo's noise so that its epsilon over the run is at most the target.

        Raises:
          JaxpflError: for a target out of range, or under the conditions of `PrivacyPlan.epsilon`.
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
    persons: tuple[np.ndarray, int] | None = None,
) -> SiloMechanism:
    """Build the mechanism for silos with these numbers of examples.

    Args:
      sizes: number of examples in each silo, [m]; silos without examples are left out.
      batch_size: expected number of examples b in a mini-batch.
      per_round: function from n_i to the number of mini-batches in a round.
      once: function from n_i to the number of mini-batches that train the personalized model outside the rounds.
      releases: number of gradients per mini-batch.
      rounds: number of rounds R.
      clipping_norm: clipping norm C for each example's gradient.
      noise_multiplier: noise multiplier z for all silos; 0 clips only.
      noise_seed: source of the noise: ``run`` (the run's seed) or ``secret`` (the operating system).
      cuts: whether large mini-batches may be cut, with a probability below 1e-6 per draw; RDP does not support this.
      persons: number of persons in each silo, [m], and largest number of examples of a person
        (`ClientData.count_persons`); None to protect examples.

    Raises:
      JaxpflError: if a value is out of range, or if no silo has an example.
    """
    checks.count("rounds", rounds)
    checks.count("batch size", batch_size)
    checks.positive("clipping_norm", clipping_norm)
    checks.not_negative("noise_multiplier", noise_multiplier)
    sizes = np.asarray(sizes)
    if not sizes.any():
        raise JaxpflError("at least one client must have training examples, got none")
    numbers = np.stack([sizes, sizes if persons is None else persons[0]])[:, sizes > 0]
    groups = zip(*map(np.ndarray.tolist, np.unique(numbers.T, axis=0, return_counts=True)), strict=True)
    silos = tuple(
        Silo(n, m, _threshold(n, batch_size), per_round(n), once(n), noise_multiplier, persons and units)
        for (n, units), m in groups
    )
    largest = max(silo.units for silo in silos)
    slots = largest
    if cuts:
        slots = max(min(silo.units, batch_size) for silo in silos)
        slots = max(slots, *(poisson_cap(silo.units, silo.rate) for silo in silos), 1)
    rows = None if persons is None else persons[1]
    return SiloMechanism(silos, clipping_norm, min(slots, largest), releases, rounds, noise_seed, rows)


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
    most: dict[int, float] = {}
    for silo in found:  # a client's noise is looked up by its number of examples
        most[silo.examples] = max(most.get(silo.examples, 0.0), silo.noise_multiplier)
    silos = tuple(replace(silo, noise_multiplier=most[silo.examples]) for silo in found)
    return replace(mechanism, silos=silos)


def _near(
    mechanism: SiloMechanism, silo: Silo, like: Silo, epsilon: float, delta: float, accountant: Accountant
) -> float | None:
    """Find a noise multiplier with an epsilon just below the target, by extrapolation from the similar silo ``like``.

    Silos may have many sizes, and a separate calibration for each size would take minutes. Returns None if a few
    attempts fail.
    """

    def demand(of: Silo) -> float:
        return of.rate * math.sqrt(mechanism.plan(of).rounds)

    # At equal epsilon z is nearly proportional to q sqrt(number of mini-batches).
    z = like.noise_multiplier * demand(silo) / demand(like)
    # Secant method for the middle of the accepted range; at first, epsilon is taken to be proportional to 1 / z.
    slope, last = -1.0, None
    for _ in range(_TRIES):
        got = mechanism.plan(replace(silo, noise_multiplier=z)).epsilon(delta, accountant)
        if epsilon * _CLOSE <= got <= epsilon:
            return z
        here = math.log(z), math.log(got / (epsilon * (1 + _CLOSE) / 2))
        if last is not None:
            slope = (here[1] - last[1]) / (here[0] - last[0])
        z, last = math.exp(here[0] - here[1] / slope), here
    return None

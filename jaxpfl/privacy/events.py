"""Translation of noise, sampling, number of rounds and relation to a ``DpEvent``, in this one place.

dp-accounting takes a noise multiplier relative to C. Under replace-one a client changes the sum by 2 C: dp-accounting's
(0.6) PLD accountant doubles the sensitivity itself; its RDP accountant does not, and is given the multiplier for 2 C.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from jaxpfl.core import checks
from jaxpfl.privacy.descriptions import CentralNoise, Cyclic, FixedSize, Full, Noise, Poisson, Sampling
from jaxpfl.privacy.refusals import Refusal
from jaxpfl.support.errors import JaxpflError, unknown_name

if TYPE_CHECKING:
    from dp_accounting import DpEvent

Relation: TypeAlias = Literal["add-or-remove-one", "zero-out", "replace-one"]
"""Neighbouring relation of two data sets: with and without a user; with a user's data and with none of it, while the
user still takes part (its noise stays); with one user's data and with another's."""
SoundAccountant: TypeAlias = Literal["pld", "rdp"]
RELATIONS = ("add-or-remove-one", "zero-out", "replace-one")


def relation_of(noise: Noise, sampling: Sampling, asked: str | None = None) -> Relation:
    """The relation under which a combination is accounted: the one asked for, or its default.

    Raises:
      JaxpflError: if the combination cannot be accounted, or not under the relation asked for.
    """
    by_clients = not isinstance(noise, CentralNoise)
    if isinstance(noise, CentralNoise):
        if noise.bands > 1:
            _check_bands(noise.bands, sampling)
    else:
        if isinstance(sampling, Cyclic):
            raise Refusal.CLIENT_NOISE_IN_TURNS.error()
        if isinstance(sampling, Poisson):
            raise Refusal.CLIENT_NOISE_UNDER_POISSON.error()
        if sampling.cohort is not None and noise.min_uploads > sampling.cohort:
            raise JaxpflError(f"min_uploads must be at most {sampling.cohort}, got {noise.min_uploads}")
    if isinstance(sampling, FixedSize):
        supported: tuple[Relation, ...] = ("replace-one",)
    elif isinstance(sampling, Poisson):
        supported = ("add-or-remove-one",)
    elif isinstance(sampling, Cyclic):
        # The blocks are of equal sizes, so that a user who comes or goes would move others to other blocks.
        supported = ("zero-out",)
    else:
        supported = ("zero-out" if by_clients else "add-or-remove-one", "replace-one")
    if asked is None:
        return supported[0]
    if asked not in RELATIONS:
        raise unknown_name("relation", asked, RELATIONS)
    for relation in supported:
        if relation == asked:
            return relation
    who = "the clients'" if by_clients else "central"
    raise JaxpflError(
        f"{sampling.name} participation with {who} noise is accounted under {' or '.join(supported)}, not {asked}"
    )


def _check_bands(bands: int, sampling: Sampling) -> None:
    if not isinstance(sampling, Cyclic):
        raise JaxpflError(
            f"banded noise needs participation = cyclic, got {sampling.name}: its bound requires {bands} rounds (the "
            "bands) from one turn of a client to the next"
        )
    if bands > sampling.cycle:
        raise JaxpflError(
            f"bands must be at most {sampling.cycle}, the rounds from one turn of a client to the next, got {bands}"
        )


def check_accountant(sampling: Sampling, accountant: SoundAccountant) -> None:
    """Check that an accountant supports the sampling.

    Raises:
      JaxpflError: for pld with cohorts of a fixed size, and for rdp with Poisson cohorts that a cap can cut.
    """
    if isinstance(sampling, FixedSize) and accountant == "pld":
        raise JaxpflError("fixed-size cohorts are accounted by rdp, under replace-one: pld has no such event")
    if isinstance(sampling, Poisson) and sampling.truncated and accountant == "rdp":
        raise JaxpflError("poisson cohorts that a cap can cut are accounted by pld: rdp has no such event")


def event(
    noise: Noise, sampling: Sampling, rounds: int, relation: Relation, accountant: SoundAccountant = "pld"
) -> DpEvent:
    """A run's releases as an event of dp-accounting.

    Implements: Ozkara et al. 2023, Lemma 2.

    Args:
      noise, sampling: of every round.
      rounds: R.
      relation: from `relation_of`.
      accountant: the accountant of dp-accounting that it is for.

    Raises:
      JaxpflError: for a noise multiplier of 0, and for anything that the accountant does not support.
    """
    import dp_accounting as dp

    checks.count("rounds", rounds)
    check_accountant(sampling, accountant)
    multiplier = noise.multiplier
    if multiplier == 0:
        raise Refusal.NO_NOISE.error()
    if relation == "replace-one" and accountant == "rdp":
        multiplier /= 2
    gaussian = dp.GaussianDpEvent(multiplier)
    one_round: DpEvent
    if isinstance(sampling, Full):
        one_round = gaussian
    elif isinstance(sampling, FixedSize):
        one_round = dp.SampledWithoutReplacementDpEvent(sampling.num_clients, sampling.cohort, gaussian)
    elif isinstance(sampling, Poisson) and sampling.truncated:
        assert sampling.num_clients is not None
        assert sampling.cap is not None
        one_round = dp.TruncatedSubsampledGaussianDpEvent(sampling.num_clients, sampling.rate, sampling.cap, multiplier)
    else:
        one_round = gaussian if sampling.rate == 1 else dp.PoissonSampledDpEvent(sampling.rate, gaussian)
    return dp.SelfComposedDpEvent(one_round, releases_about_one(sampling, rounds))


def releases_about_one(sampling: Sampling, rounds: int) -> int:
    """Rounds that can be about one client: all, or its turns.

    With a banded C of columns of norm 1 and at least as many rounds between turns as bands, the columns of a client's
    turns share no row, so that each turn is a release of its own (Choquette-Choo et al. 2023, Theorems 2 and 4).
    """
    return sampling.turns(rounds) if isinstance(sampling, Cyclic) else rounds


def neighbouring(relation: Relation, sampling: Sampling) -> Any:
    """Name of a relation in dp-accounting.

    In blocks that do not depend on who is there, a user without data and an absent one leave the same sums; the
    accountant samples under the second name only.
    """
    from dp_accounting import NeighboringRelation

    if isinstance(sampling, Cyclic):
        relation = "add-or-remove-one"
    return {
        "add-or-remove-one": NeighboringRelation.ADD_OR_REMOVE_ONE,
        "zero-out": NeighboringRelation.REPLACE_SPECIAL,
        "replace-one": NeighboringRelation.REPLACE_ONE,
    }[relation]

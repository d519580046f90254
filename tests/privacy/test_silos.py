"""Accounting of silos: epsilons of dp-accounting called directly, calibration for silos of many sizes, statements."""

import dp_accounting as dp
import numpy as np
import pytest

from jaxpfl import JaxpflError
from jaxpfl.core.protocol import LocalEpochs
from jaxpfl.privacy.guarded import Access
from jaxpfl.privacy.silos import WORD, mechanism_of

SIZES = np.array([5, 20, 20, 60, 0])
DELTA = 1e-3


def silos(z=1.0, releases=1, once=lambda n: 0, per_round=lambda n: 3, **more):
    told = {"batch_size": 10, "rounds": 7, "clipping_norm": 0.5} | more
    return mechanism_of(SIZES, per_round=per_round, once=once, releases=releases, noise_multiplier=z, **told)


def directly(n: int, q: float, slots: int, z: float, batches: int) -> float:
    """Epsilon of a silo by dp-accounting alone."""
    gaussian = dp.GaussianDpEvent(z)
    one = gaussian if q == 1 else dp.PoissonSampledDpEvent(q, gaussian)
    if q < 1 and slots < n:
        one = dp.TruncatedSubsampledGaussianDpEvent(n, q, slots, z)
    accountant = dp.pld.PLDAccountant(dp.NeighboringRelation.ADD_OR_REMOVE_ONE, 1e-3)
    return float(accountant.compose(dp.SelfComposedDpEvent(one, batches)).get_epsilon(DELTA))


@pytest.mark.parametrize("releases", [2, pytest.param(1, marks=pytest.mark.slow)])
def test_each_silo_is_accounted_by_its_own_rate(releases):
    mechanism = silos(1.3, releases, once=lambda n: 4)
    got = mechanism.epsilons(DELTA)
    assert [silo.examples for silo in mechanism.silos] == [5, 20, 60]
    assert [silo.clients for silo in mechanism.silos] == [1, 2, 1]
    z = 1.3 / releases**0.5
    want = [directly(n, min(10 / n, 1), mechanism.slots, z, 3 * 7 + 4) for n in (5, 20, 60)]
    np.testing.assert_allclose(got, want, rtol=2e-3)
    assert got[0] > got[1] > got[2]  # whole batches protect least


@pytest.mark.slow
def test_batches_that_are_cut_are_accounted_as_such():
    mechanism = silos()
    assert 10 < mechanism.slots < 60
    tight = mechanism_of(
        np.array([60]), batch_size=10, per_round=int, once=int, releases=1, rounds=1, clipping_norm=1.0
    )
    assert tight.plan(tight.silos[0]).sampling.cap == tight.slots < 60
    assert silos(cuts=False).slots == 60
    assert silos(cuts=False).epsilons(DELTA, "rdp")[0] > silos().epsilons(DELTA)[0]


@pytest.mark.slow
def test_noise_is_calibrated_for_every_silo():
    mechanism = silos().calibrated(4.0, DELTA)
    epsilons = mechanism.epsilons(DELTA)
    assert max(epsilons) <= 4.0
    assert min(epsilons) > 4.0 * 0.996
    noise = [silo.noise_multiplier for silo in mechanism.silos]
    assert noise == sorted(noise, reverse=True)
    assert mechanism.noise_multiplier == noise[0]


def test_persons_are_accounted_by_their_own_number():
    """Silos with the same number of rows share their noise, which the one with the larger epsilon needs."""
    sizes, persons = np.array([60, 60, 5]), (np.array([60, 12, 3]), 9)
    told = {"per_round": lambda n: 21, "once": lambda n: 0, "releases": 1, "rounds": 1, "clipping_norm": 0.5}
    found = mechanism_of(sizes, batch_size=10, persons=persons, **told).calibrated(4.0, DELTA)
    assert [(silo.examples, silo.persons) for silo in found.silos] == [(5, 3), (60, 12), (60, 60)]
    assert found.silos[1].noise_multiplier == found.silos[2].noise_multiplier
    want = [directly(silo.persons, silo.rate, found.slots, silo.noise_multiplier, 21) for silo in found.silos]
    np.testing.assert_allclose(found.epsilons(DELTA), want, rtol=2e-3)
    assert max(found.epsilons(DELTA)) <= 4.0
    assert "for each person of a silo (all of the person's examples), the largest of 3" in str(found.statement(DELTA))


ACCESS = Access(steps=6, own=LocalEpochs(1, 10), batches=2, releases=1)


def test_batches_of_a_descent():
    assert [ACCESS.gradients(n) for n in (5, 20, 37, 60, 600)] == [2, 4, 8, 12, 12]


@pytest.mark.slow
def test_steps_by_a_silos_own_examples():
    """In work by epochs larger silos take more steps, which calibration and claim know."""
    mechanism = silos(per_round=ACCESS.gradients).calibrated(4.0, DELTA)
    assert [mechanism.plan(silo).rounds for silo in mechanism.silos] == [14, 28, 84]
    assert max(mechanism.epsilons(DELTA)) <= 4.0


def test_the_statement_is_of_the_largest_epsilon():
    statement = silos().statement(DELTA)
    assert statement.unit == "example"
    assert statement.relation == "add-or-remove-one"
    assert statement.epsilon == max(silos().epsilons(DELTA)) == statement.silos[0]["epsilon"]
    assert sum(silo["clients"] for silo in statement.silos) == 4
    said = str(statement)
    for part in ("for each example of a silo", "the largest of 4 silos'", "21 poisson batches in R = 7 rounds",
                 "q = 1 of 5 examples", "smallest for a silo", "the numbers of examples"):  # fmt: skip
        assert part in said
    twice = statement._replace(silos=tuple(silo | {"gradients_of_a_batch": 2} for silo in statement.silos))
    assert "2 gradients of each of 21 poisson batches" in str(twice)


def test_rates_are_exact():
    """A rate is a multiple of 2^-31, as the scores of a draw are, and never above b / n."""
    for silo in silos().silos:
        assert silo.rate == silo.threshold / WORD <= min(10 / silo.examples, 1)
        assert silo.rate > min(10 / silo.examples, 1) - 1 / WORD


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"z": 0.0}, "no epsilon can be claimed"),
        ({"clipping_norm": 0.0}, "clipping_norm must be"),
        ({"rounds": 0}, "rounds must be"),
    ],
)
def test_refusals(change, message):
    with pytest.raises(JaxpflError, match=message):
        silos(**change).epsilons(DELTA)


def test_nothing_to_protect_is_refused():
    with pytest.raises(JaxpflError, match="at least one client must have training examples"):
        mechanism_of(np.zeros(3), batch_size=1, per_round=int, once=int, releases=1, rounds=1, clipping_norm=1.0)

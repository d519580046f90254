"""Stragglers and lost uploads: what arrives is averaged right, what a client did stays with it. NumPy, float64."""

import jax
import numpy as np
import pytest
from numpy_reference import average, sgd, subtract
from oracle_setup import (
    IDS,
    SEED,
    SIZES,
    STEPS,
    assert_same,
    classification_problem,
    client_row,
    clients,
    run,
    simulation,
)

from jaxpfl import JaxpflError
from jaxpfl.core.participation import Availability, availability
from jaxpfl.core.protocol import ALL_STEPS

ROUNDS = 6
HYPER = {"lr": 0.3, "lr_decay": 1.0, "decay_every": 60.0, "weight_decay": 0.02}
FAILING = {
    "lost uploads": Availability(dropout=0.5),
    "stragglers": Availability(dropout=0.0, stragglers=0.7),
    "both": Availability(dropout=0.4, stragglers=0.6, same_stragglers=True),
}


@pytest.fixture(autouse=True)
def float64():
    with jax.enable_x64(True):
        yield


def fates(given: Availability, round: int) -> tuple[list[int], list[bool]]:
    """For each client, its number of steps and whether its upload is lost."""
    key = jax.random.key(SEED)
    steps = [min(int(given.step_limit(key, round, i, STEPS)), STEPS) for i in IDS]
    return steps, [bool(given.drops_out(key, round, i)) for i in IDS]


@pytest.mark.parametrize("name", [n if n == "both" else pytest.param(n, marks=pytest.mark.slow) for n in FAILING])
def test_fedavg(name):
    """``mu + sum n_i (w_i - mu) / sum n_i`` over the uploads that arrived, w_i after as many steps as i took."""
    given = FAILING[name]
    got = run(simulation("fedavg", classification_problem(), HYPER, engine={"availability": given}), ROUNDS)
    data, mu = clients(classification_problem().train), got.states[0].server
    taken, lost_so_far = np.zeros(len(SIZES), int), np.zeros(len(SIZES), int)
    for r in range(ROUNDS):
        steps, lost = fates(given, r)
        ends = [sgd(mu, [data[i]] * steps[i], HYPER["lr"], HYPER["weight_decay"])[0] for i in range(len(SIZES))]
        heard = [i for i in range(len(SIZES)) if not lost[i]]
        if heard:
            mu = average(mu, [subtract(ends[i], mu) for i in heard], [SIZES[i] for i in heard])
        taken, lost_so_far = taken + steps, lost_so_far + lost
        state = got.states[r + 1]
        assert_same(state.server, mu)
        np.testing.assert_array_equal(state.counts.steps, taken)
        np.testing.assert_array_equal(state.counts.dropped, lost_so_far)
        np.testing.assert_array_equal(state.counts.uploads + state.counts.dropped, r + 1)
    assert given.dropout == 0 or 0 < lost_so_far.sum() < ROUNDS * len(SIZES)
    assert given.stragglers == 0 or taken.min() < ROUNDS * STEPS


@pytest.mark.slow
def test_a_client_whose_upload_is_lost_keeps_its_work():
    """``local`` uploads nothing that matters: dropout must not change a client's model."""
    plain, lossy = (
        run(simulation("local", classification_problem(), HYPER, engine={"availability": given}), ROUNDS)
        for given in (Availability(), Availability(dropout=0.5))
    )
    assert_same(client_row(plain.states[-1].clients, 0), client_row(lossy.states[-1].clients, 0))


@pytest.mark.slow
def test_a_round_in_which_everything_is_lost_leaves_the_server():
    almost_sure = Availability(dropout=1 - 1e-9)
    got = run(simulation("adaped", classification_problem(), {}, engine={"availability": almost_sure}), 2)
    assert_same(got.states[-1].server, got.states[0].server, rtol=0)
    np.testing.assert_array_equal(got.history["dropped"], len(SIZES))


def test_frequencies():
    """20000 draws: steps uniform on 1..tau for stragglers, at four standard errors (false alarm below 1e-3 in all)."""
    given, tau, n = Availability(dropout=0.3, stragglers=0.4), 5, 20000
    ids = np.arange(n)
    draw = jax.jit(jax.vmap(lambda i: given.step_limit(jax.random.key(3), 7, i, tau)))
    steps = np.asarray(draw(ids))
    lost = np.asarray(jax.vmap(lambda i: given.drops_out(jax.random.key(3), 7, i))(ids))
    # Who is not slow has no limit: a method may ask for more steps than tau.
    for value in (*range(1, tau + 1), ALL_STEPS):
        p = 0.6 if value == ALL_STEPS else 0.4 / tau
        assert abs((steps == value).mean() - p) < 4 * np.sqrt(p * (1 - p) / n), value
    assert abs(lost.mean() - 0.3) < 4 * np.sqrt(0.3 * 0.7 / n)
    assert abs(np.corrcoef(lost, steps == ALL_STEPS)[0, 1]) < 4 / np.sqrt(n)


def test_the_same_stragglers_in_every_round():
    each, same = (
        Availability(dropout=0.0, stragglers=0.5),
        Availability(dropout=0.0, stragglers=0.5, same_stragglers=True),
    )
    for given, equal in ((each, False), (same, True)):
        first, second = ([int(given.step_limit(jax.random.key(0), r, i, 100)) for i in range(20)] for r in (0, 1))
        assert (first == second) is equal


@pytest.mark.slow
def test_who_is_not_slow_takes_all_steps_that_the_method_asks_for():
    """Ditto's personal steps may be more than tau. Of these clients none is slow, at a probability of 1e-9."""
    runs = [
        run(simulation("ditto", classification_problem(), HYPER, personal_steps=3 * STEPS, engine=engine), 2)
        for engine in ({}, {"availability": Availability(dropout=0.0, stragglers=1e-9)})
    ]
    for plain, unreliable in zip(runs[0].states, runs[1].states, strict=True):
        assert_same(unreliable.clients, plain.clients, rtol=0)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"dropout": 1.0}, "dropout must be >= 0 and < 1, got 1.0"),
        ({"dropout": -0.1}, "dropout must be"),
        ({"stragglers": 1.5}, "stragglers must be >= 0 and <= 1, got 1.5"),
        ({"dropout": float("nan")}, "dropout must be"),
        ({"same_stragglers": True}, "needs stragglers > 0"),
    ],
)
def test_shares_out_of_range(arguments, message):
    with pytest.raises(JaxpflError, match=message):
        availability(**arguments)


def test_an_availability_of_another_kind_keeps_it_where_rates_are_traced():
    """An audit's canaries stay away by a `drops_out` of their own, which a program made `without_rates` must have."""

    class Missing(Availability):
        pass

    given = Missing(dropout=0.1, stragglers=0.2, same_stragglers=True)
    again = given.without_rates.at(given.rates)
    assert type(given.without_rates) is type(again) is Missing
    assert again.same_stragglers
    assert (float(again.dropout), float(again.stragglers)) == pytest.approx((0.1, 0.2))

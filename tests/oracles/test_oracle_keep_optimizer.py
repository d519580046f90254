"""Optimizer states kept across rounds, against NumPy: each client goes on from those of its own last round."""

from typing import Any

import numpy as np
import pytest
from numpy_reference import backward, cross_entropy, forward
from oracle_setup import SIZES, assert_same, classification_problem, clients, on_host, perceptron
from test_oracle_client_optimizer import Adam, Momentum

import jaxpfl
from jaxpfl import ExecutionPlan, JaxpflError, JaxpflWarning

ROUNDS, STEPS, RATE, PERSONAL, PULL, WEIGHT_DECAY = 5, 2, 0.1, 0.05, 0.7, 0.02
OPTIMIZERS = {"sgd:momentum=0.8": lambda: Momentum(0.8), "adam:b1=0.6,eps=1e-3": lambda: Adam(b1=0.6, eps=1e-3)}


@pytest.fixture(scope="module")
def problem():
    return classification_problem()


def trained(optimizer, params, x, y, rate, anchor=None):
    for _ in range(STEPS):
        gradient = backward(params, x, cross_entropy(forward(params, x), y)[1])
        pull = 0.0 if anchor is None else PULL
        gradient = {
            k: g + pull * (params[k] - (anchor or params)[k]) + WEIGHT_DECAY * params[k] for k, g in gradient.items()
        }
        params = optimizer(params, gradient, rate)
    return params


def fitted(problem, optimizer, method="ditto", **more):
    hyper = {"lr": RATE, "lr_decay": 1.0, "weight_decay": WEIGHT_DECAY}
    hyper |= {"lr_personal": PERSONAL, "lam": PULL} if method == "ditto" else {}
    given: dict[str, Any] = {
        "rounds": ROUNDS,
        "cohort": 2,
        "batch_size": 100,
        "local_steps": STEPS,
        "model": perceptron().model,
    }
    given |= {"client_optimizer": optimizer, "keep_optimizer": True, "hyper": hyper}
    return jaxpfl.fit(method, problem, **given | more)


@pytest.mark.slow
@pytest.mark.parametrize(
    "optimizer", [pytest.param("sgd:momentum=0.8", marks=pytest.mark.slow), "adam:b1=0.6,eps=1e-3"]
)
@pytest.mark.usefixtures("float64")
def test_each_of_dittos_descents_goes_on(problem, optimizer):
    """Clients are out of the cohort for some rounds, and w starts from a new mu in each."""
    simulation = fitted(problem, optimizer, rounds=1).simulation
    state = simulation.init([0])
    mu = on_host(state).server
    own, memories = [mu] * len(SIZES), [(OPTIMIZERS[optimizer](), OPTIMIZERS[optimizer]()) for _ in SIZES]
    data, seen = clients(problem.train), np.zeros(len(SIZES), int)
    for _ in range(ROUNDS):
        state, _ = simulation.advance(state, 1)
        now = np.asarray(simulation.counts(state).participations)[0]
        cohort, seen = np.flatnonzero(now > seen), now
        new = []
        for i in cohort:
            of_w, of_v = memories[i]
            new.append(trained(of_w, mu, *data[i], RATE))
            own[i] = trained(of_v, own[i], *data[i], PERSONAL, mu)
        mu = {k: np.average([w[k] for w in new], axis=0, weights=[SIZES[i] for i in cohort]) for k in mu}
    assert seen.max() > 2 > seen.min()
    end = on_host(simulation.trim(state))
    assert_same(end.server, mu)
    assert_same(end.clients[0].own, {k: np.stack([v[k] for v in own]) for k in mu})
    assert end.clients[0].rounds.tolist() == seen.tolist()


@pytest.mark.slow
def test_an_optimizer_without_zeros_begins_as_itself(problem):
    """AdaGrad's accumulator starts at 0.1, so a first round is that of a new optimizer; the second is not."""
    kept, new = (fitted(problem, "adagrad", "fedavg", cohort=5, rounds=2, keep_optimizer=on) for on in (True, False))
    assert kept.history["train_loss"][0, 0] == new.history["train_loss"][0, 0]
    assert not np.allclose(kept.scores["global"]["loss"][-1], new.scores["global"]["loss"][-1])


@pytest.mark.slow
@pytest.mark.parametrize("method", ["adaped", "fedem"])
def test_any_plan_gives_the_same_numbers(problem, method):
    def loss(**plan):
        plan = ExecutionPlan(**plan)
        given = {"model": "mlp:5", "batch_size": 4, "plan": plan, "seeds": 2}
        return fitted(problem, "adam", method, **given).history["train_loss"]

    want = loss(clients="map")
    np.testing.assert_allclose(loss(clients="vmap"), want, rtol=1e-4)
    np.testing.assert_allclose(loss(clients_in="host"), want, rtol=1e-4)


@pytest.mark.slow
def test_new_clients_keep_them_in_their_rounds(problem):
    others = problem._replace(client_ids=problem.client_ids + 100)
    found = [fitted(problem, "adam", unseen=others, adapt_rounds=2, keep_optimizer=on).unseen for on in (True, False)]
    kept, new = (one["after"]["loss"] for one in found if one is not None)
    assert not np.allclose(kept, new)


@pytest.mark.slow
def test_what_has_no_states_says_so(problem):
    with pytest.warns(JaxpflWarning, match="keep_optimizer = True changes nothing: sgd has no state"):
        fitted(problem, "sgd", rounds=1)
    with pytest.raises(JaxpflError, match="l2gd takes local steps in one of its two kinds of rounds"):
        fitted(problem, "adam", "l2gd")

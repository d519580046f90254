"""kNN-Per against NumPy: votes of the nearest remembered examples, in loops, and the likeliest interpolation."""

from functools import cache

import jax
import numpy as np
import pytest
from numpy_reference import Params, cross_entropy, forward, log_softmax
from oracle_methods import SGD, engine
from oracle_setup import (
    CLASSES,
    SIZES,
    STEPS,
    assert_same,
    classification_problem,
    clients,
    on_host,
    perceptron,
    run,
    simulation,
)

from jaxpfl import METHODS, JaxpflError, LocalWork
from jaxpfl.algorithms.knn_per import knn_per
from jaxpfl.core.protocol import ClientContext, Message
from jaxpfl.core.types import Splits

HYPER = SGD | {"scale": 0.3}
K = 3
GRID = [i / 10 for i in range(11)]

pytestmark = pytest.mark.usefixtures("float64")


@cache
def got(apart: bool):
    """After four rounds, with validation examples or without."""
    if apart:
        return engine("knn-per", HYPER, "uniform", neighbours=K)
    whole = classification_problem()
    made = simulation("knn-per", whole._replace(validation=whole.validation.emptied()), HYPER, neighbours=K)
    return run(made, 2)


def features(w: Params, x: np.ndarray) -> np.ndarray:
    return np.tanh(x @ w["w1"] + w["b1"])


def votes(w: Params, x: np.ndarray, remembered, defect: str = "", without: int | None = None) -> np.ndarray:
    """Probabilities of the classes by the nearest remembered examples of one input."""
    f, near = features(w, x), []
    for j, (other, y) in enumerate(zip(*remembered, strict=True)):
        if j != without:
            square = ((f - features(w, other)) ** 2).sum() / (HYPER["scale"] * len(f))
            near.append((np.sqrt(square) if defect == "distances for their squares" else square, y))
    found = np.zeros(CLASSES)
    for square, y in sorted(near)[: K + (defect == "one neighbour more")]:
        found[y] += 1 if defect == "equal votes" else np.exp(-square)
    return found / found.sum()


def mixed(w: Params, share: float, x: np.ndarray, remembered, defect: str = "", loo: bool = False) -> np.ndarray:
    near = np.stack([votes(w, one, remembered, defect, j if loo else None) for j, one in enumerate(x)])
    return share * near + (1 - share) * np.exp(log_softmax(forward(w, x)))


def chosen(w: Params, train, apart=None, defect: str = "") -> float:
    x, y = train if apart is None else apart
    with np.errstate(divide="ignore"):
        likelihoods = [
            np.log(mixed(w, share, x, train, defect, loo=apart is None)[np.arange(len(y)), y]).sum() for share in GRID
        ]
    return GRID[int(np.argmax(likelihoods))]


def problem():
    federation = classification_problem()
    return zip(*(clients(split) for split in (federation.train, federation.validation, federation.test)), strict=True)


@pytest.mark.slow
@pytest.mark.parametrize("apart", [True, False])
def test_predictions(apart):
    made = got(apart)
    w, found = made.states[-1].server, on_host(made.simulation.evaluate(made.state))
    shares = np.asarray(made.simulation.personal_models(made.state).share[0])
    assert len(set(shares.tolist())) > 1
    for i, (train, validation, (x, y)) in enumerate(problem()):
        share = chosen(w, train, validation if apart else None)
        assert shares[i] == pytest.approx(share)
        of_class = np.maximum(mixed(w, share, x, train)[np.arange(len(y)), y], np.finfo(float).tiny)
        np.testing.assert_allclose(found["after"]["loss"][i], -np.log(of_class).mean(), rtol=1e-9)
        for name in ("before", "global"):
            np.testing.assert_allclose(found[name]["loss"][i], cross_entropy(forward(w, x), y)[0], rtol=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("defect", ["distances for their squares", "one neighbour more", "equal votes"])
def test_a_defect_would_be_seen(defect):
    w = got(True).states[-1].server
    gaps = [np.abs(mixed(w, 0.5, x, train, defect) - mixed(w, 0.5, x, train)).max() for train, _, (x, _) in problem()]
    assert max(gaps) > 1e-2


@pytest.mark.slow
def test_the_global_model_is_that_of_fedavg():
    for mine, other in zip(got(True).states, engine("fedavg", SGD, "uniform").states, strict=True):
        assert_same(mine.server, other.server)


@pytest.mark.slow
def test_a_client_without_examples_predicts_with_the_global_model():
    task = perceptron()
    algorithm = knn_per(task, LocalWork(np.array(SIZES), STEPS, 6), neighbours=K)
    made, (client,) = got(True), algorithm.clients
    data = made.simulation.federations[0].train.emptied().bounded(6)
    w, key = made.states[-1].server, jax.random.key(0)
    ctx = ClientContext(np.int32(1), np.int32(0), np.int32(0), 3, key)
    of_one = jax.tree.map(np.asarray, data.client(0))
    x, _ = clients(classification_problem().test)[0]
    hp = METHODS["knn-per"].hyper
    personal = client.personalize(key, hp, ctx, Message(w), (), Splits(of_one, of_one))
    got_logits = np.asarray(client.predict(hp, personal, x))
    np.testing.assert_allclose(got_logits, log_softmax(forward(w, x)), rtol=1e-9)


def test_no_neighbour_is_refused():
    with pytest.raises(JaxpflError, match=r"knn-per\.neighbours must be >= 1, got 0"):
        knn_per(perceptron(), LocalWork(np.array(SIZES), STEPS, 6), neighbours=0)

"""FedProto against NumPy: steps drawn to the classes' prototypes, and these as means over clients and examples."""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy_reference import Params, Round, cross_entropy, decay, forward, step
from oracle_methods import KINDS, SGD, assert_rounds, batches, cohorts, difference, engine, own_states
from oracle_setup import (
    CLASSES,
    SIZES,
    STEPS,
    Run,
    classification_problem,
    clients,
    on_host,
    perceptron,
    simulation,
)

from jaxpfl import JaxpflError, LocalWork
from jaxpfl.algorithms.fedproto import Prototypes, fedproto
from jaxpfl.core.protocol import Message
from jaxpfl.core.types import Splits
from jaxpfl.models import build_model, classification

HYPER = SGD | {"lam": 0.7}

pytestmark = pytest.mark.usefixtures("float64")


@cache
def got(kind: str) -> Run:
    return engine("fedproto", HYPER, kind)


def features(w: Params, x: np.ndarray) -> np.ndarray:
    return np.tanh(x @ w["w1"] + w["b1"])


def worked(w: Params, given, server, rate: float, defect: str) -> tuple[Params, dict[str, float]]:
    measured = []
    for x, y in given:
        rows = features(w, x)
        loss, d_logits = cross_entropy(forward(w, x), y)
        away = (rows - server["means"][y]) * server["known"][y, None]
        if defect == "classes without a prototype are drawn to zero":
            away = rows - server["means"][y]
        pull = HYPER["lam"] * (2 if defect == "twice the pull" else 1) * 2 * away / rows.size
        d_h = (d_logits @ w["w2"].T + pull) * (1 - rows**2)
        gradient = {"w1": x.T @ d_h, "b1": d_h.sum(0), "w2": rows.T @ d_logits, "b2": d_logits.sum(0)}
        w = step(w, gradient, rate, HYPER["weight_decay"])
        measured.append({"train_loss": loss, "prototype_distance": (away**2).mean()})
    return w, {name: np.mean([one[name] for one in measured]) for name in measured[0]}


def reference(kind: str, defect: str = "") -> list[Round]:
    train, own = clients(classification_problem().train), own_states(got(kind))
    server = {"means": np.zeros((CLASSES, own[0]["b1"].size)), "known": np.zeros(CLASSES)}
    seen, history = [0] * len(SIZES), []
    for r, cohort in enumerate(cohorts(kind)):
        rate, measured = HYPER["lr"] * decay(HYPER, r, STEPS), []
        sums, counts = np.zeros_like(server["means"]), np.zeros(CLASSES)
        for i in cohort:
            old = own[i]
            own[i], metrics = worked(own[i], batches(kind, i, seen[i], r), server, rate, defect)
            measured.append(metrics)
            seen[i] += 1
            x, y = train[i]
            rows = features(old if defect == "prototypes of the model before" else own[i], x)
            for c in set(y.tolist()):
                share = 1 if defect != "uniform mean" else (y == c).sum()
                sums[c] += rows[y == c].sum(0) / share
                counts[c] += (y == c).sum() / share
        has = counts > 0
        means = server["means"].copy()
        means[has] = sums[has] / counts[has, None]
        server = {"means": means, "known": np.where(has, 1.0, server["known"])}
        metrics = {name: float(np.mean([one[name] for one in measured])) for name in measured[0]}
        history.append(Round(server, list(own), list(seen), metrics))
    return history


def predicted(w: Params, server, x: np.ndarray) -> np.ndarray:
    return -((features(w, x)[:, None] - server["means"]) ** 2).sum(-1)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_rounds_and_the_nearest_prototype(kind):
    want, made = reference(kind), got(kind)
    assert_rounds(made, want)
    last, found = want[-1], on_host(made.simulation.evaluate(made.state))
    assert last.server["known"].all()
    for i, (x, y) in enumerate(clients(classification_problem().test)):
        logits = predicted(last.clients[i], last.server, x)
        np.testing.assert_allclose(found["after"]["loss"][i], cross_entropy(logits, y)[0], rtol=1e-9)
        np.testing.assert_allclose(found["after"]["accuracy"][i], np.mean(logits.argmax(1) == y))


@pytest.mark.slow
@pytest.mark.parametrize("defect", ["twice the pull", "prototypes of the model before", "uniform mean"])
def test_a_defect_would_be_seen(defect):
    assert difference(got("uniform"), reference("uniform", defect)) > 1e-3


@pytest.mark.slow
def test_a_class_that_nobody_has_is_not_predicted_and_draws_nothing():
    whole = classification_problem()
    federation = whole._replace(train=whole.train.with_examples(y=np.minimum(whole.train.examples.y, CLASSES - 2)))
    made = simulation("fedproto", federation, HYPER)
    state, _ = made.advance(made.init([0]), 2)
    server = on_host(state).server
    assert server.known.tolist() == [1.0] * (CLASSES - 1) + [0.0]
    assert not server.means[-1].any()
    predict = made.algorithm.clients[0].predict
    personal = on_host(made.personal_models(state))
    x, _ = clients(whole.test)[0]
    own = type(personal)(
        *(  # client 0's
            {k: v[0] for k, v in personal.model.items()},
            type(server)(*(a[0] for a in personal.prototypes)),
        )
    )
    logits = np.asarray(predict(None, own, jnp.asarray(x)))
    known = predicted(own.model, {"means": server.means[:-1]}, x)
    np.testing.assert_allclose(logits[:, :-1], known, rtol=1e-9)
    np.testing.assert_allclose(logits[:, -1], known.min(axis=1) - 1, rtol=1e-9)


def test_own_classes_are_those_of_the_clients_training_examples():
    task, x = perceptron(), clients(classification_problem().test)[0][0]
    (client,) = fedproto(task, LocalWork(np.array(SIZES), STEPS, 6), predict="own-classes").clients
    train = classification_problem().train
    one = train.with_examples(y=np.minimum(train.examples.y, CLASSES - 2)).client(0)
    own, rng = task.init(jax.random.key(0)), np.random.default_rng(0)
    means, known = rng.normal(size=(CLASSES, own["b1"].size)), jnp.array([1.0, 0, 1])
    personal = client.personalize(None, None, None, Message(Prototypes(means, known)), own, Splits(one, one))
    logits = np.asarray(client.predict(None, personal, x))
    assert set(logits.argmax(axis=1)) == {0}


@pytest.mark.slow
def test_clients_with_other_models_share_prototypes():
    task = classification(build_model("mlp:5", CLASSES, (4,)), (4,), CLASSES)
    made = simulation("fedproto", classification_problem(), HYPER, task=task, architectures="same+mlp:7,5")
    state, history = made.advance(made.init([0]), 2)
    assert [len(own) for own in on_host(state).clients] == [2, 3]
    assert np.isfinite(history["train_loss"]).all()
    assert (history["prototype_distance"][:, -1] > 0).all()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"architectures": "same+mlp:7"}, "fedproto needs models with features of one width, got 5 and 7"),
        ({"predict": "heads"}, "unknown fedproto.predict 'heads'"),
    ],
)
def test_refusals(options, said):
    with pytest.raises(JaxpflError, match=said):
        fedproto(perceptron(), LocalWork(np.array(SIZES), STEPS, 6), **options)

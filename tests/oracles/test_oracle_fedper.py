"""FedPer by the engine in float64 against NumPy: bodies are averaged by n_i, heads stay where they are."""

from functools import cache

import jax
import numpy as np
import pytest
from numpy_reference import average, decay, sgd, subtract
from oracle_setup import (
    HEAD,
    SEED,
    SIZES,
    STEPS,
    Run,
    assert_same,
    classification_problem,
    client_row,
    distance,
    filled,
    participation,
    perceptron,
    run,
    simulation,
    world,
)

from jaxpfl import METHODS, JaxpflError, LocalWork, Model, classification
from jaxpfl.models import build_model

ROUNDS, BATCH = 4, 6
HYPER = {"lr": 0.4, "lr_decay": 0.7, "decay_every": 4.0, "weight_decay": 0.02}
DEFECTS = ("heads averaged", "heads restart", "uniform mean", "body alone steps")


@pytest.fixture(autouse=True)
def float64():
    with jax.enable_x64(True):
        yield


@cache
def engine() -> Run:
    made = simulation("fedper", classification_problem(), HYPER, cohort=participation("uniform"), batch_size=BATCH)
    return run(made, ROUNDS)


def reference(start, defect: str = "") -> list:
    """``(phi_i, h_i)`` after tau joint steps; ``phi <- phi + sum_i n_i (phi_i - phi) / sum_i n_i``: after each round
    the body and every client's head."""
    given = world(classification_problem(), participation("uniform"), BATCH, ROUNDS)
    body = filled(start.server)
    first = [filled(client_row(start.clients[0], i)) for i in range(len(SIZES))]
    heads, seen, history = list(first), [0] * len(SIZES), []
    for r, cohort in enumerate(given.cohorts):
        changes, ends = [], []
        for i in cohort:
            head = first[i] if defect == "heads restart" else heads[i]
            params, _ = sgd(body | head, given.batches(i, seen[i]), HYPER["lr"] * decay(HYPER, r, STEPS), 0.02)
            changes.append(subtract({k: params[k] for k in body}, body))
            ends.append({k: params[k] for k in head})
            heads[i] = head if defect == "body alone steps" else ends[-1]
            seen[i] += 1
        weights = [1.0 if defect == "uniform mean" else given.sizes[i] for i in cohort]
        body = average(body, changes, weights)
        if defect == "heads averaged":
            mean = {k: sum(w * e[k] for w, e in zip(weights, ends, strict=True)) / sum(weights) for k in HEAD}
            heads = [mean] * len(SIZES)
        history.append((body, list(heads)))
    return history


def of_engine() -> list:
    return [(filled(s.server), [filled(client_row(s.clients[0], i)) for i in range(5)]) for s in engine().states[1:]]


def test_rounds():
    assert_same(of_engine(), reference(engine().states[0]))


def test_the_personalised_model_is_the_servers_body_with_the_own_head():
    got = engine()
    models = got.simulation.personal_models(got.state)
    body, heads = reference(got.states[0])[-1]
    for i, head in enumerate(heads):
        assert_same(jax.tree.map(lambda a, i=i: a[0, i], models), body | head)


@pytest.mark.parametrize("method", ["fedper", "fedrep", "lg-fedavg", "fedbn", "fedproto", "fml", "local"])
def test_clients_start_alike_but_for_local(method):
    options = {"architectures": "mlp:5"} if method == "fml" else {}
    first = simulation(method, classification_problem(), {}, **options).init([SEED]).clients[0]
    apart = max(float(abs(leaf[0] - leaf[0, :1]).max()) for leaf in jax.tree.leaves(first))
    assert apart > 0.1 if method == "local" else apart == 0


@pytest.mark.parametrize("defect", DEFECTS)
def test_a_defect_would_be_seen(defect):
    assert distance(of_engine(), reference(engine().states[0], defect)) > 1e-3


def no_head() -> Model:
    return perceptron().model._replace(head=None)


@pytest.mark.parametrize("method", ["fedper", "fedrep"])
@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (no_head, "names its head"),
        (lambda: no_head()._replace(head=lambda path: False), "accepts none of its parameters"),
        (lambda: build_model("linear", 3, (4,)), "head is the whole model"),
    ],
)
def test_models_that_cannot_be_split_are_refused(method, model, reason):
    work = LocalWork(np.array(SIZES), STEPS, BATCH)
    with pytest.raises(JaxpflError, match=f"^{method} needs .*{reason}"):
        METHODS[method].build(classification(model(), (4,), 3), work)

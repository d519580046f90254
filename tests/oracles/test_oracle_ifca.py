"""IFCA by the engine in float64 against NumPy: choice by training loss, a uniform mean by cluster, empty ones rest."""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy_reference import average, cross_entropy, decay, forward, sgd, subtract
from oracle_setup import (
    SIZES,
    STEPS,
    Run,
    assert_same,
    classification_problem,
    client_row,
    clients,
    distance,
    participation,
    perceptron,
    run,
    simulation,
    world,
)

from jaxpfl import METHODS, JaxpflError, LocalWork, Model
from jaxpfl.models.base import start_from

ROUNDS, BATCH, CLUSTERS = 5, 6, 3
HYPER = {"lr": 0.4, "lr_decay": 0.7, "decay_every": 4.0, "weight_decay": 0.02}
DEFECTS = ("empty cluster to zero", "mean over the cohort", "mean by n_i", "choice by the batch", "another cluster")


@pytest.fixture(autouse=True)
def float64():
    with jax.enable_x64(True):
        yield


@cache
def engine() -> Run:
    made = simulation(
        "ifca",
        classification_problem(),
        HYPER,
        cohort=participation("uniform"),
        batch_size=BATCH,
        clusters=CLUSTERS,
    )
    return run(made, ROUNDS)


def models_of(stacked) -> list:
    return [client_row(stacked, j) for j in range(CLUSTERS)]


def choice(models: list, x: np.ndarray, y: np.ndarray) -> int:
    return int(np.argmin([cross_entropy(forward(model, x), y)[0] for model in models]))


@cache
def reference(defect: str = "") -> tuple[list, list]:
    """``j_i = argmin_j f_i(theta_j)``; ``theta_j`` becomes the mean of what its clients in the cohort made of it.

    The models after each round, and how many chose each in it.
    """
    problem = classification_problem()
    given = world(problem, participation("uniform"), BATCH, ROUNDS)
    models, seen, history, choices = models_of(engine().states[0].server), [0] * len(SIZES), [], []
    for r, cohort in enumerate(given.cohorts):
        changes, weights = [[] for _ in models], [[] for _ in models]
        for i in cohort:
            batches = given.batches(i, seen[i])
            j = choice(models, *(batches[0] if defect == "choice by the batch" else clients(problem.train)[i]))
            j = (j + 1) % CLUSTERS if defect == "another cluster" else j
            w, _ = sgd(models[j], batches, HYPER["lr"] * decay(HYPER, r, STEPS), HYPER["weight_decay"])
            changes[j].append(subtract(w, models[j]))
            weights[j].append(given.sizes[i] if defect == "mean by n_i" else 1.0)
            seen[i] += 1
        for j, model in enumerate(models):
            if defect == "mean over the cohort":
                models[j] = {k: a + sum(c[k] for c in changes[j]) / len(cohort) for k, a in model.items()}
            elif changes[j]:
                models[j] = average(model, changes[j], weights[j])
            elif defect == "empty cluster to zero":
                models[j] = {k: 0 * a for k, a in model.items()}
        history.append(list(models))
        choices.append([len(c) for c in changes])
    return history, choices


def of_engine() -> list:
    return [models_of(state.server) for state in engine().states[1:]]


@pytest.mark.slow
def test_rounds():
    assert_same(of_engine(), reference()[0])


@pytest.mark.slow
def test_the_run_has_every_case():
    """A cluster with nobody, with one and with more: else the test above is hollow."""
    counts = {count for row in reference()[1] for count in row}
    assert {0, 1} < counts


@pytest.mark.slow
def test_an_empty_cluster_keeps_every_bit():
    for before, after, counts in zip(engine().states, engine().states[1:], reference()[1], strict=False):
        for j in np.flatnonzero(np.array(counts) == 0):
            assert_same(client_row(after.server, j), client_row(before.server, j), rtol=0)


def test_the_personalised_model_is_the_one_of_the_clients_cluster():
    got = engine()
    got_models = got.simulation.personal_models(got.state)
    last = reference()[0][-1]
    chosen = [choice(last, x, y) for x, y in clients(classification_problem().train)]
    assert len(set(chosen)) > 1
    for i, j in enumerate(chosen):
        assert_same(jax.tree.map(lambda a, i=i: a[0, i], got_models), last[j])
    np.testing.assert_array_equal(got.simulation.clusters(got.state), [chosen])


@pytest.mark.slow
@pytest.mark.parametrize("defect", DEFECTS)
def test_a_defect_would_be_seen(defect):
    assert distance(of_engine(), reference(defect)[0]) > 1e-3


@pytest.mark.parametrize(("method", "option"), [("ifca", "clusters"), ("fedem", "components")])
@pytest.mark.parametrize(
    ("sizes", "k", "reason"),
    [
        (SIZES, 1, "{}.{} must be >= 2, got 1"),
        (SIZES, 6, "{}.{} must be <= 5, the number of clients"),
        ((9,), 2, "{} needs at least 2 clients, got 1"),
    ],
)
def test_a_number_of_models_that_the_clients_cannot_serve_is_refused(method, option, sizes, k, reason):
    with pytest.raises(JaxpflError, match="^" + reason.format(method, option)):
        METHODS[method].build(perceptron(), LocalWork(np.array(sizes), STEPS, BATCH), **{option: k})


@pytest.mark.parametrize(("method", "option"), [("ifca", "clusters"), ("fedem", "components")])
def test_unseen_clients_do_not_count(method, option):
    work = LocalWork(np.array([*SIZES, 8, 13]), STEPS, BATCH, unseen=2)
    with pytest.raises(JaxpflError, match=f"^{method}.{option} must be <= 5, the number of clients, got 6"):
        METHODS[method].build(perceptron(), work, **{option: 6})


@pytest.mark.parametrize("method", ["ifca", "fedem"])
def test_models_that_start_alike_are_refused(method):
    task = start_from(perceptron(), perceptron().init(jax.random.key(0)))
    zeros = perceptron()._replace(model=Model(lambda key, x: jnp.zeros((4, 3)), lambda w, x: x @ w))
    for alike in (task, zeros):
        with pytest.raises(JaxpflError, match=f"^{method} needs models that start apart"):
            METHODS[method].build(alike, LocalWork(np.array(SIZES), STEPS, BATCH))


def test_other_optimizers_of_the_server_are_refused():
    with pytest.raises(JaxpflError, match="server_optimizer must be sgd, got fedadam"):
        METHODS["ifca"].build(perceptron(), LocalWork(np.array(SIZES), STEPS, BATCH, server_optimizer="fedadam"))

"""FedEM by the engine in float64 against NumPy: responsibilities, proportions, weighted steps, the participants' mean.

And where every step is exact (everyone, full batches, one small step), the likelihood can only rise.
"""

from functools import cache

import jax
import numpy as np
import pytest
from numpy_reference import average, backward, cross_entropy, decay, forward, log_softmax, step, subtract
from oracle_setup import (
    SIZES,
    STEPS,
    Run,
    assert_same,
    classification_problem,
    client_row,
    clients,
    distance,
    least_squares,
    on_host,
    participation,
    run,
    simulation,
    world,
)

from jaxpfl import METHODS, JaxpflError, LocalWork

ROUNDS, BATCH, COMPONENTS = 4, 6, 3
HYPER = {"lr": 0.4, "lr_decay": 0.7, "decay_every": 4.0, "weight_decay": 0.02}
DEFECTS = (
    "mean over all clients",
    "uniform mean",
    "mean by responsibility",
    "responsibilities without proportions",
    "old proportions kept",
    "sharper responsibilities",
)


@pytest.fixture(autouse=True)
def float64():
    with jax.enable_x64(True):
        yield


@cache
def engine(kind: str, batch_size: int) -> Run:
    made = simulation(
        "fedem",
        classification_problem(),
        HYPER,
        cohort=participation(kind),
        batch_size=batch_size,
        components=COMPONENTS,
    )
    return run(made, ROUNDS)


def models_of(stacked) -> list:
    return [client_row(stacked, j) for j in range(COMPONENTS)]


def log_joint(models: list, pi: np.ndarray, x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """``log pi_l + log p_l(y | x)``, [n, k]."""
    return np.stack([log_softmax(forward(m, x))[np.arange(len(y)), y] for m in models], axis=1) + np.log(pi)


def responsibilities(models: list, pi: np.ndarray, x: np.ndarray, y: np.ndarray, defect: str) -> np.ndarray:
    """``q_s(l) = pi_l p_l(y_s | x_s) / sum_j pi_j p_j(y_s | x_s)``, [n, k]."""
    joint = log_joint(models, np.ones_like(pi) if defect == "responsibilities without proportions" else pi, x, y)
    q = np.exp(2 * joint if defect == "sharper responsibilities" else joint)
    return q / q.sum(axis=1, keepdims=True)


def train(model: dict, weights: dict, batches: list, rate: float) -> tuple[dict, list[float]]:
    """``w <- w - eta (grad mean_B q_s CE_s + wd w)``; ``weights`` finds an example's q by its inputs."""
    losses = []
    for x, y in batches:
        q = np.array([weights[row.tobytes()] for row in x])
        # Example by example, so that each has its weight.
        parts = [cross_entropy(forward(model, x[s : s + 1]), y[s : s + 1]) for s in range(len(y))]
        losses.append(float(np.mean([w * loss for w, (loss, _) in zip(q, parts, strict=True)])))
        d_logits = np.concatenate([w * d for w, (_, d) in zip(q, parts, strict=True)]) / len(y)
        model = step(model, backward(model, x, d_logits), rate, HYPER["weight_decay"])
    return model, losses


@cache
def reference(kind: str, batch_size: int, defect: str = "") -> list:
    """After each round: the components, every client's proportions, and the mean training loss."""
    problem = classification_problem()
    given = world(problem, participation(kind), batch_size, ROUNDS)
    models = models_of(engine(kind, batch_size).states[0].server)
    pi, seen, history = [np.full(COMPONENTS, 1 / COMPONENTS)] * len(SIZES), [0] * len(SIZES), []
    for r, cohort in enumerate(given.cohorts):
        changes, weights, losses = [[] for _ in models], [[] for _ in models], []
        for i in cohort:
            x, y = clients(problem.train)[i]
            q = responsibilities(models, pi[i], x, y, defect)
            batches, rate = given.batches(i, seen[i]), HYPER["lr"] * decay(HYPER, r, STEPS)
            totals = np.zeros(STEPS)
            for j, model in enumerate(models):
                w, values = train(model, dict(zip([row.tobytes() for row in x], q[:, j], strict=True)), batches, rate)
                changes[j].append(subtract(w, model))
                size = q[:, j].sum() if defect == "mean by responsibility" else given.sizes[i]
                weights[j].append(1.0 if defect == "uniform mean" else size)
                totals += values
            losses.append(totals.mean())
            if defect != "old proportions kept":
                pi[i] = q.mean(axis=0)
            seen[i] += 1
        for j, model in enumerate(models):
            if defect == "mean over all clients":
                rest = sum(given.sizes) - sum(weights[j])  # those who were not there, as if they had not moved
                still = {k: np.zeros_like(a) for k, a in model.items()}
                models[j] = average(model, [*changes[j], still], [*weights[j], rest])
            else:
                models[j] = average(model, changes[j], weights[j])
        history.append((list(models), list(pi), float(np.mean(losses))))
    return history


def of_engine(kind: str, batch_size: int) -> list:
    got = engine(kind, batch_size)
    return [
        (models_of(state.server), [client_row(state.clients[0], i) for i in range(len(SIZES))], float(loss))
        for state, loss in zip(got.states[1:], got.history["train_loss"], strict=True)
    ]


@pytest.mark.parametrize(
    ("kind", "batch_size"),
    [pytest.param("full", 100, marks=pytest.mark.slow), ("uniform", 6)],
    ids=["everyone, full batches", "mini-batches"],
)
def test_rounds(kind, batch_size):
    assert_same(of_engine(kind, batch_size), reference(kind, batch_size))


def test_scores_are_those_of_the_mixture_of_probabilities():
    got = engine("uniform", BATCH)
    models, pi, _ = reference("uniform", BATCH)[-1]
    scores = on_host(got.simulation.evaluate(got.state))
    assert scores.keys() == {"before", "after"}
    for i, (x, y) in enumerate(clients(classification_problem().test)):
        p = sum(w * np.exp(log_softmax(forward(model, x))) for w, model in zip(pi[i], models, strict=True))
        for which in scores.values():
            np.testing.assert_allclose(which["loss"][i], -np.log(p[np.arange(len(y)), y]).mean(), rtol=1e-9)
            assert which["accuracy"][i] == np.mean(p.argmax(1) == y)


@pytest.mark.parametrize("defect", DEFECTS)
def test_a_defect_would_be_seen(defect):
    got, want = (
        [state[:2] for state in part] for part in (of_engine("uniform", BATCH), reference("uniform", BATCH, defect))
    )
    assert distance(got, want) > 1e-3


@pytest.mark.slow
def test_the_likelihood_only_rises():
    """``sum_i sum_s log sum_l pi_il p_l(y_s | x_s)``: the mean by n_i of one full-batch step is a step on the lower
    bound, and the proportions maximise it."""
    problem, hp = classification_problem(), {"lr": 0.3, "lr_decay": 1.0, "weight_decay": 0.0}
    got = run(simulation("fedem", problem, hp, steps=1, components=COMPONENTS), 40)

    def likelihood(state) -> float:
        return sum(
            float(np.logaddexp.reduce(log_joint(models_of(state.server), pi, x, y), axis=1).sum())
            for pi, (x, y) in zip(state.clients[0], clients(problem.train), strict=True)
        )

    values = np.array([likelihood(state) for state in got.states])
    assert (np.diff(values) > 0).all()
    assert values[-1] > values[0] + 5


def test_a_task_without_classes_is_refused():
    task = least_squares(4)
    apart = task._replace(model=task.model._replace(init=lambda key, x: jax.random.normal(key, (4,))))
    with pytest.raises(JaxpflError, match="fedem mixes class probabilities"):
        METHODS["fedem"].build(apart, LocalWork(np.array(SIZES), STEPS, BATCH))

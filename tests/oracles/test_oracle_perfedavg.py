"""Per-FedAvg against NumPy: ``w <- w - beta (I - alpha H) grad f(w - alpha grad f(w; D); D')``, H by differences."""

from functools import cache

import numpy as np
import pytest
from numpy_reference import Round, backward, cross_entropy, forward, step
from oracle_methods import (
    BATCH_SIZES,
    KINDS,
    ROUNDS,
    SGD,
    assert_rounds,
    assert_scores,
    combine,
    difference,
    engine,
    run_averaging,
    scores,
)
from oracle_setup import (
    SIZES,
    Run,
    classification_problem,
    clients,
    distance,
    draws,
    least_squares,
    on_host,
    simulation,
    stack,
)

from jaxpfl.core.randomness import Purpose

HYPER = SGD | {"alpha": 0.3}

pytestmark = pytest.mark.usefixtures("float64")


@cache
def got(kind: str, hessian: bool = False) -> Run:
    return engine("perfedavg", HYPER, kind, hessian=hessian)


def gradient(params, batch) -> tuple[float, dict]:
    x, y = batch
    loss, d_logits = cross_entropy(forward(params, x), y)
    return loss, backward(params, x, d_logits)


def hessian_product(params, batch, vector, size: float = 1e-4) -> dict:
    """``H vector`` by central differences of fourth order."""

    def difference_of(s: float) -> dict:
        return combine(
            gradient(combine(params, vector, s), batch)[1], gradient(combine(params, vector, -s), batch)[1], -1
        )

    near, far = difference_of(size), difference_of(2 * size)
    return {k: (8 * near[k] - far[k]) / (12 * size) for k in near}


def reference(kind: str, *, hessian: bool = False, defect: str = "") -> list[Round]:
    alpha, wd = HYPER["alpha"], HYPER["weight_decay"]

    def work(mu, own, batches, factor):
        w, losses = mu, []
        for inner, outer in zip(batches[::2], batches[1::2], strict=True):
            adapted = combine(w, gradient(w, inner)[1], -alpha)
            loss, g = gradient(adapted, inner if defect == "one batch for both" else outer)
            if hessian:
                g = combine(g, hessian_product(w, inner, g), -alpha)
            start = adapted if defect == "w not restored" else w
            w = step(start, g, HYPER["lr"] * factor, wd)
            losses.append(loss)
        return (), w, {"train_loss": np.mean(losses)}

    start = got(kind)
    return run_averaging(kind, HYPER, start.states[0].server, [()] * len(SIZES), work, each=2)


def personal(mu, kind: str, split: str = "train") -> list:
    """mu after one step alpha on a mini-batch of each client's training examples (planted: on its test examples)."""
    problem = classification_problem()
    given = [draws(problem, i, Purpose.PERSONALIZE_BATCHES, BATCH_SIZES[kind], 1, 0)[0] for i in range(len(SIZES))]
    given = clients(problem.test) if split == "test" else given
    return [combine(mu, gradient(mu, batch)[1], -HYPER["alpha"]) for batch in given]


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_rounds(kind):
    want = reference(kind)
    assert len(want) == ROUNDS
    assert_rounds(got(kind), want)
    mu = want[-1].server
    assert_scores(got(kind), personal(mu, kind), mu, before=[mu] * len(SIZES))


@pytest.mark.slow
def test_rounds_with_the_hessian():
    want = reference("uniform", hessian=True)
    assert difference(got("uniform", hessian=True), want) < 1e-9
    assert difference(got("uniform"), want) > 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("defect", ["w not restored", "one batch for both"])
def test_a_defect_would_be_seen(defect):
    assert difference(got("uniform"), reference("uniform", defect=defect)) > 1e-3


@pytest.mark.slow
def test_adapting_on_test_examples_would_be_seen():
    run = got("full")
    measured = on_host(run.simulation.evaluate(run.state))
    on_test = scores(personal(run.states[-1].server, "full", "test"))
    assert distance(measured["after"]["loss"], on_test["loss"]) > 1e-2


@pytest.mark.parametrize("hessian", [True, False])
def test_one_step_on_a_quadratic(hessian):
    """``f = (w - b)'A(w - b)/2``: the outer gradient is ``(I - alpha A) A (I - alpha A) (w - b)``, to the first order
    without the first factor."""
    rng, alpha, rate = np.random.default_rng(6), 0.4, 0.3
    x = rng.normal(size=(9, 3))
    y = x @ np.array([1.0, -2.0, 0.5])
    hp = {"lr": rate, "alpha": alpha, "weight_decay": 0.0}
    problem, task = stack([(x, y)], [(x, y)], [0]), least_squares(3)
    made = simulation("perfedavg", problem, hp, task=task, steps=1, hessian=hessian)
    state, _ = made.advance(made.init([0]), 1)
    a = x.T @ x / len(y)
    keep = np.eye(3) - alpha * a
    outer = (keep if hessian else np.eye(3)) @ a @ keep @ (0 - np.array([1.0, -2.0, 0.5]))
    np.testing.assert_allclose(np.asarray(state.server)[0], -rate * outer, rtol=1e-12)

"""FedALA against NumPy: weights of the mixture by clipped steps, then local steps from it; means by n_i."""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy_reference import Params, average, backward, cross_entropy, decay, forward, sgd, subtract
from oracle_methods import AVAILABILITY, KINDS, SGD, cohorts, engine
from oracle_setup import (
    HEAD,
    IDS,
    SEED,
    SIZES,
    STEPS,
    Run,
    assert_same,
    classification_problem,
    client_row,
    distance,
    draws,
    filled,
)

from jaxpfl import JaxpflError
from jaxpfl.core.randomness import Purpose

ETA, WEIGHT_STEPS = 6.0, 4
HYPER = SGD | {"lr_weights": ETA}
BATCH = {"full": 100, "uniform": 6}

pytestmark = pytest.mark.usefixtures("float64")


@cache
def got(kind: str) -> Run:
    return engine("fedala", HYPER, kind, weight_steps=WEIGHT_STEPS)


def mixture(theta: Params, head: Params, weights: Params) -> Params:
    return theta | {k: head[k] + (theta[k] - head[k]) * weights[k] for k in HEAD}


def learnt(theta: Params, head: Params, weights: Params, batches, defect: str = "") -> Params:
    """Weights after a step on each mini-batch."""
    for x, y in batches:
        at = mixture(theta, head, weights)
        gradient = backward(at, x, cross_entropy(forward(at, x), y)[1])
        weights = {k: weights[k] - ETA * (theta[k] - head[k]) * gradient[k] for k in HEAD}
        if defect != "no clipping":
            weights = {k: np.clip(w, 0, 1) for k, w in weights.items()}
    return weights


def reference(kind: str, defect: str = "") -> list[tuple[Params, list[Params], list[Params]]]:
    """The global model, the clients' heads and their weights after each round."""
    theta = got(kind).states[0].server
    heads = [{k: theta[k] for k in HEAD}] * len(SIZES)
    weights = [{k: np.ones_like(theta[k]) for k in HEAD}] * len(SIZES)
    seen, history = [0] * len(SIZES), []
    for r, cohort in enumerate(cohorts(kind)):
        changes = []
        for i in cohort:
            limit = int(AVAILABILITY[kind].step_limit(jax.random.key(SEED), jnp.int32(r), jnp.int32(IDS[i]), STEPS))

            def given(steps: int, i: int = i, limit: int = limit):
                drawn = draws(classification_problem(), i, Purpose.BATCHES, BATCH[kind], steps, seen[i])
                return drawn[: min(limit, steps)]

            if defect != "weights stay":
                weights[i] = learnt(theta, heads[i], weights[i], given(WEIGHT_STEPS), defect)
            start = theta if defect == "starts from the global model" else mixture(theta, heads[i], weights[i])
            end, _ = sgd(start, given(STEPS), SGD["lr"] * decay(SGD, r, STEPS), SGD["weight_decay"])
            changes.append(subtract(end, start if defect == "change from the mixture" else theta))
            heads[i], seen[i] = {k: end[k] for k in HEAD}, seen[i] + 1
        theta = average(theta, changes, [SIZES[i] for i in cohort])
        history.append((theta, list(heads), list(weights)))
    return history


def of_engine(kind: str) -> list[tuple[Params, list[Params], list[Params]]]:
    return [
        (
            state.server,
            [filled(client_row(state.clients[0].head, i)) for i in range(len(SIZES))],
            [filled(client_row(state.clients[0].weights, i)) for i in range(len(SIZES))],
        )
        for state in got(kind).states[1:]
    ]


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_rounds(kind):
    assert_same(of_engine(kind), reference(kind))


@pytest.mark.slow
def test_some_weights_are_inside_and_some_at_a_bound():
    weights = np.concatenate([w["w2"].ravel() for w in reference("uniform")[-1][2]])
    assert (weights == 0).any()
    assert ((weights > 0) & (weights < 1)).any()


@pytest.mark.slow
@pytest.mark.parametrize(
    "defect", ["no clipping", "weights stay", "starts from the global model", "change from the mixture"]
)
def test_a_defect_would_be_seen(defect):
    assert distance(of_engine("uniform")[-1], reference("uniform", defect)[-1]) > 1e-3


def test_the_personalised_model_is_mixed_anew():
    run, (theta, heads, weights) = got("uniform"), reference("uniform")[-1]
    models = run.simulation.personal_models(run.state)
    for i in range(len(SIZES)):
        given = draws(classification_problem(), i, Purpose.PERSONALIZE_BATCHES, BATCH["uniform"], WEIGHT_STEPS, 0)
        want = mixture(theta, heads[i], learnt(theta, heads[i], weights[i], given))
        assert_same(jax.tree.map(lambda a, i=i: a[0, i], models), want)


def test_a_round_has_steps_on_the_weights():
    with pytest.raises(JaxpflError, match=r"^fedala.weight_steps must be >= 1, got 0$"):
        engine("fedala", HYPER, "full", weight_steps=0)

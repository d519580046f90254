"""FedBABU against NumPy: the head never moves, bodies are averaged by n_i, and fine-tuning moves what it says."""

from functools import cache

import jax
import numpy as np
import pytest
from numpy_reference import Params, average, decay, sgd, subtract
from oracle_methods import KINDS, ROUNDS, SGD, batches, cohorts, engine
from oracle_setup import (
    HEAD,
    SIZES,
    STEPS,
    Run,
    assert_same,
    classification_problem,
    client_row,
    distance,
    draws,
    participation,
    simulation,
)

from jaxpfl import JaxpflError
from jaxpfl.core.randomness import Purpose

HYPER = SGD | {"fine_tune_factor": 0.3}
DEFECTS = ("head steps too", "uniform mean")
TUNED = 4

pytestmark = pytest.mark.usefixtures("float64")


@cache
def got(kind: str) -> Run:
    return engine("fedbabu", SGD, kind, fine_tune_steps=TUNED)


def whole(state) -> Params:
    """Parameters of the server's two halves."""
    return {name: leaf for half in state for name, leaf in half.items() if leaf is not None}


def stepped(params: Params, given, rate: float, moving) -> tuple[Params, float]:
    """Steps of SGD on some parameters, one batch at a time."""
    losses = []
    for batch in given:
        new, loss = sgd(params, [batch], rate, SGD["weight_decay"])
        params = params | {k: new[k] for k in moving}
        losses.append(loss)
    return params, float(np.mean(losses))


def reference(kind: str, defect: str = "") -> list[tuple[Params, float]]:
    """The global model and the training loss after each round."""
    model = whole(got(kind).states[0].server)
    body = [k for k in model if k not in HEAD]
    moving = list(model) if defect == "head steps too" else body
    seen, history = [0] * len(SIZES), []
    for r, cohort in enumerate(cohorts(kind)):
        changes, losses = [], []
        for i in cohort:
            rate = SGD["lr"] * decay(SGD, r, STEPS)
            end, loss = stepped(model, batches(kind, i, seen[i], r), rate, moving)
            changes.append(subtract({k: end[k] for k in body}, model))
            losses.append(loss)
            seen[i] += 1
        weights = [1.0 if defect == "uniform mean" else SIZES[i] for i in cohort]
        model = model | average({k: model[k] for k in body}, changes, weights)
        history.append((model, float(np.mean(losses))))
    return history


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_rounds(kind):
    for state, (model, _) in zip(got(kind).states[1:], reference(kind), strict=True):
        assert_same(whole(state.server), model)
    np.testing.assert_allclose(got(kind).history["train_loss"], [loss for _, loss in reference(kind)], rtol=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("defect", DEFECTS)
def test_a_defect_would_be_seen(defect):
    assert distance(whole(got("uniform").states[-1].server), reference("uniform", defect)[-1][0]) > 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("part", ["all", "head", "body"])
def test_fine_tuning_moves_that_part(part):
    federation, batch = classification_problem(), 6
    made = simulation(
        "fedbabu",
        federation,
        HYPER,
        cohort=participation("uniform"),
        batch_size=batch,
        fine_tune_steps=TUNED,
        fine_tune=part,
    )
    state, _ = made.advance(made.init([17]), ROUNDS)
    models, start = made.personal_models(state), whole(jax.tree.map(lambda a: a[0], state.server))
    moving = {"all": list(start), "head": HEAD, "body": [k for k in start if k not in HEAD]}[part]
    for i in range(len(SIZES)):
        given = draws(federation, i, Purpose.PERSONALIZE_BATCHES, batch, TUNED, 0)
        rate = HYPER["fine_tune_factor"] * SGD["lr"] * decay(SGD, ROUNDS - 1, STEPS)
        want, _ = stepped(start, given, rate, moving)
        assert_same(client_row(jax.tree.map(lambda a: a[0], models), i), want)


def test_parts_that_are_none_are_refused():
    with pytest.raises(JaxpflError, match=r"unknown fedbabu.fine_tune 'heads': did you mean 'head'"):
        simulation("fedbabu", classification_problem(), SGD, fine_tune="heads")
    with pytest.raises(JaxpflError, match=r"^fedbabu.fine_tune_steps must be >= 0, got -1$"):
        simulation("fedbabu", classification_problem(), SGD, fine_tune_steps=-1)

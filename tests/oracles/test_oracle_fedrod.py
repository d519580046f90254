"""FedROD against NumPy: the generic model on the balanced softmax, the personal head on what that leaves."""

from functools import cache

import jax
import numpy as np
import pytest
from numpy_reference import Params, Round, average, backward, cross_entropy, decay, forward, step, subtract
from oracle_methods import KINDS, SGD, batches, cohorts, difference, engine
from oracle_setup import (
    CLASSES,
    HEAD,
    SIZES,
    STEPS,
    Run,
    assert_same,
    classification_problem,
    client_row,
    clients,
    filled,
    perceptron,
    run,
    simulation,
)

from jaxpfl.models.base import smoothed_cross_entropy

pytestmark = pytest.mark.usefixtures("float64")


@cache
def got(kind: str) -> Run:
    made = engine("fedrod", SGD, kind)
    return made._replace(states=[state._replace(clients=(filled(state.clients[0]),)) for state in made.states])


def log_counts(federation) -> list[np.ndarray]:
    with np.errstate(divide="ignore"):
        return [np.log(np.bincount(y, minlength=CLASSES)) for _, y in clients(federation.train)]


def balanced(logits: np.ndarray, prior: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Gradient of the balanced softmax's loss by the logits: of the classes that the client has, zero for others."""
    (present,) = np.nonzero(np.isfinite(prior))
    gradient = np.zeros_like(logits)
    gradient[:, present] = cross_entropy(logits[:, present] + prior[present], np.searchsorted(present, y))[1]
    return gradient


def worked(g: Params, head: Params, given, prior, rate: float, defect: str = "") -> tuple[Params, Params, float]:
    """A client's steps: the generic model, its own head, and the mean of the personal losses."""
    losses = []
    for x, y in given:
        logits, both = forward(g, x), g | head
        loss, d_both = cross_entropy(logits + forward(both, x), y)
        by_head = backward(both, x, d_both)
        by_generic = backward(g, x, balanced(logits, prior, y))
        if defect == "the personal loss trains the body":
            by_generic = {k: by_generic[k] + (0 if k in HEAD else by_head[k]) for k in g}
        g = step(g, by_generic, rate, SGD["weight_decay"])
        head = step(head, by_head, rate, SGD["weight_decay"])
        losses.append(loss)
    return g, head, float(np.mean(losses))


def reference(kind: str, defect: str = "") -> list[Round]:
    generic: Params = got(kind).states[0].server
    own = [{k: np.zeros_like(generic[k]) for k in HEAD}] * len(SIZES)
    priors, seen, history = log_counts(classification_problem()), [0] * len(SIZES), []
    for r, cohort in enumerate(cohorts(kind)):
        rate, changes, losses = SGD["lr"] * decay(SGD, r, STEPS), [], []
        for i in cohort:
            prior = np.zeros(CLASSES) if defect == "plain softmax" else priors[i]
            g, own[i], loss = worked(generic, own[i], batches(kind, i, seen[i], r), prior, rate, defect)
            changes.append(subtract(g, generic))
            losses.append(loss)
            seen[i] += 1
        generic = average(generic, changes, [1.0 if defect == "uniform mean" else SIZES[i] for i in cohort])
        history.append(Round(generic, list(own), list(seen), {"train_loss": float(np.mean(losses))}))
    return history


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_rounds(kind):
    want = reference(kind)
    for state, expected in zip(got(kind).states[1:], want, strict=True):
        assert_same(state.server, expected.server)
        for i in range(len(SIZES)):
            assert_same(client_row(state.clients[0], i), expected.clients[i])
    losses = [one.metrics["train_loss"] for one in want]
    np.testing.assert_allclose(got(kind).history["train_loss"], losses, rtol=1e-9)


@pytest.mark.slow
def test_classes_that_a_client_lacks_are_left_out():
    whole = classification_problem()
    federation = whole._replace(train=whole.train.with_examples(y=np.minimum(whole.train.examples.y, CLASSES - 2)))
    priors = log_counts(federation)
    assert all(np.isneginf(prior[-1]) for prior in priors)
    made = run(simulation("fedrod", federation, SGD), 1)
    start = made.states[0].server
    nothing = {k: np.zeros_like(start[k]) for k in HEAD}
    ends = [
        worked(start, nothing, [batch] * STEPS, prior, SGD["lr"])
        for batch, prior in zip(clients(federation.train), priors, strict=True)
    ]
    assert_same(made.states[1].server, average(start, [subtract(g, start) for g, _, _ in ends], SIZES))
    for i, (_, head, _) in enumerate(ends):
        assert_same(filled(client_row(made.states[1].clients[0], i)), head)


def test_a_smoothed_target_keeps_them_finite():
    whole = classification_problem()
    federation = whole._replace(train=whole.train.with_examples(y=np.minimum(whole.train.examples.y, CLASSES - 2)))
    task = perceptron()._replace(loss=smoothed_cross_entropy(0.2))
    made = run(simulation("fedrod", federation, SGD, task=task), 2)
    assert not made.states[-1].diverged.any()


@pytest.mark.slow
@pytest.mark.parametrize("defect", ["plain softmax", "the personal loss trains the body", "uniform mean"])
def test_a_defect_would_be_seen(defect):
    assert difference(got("uniform"), reference("uniform", defect)) > 1e-3


def test_predictions_add_both_heads():
    run, want = got("uniform"), reference("uniform")[-1]
    found = run.simulation.evaluate(run.state)
    for i, (x, y) in enumerate(clients(classification_problem().test)):
        generic = forward(want.server, x)
        scores = {"after": generic + forward(want.server | want.clients[i], x), "global": generic}
        for name, logits in scores.items():
            got_loss = jax.tree.map(lambda a, i=i: a[0, i], found[name])["loss"]
            np.testing.assert_allclose(got_loss, cross_entropy(logits, y)[0], rtol=1e-9)

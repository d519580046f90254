"""FedRep by the engine in float64 against NumPy: steps on the head, then on the body; bodies averaged uniformly."""

from functools import cache

import jax
import numpy as np
import pytest
from numpy_reference import average, backward, cross_entropy, decay, forward, step, subtract
from oracle_setup import (
    SIZES,
    Run,
    assert_same,
    classification_problem,
    client_row,
    distance,
    draws,
    filled,
    participation,
    perceptron,
    run,
    simulation,
    world,
)

from jaxpfl import METHODS, JaxpflError, LocalWork
from jaxpfl.core.participation import availability
from jaxpfl.core.randomness import Purpose

ROUNDS, BATCH = 4, 6
HYPER = {"lr": 0.4, "lr_decay": 0.7, "decay_every": 4.0, "weight_decay": 0.02}
COUNTS = {"default": {}, "3 and 2": {"head_steps": 3, "body_steps": 2}, "2 of the body": {"body_steps": 2}}
STEPS_OF = {"default": (1, 2), "3 and 2": (3, 2), "2 of the body": (1, 2)}
DEFECTS = ("body first", "joint steps", "body's gradient at the old head", "mean by n_i")


@pytest.fixture(autouse=True)
def float64():
    with jax.enable_x64(True):
        yield


@cache
def engine(counts: str) -> Run:
    made = simulation(
        "fedrep",
        classification_problem(),
        HYPER,
        cohort=participation("uniform"),
        batch_size=BATCH,
        **COUNTS[counts],
    )
    return run(made, ROUNDS)


def alternate(body: dict, head: dict, batches: list, of_head: int, rate: float, defect: str = "") -> tuple[dict, dict]:
    """``h <- h - eta grad_h f(phi, h)``, then ``phi <- phi - eta grad_phi f(phi, h)``: the new body and head."""
    first = head
    for t, (x, y) in enumerate(batches):
        on_head = t < of_head
        if defect == "body first":
            on_head = t >= len(batches) - of_head
        at = body | (first if defect == "body's gradient at the old head" and not on_head else head)
        gradient = backward(at, x, cross_entropy(forward(at, x), y)[1])
        new = step(body | head, gradient, rate, HYPER["weight_decay"])
        if on_head or defect == "joint steps":
            head = {k: new[k] for k in head}
        if not on_head or defect == "joint steps":
            body = {k: new[k] for k in body}
    return body, head


def reference(counts: str, defect: str = "") -> list:
    of_head, of_body = STEPS_OF[counts]
    problem, total = classification_problem(), of_head + of_body
    start = engine(counts).states[0]
    given = world(problem, participation("uniform"), BATCH, ROUNDS)
    body = filled(start.server)
    heads = [filled(client_row(start.clients[0], i)) for i in range(len(SIZES))]
    seen, history = [0] * len(SIZES), []
    for r, cohort in enumerate(given.cohorts):
        changes = []
        for i in cohort:
            batches = draws(problem, i, Purpose.BATCHES, BATCH, total, seen[i])
            rate = HYPER["lr"] * decay(HYPER, r, total)
            new, heads[i] = alternate(body, heads[i], batches, of_head, rate, defect)
            changes.append(subtract(new, body))
            seen[i] += 1
        body = average(body, changes, [given.sizes[i] if defect == "mean by n_i" else 1.0 for i in cohort])
        history.append((body, list(heads)))
    return history


def of_engine(counts: str) -> list:
    rows = range(len(SIZES))
    states = engine(counts).states[1:]
    return [(filled(s.server), [filled(client_row(s.clients[0], i)) for i in rows]) for s in states]


@pytest.mark.parametrize(
    "counts", ["default", *(pytest.param(c, marks=pytest.mark.slow) for c in ("3 and 2", "2 of the body"))]
)
def test_rounds(counts):
    assert_same(of_engine(counts), reference(counts))


@pytest.mark.parametrize("defect", DEFECTS)
def test_a_defect_would_be_seen(defect):
    assert distance(of_engine("3 and 2"), reference("3 and 2", defect)) > 1e-3


@pytest.mark.slow
def test_a_straggler_ends_its_round_early():
    """Whoever takes s steps takes the first s of the sequence: fewer than the head's leave the body as it is."""
    slow = {"availability": availability(stragglers=1.0, same_stragglers=True)}
    problem, of_head, of_body = classification_problem(), 3, 2
    made = simulation("fedrep", problem, HYPER, batch_size=BATCH, head_steps=of_head, body_steps=of_body, engine=slow)
    start, end = run(made, 1).states
    taken, body, changes = end.counts.steps, filled(start.server), []
    assert taken.min() < of_head < taken.max()
    for i in range(len(SIZES)):
        batches = draws(problem, i, Purpose.BATCHES, BATCH, of_head + of_body, 0)[: taken[i]]
        new, head = alternate(body, filled(client_row(start.clients[0], i)), batches, of_head, HYPER["lr"])
        assert_same(filled(client_row(end.clients[0], i)), head)
        changes.append(subtract(new, body))
    assert_same(filled(end.server), average(body, changes, [1.0] * len(SIZES)))


@pytest.mark.parametrize(("steps", "options"), [(1, {}), (3, {"head_steps": 3}), (3, {"body_steps": 4})])
def test_both_must_step(steps, options):
    work = LocalWork(np.array(SIZES), steps, BATCH)
    with pytest.raises(JaxpflError, match="at least one step on the head and one on the body"):
        METHODS["fedrep"].build(perceptron(), work, **options)

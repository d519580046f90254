"""FedAMP against NumPy: cloud models as printed, of pairs of clients, and proximal steps near them."""

from functools import cache

import jax
import numpy as np
import pytest
from numpy_reference import Params, Round, backward, cross_entropy, decay, forward, step
from oracle_methods import KINDS, SGD, batches, cohorts, engine, scores
from oracle_setup import SIZES, STEPS, Run, assert_same, client_row, distance, on_host

from jaxpfl import METHODS
from jaxpfl.algorithms.fedamp import clouds

HYPER = SGD | {"alpha": 0.4, "sigma": 2.5, "lam": 0.7}
M = len(SIZES)

pytestmark = pytest.mark.usefixtures("float64")


@cache
def got(kind: str) -> Run:
    return engine("fedamp", HYPER, kind)


def cloud(models: list[Params], i: int, hp=HYPER, defect: str = "") -> Params:
    xi = []
    for j, other in enumerate(models):
        square = sum(((models[i][k] - other[k]) ** 2).sum() for k in other)
        scale = hp["alpha"] if defect == "A for its derivative" else hp["alpha"] / hp["sigma"]
        xi.append(0.0 if i == j else scale * np.exp(-square / hp["sigma"]))
    if sum(xi) > 1:
        xi = [one / sum(xi) for one in xi]
    xi[i] = 1 - sum(xi)
    return {k: sum(one * model[k] for one, model in zip(xi, models, strict=True)) for k in models[i]}


def reference(kind: str, defect: str = "") -> list[Round]:
    models = [client_row(got(kind).states[0].clients[0], i) for i in range(M)]
    seen, history = [0] * M, []
    for r, cohort in enumerate(cohorts(kind)):
        rate, losses, before = HYPER["lr"] * decay(HYPER, r, STEPS), [], list(models)
        for i in cohort:
            u, mine = cloud(before, i, defect=defect), []
            w = u if defect == "steps from the cloud model" else models[i]
            pull = HYPER["lam"] / (1 if defect == "alpha left out of the pull" else HYPER["alpha"])
            for x, y in batches(kind, i, seen[i], r):
                loss, d_logits = cross_entropy(forward(w, x), y)
                gradient = backward(w, x, d_logits)
                w = step(w, {k: gradient[k] + pull * (w[k] - u[k]) for k in w}, rate, HYPER["weight_decay"])
                mine.append(loss)
            models[i], seen[i] = w, seen[i] + 1
            losses.append(np.mean(mine))
        history.append(Round(list(models), list(models), list(seen), {"train_loss": float(np.mean(losses))}))
    return history


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_rounds(kind):
    want, made = reference(kind), got(kind)
    for state, expected in zip(made.states[1:], want, strict=True):
        for i in range(M):
            assert_same(client_row(state.server.models, i), expected.server[i])
            assert_same(client_row(state.clients[0], i), expected.clients[i])
    np.testing.assert_allclose(made.history["train_loss"], [one.metrics["train_loss"] for one in want], rtol=1e-9)
    found = on_host(made.simulation.evaluate(made.state))
    assert "global" not in found
    np.testing.assert_allclose(found["after"]["loss"], scores(want[-1].clients)["loss"], rtol=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("defect", ["A for its derivative", "steps from the cloud model", "alpha left out of the pull"])
def test_a_defect_would_be_seen(defect):
    want = reference("uniform", defect)[-1].clients
    assert max(distance(client_row(got("uniform").states[-1].clients[0], i), want[i]) for i in range(M)) > 1e-3


@pytest.mark.parametrize("scale", [1e-3, 0.5, 3.0])
def test_clouds(scale):
    """Nearly equal models, whose weights sum to more than one, to models apart."""
    rng = np.random.default_rng(3)
    models = [{"a": 5 + scale * rng.normal(size=(2, 3)), "b": scale * rng.normal(size=2)} for _ in range(M)]
    given = HYPER | {"alpha": 2.0}
    hp = METHODS["fedamp"].hyper.replace(**given)
    made = clouds(hp, jax.tree.map(lambda *leaves: np.stack(leaves), *models))
    for i in range(M):
        assert_same(client_row(made, i), cloud(models, i, given))

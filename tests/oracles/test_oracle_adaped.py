"""AdaPeD against NumPy: planted mistakes in Algorithm 2, the gate, Algorithm 7, gradients, and psi at rest."""

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from numpy_reference import (
    ADAPED_DEFECTS,
    adaped_step,
    averaged,
    backward,
    cross_entropy,
    distillation,
    forward,
    run_adaped,
    run_rounds,
    step,
)
from oracle import ADAPED, CLASSES, SETTINGS, STEPS, M, Oracle, cases, classification_problem, client_row, clients

from jaxpfl import ExecutionPlan
from jaxpfl.priors.distillation import divergence

CAP, ROUNDS = 2, 8
TRUSTS: list[float] = []
"""The gate's factors in the last run of its formula."""


def gated(world, hp, server, own, defect=""):
    """theta's pull is multiplied by ``max(1 - CE(mu) / log K, 0)``; nothing else changes."""
    TRUSTS.clear()

    def work(server, theta, turn):
        mu, psi = server["mu"], server["psi"]
        for x, y in turn.batches:
            TRUSTS.append(max(1 - cross_entropy(forward(mu, x), y)[0] / np.log(CLASSES), 0))
            pull = distillation(forward(mu, x), forward(theta, x))[2] / (2 * psi)
            gradient = backward(theta, x, cross_entropy(forward(theta, x), y)[1] + TRUSTS[-1] * pull)
            theta = step(theta, gradient, hp["lr"] * turn.factor, hp["weight_decay"])
            # The rest of the step starts from theta+: a rate of zero leaves it where it is.
            _, mu, psi, _, _ = adaped_step(theta, mu, psi, (x, y), hp | {"lr": 0.0}, turn.factor)
        return theta, {"mu": mu, "psi": psi}, {}

    return run_rounds(world, hp, server, own, work, averaged([1.0] * M))


def idle(world, hp, server, own, defect=""):
    return run_adaped(world, hp, server, own, defect, idle_cap=CAP)


ORACLES = {
    "planted": Oracle(
        "adaped",
        ADAPED | {"psi_floor": 0.55},
        run_adaped,
        ADAPED_DEFECTS,
        models=lambda last: {"after": last.clients, "mu": last.server["mu"]},
        rounds=3,
        seen=1e-5,
        kinds=("full",),
        plain=True,
    ),
    "gate": Oracle(
        "adaped",
        ADAPED | {"lr_global": 0.9, "psi_init": 0.8, "c": 2.0},
        gated,
        options={"gate": True},
        models=lambda last: {"after": last.clients, "mu": last.server["mu"]},
        kinds=("full",),
        plain=True,
    ),
    "idle": Oracle(
        "adaped",
        ADAPED,
        idle,
        options={"idle_rounds": CAP},
        models=lambda last: {"after": [own["theta"] for own in last.clients], "mu": last.server["mu"]},
        rounds=ROUNDS,
        kinds=("reliable",),
    ),
}


@pytest.mark.parametrize(("name", "kind"), cases(ORACLES))
def test_rounds(name, kind):
    ORACLES[name].check(kind)
    if name == "gate":
        assert min(TRUSTS) == 0 < max(TRUSTS)


# --- Algorithm 7 ----------------------------------------------------------------------------------


@pytest.mark.slow
def test_counts_and_cost_of_idle_clients():
    """Every turn costs tau client-steps, in the cohort or alone; the run has every case."""
    got, idled, taken, streak = ORACLES["idle"].got("reliable"), *(np.zeros(M, int) for _ in range(3))
    found, seen = set(), np.zeros(M, bool)
    for r, cohort in enumerate(oracle.world(SETTINGS["reliable"], ROUNDS).cohorts):
        inside = np.isin(range(M), cohort)
        alone = ~inside & (streak < CAP)
        found |= {("inside", bool(after)) for after in streak[inside]}
        found |= {("alone", bool(received)) for received in seen[alone]}
        found |= {("at the cap", True) for _ in np.flatnonzero(~inside & ~alone)}
        idled, taken, streak, seen = idled + alone, taken + inside, np.where(inside, 0, streak + alone), seen | inside
        state = got.states[r + 1]
        np.testing.assert_array_equal(state.counts.idle_rounds, idled)
        np.testing.assert_array_equal(state.counts.idle_streak, streak)
        np.testing.assert_array_equal(state.counts.steps, STEPS * (idled + taken))
        np.testing.assert_array_equal(got.history["idle"][r], alone.sum())
    assert len(found) == 5


@pytest.mark.slow
def test_full_participation_leaves_nobody_idle():
    got = oracle.run_method("adaped", ADAPED, rounds=2, idle_rounds=CAP)
    assert "idle" not in got.history
    np.testing.assert_array_equal(got.states[-1].counts.idle_rounds, 0)


# --- gradients ------------------------------------------------------------------------------------

C = 5.0


@pytest.fixture
def logits():
    """Teacher and student, [7, 4]; the last rows are far apart."""
    rng = np.random.default_rng(1)
    scale = np.array([1, 1, 1, 1, 3, 10, 30.0])[:, None]
    return scale * rng.normal(size=(7, 4)), scale * rng.normal(size=(7, 4))


def logit_gradients(teacher, student):
    """The library's, by (student, teacher)."""
    by_both = jax.grad(lambda a, b: divergence(b, a).sum(), argnums=(0, 1))
    a, b = by_both(jnp.asarray(student), jnp.asarray(teacher))
    return np.asarray(a), np.asarray(b)


def test_logit_gradients(logits):
    """``d KL / da = q - p`` and ``d KL / db = p (log p - log q - KL)``, p of the teacher; both sum to zero."""
    teacher, student = logits
    p, q = (np.exp(z) / np.exp(z).sum(1, keepdims=True) for z in logits)
    kl = (p * np.log(p / q)).sum(1, keepdims=True)
    d_student, d_teacher = logit_gradients(teacher, student)
    np.testing.assert_allclose(divergence(jnp.asarray(teacher), jnp.asarray(student)), kl[:, 0], rtol=1e-9)
    np.testing.assert_allclose(d_student, q - p, atol=1e-12)
    np.testing.assert_allclose(d_teacher, p * (np.log(p / q) - kl), atol=1e-12)
    for gradient in (d_student, d_teacher):
        assert np.abs(gradient).max() > 0.1
        np.testing.assert_allclose(gradient.sum(1), 0, atol=1e-12)


def test_logits_out_of_range_stay_finite():
    """Probabilities that underflow to 0 leave ``0 log 0 = 0``, not NaN."""
    teacher, student = np.array([[900.0, 0, -900]]), np.array([[-900.0, 0, 900]])
    np.testing.assert_allclose(divergence(jnp.asarray(teacher), jnp.asarray(student)), 1800)
    assert all(np.isfinite(g).all() for g in logit_gradients(teacher, student))


# --- psi at rest ----------------------------------------------------------------------------------


def settled(sizes, psi, floor):
    """psi after many rounds in which nothing else moves, one run for each start and floor, [runs].

    And f_KD(theta_i, mu), [runs, clients]. Then ``psi+ = max(psi - eta3 [1/(2 psi) - c f/(2 psi^2)], floor) = psi``.
    """
    problem, rounds = classification_problem(sizes, (1, 6)[: len(sizes)]), 500
    hp = {"lr": 0.0, "lr_global": 0.0, "weight_decay": 0.0, "lr_psi": 0.5, "c": C}
    hp |= {"psi_init": np.array(psi), "psi_floor": np.array(floor)}
    made = oracle.simulation("adaped", hp, problem=problem, steps=1, plan=ExecutionPlan(rounds_per_call=rounds))
    state = made.init(range(len(psi)))
    apart = [oracle.perceptron().init(jax.random.key(s)) for s in range(30, 30 + len(sizes))]
    thetas = jax.tree.map(lambda *a: jnp.stack([jnp.stack(a)] * len(psi)), *apart)
    end, _ = made.advance(state._replace(clients=(thetas,)), rounds)

    def divergences(mu, own):
        pairs = enumerate(clients(problem.train))
        return [distillation(forward(mu, x), forward(client_row(own, i), x))[0] for i, (x, _) in pairs]

    runs = (client_row((end.server.mu, end.clients[0]), s) for s in range(len(psi)))
    return np.asarray(end.server.psi), np.array([divergences(*one) for one in runs])


@pytest.mark.slow
def test_psi_of_one_client():
    """``1/(2 psi) = c f/(2 psi^2)`` at ``psi* = c f_KD``, from below and above; or the floor, if higher."""
    psi, f = settled((10,), [0.3, 6.0, 3.5], [0.05, 0.05, 3.0])
    np.testing.assert_allclose(psi[:2], C * f[:2, 0], rtol=1e-9)
    assert 0.05 < C * f[2, 0] < 3.0
    assert psi[2] == 3.0


@pytest.mark.slow
def test_psi_of_two_clients():
    """The clients' mean of ``1/(2 psi) - c f_i/(2 psi^2)`` is 0 at ``psi* = c mean_i f_i``, whatever their sizes."""
    (psi,), (f,) = settled((10, 5), [2.0], [0.05])
    np.testing.assert_allclose(psi, C * np.mean(f), rtol=1e-9)
    assert abs(psi / (C * np.average(f, weights=(10, 5))) - 1) > 0.01

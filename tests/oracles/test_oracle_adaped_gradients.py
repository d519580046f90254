"""AdaPeD's gradients, as the library's own steps reveal them, against differences of the paper's objective.

``F(theta, mu, psi) = CE(theta) + log(2 psi) / 2 + c f_KD(theta, mu) / (2 psi)``, f_KD the batch mean of
``KL(softmax(b) || softmax(a))``, a the logits of theta and b those of mu.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy_reference import adaped_objective, distillation, forward
from oracle_setup import classification_problem, clients, perceptron, simulation

from jaxpfl.algorithms.adaped import Shared
from jaxpfl.core.protocol import ClientContext, Message
from jaxpfl.priors.distillation import divergence, scale_gradient

ETA1, ETA2, ETA3, PSI, C, EPS = 0.3, 0.2, 0.01, 0.9, 5.0, 1e-5


@pytest.fixture(autouse=True)
def float64():
    with jax.enable_x64(True):
        yield


@pytest.fixture
def logits() -> tuple[np.ndarray, np.ndarray]:
    """Teacher and student, [7, 4]; the last rows are far apart."""
    rng = np.random.default_rng(1)
    scale = np.array([1, 1, 1, 1, 3, 10, 30.0])[:, None]
    return scale * rng.normal(size=(7, 4)), scale * rng.normal(size=(7, 4))


def logit_gradients(teacher: np.ndarray, student: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The library's, by (student, teacher)."""
    by_both = jax.grad(lambda a, b: divergence(b, a).sum(), argnums=(0, 1))
    a, b = by_both(jnp.asarray(student), jnp.asarray(teacher))
    return np.asarray(a), np.asarray(b)


def test_logit_gradients(logits):
    """``d KL / da = q - p`` and ``d KL / db = p (log p - log q - KL)``, p of the teacher."""
    teacher, student = logits
    p, q = (np.exp(z) / np.exp(z).sum(1, keepdims=True) for z in logits)
    kl = (p * np.log(p / q)).sum(1, keepdims=True)
    d_student, d_teacher = logit_gradients(teacher, student)
    np.testing.assert_allclose(divergence(jnp.asarray(teacher), jnp.asarray(student)), kl[:, 0], rtol=1e-9)
    np.testing.assert_allclose(d_student, q - p, atol=1e-12)
    np.testing.assert_allclose(d_teacher, p * (np.log(p / q) - kl), atol=1e-12)


def test_logit_gradients_by_finite_differences(logits):
    """``(KL(z + eps e_k) - KL(z - eps e_k)) / (2 eps)`` for both arguments."""
    teacher, student = logits

    def kl(b: np.ndarray, a: np.ndarray) -> np.ndarray:
        return np.array([distillation(b[i : i + 1], a[i : i + 1])[0] for i in range(len(a))])

    d_student, d_teacher = logit_gradients(teacher, student)
    for k in range(teacher.shape[1]):
        e = EPS * np.eye(teacher.shape[1])[k]
        by_student = (kl(teacher, student + e) - kl(teacher, student - e)) / (2 * EPS)
        by_teacher = (kl(teacher + e, student) - kl(teacher - e, student)) / (2 * EPS)
        np.testing.assert_allclose(d_student[:, k], by_student, atol=1e-7)
        np.testing.assert_allclose(d_teacher[:, k], by_teacher, atol=1e-7)


def test_logit_gradients_sum_to_zero(logits):
    """``sum_k (q - p)_k = 0 = sum_k p_k (log p_k - log q_k - KL)``: a shift of all logits changes nothing."""
    for gradient in logit_gradients(*logits):
        assert np.abs(gradient).max() > 0.1
        np.testing.assert_allclose(gradient.sum(1), 0, atol=1e-12)


def test_logits_out_of_range_stay_finite():
    """Probabilities that underflow to 0 leave ``0 log 0 = 0``, not NaN."""
    teacher, student = np.array([[900.0, 0, -900]]), np.array([[-900.0, 0, 900]])
    np.testing.assert_allclose(divergence(jnp.asarray(teacher), jnp.asarray(student)), 1800)
    assert all(np.isfinite(g).all() for g in logit_gradients(teacher, student))


def test_scale_gradient_by_finite_differences():
    """``d/dpsi [log(2 psi)/2 + c f/(2 psi)] = 1/(2 psi) - c f/(2 psi^2)``."""
    for psi, f, c in [(0.5, 0.3, 1.0), (3.5, 2.0, 5.0), (0.7, 0.0, 5.0)]:
        up, down = (np.log(2 * s) / 2 + c * f / (2 * s) for s in (psi + EPS, psi - EPS))
        got = scale_gradient(*map(np.float64, (psi, f, c)))
        np.testing.assert_allclose(got, (up - down) / (2 * EPS), rtol=1e-8)


@pytest.fixture(scope="module")
def one_step():
    """theta, mu, the library's (theta+, mu+, psi+) after one full-batch step, and the client's examples."""
    with jax.enable_x64(True):
        hp = {"lr": ETA1, "lr_global": ETA2, "lr_psi": ETA3, "psi_init": PSI, "c": C}
        hp |= {"weight_decay": 0.0, "psi_floor": 1e-9}
        problem = classification_problem(sizes=(10,), ids=(2,))
        made = simulation("adaped", problem, hp, steps=1)
        zero = jnp.int32(0)
        ctx = ClientContext(zero, jnp.int32(2), zero, 1, jax.random.key(1))
        theta, mu = (perceptron().init(jax.random.key(s)) for s in (8, 9))
        message, splits = Shared(mu, jnp.float64(PSI)), problem.splits.client(0)
        update = jax.jit(made.algorithm.clients[0].update)
        new, upload, _ = update(jax.random.key(3), made.hp, ctx, Message(message), theta, splits)
        theta, mu, new, change = jax.tree.map(np.asarray, (theta, mu, new, upload.total))
        assert upload.weight == 1
        end = {k: mu[k] + change.mu[k] for k in mu}
        return theta, mu, new, end, PSI + float(change.psi), clients(problem.train)[0]


def differences(f, params: dict) -> dict:
    """Central differences of a function of parameters."""
    gradient = {}
    for name, w in params.items():
        gradient[name] = np.empty_like(w)
        for j in np.ndindex(w.shape):
            e = np.zeros_like(w)
            e[j] = EPS
            ends = f(params | {name: w + e}), f(params | {name: w - e})
            gradient[name][j] = (ends[0] - ends[1]) / (2 * EPS)
    return gradient


def test_theta_gradient(one_step):
    """``(theta - theta+) / eta1 = grad_theta [CE + f/(2 psi)]`` at the old mu and psi."""
    theta, mu, new, _, _, (x, y) = one_step
    want = differences(lambda w: adaped_objective(w, mu, PSI, x, y), theta)
    for k in theta:
        np.testing.assert_allclose((theta[k] - new[k]) / ETA1, want[k], atol=1e-8)


def test_mu_gradient(one_step):
    """``(mu - mu+) / eta2 = grad_mu f(theta+, mu) / (2 psi)``: at theta+, the old psi, no cross-entropy."""
    _, mu, new, end, _, (x, _) = one_step
    want = differences(lambda w: distillation(forward(w, x), forward(new, x))[0] / (2 * PSI), mu)
    assert max(np.abs(g).max() for g in want.values()) > 1e-3
    for k in mu:
        np.testing.assert_allclose((mu[k] - end[k]) / ETA2, want[k], atol=1e-8)


def test_psi_gradient(one_step):
    """``(psi - psi+) / eta3 = d/dpsi [log(2 psi)/2 + c f(theta+, mu+)/(2 psi)]`` at theta+ and mu+."""
    _, _, new, end, psi, (x, y) = one_step
    up, down = (adaped_objective(new, end, s, x, y, c=C) for s in (PSI + EPS, PSI - EPS))
    np.testing.assert_allclose((PSI - psi) / ETA3, (up - down) / (2 * EPS), rtol=1e-7)

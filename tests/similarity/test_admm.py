"""The network lasso's step against scipy and against its limits; warm starts; graphs without edges, and duplicates."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import optimize

from jaxpfl.similarity import admm, graphs
from jaxpfl.support.errors import JaxpflError

NORMS = [1, 2, math.inf]
N, DIM = 7, 3
PAIRS = [(0, 1), (1, 2), (0, 2), (2, 3), (3, 4), (4, 5), (3, 5)]  # node 6 has no neighbour
GRAPH = graphs.from_edges(PAIRS, N)


pytestmark = pytest.mark.usefixtures("x64")


def data(seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(N, DIM)) + 5


@functools.partial(jax.jit, static_argnames=("p", "dense", "most"))
def fuse(y, strength, p, rho=1.0, warm=None, dense=None, tolerance=1e-10, most=20_000):
    how = {"rho": rho, "warm": warm, "dense": dense, "tolerance": tolerance, "most": most}
    return admm.fuse(GRAPH, y, strength, p, **how)


def incidence() -> np.ndarray:
    q = np.zeros((N, len(PAIRS)))
    for e, (i, j) in enumerate(zip(GRAPH.first, GRAPH.second, strict=True)):
        q[i, e], q[j, e] = 1, -1
    return q


def by_solver(y: np.ndarray, s: float, p: float) -> np.ndarray:
    """The dual problem: z = y - Q v with v_e in the dual ball of radius s, |y - Q v|^2 least."""
    q, size = incidence(), (len(PAIRS), DIM)
    flat = math.prod(size)
    # The l1 ball is written with the positive and the negative part of v.
    parts = 2 if p == math.inf else 1

    def read(a):
        return (a[:flat] - a[flat:] if parts == 2 else a).reshape(size)

    def objective(a):
        return ((y - q @ read(a)) ** 2).sum() / 2

    def slope(a):
        g = -(q.T @ (y - q @ read(a))).reshape(-1)
        return np.concatenate([g, -g]) if parts == 2 else g

    if p == 1:
        bounds, limits = [(-s, s)] * flat, []
    elif p == 2:
        bounds, limits = None, [{"type": "ineq", "fun": lambda a: s**2 - (read(a) ** 2).sum(axis=1)}]
    else:
        total = np.kron(np.ones(2), np.kron(np.eye(len(PAIRS)), np.ones(DIM)))
        bounds, limits = (
            [(0, None)] * (2 * flat),
            [{"type": "ineq", "fun": lambda a: s - total @ a, "jac": lambda a: -total}],
        )
    options = {"ftol": 1e-16, "maxiter": 2000}
    start = np.zeros(parts * flat)
    found = optimize.minimize(
        objective, start, jac=slope, bounds=bounds, constraints=limits, method="SLSQP", options=options
    )
    return y - q @ read(found.x)


def minimand(y: np.ndarray, z: np.ndarray, s: float, p: float) -> float:
    return ((z - y) ** 2).sum() / 2 + s * sum(np.linalg.norm(z[i] - z[j], p) for i, j in PAIRS)


@pytest.mark.parametrize("p", NORMS)
def test_it_is_the_solvers_minimum(p):
    y, s = data(), 0.4
    got = fuse(y, s, p)
    assert max(got.primal, got.dual) <= 1e-10
    want = by_solver(y, s, p)
    np.testing.assert_allclose(got.z, want, atol=1e-6)
    assert minimand(y, np.asarray(got.z), s, p) <= minimand(y, want, s, p) + 1e-9


def test_conjugate_gradients_give_what_the_factored_matrix_gives():
    y = data(1)
    np.testing.assert_allclose(fuse(y, 0.3, 2, dense=False).z, fuse(y, 0.3, 2).z, atol=1e-8)


@pytest.mark.parametrize("p", NORMS)
def test_the_number_of_steps_alone_depends_on_rho(p):
    y = data(2)
    ends = [fuse(y, 0.3, p, rho=rho) for rho in (0.2, 1.0, 5.0)]
    for end in ends[1:]:
        np.testing.assert_allclose(end.z, ends[0].z, atol=1e-7)
    assert len({int(end.steps) for end in ends}) == 3


@pytest.mark.parametrize("p", NORMS)
def test_without_strength_each_is_alone_and_with_much_all_are_their_components_mean(p):
    y = data(3)
    np.testing.assert_allclose(fuse(y, 0.0, p).z, y, atol=1e-12)
    means = np.concatenate([np.tile(y[:6].mean(axis=0), (6, 1)), y[6:]])
    for s in (100.0, np.inf):
        end = fuse(y, s, p)
        np.testing.assert_allclose(end.z, means, atol=1e-8)
        np.testing.assert_array_equal(graphs.components(GRAPH, (end.warm.w == 0).all(axis=1)), [0] * 6 + [1])


def test_the_prints_step():
    """Z of eta, lam, G and N is that of y = Z - eta G / N and s = eta lam: no direction lowers the printed minimand."""
    rng, z, g, eta, lam = np.random.default_rng(4), data(4), data(5), 0.3, 0.6

    def printed(new):
        fusion = lam * sum(np.linalg.norm(new[i] - new[j]) for i, j in PAIRS)
        return (g * new).sum() / N + ((new - z) ** 2).sum() / (2 * eta) + fusion

    end = np.asarray(fuse(z - eta * g / N, eta * lam, 2).z)
    for size in (1e-4, 1e-2, 1):
        for _ in range(200):
            assert printed(end) <= printed(end + size * rng.normal(size=end.shape))


def test_a_warm_start_saves_steps():
    y = data(6)
    first = fuse(y, 0.3, 2, tolerance=1e-6)
    again = fuse(y, 0.3, 2, warm=first.warm, tolerance=1e-6)
    near = fuse(y + 1e-3 * data(7), 0.3, 2, warm=first.warm, tolerance=1e-6)
    assert int(again.steps) <= 2 < int(near.steps) < int(fuse(y, 0.3, 2, tolerance=1e-6).steps)


def test_it_stops_at_the_cap_and_says_how_far_it_was():
    end = fuse(data(8), 0.3, 2, most=3)
    assert int(end.steps) == 3
    here = np.asarray(end.warm.w) - np.asarray(graphs.differences(GRAPH, end.z))
    y = data(8)
    assert float(end.primal) == pytest.approx(np.linalg.norm(here) / np.linalg.norm(y - y.mean(axis=0)), rel=1e-6)
    assert float(end.primal) > 1e-10


@pytest.mark.parametrize("dense", [True, False])
def test_one_client_no_edges_and_duplicates(dense):
    y = jnp.asarray(data(9))
    for graph in (graphs.from_edges([], 1), graphs.from_edges([], N)):
        end = jax.jit(lambda y, graph=graph: admm.fuse(graph, y, 0.7, 2, dense=dense))(y[: graph.nodes])
        np.testing.assert_allclose(end.z, y[: graph.nodes], rtol=1e-12)
        assert int(end.steps) == 1
    same = jnp.tile(y[:1], (N, 1))
    end = fuse(same, 0.7, 2, dense=dense, tolerance=1e-5)
    np.testing.assert_allclose(end.z, same, rtol=1e-12)
    assert int(end.steps) < 5


def test_planted_clusters_are_read_off():
    """Two groups, of which neighbours are mostly one's own: fused within, apart between."""
    rng = np.random.default_rng(10)
    truth = np.repeat([0, 1], 15)
    y = np.where(truth[:, None] == 0, 2.0, -2.0) + 0.3 * rng.normal(size=(30, 4))
    graph = graphs.from_edges(
        [(i, j) for i in range(30) for j in range(i) if truth[i] == truth[j] or (i, j) == (15, 0)], 30
    )
    end = jax.jit(lambda y: admm.fuse(graph, y, 0.2, 2.0, tolerance=1e-8, most=5000))(y)
    np.testing.assert_array_equal(graphs.components(graph, (end.warm.w == 0).all(axis=1)), truth)


def test_single_precision_reaches_its_tolerance():
    y = jnp.asarray(data(11), jnp.float32)
    for p in NORMS:
        end = fuse(y, jnp.float32(0.3), p, rho=jnp.float32(1), tolerance=1e-5)
        assert end.z.dtype == jnp.float32
        assert max(float(end.primal), float(end.dual)) <= 1e-5
        np.testing.assert_allclose(end.z, fuse(data(11), 0.3, p).z, atol=2e-4)


@pytest.mark.slow
@pytest.mark.parametrize("dense", [True, False])
def test_more_parameters_than_clients(dense):
    """A rotation into 12 dimensions rotates the minimiser; the second step begins with what the first one left."""
    rotation = np.linalg.qr(np.random.default_rng(13).normal(size=(12, DIM)))[0].T
    first, second = data(13), data(14)
    end = fuse(first @ rotation, 0.3, 2, dense=dense)
    np.testing.assert_allclose(end.z, fuse(first, 0.3, 2).z @ rotation, atol=1e-8)
    end = fuse(second @ rotation, 0.3, 2, warm=end.warm, dense=dense)
    np.testing.assert_allclose(end.z, fuse(second, 0.3, 2).z @ rotation, atol=1e-8)
    np.testing.assert_allclose(end.warm.w, graphs.differences(GRAPH, end.z), atol=1e-8)


def test_a_basis_of_the_rows():
    rng = np.random.default_rng(15)
    rows = rng.normal(size=(4, 9)) * np.array([[1], [1e3], [1e-3], [1]])
    rows = np.concatenate([rows, rows[:2], np.zeros((1, 9)), -rows.sum(axis=0, keepdims=True)])
    basis = np.asarray(jax.jit(admm.orthonormal)(rows))
    np.testing.assert_array_equal(np.flatnonzero((basis**2).sum(axis=1)), range(4))
    np.testing.assert_allclose(basis[:4] @ basis[:4].T, np.eye(4), atol=1e-12)
    np.testing.assert_allclose(rows @ basis.T @ basis, rows, atol=1e-10)


def test_rho_follows_the_residuals():
    """From a rho that is far off it comes back, and the next step begins with the one that it has come to."""
    y = data(16)
    far = fuse(y, 0.3, 2, rho=1e3)
    assert int(far.steps) < 60
    assert 0.05 < float(far.warm.rho) < 50


def test_settings_side_by_side():
    y = data(12)
    strengths = jnp.array([0.05, 0.5])
    many = jax.jit(jax.vmap(lambda s: admm.fuse(GRAPH, y, s, 2, tolerance=1e-10, most=20_000).z))(strengths)
    for s, z in zip(strengths, many, strict=True):
        np.testing.assert_allclose(z, fuse(y, s, 2).z, atol=1e-8)
    assert not np.asarray(admm.norm(many[0] - many[1], 2) < 1e-3).all()


DUAL = {1: math.inf, 2: 2, math.inf: 1}


@pytest.mark.parametrize("p", NORMS)
def test_what_is_left_over_is_the_projection_onto_the_dual_ball(p):
    """v - w is within it; on its border, and of full effect on w, wherever w is not zero: <v - w, w> = kappa |w|."""
    v = jnp.asarray(np.random.default_rng(1).normal(size=(500, 7)))
    kappa = jnp.asarray(np.random.default_rng(2).uniform(0.01, 4, 500))
    w = jax.jit(jax.vmap(lambda v, k: admm.prox(v, k, p)))(v, kappa)
    left = v - w
    assert (np.linalg.norm(left, DUAL[p], axis=1) <= np.asarray(kappa) * (1 + 1e-12)).all()
    np.testing.assert_allclose((left * w).sum(axis=1), kappa * admm.norm(w, p), atol=1e-12)
    assert 0 < int((w == 0).all(axis=1).sum()) < 500


@pytest.mark.parametrize("p", NORMS)
def test_the_ends(p):
    prox = jax.jit(admm.prox, static_argnums=2)
    v = np.array([[1.0, -2.0, 3.0], [0.0, 0.0, 0.0], [2.0, 2.0, -2.0]])
    np.testing.assert_array_equal(prox(v, 0.0, p), v)
    np.testing.assert_array_equal(prox(v, jnp.inf, p), 0 * v)
    # Exactly zero from the dual norm on.
    for row in v:
        radius = float(np.linalg.norm(row, DUAL[p]))
        np.testing.assert_array_equal(prox(row, radius * 1.0001, p), 0 * row)
        assert radius == 0 or np.asarray(prox(row, radius * 0.999, p)).any()


def test_the_printed_formula_is_right_for_two_alone():
    v, kappa = np.array([3.0, -1.0, 0.5]), 0.8
    for p in NORMS:
        printed = max(0, 1 - kappa / np.linalg.norm(v, DUAL[p])) * v
        assert np.allclose(printed, admm.prox(jnp.asarray(v), kappa, p)) == (p == 2)


def test_other_norms_are_refused():
    with pytest.raises(JaxpflError, match=r"^p must be 1, 2 or inf, got 3$"):
        admm.prox(jnp.ones(3), 1.0, 3)

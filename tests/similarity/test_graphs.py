"""Graphs of clients: nearest neighbours whatever the blocks, odd graphs, and the three senses of being near."""

import importlib.util

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxpfl
from jaxpfl.engine.client_graph import client_graph
from jaxpfl.similarity import graphs
from jaxpfl.support.errors import JaxpflError


def pairs(graph: graphs.Graph) -> set[tuple[int, int]]:
    return set(zip(graph.first.tolist(), graph.second.tolist(), strict=True))


def square_distances(vectors: jax.Array) -> np.ndarray:
    return ((np.asarray(vectors)[:, None] - np.asarray(vectors)) ** 2).sum(axis=-1)


def brute_force(points: np.ndarray, k: int) -> set[tuple[int, int]]:
    apart = ((points[:, None] - points) ** 2).sum(axis=-1)
    np.fill_diagonal(apart, np.inf)
    near = [set(np.argsort(row, kind="stable")[:k].tolist()) for row in apart]
    n = len(points)
    return {(i, j) for i in range(n) for j in range(i + 1, n) if j in near[i] or i in near[j]}


@pytest.mark.parametrize(("k", "block"), [(1, 4), (3, 7), (3, 23), (3, 300), (40, 8)])
def test_nearest_neighbours_whatever_the_blocks(k, block):
    points = np.random.default_rng(0).normal(size=(23, 4))
    assert pairs(graphs.nearest_vectors(points, k, block=block)) == brute_force(points, min(k, 22))


@pytest.mark.parametrize("k", [1, 3])
@pytest.mark.parametrize("far", [0, 100, 3000])
def test_ties_go_to_the_first_wherever_the_points_lie(k, far):
    """Points of a lattice have many equal distances; inner products of far-off ones leave noise in their place."""
    points = np.random.default_rng(0).integers(0, 3, size=(40, 3)).astype(np.float32) / 8 + np.float32(far) / 7
    assert pairs(graphs.nearest_vectors(jnp.asarray(points), k)) == brute_force(points.astype(float), k)


def test_vectors_that_are_not_finite_are_near_nobody():
    points = np.array([[0.0], [1.0], [np.nan], [1.5], [np.inf]])
    assert pairs(graphs.nearest_vectors(points, 3)) == {(0, 1), (0, 3), (1, 3)}
    assert graphs.nearest_vectors(points[2:], 2).edges == 0


def test_one_client_has_no_neighbour_and_duplicates_find_each_other():
    assert graphs.nearest_vectors(jnp.ones((1, 3)), 5).edges == 0
    # Far from the origin, where squares would cancel.
    points = jnp.asarray(np.repeat(np.random.default_rng(1).normal(size=(5, 3)), 2, axis=0) + 1000, jnp.float32)
    got = graphs.nearest_vectors(points, 1)
    assert pairs(got) == {(2 * i, 2 * i + 1) for i in range(5)}
    everyone_alike = graphs.nearest_vectors(jnp.ones((4, 3)), 2)
    assert (np.asarray(graphs.degrees(everyone_alike)) >= 2).all()


def test_users_edges():
    got = graphs.from_edges([(3, 1), (1, 3), (0, 1)], 5)
    assert pairs(got) == {(1, 3), (0, 1)}
    assert got.nodes == 5
    assert graphs.from_edges([], 2).edges == 0


@pytest.mark.parametrize(
    ("given", "nodes", "message"),
    [
        ([(0, 5)], 5, "an edge has node 5, expected 0 to 4"),
        ([(0, -1)], 5, "an edge has node -1, expected 0 to 4"),
        ([(2, 2)], 5, "an edge joins node 2 with itself"),
        ([(0.5, 1)], 5, r"edges must be pairs of whole numbers, got float64 of shape \(1, 2\)"),
        ([(0, 1, 2)], 5, r"edges must be pairs of whole numbers, got int64 of shape \(1, 3\)"),
        ([], 0, "nodes must be at least 1, got 0"),
    ],
)
def test_bad_edges_are_refused(given, nodes, message):
    with pytest.raises(JaxpflError, match=f"^{message}$"):
        graphs.from_edges(given, nodes)


STAR = [(40, i) for i in range(40)]
"""More edges at one node than are gathered."""


@pytest.mark.parametrize(("edges", "nodes"), [([(0, 1), (1, 2), (0, 4)], 5), ([], 5), (STAR[:9], 41), (STAR, 42)])
def test_incidence_and_laplacian(edges, nodes):
    graph = graphs.from_edges(edges, nodes)
    q = np.zeros((nodes, graph.edges))
    for e, (i, j) in enumerate(zip(graph.first, graph.second, strict=True)):
        q[i, e], q[j, e] = 1, -1
    rng = np.random.default_rng(2)
    z, w = rng.normal(size=(nodes, 3)).astype(np.float32), rng.normal(size=(graph.edges, 3)).astype(np.float32)
    np.testing.assert_allclose(graphs.differences(graph, jnp.asarray(z)), q.T @ z, atol=1e-6)
    np.testing.assert_allclose(graphs.gathered(graph, jnp.asarray(w)), q @ w, atol=1e-5)
    np.testing.assert_array_equal(graphs.laplacian(graph), q @ q.T)
    np.testing.assert_array_equal(graphs.degrees(graph), (q**2).sum(axis=1))
    values, vectors = graphs.spectrum(graph)
    np.testing.assert_allclose(vectors * values @ vectors.T, q @ q.T, atol=1e-12)


def test_components_are_scipys():
    from scipy.sparse import coo_array
    from scipy.sparse.csgraph import connected_components

    rng = np.random.default_rng(3)
    path = graphs.from_edges([(i, i + 1) for i in rng.permutation(199)], 200)
    for graph in (path, graphs.from_edges(rng.integers(0, 99, size=(80, 2)) + np.array([0, 100]), 200)):
        for joined in (rng.random(graph.edges) < 0.7, np.ones(graph.edges, bool), np.zeros(graph.edges, bool)):
            there = coo_array((joined[joined], (graph.first[joined], graph.second[joined])), shape=(200, 200))
            np.testing.assert_array_equal(graphs.components(graph, joined), connected_components(there)[1])


covariances = jax.jit(jax.vmap(graphs.covariance))


def clients() -> tuple[np.ndarray, np.ndarray]:
    """Six clients of three distributions with up to 60 examples: [6, 60, 2] and mask."""
    rng = np.random.default_rng(4)
    x = rng.normal(size=(6, 60, 2))
    x[2:4] += 2
    x[4:] *= [3, 0.3]
    mask = np.arange(60) < np.array([60, 50, 55, 60, 40, 45])[:, None]
    return np.where(mask[..., None], x, 1e6), mask  # what is padded must not count


def exact_mmd(x: np.ndarray, y: np.ndarray, b: float) -> float:
    def k(a, c):
        return np.exp(-((a[:, None] - c) ** 2).sum(axis=-1) / (2 * b**2)).mean()

    return k(x, x) + k(y, y) - 2 * k(x, y)


def exact_discrepancies() -> np.ndarray:
    own = [a[seen] for a, seen in zip(*clients(), strict=True)]
    return np.array([[exact_mmd(a, b, 1.5) for b in own] for a in own])


def test_random_features_approach_the_discrepancies():
    """The error of a mean of 20000 features in [-2, 2] is about 0.01; 0.05 are five of them."""
    x, mask = (jnp.asarray(a) for a in clients())
    key = jax.random.key(0)
    embed = jax.jit(jax.vmap(lambda x, mask: graphs.mean_embedding(key, x, mask, 1.5, 20_000)))
    vectors = embed(x.astype(jnp.float32), mask)
    exact = exact_discrepancies()
    np.testing.assert_allclose(square_distances(vectors), exact, atol=0.05)
    assert exact.max() > 0.5


def test_covariances_and_their_distances():
    x, mask = clients()
    vectors = covariances(jnp.asarray(x, jnp.float32), jnp.asarray(mask))
    own = [np.cov(a[seen].T, bias=True) for a, seen in zip(x, mask, strict=True)]
    want = [[((a - b) ** 2).sum() for b in own] for a in own]
    np.testing.assert_allclose(square_distances(vectors), want, rtol=1e-4, atol=1e-4)


def test_clients_of_one_distribution_are_neighbours():
    x, mask = (jnp.asarray(a) for a in clients())
    x = x.astype(jnp.float32)
    assert (4, 5) in pairs(graphs.nearest_vectors(covariances(x, mask), 1))


def test_a_client_without_examples_is_zero_not_nan():
    x, mask = jnp.full((3, 2), jnp.nan), jnp.zeros(3, bool)
    assert not np.asarray(jax.jit(graphs.covariance)(x, mask)).any()
    embed = jax.jit(graphs.mean_embedding, static_argnums=4)
    assert not np.asarray(embed(jax.random.key(0), x, mask, 1.0, 8)).any()


def curved(number: int) -> np.ndarray:
    """Vectors near a surface of six dimensions in sixty-four."""
    rng = np.random.default_rng(0)
    return np.cos(rng.normal(size=(number, 6)) @ rng.normal(size=(6, 64))).astype(np.float32)


def test_few_vectors_are_compared_exactly():
    points = curved(50)
    assert pairs(graphs.nearest(points, 3)) == pairs(graphs.nearest_vectors(points, 3))


def test_many_clients_without_the_package_are_refused_before_any_work(monkeypatch):
    monkeypatch.setattr(graphs, "MOST_EXACT", 5)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    clients = [(np.full((2, 3), np.float32(i)), np.zeros(2, np.int32)) for i in range(6)]
    federation = jaxpfl.stack_clients(clients, test=clients)
    for space in ("data", "models"):
        with pytest.raises(JaxpflError) as refused:
            client_graph(space, federation, task=None, work=None)  # pyright: ignore[reportArgumentType]
        assert "a graph of over 5 clients, here 6, requires the package pynndescent: pip" in str(refused.value)
        assert "\n" not in str(refused.value)


@pytest.mark.slow
def test_the_approximate_graph_is_nearly_the_exact_one():
    """Its first call compiles pynndescent's code, for half a minute."""
    pytest.importorskip("pynndescent")
    few, many = curved(300), curved(3000)
    few[7], few[8] = np.nan, few[9]
    assert pairs(graphs.approximate(few, 5)) == pairs(graphs.nearest_vectors(few, 5))
    exact, found = pairs(graphs.nearest_vectors(many, 5)), pairs(graphs.approximate(many, 5))
    assert len(exact & found) / len(exact) > 0.995
    assert pairs(graphs.approximate(many, 5)) == found
    assert graphs.approximate(few[:1], 5).edges == 0
    with pytest.raises(JaxpflError, match="at least 1, got 300 and 0"):
        graphs.approximate(few, 0)

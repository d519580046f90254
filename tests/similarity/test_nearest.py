"""Graphs of very many clients: exact or approximate, and the package that the latter needs."""

import importlib.util

import numpy as np
import pytest

import jaxpfl
from jaxpfl.engine.client_graph import client_graph
from jaxpfl.similarity import graphs
from jaxpfl.support.errors import JaxpflError


def pairs(graph: graphs.Graph) -> set[tuple[int, int]]:
    return set(zip(graph.first.tolist(), graph.second.tolist(), strict=True))


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
        assert "6 clients needs the package pynndescent (pip install 'jaxpfl[graph]')" in str(refused.value)
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

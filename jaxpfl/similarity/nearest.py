"""Graphs of nearest neighbours of very many vectors, by NN-descent (Dong et al. 2011; the pynndescent package).

All pairs of N vectors of q numbers take N^2 q products; NN-descent compares each vector with the neighbours of its
neighbours and takes about N^1.14 comparisons.
"""

from __future__ import annotations

import importlib.util
from typing import Any

import numpy as np

from jaxpfl.similarity import graphs
from jaxpfl.similarity.graphs import Graph
from jaxpfl.support.errors import JaxpflError

MOST_EXACT = 20_000
"""Number of vectors up to which `nearest` compares all pairs: 20 s for 1024 numbers each on two cores."""

_CANDIDATES = 30
"""Least number of neighbours that NN-descent keeps for each vector; fewer cost recall."""


def nearest(vectors: Any, k: int) -> Graph:
    """Graph of k nearest neighbours in Euclidean distance, exact for up to `MOST_EXACT` vectors.

    Args:
      vectors: [N, q]; one that is not finite has no neighbours.
      k: neighbours of each, all others if there are fewer.

    Raises:
      JaxpflError: as in `graphs.nearest_vectors`, and for more vectors without the package pynndescent.
    """
    check_possible(len(vectors))
    return graphs.nearest_vectors(vectors, k) if len(vectors) <= MOST_EXACT else approximate(vectors, k)


def check_possible(number: int) -> None:
    """Refuse so many vectors that pynndescent is needed if it is not installed; before they are computed, say.

    Raises:
      JaxpflError: naming the package.
    """
    if number > MOST_EXACT and importlib.util.find_spec("pynndescent") is None:
        raise JaxpflError(
            f"a graph of {number} clients needs the package pynndescent (pip install 'jaxpfl[graph]'), as more "
            f"than {MOST_EXACT} are not compared pair by pair; or give the graph"
        )


def approximate(vectors: Any, k: int) -> Graph:
    """`nearest` by NN-descent, which may miss neighbours: one edge of 1000 for 10,000 vectors near a curved surface.

    Its draws are seeded by 0; which neighbours are missed depends on the order of the vectors.

    Raises:
      JaxpflError: as in `graphs.nearest_vectors`.
    """
    from pynndescent import NNDescent  # pyright: ignore[reportMissingImports]

    given = np.asarray(vectors)
    graphs.check_neighbours(len(given), k)
    finite = np.flatnonzero(np.isfinite(given).all(axis=1))
    k = min(k, len(finite) - 1)
    if k < 1:
        return graphs.from_edges([], len(given))
    kept = given[finite].astype(np.float32)
    kept -= kept.mean(axis=0, dtype=np.float64).astype(np.float32)  # rounding is relative to the distance from zero
    candidates = min(max(_CANDIDATES, 2 * k) + 1, len(kept))
    index = NNDescent(kept, n_neighbors=candidates, random_state=0, compressed=False)
    assert index.neighbor_graph is not None
    places = index.neighbor_graph[0]
    found = [np.zeros(0, np.int64)] * len(given)
    for i, near in zip(finite, places, strict=True):
        among = np.unique(finite[near[near >= 0]])  # -1 where it found none
        among = among[among != i]
        exact = ((given[among].astype(np.float64) - given[i]) ** 2).sum(axis=1)
        found[i] = among[np.argsort(exact, kind="stable")[:k]]
    return graphs.joined(found, mutual=False)

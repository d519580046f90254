r"""Graphs of clients: nodes 0 ... N - 1 and edges, given by the user or between k nearest neighbours.

Q, the paper's N x M incidence matrix with one +1 and one -1 in the column of each edge, is never formed: for models Z
[N, d] (rows are the paper's columns) ``differences`` is Z Q, and for W [M, d] ``gathered`` is W Q^T. Both hold without
edges, for isolated nodes, and for N = 1.
"""

from __future__ import annotations

import importlib.util
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from jaxpfl.core.types import Array, Key, Scalar
from jaxpfl.support.errors import JaxpflError


@struct.dataclass
class Graph:
    """Undirected edges between ``first`` [M] and ``second`` [M] int32, first < second, each once.

    Reference: Zhao et al., Figure 1.
    """

    first: Any
    second: Any
    nodes: int = struct.field(pytree_node=False)

    @property
    def edges(self) -> int:
        """M, the number of edges."""
        return len(self.first)


def from_edges(pairs: Any, nodes: int) -> Graph:
    """Graph from pairs of nodes, [M, 2] in any order and orientation; repeated pairs count once.

    Raises:
      JaxpflError: for less than one node, pairs that are not integers from 0 to nodes - 1, or a node joined to itself.
    """
    if nodes < 1:
        raise JaxpflError(f"nodes must be at least 1, got {nodes}")
    given = np.asarray(pairs)
    given = given.reshape(0, 2).astype(np.int64) if given.size == 0 else given
    if given.ndim != 2 or given.shape[1] != 2 or not np.issubdtype(given.dtype, np.integer):
        raise JaxpflError(f"edges must be pairs of whole numbers, got {given.dtype} of shape {given.shape}")
    outside = given[(given < 0) | (given >= nodes)]
    if len(outside):
        raise JaxpflError(f"an edge has node {outside[0]}, expected 0 to {nodes - 1}")
    loops = given[given[:, 0] == given[:, 1]]
    if len(loops):
        raise JaxpflError(f"an edge joins node {loops[0, 0]} with itself")
    once = np.unique(np.sort(given, axis=1), axis=0).astype(np.int32)
    return Graph(once[:, 0], once[:, 1], nodes)


def nearest_vectors(vectors: Any, k: int, *, block: int = 256) -> Graph:
    """Graph of k nearest neighbours in Euclidean distance, exact to the rounding of float64; on the host.

    Two vectors are joined if either is among the k nearest of the other. Inner products give all distances quickly, but
    suffer from cancellation. They only select candidates, as many as their rounding error leaves undecided; the nearest
    are decided by differences, so that duplicates are at distance zero and ties go to the first nodes.

    Implements: Zhao et al., section II-A.

    Args:
      vectors: [N, q]; one that is not finite has no neighbours.
      k: neighbours of each vector, all others if there are fewer.
      block: vectors at a time.

    Raises:
      JaxpflError: for less than one vector or neighbour.
    """
    given = np.asarray(vectors)
    nodes, numbers = given.shape
    check_neighbours(nodes, k)
    finite = np.asarray(np.isfinite(given).all(axis=1))
    k = min(k, int(finite.sum()) - 1)
    if k < 1:
        return from_edges([], nodes)
    centered = np.where(finite[:, None], given, 0).astype(np.float64)
    centered -= centered.sum(axis=0) / finite.sum()
    squares = (centered**2).sum(axis=1)
    # Bound on the relative rounding error of a sum of so many products.
    rounding = 8 * (numbers + 8) * np.finfo(np.float64).eps
    found = [np.zeros(0, np.int64)] * nodes
    for start in range(0, nodes, block):
        rows = np.flatnonzero(finite[start : start + block]) + start
        sums = squares[rows, None] + squares
        apart, slack = sums - 2 * centered[rows] @ centered.T, rounding * sums
        apart[:, ~finite] = apart[np.arange(len(rows)), rows] = np.inf
        reach = np.partition(apart + slack, k - 1, axis=1)[:, k - 1]
        for i, close in zip(rows, apart - slack <= reach[:, None], strict=True):
            among = np.flatnonzero(close)
            exact = ((given[among].astype(np.float64) - given[i]) ** 2).sum(axis=1)
            found[i] = among[np.argsort(exact, kind="stable")[:k]]
    return joined(found)


def check_neighbours(nodes: int, k: int) -> None:
    """Refuse a graph without nodes or neighbours.

    Raises:
      JaxpflError: for less than one of either.
    """
    if nodes < 1 or k < 1:
        raise JaxpflError(f"nodes and neighbours must be at least 1, got {nodes} and {k}")


def joined(found: list[np.ndarray]) -> Graph:
    """Graph from the neighbours found for each node."""
    nodes = len(found)
    pairs = np.stack([np.repeat(np.arange(nodes), list(map(len, found))), np.concatenate(found)], axis=1)
    return from_edges(pairs, nodes)


def differences(graph: Graph, z: Array) -> Array:
    """Differences ``z_i - z_j`` along every edge: [N, d] -> [M, d].

    Reference: Zhao et al., Figure 2.
    """
    return z[graph.first] - z[graph.second]


MOST_UNROLLED = 32
"""Largest degree for which `gathered` gathers: one pass over the rows per edge of a node is ten to thirty times as fast
on a CPU as a scatter, which processes the edges one by one."""


def gathered(graph: Graph, w: Array) -> Array:
    """Transpose of `differences`: [M, d] -> [N, d].

    Reference: Zhao et al., Figure 2.
    """
    on_host = isinstance(graph.first, np.ndarray) and isinstance(graph.second, np.ndarray)
    if on_host and graph.edges and (most := int(host_degrees(graph).max())) <= MOST_UNROLLED:
        # The nth edge of every node, M where it has none, and whether the node is its first end.
        ends, signs = np.append(graph.first, graph.second), np.repeat([1, -1], graph.edges)
        order = np.argsort(ends, kind="stable")
        nth = np.arange(len(ends)) - np.searchsorted(ends[order], ends[order])
        edge, sign = np.full((most, graph.nodes), graph.edges), np.zeros((most, graph.nodes), np.int8)
        edge[nth, ends[order]], sign[nth, ends[order]] = order % graph.edges, signs[order]
        total = jnp.zeros((graph.nodes, *w.shape[1:]), w.dtype)
        for rows, sides in zip(edge, sign, strict=True):
            sides = sides.reshape(-1, *[1] * (w.ndim - 1)).astype(w.dtype)
            total += sides * w.at[rows].get(mode="fill", fill_value=0)
        return total
    return jnp.zeros((graph.nodes, *w.shape[1:]), w.dtype).at[graph.first].add(w).at[graph.second].add(-w)


def host_degrees(graph: Graph) -> np.ndarray:
    """Number of edges of every node, [N], on the host."""
    return np.bincount(np.append(graph.first, graph.second), minlength=graph.nodes)


def degrees(graph: Graph) -> Array:
    """Number of edges of every node, [N] int32."""
    return jnp.zeros(graph.nodes, jnp.int32).at[graph.first].add(1).at[graph.second].add(1)


def laplacian(graph: Graph) -> np.ndarray:
    """Graph Laplacian ``Q Q^T``, [N, N], on the host: degrees on the diagonal, -1 for every edge."""
    matrix = np.diag(host_degrees(graph).astype(np.float64))
    matrix[graph.first, graph.second] = matrix[graph.second, graph.first] = -1
    return matrix


class Spectrum(NamedTuple):
    """Eigendecomposition ``vectors diag(values) vectors^T`` of the Laplacian, [N] and [N, N], on the host."""

    values: np.ndarray
    vectors: np.ndarray


def spectrum(graph: Graph) -> Spectrum:
    """Spectrum of the `laplacian`, by NumPy."""
    return Spectrum(*np.linalg.eigh(laplacian(graph)))


def components(graph: Graph, joined: Any) -> np.ndarray:
    """Connected components of the nodes under the edges ``joined`` [M] bool.

    Returns the cluster of each node, [N], numbered by their first nodes. In the network lasso, ``joined`` are the edges
    whose w is zero.
    """
    joined = np.asarray(joined)
    first, second = np.asarray(graph.first)[joined], np.asarray(graph.second)[joined]
    label = np.arange(graph.nodes)
    while True:
        lower = np.minimum(label[first], label[second])
        new = label.copy()
        np.minimum.at(new, first, lower)
        np.minimum.at(new, second, lower)
        new = new[new]  # a label is a node of the same cluster: its own label is as good, and may be lower
        if (new == label).all():
            return np.unique(label, return_inverse=True)[1]
        label = new


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
      JaxpflError: as in `nearest_vectors`, and for more vectors without the package pynndescent.
    """
    check_possible(len(vectors))
    return nearest_vectors(vectors, k) if len(vectors) <= MOST_EXACT else approximate(vectors, k)


def check_possible(number: int) -> None:
    """Refuse so many vectors that pynndescent is needed if it is not installed; before they are computed, say.

    Raises:
      JaxpflError: naming the package.
    """
    if number > MOST_EXACT and importlib.util.find_spec("pynndescent") is None:
        raise JaxpflError(
            f"a graph of {number} clients needs the package pynndescent (pip install '.[graph]' in a clone, or "
            f"'jaxpfl[graph]'), because more than {MOST_EXACT} are not compared in pairs; or give a graph"
        )


def approximate(vectors: Any, k: int) -> Graph:
    """`nearest` by NN-descent (Dong et al. 2011; the pynndescent package), which may miss neighbours: one
    edge of 1000 for 10,000 vectors near a curved surface.

    All pairs of N vectors of q numbers take N^2 q products; NN-descent compares each vector with the neighbours of its
    neighbours and takes about N^1.14 comparisons. Its draws are seeded by 0; which neighbours are missed depends on the
    order of the vectors.

    Raises:
      JaxpflError: as in `nearest_vectors`.
    """
    from pynndescent import NNDescent  # pyright: ignore[reportMissingImports]

    given = np.asarray(vectors)
    check_neighbours(len(given), k)
    finite = np.flatnonzero(np.isfinite(given).all(axis=1))
    k = min(k, len(finite) - 1)
    if k < 1:
        return from_edges([], len(given))
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
    return joined(found)


def mean_embedding(key: Key, x: Array, mask: Array, bandwidth: Scalar, number: int) -> Array:
    """A client's mean of random Fourier features (Rahimi and Recht 2007), [number], a vector of its data.

    Implements: Zhao et al., section II-A.

    Distances between clients' embeddings approximate their maximum mean discrepancy under the
    Gaussian kernel exp(-|x - y|^2 / (2 b^2)), with an error of about ``1 / sqrt(number)``.

    Args:
      key: the same for all clients.
      x: [n, q], with mask [n] bool; the embedding is zero for a client without examples.
      bandwidth: b of the kernel.
      number: number of features.
    """
    of_frequency, of_phase = jax.random.split(key)
    frequency = jax.random.normal(of_frequency, (x.shape[1], number), x.dtype) / bandwidth
    phase = jax.random.uniform(of_phase, (number,), x.dtype, maxval=2 * jnp.pi)
    features = jnp.sqrt(2 / number) * jnp.cos(jnp.where(mask[:, None], x, 0) @ frequency + phase)
    return _mean(features, mask)


def covariance(x: Array, mask: Array) -> Array:
    """A client's covariance matrix as a vector, [q (q + 1) / 2], whose Euclidean distances are the Frobenius ones.

    Entries off the diagonal are scaled to count twice. x is [n, q] with mask [n] bool; zero for a client without
    examples.
    """
    apart = jnp.where(mask[:, None], x - _mean(x, mask), 0)
    matrix = apart.T @ apart / jnp.maximum(mask.sum(), 1)
    row, column = jnp.triu_indices(x.shape[1])
    return matrix[row, column] * jnp.where(row == column, 1, jnp.sqrt(2.0)).astype(x.dtype)


def _mean(x: Array, mask: Array) -> Array:
    return jnp.where(mask[:, None], x, 0).sum(axis=0) / jnp.maximum(mask.sum(), 1)

r"""Graphs of clients: nodes 0 ... N - 1, with edges that the user gives or that join k nearest neighbors.

Q is the N x M incidence matrix of Zhao et al., with one +1 and one -1 in the column of each edge. The matrix Q is never
formed. For models Z [N, d], `differences` computes the paper's Z Q. For differences W [M, d], `gathered` computes the
paper's W Q^T. (In the paper, the models are the columns of Z, not the rows.) Both functions also work for graphs
without edges, with isolated nodes or with a single node.
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
    """Undirected graph, whose edge i joins the nodes ``first[i] < second[i]``; both arrays are [M] int32.

    Each edge is listed once.

    Reference: Zhao et al., Figure 1.
    """

    first: Any
    second: Any
    nodes: int = struct.field(pytree_node=False)

    @property
    def edges(self) -> int:
        """Number M of edges."""
        return len(self.first)


def from_edges(pairs: Any, nodes: int) -> Graph:
    """Make a graph from pairs of nodes, [M, 2] in any order and orientation; repeated pairs count once.

    Raises:
      JaxpflError: if ``nodes`` < 1, a pair does not consist of integers from 0 to ``nodes - 1``, or a node is joined to
        itself.
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
    """Compute the graph of k nearest neighbors in Euclidean distance on the host, exact to float64 rounding.

    Two vectors are joined if one is among the k nearest neighbors of the other. Distances from inner products are
    fast, but lose digits by cancellation. Such distances therefore only select candidates: all vectors that could be
    among the nearest, given the rounding error. The distances to the candidates are then computed from differences, so
    that duplicates have distance zero. In a tie, the first nodes are chosen.

    Implements: Zhao et al., section II-A.

    Args:
      vectors: one vector of length q for each of N nodes, [N, q]; a vector that is not finite has no neighbors.
      k: number of neighbors of each vector; if there are fewer other vectors, all of them are neighbors.
      block: number of vectors whose distances are computed at a time.

    Raises:
      JaxpflError: if there is no vector, or k < 1.
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
    # Upper bound on the relative rounding error of a sum of this many products.
    rounding = 8 * (numbers + 8) * np.finfo(np.float64).eps
    found = [np.zeros(0, np.int64)] * nodes
    for start in range(0, nodes, block):
        rows = np.flatnonzero(finite[start : start + block]) + start
        sums = squares[rows, None] + squares
        apart, slack = sums - 2 * centered[rows] @ centered.T, rounding * sums
        apart[:, ~finite] = apart[np.arange(len(rows)), rows] = np.inf
        # At least k vectors are certainly within this distance, so vectors that are certainly farther are excluded.
        reach = np.partition(apart + slack, k - 1, axis=1)[:, k - 1]
        for i, close in zip(rows, apart - slack <= reach[:, None], strict=True):
            among = np.flatnonzero(close)
            exact = ((given[among].astype(np.float64) - given[i]) ** 2).sum(axis=1)
            found[i] = among[np.argsort(exact, kind="stable")[:k]]
    return joined(found)


def check_neighbours(nodes: int, k: int) -> None:
    """Check that a nearest-neighbor graph has at least one node, and that the number k of neighbors is at least one.

    Raises:
      JaxpflError: if ``nodes`` < 1 or k < 1.
    """
    if nodes < 1 or k < 1:
        raise JaxpflError(f"nodes and neighbors must be at least 1, got {nodes} and {k}")


def joined(found: list[np.ndarray]) -> Graph:
    """Make a graph from a list of arrays, one for each node, with the numbers of the node's neighbors."""
    nodes = len(found)
    pairs = np.stack([np.repeat(np.arange(nodes), list(map(len, found))), np.concatenate(found)], axis=1)
    return from_edges(pairs, nodes)


def differences(graph: Graph, z: Array) -> Array:
    """Compute the difference ``z_i - z_j`` along each of the M edges, [M, d], for z [N, d].

    Reference: Zhao et al., Figure 2.
    """
    return z[graph.first] - z[graph.second]


MOST_UNROLLED = 32
"""Largest number of edges of any node for which `gathered` uses gathers, one for each edge of the node with the most
edges. On a CPU, gathers are 10 to 30 times as fast as a scatter, which processes the edges one by one.
"""


def gathered(graph: Graph, w: Array) -> Array:
    """Apply the transpose of `differences` to w [M, d].

    Row i of the result, [N, d], is the sum of w over the edges in which node i comes first, minus the sum of w over the
    edges in which node i comes second.

    Reference: Zhao et al., Figure 2.
    """
    on_host = isinstance(graph.first, np.ndarray) and isinstance(graph.second, np.ndarray)
    if on_host and graph.edges and (most := int(host_degrees(graph).max())) <= MOST_UNROLLED:
        # For each n, the nth edge of every node (M if there is none) and its sign: 1 if the node is the edge's first
        # node, else -1. With mode "fill", the row M reads zeros.
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
    """Compute the graph Laplacian ``Q Q^T``, [N, N], on the host: degrees on the diagonal, -1 for every edge."""
    matrix = np.diag(host_degrees(graph).astype(np.float64))
    matrix[graph.first, graph.second] = matrix[graph.second, graph.first] = -1
    return matrix


class Spectrum(NamedTuple):
    """Eigendecomposition ``vectors diag(values) vectors^T`` of the Laplacian, with values [N] and vectors [N, N]."""

    values: np.ndarray
    vectors: np.ndarray


def spectrum(graph: Graph) -> Spectrum:
    """Compute the eigendecomposition of a graph's Laplacian with NumPy."""
    return Spectrum(*np.linalg.eigh(laplacian(graph)))


def components(graph: Graph, joined: Any) -> np.ndarray:
    """Compute the connected components after removing all edges for which ``joined`` [M] is false.

    Args:
      graph: graph with N nodes and M edges.
      joined: mask of the edges to keep, [M]. For the network lasso, these are the edges whose difference of models
        (a row of W, see above) is zero.

    Returns:
      The index of each node's component, [N]. Components are numbered in the order of their first nodes.
    """
    joined = np.asarray(joined)
    first, second = np.asarray(graph.first)[joined], np.asarray(graph.second)[joined]
    label = np.arange(graph.nodes)
    while True:
        lower = np.minimum(label[first], label[second])
        new = label.copy()
        np.minimum.at(new, first, lower)
        np.minimum.at(new, second, lower)
        new = new[new]  # each label is also a node of the same component, and that node's label may be lower
        if (new == label).all():
            return np.unique(label, return_inverse=True)[1]
        label = new


MOST_EXACT = 20_000
"""Largest number of vectors for which `nearest` compares all pairs. At this number, the comparison takes 20 s on two
cores for vectors of length 1024."""

_CANDIDATES = 30
"""Smallest number of candidates that NN-descent keeps for each vector. With fewer candidates, more neighbors are
missed.
"""


def nearest(vectors: Any, k: int) -> Graph:
    """Compute the graph of k nearest neighbors in Euclidean distance, exact for up to `MOST_EXACT` vectors.

    Args:
      vectors: one vector of length q for each of N nodes, [N, q]; a vector that is not finite has no neighbors.
      k: number of neighbors of each vector; if there are fewer other vectors, all of them are neighbors.

    Raises:
      JaxpflError: if there is no vector, k < 1, or there are more than `MOST_EXACT` vectors and the package pynndescent
        is not installed.
    """
    check_possible(len(vectors))
    return nearest_vectors(vectors, k) if len(vectors) <= MOST_EXACT else approximate(vectors, k)


def check_possible(number: int) -> None:
    """Check that `nearest` supports this number of vectors. Callers can check before they compute the vectors.

    Raises:
      JaxpflError: if there are more than `MOST_EXACT` vectors and the package pynndescent is not installed.
    """
    if number > MOST_EXACT and importlib.util.find_spec("pynndescent") is None:
        raise JaxpflError(
            f"a graph of over {MOST_EXACT} clients, here {number}, requires the package pynndescent: pip install "
            "'.[graph]' (or 'jaxpfl[graph]'), or give a graph"
        )


def approximate(vectors: Any, k: int) -> Graph:
    """Approximate `nearest` by NN-descent (Dong et al. 2011), with the pynndescent package.

    NN-descent may miss neighbors; for 10,000 vectors near a curved surface, it missed one edge in 1000. Comparing all
    pairs of N vectors of length q takes N^2 q products. NN-descent compares each vector only with the neighbors of its
    neighbors, in about N^1.14 comparisons. The random seed is always 0. The order of the vectors affects which
    neighbors are missed.

    Raises:
      JaxpflError: if there is no vector, or k < 1.
    """
    from pynndescent import NNDescent  # pyright: ignore[reportMissingImports]

    given = np.asarray(vectors)
    check_neighbours(len(given), k)
    finite = np.flatnonzero(np.isfinite(given).all(axis=1))
    k = min(k, len(finite) - 1)
    if k < 1:
        return from_edges([], len(given))
    kept = given[finite].astype(np.float32)
    kept -= kept.mean(axis=0, dtype=np.float64).astype(np.float32)  # centering reduces rounding errors of distances
    candidates = min(max(_CANDIDATES, 2 * k) + 1, len(kept))
    index = NNDescent(kept, n_neighbors=candidates, random_state=0, compressed=False)
    assert index.neighbor_graph is not None
    places = index.neighbor_graph[0]
    found = [np.zeros(0, np.int64)] * len(given)
    for i, near in zip(finite, places, strict=True):
        among = np.unique(finite[near[near >= 0]])  # -1 marks a neighbor that was not found
        among = among[among != i]
        exact = ((given[among].astype(np.float64) - given[i]) ** 2).sum(axis=1)
        found[i] = among[np.argsort(exact, kind="stable")[:k]]
    return joined(found)


def mean_embedding(key: Key, x: Array, mask: Array, bandwidth: Scalar, number: int) -> Array:
    """Compute the mean of random Fourier features over a client's examples (Rahimi and Recht 2007), [number].

    The squared distance between two clients' embeddings approximates the squared maximum mean discrepancy of their data
    under the Gaussian kernel exp(-|x - y|^2 / (2 b^2)), with an error of about ``1 / sqrt(number)``.

    Implements: Zhao et al., section II-A.

    Args:
      key: random key, which must be the same for all clients.
      x: examples, [n, q].
      mask: mask of the real examples, [n] bool. Without any real example, the embedding is zero.
      bandwidth: bandwidth b of the kernel.
      number: number of features.
    """
    of_frequency, of_phase = jax.random.split(key)
    frequency = jax.random.normal(of_frequency, (x.shape[1], number), x.dtype) / bandwidth
    phase = jax.random.uniform(of_phase, (number,), x.dtype, maxval=2 * jnp.pi)
    features = jnp.sqrt(2 / number) * jnp.cos(jnp.where(mask[:, None], x, 0) @ frequency + phase)
    return _mean(features, mask)


def covariance(x: Array, mask: Array) -> Array:
    """Compute the covariance matrix of a client's examples of q numbers as a vector, [q (q + 1) / 2].

    Entries off the diagonal are multiplied by the square root of 2, so that the Euclidean distance between two vectors
    is the Frobenius distance between the matrices.

    Args:
      x: examples, [n, q].
      mask: mask of the real examples, [n] bool. Without any real example, the result is zero.
    """
    apart = jnp.where(mask[:, None], x - _mean(x, mask), 0)
    matrix = apart.T @ apart / jnp.maximum(mask.sum(), 1)
    row, column = jnp.triu_indices(x.shape[1])
    return matrix[row, column] * jnp.where(row == column, 1, jnp.sqrt(2.0)).astype(x.dtype)


def _mean(x: Array, mask: Array) -> Array:
    return jnp.where(mask[:, None], x, 0).sum(axis=0) / jnp.maximum(mask.sum(), 1)

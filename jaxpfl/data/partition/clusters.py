"""The partition "clusters": clusters of clients that differ in concept, each with its own permutation of the labels.

Every client holds iid examples. A client of cluster c labels class y as ``labels[c, y]``: a correct prediction for one
cluster is wrong for another, for every input. Only `Generator.permutation` is used, which returns the same numbers on
every platform.

Reference: Sattler, Müller and Samek 2020, "Clustered Federated Learning" (permuted labels).
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from jaxpfl.data.partition.classes import check_clients
from jaxpfl.support.errors import JaxpflError


class ClientClusters(NamedTuple):
    """True clusters of a split.

    Attributes:
      member: [m] in 0 .. k - 1, the cluster of each client; clusters differ in size by at most 1.
      labels: [k, num_classes] int32, each cluster's label of each class: distinct permutations.
    """

    member: np.ndarray
    labels: np.ndarray


def draw_clusters(m: int, k: int, num_classes: int, rng: np.random.Generator) -> ClientClusters:
    """Draw the clusters and each one's permutation of the labels.

    Raises:
      JaxpflError: for k outside 1 .. m, or above the number of permutations of the classes.
    """
    check_clients(m)
    most = min(m, math.factorial(num_classes))
    if not 1 <= k <= most:
        limit = f"the {m} clients" if most == m else f"the {most} permutations of {num_classes} classes"
        raise JaxpflError(f"clusters must be 1 to {most} ({limit}), got {k}")
    member = rng.permutation(np.arange(m) % k)
    permutations: dict[tuple[int, ...], None] = {}  # in the order in which they are drawn
    while len(permutations) < k:
        permutations[tuple(rng.permutation(num_classes).tolist())] = None
    return ClientClusters(member, np.array(list(permutations), np.int32))

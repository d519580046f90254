"""Graph of a federation's clients: two clients share an edge if one is among the k nearest neighbors of the other.

The distance of two clients is computed in one of three spaces (Zhao et al., section II-A):

- "data": the maximum mean discrepancy of the clients' inputs, with a Gaussian kernel;
- "features": the distance of the covariance matrices of the clients' inputs;
- "models": the distance of models that each client has trained alone for a few rounds from a common start.

The first two distances ignore labels, so they cannot separate clients that differ only in their labels. Both leave out
examples with a value that is not finite. The graph does not depend on the order of the clients, on padding or on the
run's seed. The exception is a federation of more than `graphs.MOST_EXACT` clients, for which the graph is approximate
and depends on the order of the clients.

The graph is computed on the host before a run. In a deployment, each client would first upload the vector that
represents its inputs or its model. The reported bytes of a run do not include this upload.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from jaxpfl import algorithms
from jaxpfl.algorithms import LocalWork
from jaxpfl.core import full_precision, participation
from jaxpfl.core.types import Array, ClientData, Examples, Federation
from jaxpfl.data.passes import class_of, size_classes
from jaxpfl.engine.simulation import Simulation
from jaxpfl.models import Task
from jaxpfl.models.base import start_from
from jaxpfl.similarity import graphs
from jaxpfl.similarity.graphs import Graph
from jaxpfl.support.errors import JaxpflError, unknown_name

SPACES = ("data", "features", "models")
NEIGHBOURS = 5
RANDOM_FEATURES = 1024
"""Number of random features that approximate the kernel. Squared discrepancies are then accurate to about 1/32."""
MOST_FEATURES = 128
"""Largest number of features without a projection. Inputs with more features are projected at random to this number of
features. The projection preserves distances of covariances to about 10 %. A client's matrix then takes 33 kB."""
MOST_COMPARED = 1000
"""Largest number of examples from which the kernel's bandwidth is computed."""
LOCAL_ROUNDS = 10
"""Number of rounds of local training before models are compared."""


def client_graph(
    space: str, federation: Federation, task: Task, work: LocalWork, *, neighbours: int = NEIGHBOURS
) -> Graph:
    """Graph that joins each client to its k nearest neighbors. Its nodes are in the order of the federation.

    Args:
      space: "data", "features" or "models".
      federation: trained clients; their training inputs (or the models trained on them) are compared.
      task: task whose model is trained if the space is "models", initialized with key 0.
      work: local work of a round if the space is "models". The method ``local`` runs for `LOCAL_ROUNDS` rounds with
        its default hyper-parameters.
      neighbours: number k of neighbors. If there are fewer than k other clients, all of them are neighbors.

    Raises:
      JaxpflError: if the space is unknown, if ``neighbours`` is below 1, if the space is not "models" and the inputs
        are not a single floating-point array, or as in `graphs.nearest`.
    """
    if space not in SPACES:
        raise unknown_name("graph", space, SPACES)
    graphs.check_possible(federation.num_clients)
    if space != "models":
        return graph_by_inputs(space, federation, neighbours=neighbours)
    return graphs.nearest(_models(federation, task, work), neighbours)


def graph_by_inputs(space: str, federation: Federation, *, neighbours: int = NEIGHBOURS) -> Graph:
    """Graph as in `client_graph` for the spaces "data" and "features", which do not need a task."""
    return graphs.nearest(_input_vectors(space, federation), neighbours)


def _input_vectors(space: str, federation: Federation) -> Array:
    """Array that represents each client's inputs in the space "data" or "features", [m, ...]."""
    x, y = federation.train.flat()[:2]
    if len(jax.tree.leaves(x)) != 1 or not np.issubdtype(jax.tree.leaves(x)[0].dtype, np.floating):
        raise JaxpflError(f"graph = {space} requires one floating-point array as inputs: use graph = models")
    (leaf,) = jax.tree.leaves(x)
    x = leaf.reshape(len(y), -1)
    whole = np.isfinite(x).all(axis=1)  # one broken example must not make all distances NaN
    owner = np.repeat(np.arange(federation.num_clients), np.asarray(federation.train.size))
    sizes = np.bincount(owner[whole], minlength=federation.num_clients)
    clients = ClientData.stacked(Examples(x[whole], y[whole]), sizes)
    key = jax.random.key(0)
    if space == "data":
        bandwidth = median_distance(clients, np.asarray(federation.client_ids))
        return _each(lambda x, mask: graphs.mean_embedding(key, x, mask, bandwidth, RANDOM_FEATURES), clients)
    if x.shape[1] <= MOST_FEATURES:
        return _each(graphs.covariance, clients)
    projection = jax.random.normal(key, (x.shape[1], MOST_FEATURES), x.dtype) / np.sqrt(MOST_FEATURES)
    return _each(lambda x, mask: graphs.covariance(x @ projection, mask), clients)


def _each(vector: Callable[[Array, Array], Array], clients: ClientData) -> Array:
    """Apply a function to each client, one after the other, so that only the results [m, ...] are in memory.

    Clients are padded to a few lengths (`size_classes`), so that few programs are compiled.
    """
    sizes, examples = np.asarray(clients.size), jax.tree.map(jnp.asarray, clients.examples)
    lengths = size_classes(sizes)
    vectors: list[Array] = []
    places: list[np.ndarray] = []
    for length, own in zip(lengths, class_of(sizes, lengths), strict=True):
        part = replace(clients.client(own), examples=examples, capacity=length)
        vectors.append(full_precision.jit(partial(_map_clients, vector))(part))
        places.append(own)
    return jnp.concatenate(vectors)[np.argsort(np.concatenate(places))]


def _map_clients(vector: Callable[[Array, Array], Array], clients: ClientData) -> Array:
    def one(own: tuple[Array, Array]) -> Array:
        one = replace(clients, start=own[0], size=own[1])
        return vector(one.x, one.mask)

    return jax.lax.map(one, (clients.start, clients.size))


def median_distance(clients: ClientData, client_ids: np.ndarray) -> float:
    """Median distance between unequal examples, which is the usual bandwidth of a kernel; 1 if all examples are equal.

    At most `MOST_COMPARED` examples are compared. Each client contributes its first examples, at most `MOST_COMPARED` /
    m of them for m clients. If there are more clients than `MOST_COMPARED`, only the `MOST_COMPARED` clients with the
    smallest ids are used, each with its first example.
    """
    compared = np.argsort(client_ids)[:MOST_COMPARED]
    each = max(1, MOST_COMPARED // len(compared))
    first = clients.client(compared)
    (sample,) = jax.tree.leaves(replace(first, size=np.minimum(first.size, each)).flat().x)
    sample = sample.astype(np.float64)
    squares = (sample**2).sum(axis=1)
    apart = squares[:, None] + squares - 2 * sample @ sample.T
    apart = apart[np.triu_indices(len(sample), 1)]
    apart = apart[apart > 1e-12 * max(squares.max(initial=0), 1e-300)]  # equal examples differ by rounding errors only
    return float(np.median(np.sqrt(apart))) if len(apart) else 1.0


def _models(federation: Federation, task: Task, work: LocalWork) -> Array:
    """Each client's parameters after `LOCAL_ROUNDS` rounds of local training from a common start, [m, parameters]."""
    together = start_from(task, task.init(jax.random.key(0)))
    alone = dataclasses.replace(work, sizes=np.asarray(federation.train.size), unseen=0, privacy=None)
    local, m = algorithms.get("local"), federation.num_clients
    made = Simulation(local.build(together, alone), together, federation, participation.full(m), local.hyper)
    state, _ = made.advance(made.init([0]), LOCAL_ROUNDS)
    leaves = jax.tree.leaves(made.personal_models(state))
    return jnp.asarray(np.concatenate([np.asarray(leaf)[0, :m].reshape(m, -1) for leaf in leaves], axis=1))

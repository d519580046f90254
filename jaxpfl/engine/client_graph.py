"""Graph of a federation's clients: an edge between two if either is among the k nearest neighbours of the other.

Distances are in one of three spaces (Zhao et al., section II-A): their inputs by the maximum mean discrepancy of a
Gaussian kernel ("data"), the covariance matrices of their inputs ("features"), or models that each has trained alone
for a few rounds from a common start ("models"). The first two ignore labels, and are of no use if clients differ in
these alone. An example that is not finite is left out. Nothing depends on the order of the clients, on padding or on
the run's seed.

Of more than `graphs.MOST_EXACT` clients the graph is approximate, and depends on their order.

It is computed on the host before a run. In a deployment clients would upload the compared vector once; this is not
counted among the bytes of a run.
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
"""Random features of the kernel; squared discrepancies are accurate to about 1/32."""
MOST_FEATURES = 128
"""Inputs with more features are projected to this number at random, which preserves distances of covariances to some 10
%; a client's matrix takes 33 kB.
"""
MOST_COMPARED = 1000
"""Number of examples from which the kernel's bandwidth is computed."""
LOCAL_ROUNDS = 10
"""Rounds of local training before models are compared."""


def client_graph(
    space: str, federation: Federation, task: Task, work: LocalWork, *, neighbours: int = NEIGHBOURS
) -> Graph:
    """Graph that joins a federation's clients to their k nearest neighbours; its nodes are in stack order.

    Args:
      space: "data", "features" or "models".
      federation: the trained clients, whose training inputs are compared.
      task: model to train for "models", initialised with key 0.
      work: local steps for "models", in each of `LOCAL_ROUNDS` rounds of ``local`` at its own hyper-parameters.
      neighbours: k; all others, if there are fewer.

    Raises:
      JaxpflError: for an unknown space, less than one neighbour, except for "models" inputs that are not one array of
        real numbers, and as `graphs.nearest`.
    """
    if space not in SPACES:
        raise unknown_name("graph", space, SPACES)
    graphs.check_possible(federation.num_clients)
    if space != "models":
        return graph_by_inputs(space, federation, neighbours=neighbours)
    return graphs.nearest(_models(federation, task, work), neighbours)


def graph_by_inputs(space: str, federation: Federation, *, neighbours: int = NEIGHBOURS) -> Graph:
    """`client_graph` for "data" or "features", which need no training."""
    return graphs.nearest(_input_vectors(space, federation), neighbours)


def _input_vectors(space: str, federation: Federation) -> Array:
    """Vectors that represent the clients' inputs in a space, [m, ...]."""
    x, y = federation.train.flat()
    if len(jax.tree.leaves(x)) != 1 or not np.issubdtype(jax.tree.leaves(x)[0].dtype, np.floating):
        raise JaxpflError(f"graph = {space} needs inputs that are one array of real numbers: use graph = models")
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
    """Apply a function to one client after the other, padded to a length of its class: only the vectors are held."""
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
    """Median distance between different examples, the usual bandwidth; 1 if all are equal.

    It uses at most `MOST_COMPARED` examples: equally many first ones of each client, or one of each of the first
    clients by id.
    """
    compared = np.argsort(client_ids)[:MOST_COMPARED]
    each = max(1, MOST_COMPARED // len(compared))
    first = clients.client(compared)
    (sample,) = jax.tree.leaves(replace(first, size=np.minimum(first.size, each)).flat().x)
    sample = sample.astype(np.float64)
    squares = (sample**2).sum(axis=1)
    apart = squares[:, None] + squares - 2 * sample @ sample.T
    apart = apart[np.triu_indices(len(sample), 1)]
    apart = apart[apart > 1e-12 * max(squares.max(initial=0), 1e-300)]
    return float(np.median(np.sqrt(apart))) if len(apart) else 1.0


def _models(federation: Federation, task: Task, work: LocalWork) -> Array:
    """Each client's parameters after some rounds of local training from a common start."""
    together = start_from(task, task.init(jax.random.key(0)))
    alone = dataclasses.replace(work, sizes=np.asarray(federation.train.size), unseen=0, privacy=None)
    local, m = algorithms.get("local"), federation.num_clients
    made = Simulation(local.build(together, alone), together, federation, participation.full(m), local.hyper)
    state, _ = made.advance(made.init([0]), LOCAL_ROUNDS)
    leaves = jax.tree.leaves(made.personal_models(state))
    return jnp.asarray(np.concatenate([np.asarray(leaf)[0, :m].reshape(m, -1) for leaf in leaves], axis=1))

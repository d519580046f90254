r"""Clustered federated learning: a cluster is split when the mean of its clients' updates vanishes.

All clients begin in one cluster. In each round every client i takes tau local steps from the model theta_c of its
cluster c. These steps change the model by :math:`\Delta_i`. The uniform mean of the cluster's updates is then added to
theta_c. A cluster is split if its mean update is short although some client's update is long,

.. math:: \Big\| \frac{1}{|c|} \sum_{i \in c} \Delta_i \Big\| < \varepsilon_1, \qquad
   \max_{i \in c} \|\Delta_i\| > \varepsilon_2,

because theta_c is then a stationary point of the mean loss, but not of the clients' own losses. The two new clusters
are chosen to minimize the largest cosine :math:`\alpha_{ij}` between updates of clients in different clusters,

.. math:: c_1, c_2 = \arg\min_{c_1 \cup c_2 = c} \; \max_{i \in c_1, j \in c_2} \alpha_{ij}.

The cluster is split only if this largest cosine, :math:`\alpha_\text{cross}`, satisfies
:math:`\sqrt{(1 - \alpha_\text{cross}) / 2} > \gamma`, where gamma is the paper's bound on the noise of the updates. The
model of each new cluster is theta_c plus the mean update of the new cluster's clients.

The minimum is found exactly by single linkage: the weakest edge is removed from a maximum spanning tree of the cosines.
There are at most ``max_clusters`` clusters, and clusters are never merged. A cluster is not split in a round in which
one of its clients dropped out or diverged.

The method performs poorly if the two thresholds do not fit the lengths of the updates, which grow with the learning
rate, the number of steps and the size of the model. The metrics ``mean_update`` and ``largest_update`` show these
lengths. If eps1 (:math:`\varepsilon_1`) is too large, noise causes splits, which cannot be undone, and each new cluster
learns from fewer clients. Single linkage tends to split off outlying clients one at a time. The server stores the
updates of all clients, and computes the cosine of every pair.

The default thresholds are from the authors' code, which differs from this method: it splits only clusters of more than
two clients, starts after round 20, uses complete linkage, and has no gamma.

Reference: Sattler, Müller and Samek 2020, "Clustered Federated Learning: Model-Agnostic Distributed Multi-Task
Optimization under Privacy Constraints", https://arxiv.org/abs/1910.01991.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from jaxpfl.algorithms.parts import several_models
from jaxpfl.algorithms.parts.hyper import SgdHyper, hyper
from jaxpfl.algorithms.parts.local_work import LocalWork, gradients, sgd
from jaxpfl.algorithms.parts.servers import increment
from jaxpfl.core.protocol import (
    Algorithm,
    Client,
    ClientContext,
    Message,
    Reduction,
    Server,
    ServerContext,
    Stacked,
    Upload,
)
from jaxpfl.core.types import Array, ClientData, Key, Metrics, PyTree, Scalar, Splits
from jaxpfl.models import Task
from jaxpfl.support.errors import JaxpflError


@struct.dataclass
class CFLHyper(SgdHyper):
    """Hyper-parameters of clustered federated learning."""

    eps1: Scalar = hyper(0.4, "eps1, length below which the mean update of a cluster counts as zero")
    eps2: Scalar = hyper(1.6, "eps2, length that some client's update must exceed for a cluster to be split")
    gamma: Scalar = hyper(0.0, "gamma, least distance between the two parts of a cluster to be split; 0 splits any")


class State(NamedTuple):
    """Server state: the models of the clusters (leaves [k, ...]), each client's cluster ([m]), and the number of
    clusters in use ([]).
    """

    models: PyTree
    cluster: Array
    used: Array


class Offered(NamedTuple):
    """Message to a new client: the models of all clusters (leaves [k, ...]), and the number of clusters in use ([])."""

    models: PyTree
    used: Array


def bipartition(similarity: Array, members: Array) -> tuple[Array, Array]:
    """Split the members into two parts so that the largest similarity between the parts is as small as possible.

    Prim's algorithm builds a maximum spanning tree. It adds one member at a time: the member with the largest
    similarity to any member in the tree. Just before the weakest edge is added, the tree contains exactly the members
    of one part; the members added from then on form the other part.

    Args:
      similarity: finite similarities of the clients, [m, m].
      members: mask of the cluster's clients, [m] bool, with at least two true entries.

    Returns:
      A pair: the mask of the part that does not contain the first member, [m] bool; and the largest similarity between
      the two parts, [].
    """
    size = len(members)

    def join(t: Array, carry: tuple[Array, Array, Array, Array]) -> tuple[Array, Array, Array, Array]:
        joined, nearest, place, links = carry
        free = members & ~joined
        at = jnp.argmax(jnp.where(free, nearest, -jnp.inf))
        here = free.any() & (jnp.arange(size) == at)
        links = links.at[t].set(jnp.where(free.any(), nearest[at], jnp.inf))
        nearest = jnp.where(free.any(), jnp.maximum(nearest, similarity[at]), nearest)
        return joined | here, nearest, jnp.where(here, t, place), links

    first = jnp.argmax(members)
    start = jnp.arange(size) == first, similarity[first], jnp.zeros(size, jnp.int32)
    _, _, place, links = jax.lax.fori_loop(1, size, join, (*start, jnp.full(size, jnp.inf, similarity.dtype)))
    cut = jnp.argmin(links)
    return members & (place >= cut), links[cut]


def cosines(updates: PyTree) -> tuple[Array, Array]:
    """Compute the cosine between every pair of updates, [m, m], and the length of each update, [m].

    The cosine is zero if one of the two updates is zero.
    """
    rows = [leaf.reshape(len(leaf), -1) for leaf in jax.tree.leaves(updates)]
    lengths = jnp.sqrt(sum((jnp.square(leaf).sum(axis=1) for leaf in rows[1:]), jnp.square(rows[0]).sum(axis=1)))
    inverse = jnp.where(lengths > 0, 1 / jnp.where(lengths > 0, lengths, 1), 0)
    units = [leaf * inverse[:, None].astype(leaf.dtype) for leaf in rows]
    similarity = sum((unit @ unit.T for unit in units[1:]), units[0] @ units[0].T)
    return jnp.asarray(similarity), lengths


def cfl(task: Task, work: LocalWork, *, max_clusters: int = 8) -> Algorithm:
    """Clustered federated learning (CFL): clusters of clients are split by the directions of their updates.

    The personalized model is the model of the client's cluster. There is no global model.

    The server receives each upload individually, and does not use a server optimizer. Every client must take part in
    every round. A new client uses the cluster model with the smallest loss on its training examples. (The paper instead
    leads a new client through all earlier splits. At each split, the new client's update is compared with the other
    clients' updates, which the server would have to store.)

    Args:
      task: the task; any model without running statistics is supported.
      work: the local work in a round.
      max_clusters: largest number k of clusters, at least 2.

    Raises:
      JaxpflError: if ``max_clusters`` is below two. An error is also raised when a run starts if not all clients take
        part in a round.
    """
    if max_clusters < 2:
        raise JaxpflError(f"cfl.max_clusters must be >= 2, got {max_clusters}: use fedavg for a single cluster")

    def model_of(message: Message, data: ClientData) -> PyTree:
        sent = message.per_client
        if not isinstance(sent, Offered):
            return sent
        losses = several_models.mean_losses(task, sent.models, data)
        known = jnp.arange(max_clusters) < sent.used
        # argmin would return the position of a NaN.
        return several_models.pick(sent.models, jnp.argmin(jnp.where(known & ~jnp.isnan(losses), losses, jnp.inf)))

    def update(
        key: Key, hp: CFLHyper, ctx: ClientContext, message: Message, state: PyTree, splits: Splits
    ) -> tuple[PyTree, Upload, Metrics]:
        start, rate = model_of(message, splits.train), hp.lr * hp.decay(ctx.round, work.steps)
        new, metrics = sgd(work, task, key, ctx, splits.train, start, rate=rate, weight_decay=hp.weight_decay)
        return state, increment(new, start), metrics

    client = Client(
        init=lambda key, hp, ctx, message: (),
        update=update,
        personalize=lambda key, hp, ctx, message, state, splits: model_of(message, splits.train),
        predict=lambda hp, params, x: task.model.apply(params, x),
        gradients=gradients(work.steps),
    )

    def server_init(key: Key, hp: CFLHyper, ctx: ServerContext) -> State:
        if ctx.expected_cohort != ctx.num_clients:
            raise JaxpflError(
                f"cfl compares the updates of all clients: the cohort must be {ctx.num_clients} (the number of "
                f"clients), got {ctx.expected_cohort:g}"
            )
        model = task.init(key)
        models = jax.tree.map(lambda a: jnp.broadcast_to(a, (max_clusters, *a.shape)), model)
        return State(models, jnp.zeros(ctx.num_clients, jnp.int32), jnp.int32(1))

    def server_update(
        key: Key, hp: CFLHyper, ctx: ServerContext, state: State, uploads: Stacked
    ) -> tuple[State, Metrics]:
        def client_rows(sent: Array) -> Array:
            return jnp.zeros((ctx.num_clients, *sent.shape[1:]), sent.dtype).at[uploads.rows].set(sent, mode="drop")

        updates, present = jax.tree.map(client_rows, uploads.total), client_rows(uploads.valid)
        similarity, lengths = cosines(updates)
        means = _means(updates, state.cluster, present, max_clusters)
        resting = cosines(means)[1]

        def consider(c: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
            cluster, parents, used = carry
            members = state.cluster == c
            second, cross = bipartition(similarity, members)
            apart = jnp.sqrt(jnp.maximum(1 - cross, 0) / 2) > hp.gamma
            stuck = (resting[c] < hp.eps1) & (jnp.where(members, lengths, 0).max() > hp.eps2)
            parted = (members.sum() > 1) & (present | ~members).all() & stuck & apart & (used < max_clusters)
            new = jnp.where(second & parted, used, cluster)
            parents = jnp.where(parted & (jnp.arange(max_clusters) == used), c, parents)
            return new, parents, used + parted

        start = state.cluster, jnp.arange(max_clusters, dtype=jnp.int32), state.used
        # The loop covers only the old clusters: until the next round, new clusters have no updates from their models.
        cluster, parents, used = jax.lax.fori_loop(jnp.int32(0), state.used, consider, start)
        moves = _means(updates, cluster, present, max_clusters)
        models = jax.tree.map(lambda old, move: (old[parents] + move).astype(old.dtype), state.models, moves)
        known = jnp.arange(max_clusters) < state.used
        metrics = {
            "clusters": used.astype(jnp.result_type(float)),
            "mean_update": jnp.where(known, resting, 0).max(),
            "largest_update": lengths.max(),
        }
        return State(models, cluster, used), metrics

    server = Server(
        init=server_init,
        broadcast=lambda key, hp, ctx, state: Message((), jax.tree.map(lambda a: a[state.cluster], state.models)),
        update=server_update,
        welcome=lambda key, hp, ctx, state: Message((), Offered(state.models, state.used)),
    )
    return Algorithm(
        (client,), server, work.steps, Reduction.STACK, clusters=lambda state: np.asarray(state.cluster, np.int32)
    )


def _means(updates: PyTree, cluster: Array, present: Array, k: int) -> PyTree:
    """Mean update of each cluster over its clients that uploaded, leaves [k, ...]; zero if no client uploaded."""
    members = (jnp.arange(k)[:, None] == cluster) & present
    shares = members / jnp.maximum(members.sum(axis=1, keepdims=True), 1)
    return jax.tree.map(lambda a: jnp.tensordot(shares.astype(a.dtype), a, axes=1), updates)

r"""Network lasso: personal models, those of clients that are alike drawn together along the edges of a graph.

.. math:: \min_{x, Z} \sum_n f_n(M x + N z_n) + \lambda \sum_{(i,j)} \|z_i - z_j\|_p

Client n is sent x, which all share, and z_n, its own, and makes tau steps of its own on f_n from
:math:`M x + N z_n` at the rate eta. It uploads by how much its model has moved, :math:`\delta_n`: with one step of
plain SGD, :math:`-\eta g_n`. The server's step, with S the clients whose uploads arrived and :math:`\delta_n = 0`
(the print's G) for all others:

.. math::
   x &\leftarrow x + \frac1{|S|} \sum_{n \in S} M^T \delta_n, \\
   Z &\leftarrow \operatorname*{argmin}_Z \frac12 \sum_n \|z_n - (z_n^t + c N^T \delta_n)\|^2
      + \eta \tau \frac{|S|}{N} \lambda \sum_{(i,j)} \|z_i - z_j\|_p

by ADMM (`similarity.admm`) in the same compiled round, from the multipliers of the round before, until its residuals
are small or a cap is reached. Edges whose z are equal at the end join clients to clusters (`clusters`).

The print (Zhao et al.) has (1/N) sum_n f_n, so that z_n moves by eta g_n / N. With ``scaling="mean"`` that is done
(c = 1 / N); with everybody, tau = 1 and full batches it is the print's step exactly. With ``scaling="sum"``, the
default, each f_n counts in full (c = 1): a client's model moves by its own gradient at the rate eta, as with every
other method here, whatever N is, and the shared x by the mean. Both have the same minimiser where lambda is N times as
large for the sum. lambda = 0 leaves every client alone: with "sum" z_n is local training from a common start. A large
lambda gives all clients of a component the mean of their z, federated averaging.

eta tau lambda, not eta lambda, so that the same lambda rests at the same models (up to clients' drift) for any tau;
and |S| / N, as a client outside the cohort has no gradient to hold against the pull of its neighbours. tau is what a
reliable client works. With a client optimiser other than SGD, delta is no multiple of a gradient, and lambda has
another scale. Weight decay is part of f_n.

Where a parameter is both shared and personal, the model is their sum, and both move; where it is neither, it keeps its
first value, which is sent along.

Reference: Zhao, Liu, Jiang and He, "Communication Efficient Training of Federated Model Over Unbalanced Labels",
Algorithms 1 and 2; what its Z step prints wrongly is right in `similarity.proximal`.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import struct
from jax.flatten_util import ravel_pytree

from jaxpfl import trees
from jaxpfl.algorithms.parts.averaging import increment
from jaxpfl.algorithms.parts.hyper import SgdHyper, hyper
from jaxpfl.algorithms.parts.local_work import LocalWork, gradients, sgd
from jaxpfl.algorithms.parts.masks import Parts, masks, with_fixed
from jaxpfl.errors import JaxpflError, unknown_name
from jaxpfl.models import Task
from jaxpfl.protocol import (
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
from jaxpfl.similarity import admm, graphs, proximal
from jaxpfl.similarity.graphs import Graph
from jaxpfl.types import Array, Key, Metrics, PyTree, Scalar, Splits

SCALINGS = ("sum", "mean")


@struct.dataclass
class NetworkHyper(SgdHyper):
    """The network lasso's hyper-parameters."""

    lam: Scalar = hyper(0.03, "lambda, weight of |z_i - z_j| on every edge")
    rho: Scalar = hyper(1.0, "ADMM's first penalty, eta times the print's: its number of steps", positive=True)


class NetworkState(NamedTuple):
    """The server's state.

    Attributes:
      shared: x, the shared parameters.
      z: [m, d], the clients' own parameters, flat, in the order of the stack.
      fixed: the parameters that nobody trains.
      warm: of ADMM: the differences w [M, d] along the edges, exactly zero where two clients are fused, and their
        multipliers.
    """

    shared: PyTree
    z: Array
    fixed: PyTree
    warm: admm.Warm


class Sent(NamedTuple):
    """What all clients receive."""

    shared: PyTree
    fixed: PyTree


def clusters(graph: Graph, state: NetworkState) -> np.ndarray:
    """The cluster of each client, [m] from 0 on in the order of their first clients: those joined by edges along which
    z is the same. With nothing personal, the components of the graph."""
    return graphs.components(graph, (np.asarray(state.warm.w) == 0).all(axis=1))


def network_lasso(
    task: Task,
    work: LocalWork,
    *,
    p: float = 2.0,
    shared: str = "none",
    personal: str = "*",
    scaling: str = "sum",
    admm_steps: int = 200,
    tolerance: float = 1e-4,
) -> Algorithm:
    """The network lasso. Models: personalised, M x + N z_n; global, x where nothing is personal, else none.

    The server keeps the uploads apart, and no optimiser of its own. A client that was never trained is sent the mean of
    all z. The metrics of a round: ``admm_steps`` taken, ``admm_primal`` and ``admm_dual`` residuals, relative to how
    far clients are apart, and ``fused_edges``, the share of edges whose clients have the same z. The state holds
    2 edges x d numbers beside the models.

    Implements: Zhao et al., equation (1); Zhao et al., equation (2); Zhao et al., equation (5);
      Zhao et al., Algorithm 1; Zhao et al., Algorithm 2; Zhao et al., Algorithm 5.
    Reference: Zhao et al., Figure 4.

    Args:
      task: any model.
      work: the local work in a round; ``work.graph`` says which clients are neighbours.
      p: the norm of differences along edges: 2 fuses whole clients, 1 each parameter by itself; or infinity.
      shared, personal: which parameters are, by patterns of their paths (`masks.masks`). By default all are personal:
        the network lasso itself.
      scaling: whether the losses f_n count in full ("sum"), or by 1 / N as printed ("mean").
      admm_steps: steps of ADMM in a round at most.
      tolerance: of its residuals.

    Raises:
      JaxpflError: without a graph or with one of other clients, for other p or scaling, patterns that fit no parameter,
        nothing to train, less than one step, and a tolerance that is not positive.
    """
    proximal.check_norm(p)
    if scaling not in SCALINGS:
        raise unknown_name("scaling", scaling, SCALINGS)
    if admm_steps < 1:
        raise JaxpflError(f"network-lasso.admm_steps must be >= 1, got {admm_steps}")
    if not 0 < tolerance < 1:
        raise JaxpflError(f"network-lasso.tolerance must be > 0 and < 1, got {tolerance}")
    graph = _graph_of(work)
    mask = masks("network-lasso", task, shared, personal)
    start = jax.eval_shape(lambda key: mask.split(task.init(key)), jax.random.key(0))
    flat, unravel = ravel_pytree(jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), start.personal))
    # Of a larger graph neither the spectrum nor the inverse is made: the system is solved by conjugate gradients.
    spectrum = graphs.spectrum(graph) if graph.nodes <= admm.MOST_DENSE else None

    def model(message: Message) -> PyTree:
        return Parts(message.shared.shared, unravel(message.per_client), message.shared.fixed).model()

    def update(
        key: Key, hp: NetworkHyper, ctx: ClientContext, message: Message, state: tuple[()], splits: Splits
    ) -> tuple[tuple[()], Upload, Metrics]:
        rate = hp.lr * hp.decay(ctx.round, work.steps)
        old, _ = trees.split_by_path(model(message), mask.is_trained)
        rest = with_fixed(task, message.shared.fixed)
        new, metrics = sgd(work, rest, key, ctx, splits.train, old, rate=rate, weight_decay=hp.weight_decay)
        return state, increment(new, old), metrics

    client = Client(
        init=lambda key, hp, ctx, message: (),
        update=update,
        personalize=lambda key, hp, ctx, message, state, splits: model(message),
        predict=lambda hp, params, x: task.model.apply(params, x),
        gradients=gradients(work.steps),
    )

    def init(key: Key, hp: NetworkHyper, ctx: ServerContext) -> NetworkState:
        parts = mask.split(task.init(key))
        z = jnp.broadcast_to(ravel_pytree(parts.personal)[0], (graph.nodes, flat.size))
        return NetworkState(parts.shared, z, parts.fixed, admm.cold(graph, z, hp.rho))

    def fused(
        hp: NetworkHyper, ctx: ServerContext, state: NetworkState, uploads: Stacked
    ) -> tuple[Array, admm.Warm, Metrics]:
        own = jax.vmap(lambda tree: ravel_pytree(mask.of_personal(tree))[0])(uploads.total)
        scale = 1.0 if scaling == "sum" else 1 / graph.nodes
        # What did not arrive is zero, and has no row: no other upload can reach the system.
        y = state.z.at[uploads.rows].add((scale * own).astype(state.z.dtype), mode="drop")
        pull = hp.lr * hp.decay(ctx.round, work.steps) * work.steps * hp.lam * uploads.contributors / graph.nodes
        how = {"warm": state.warm, "tolerance": tolerance, "most": admm_steps, "spectrum": spectrum}
        end = admm.fuse(graph, y, pull, p, **how)
        joined = (end.warm.w == 0).all(axis=1)
        share = joined.sum() / max(graph.edges, 1)
        metrics = {"admm_steps": end.steps, "admm_primal": end.primal, "admm_dual": end.dual, "fused_edges": share}
        return end.z, end.warm, metrics

    def server_update(
        key: Key, hp: NetworkHyper, ctx: ServerContext, state: NetworkState, uploads: Stacked
    ) -> tuple[NetworkState, Metrics]:
        z, warm, metrics = fused(hp, ctx, state, uploads) if flat.size else (state.z, state.warm, {})
        x = optax.apply_updates(state.shared, mask.of_shared(uploads.summed().mean()))
        new = NetworkState(x, z, state.fixed, warm)
        return trees.where(uploads.contributors > 0, new, state), metrics

    def predict_global(hp: NetworkHyper, state: NetworkState, x: PyTree) -> Array:
        return task.model.apply(trees.merge(state.shared, state.fixed), x)

    server = Server(
        init=init,
        broadcast=lambda key, hp, ctx, state: Message(Sent(state.shared, state.fixed), state.z),
        update=server_update,
        predict_global=None if flat.size else predict_global,
        welcome=lambda key, hp, ctx, state: Message(Sent(state.shared, state.fixed), state.z.mean(axis=0)),
    )
    return Algorithm((client,), server, work.steps, Reduction.STACK, clusters=lambda state: clusters(graph, state))


def _graph_of(work: LocalWork) -> Graph:
    if work.graph is None:
        raise JaxpflError("network-lasso needs a graph of the clients (LocalWork.graph)")
    if work.graph.nodes != work.num_clients:
        raise JaxpflError(f"the graph has {work.graph.nodes} nodes, expected the {work.num_clients} clients")
    return work.graph

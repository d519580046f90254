r"""Network lasso: personal models whose differences along the edges of a client graph are penalized.

.. math:: \min_{x, Z} \sum_n f_n(M x + N z_n) + \lambda \sum_{(i,j)} \|z_i - z_j\|_p

The matrices M and N select the shared and the personal parameters (`parts.split_models`), f_n is the loss of client n,
and Z is the matrix of all z_n. Client n receives the shared x and its own z_n, takes tau local steps on f_n from
:math:`M x + N z_n` at the rate eta, and uploads its model update :math:`\delta_n`. With one step of plain SGD,
:math:`\delta_n = -\eta g_n`, where g_n is the gradient. Let S be the set of clients whose uploads arrived, and let
:math:`\delta_n = 0` for all other clients. The server's step is

.. math::
   x &\leftarrow x + \frac1{|S|} \sum_{n \in S} M^T \delta_n, \\
   Z &\leftarrow \operatorname*{argmin}_Z \frac12 \sum_n \|z_n - (z_n^t + c N^T \delta_n)\|^2
      + \eta \tau \frac{|S|}{m} \lambda \sum_{(i,j)} \|z_i - z_j\|_p

Here m is the number of clients, and c is 1 or 1 / m (see below). The minimization over Z uses ADMM (`similarity.admm`)
in the same compiled round. ADMM starts from the solution and the multipliers of the previous round (`admm.Warm`), and
stops when its residuals are small or after a maximum number of steps. Neighboring clients that have equal z at the end
belong to the same cluster (`clusters`).

The paper's objective has the mean of the m losses f_n, so a step changes z_n by -eta g_n / m. ``scaling="mean"``
selects this objective (c = 1 / m). With full participation, tau = 1 and full batches, the server's step is exactly the
paper's step. With the default ``scaling="sum"``, the objective is the sum of all f_n (c = 1). A step then changes z_n
by -eta g_n, as in every other method of this package, and the shared x by the clients' mean change. The two objectives
have the same minimizer if lambda is m times as large for the sum. With lambda = 0 and no shared parameters, the clients
are decoupled; with "sum", z_n is then trained locally from a common start. With a large lambda, all clients of a
connected component share one z, the mean over the component, as in federated averaging.

The penalty's weight contains eta tau lambda rather than eta lambda, so that the fixed point depends on lambda but not
on tau (up to client drift). The weight also contains |S| / m, because a client outside the cohort has no gradient to
balance the penalty. tau is the number of steps of a client that is not a straggler. With a client optimizer other than
SGD, delta is not a multiple of a gradient, and lambda is on a different scale. Weight decay is part of f_n.

A parameter that is both shared and personal is the sum of two parameters, which are both trained. A parameter that is
neither shared nor personal keeps its initial value, which the server sends in every message.

Reference: Zhao, Liu, Jiang and He, "Communication Efficient Training of Federated Model Over Unbalanced Labels",
Algorithms 1 and 2. The paper's Z step is correct only for p = 2; `similarity.admm.prox` is correct for every p.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import struct
from jax.flatten_util import ravel_pytree

from jaxpfl.algorithms.parts.hyper import SgdHyper, hyper
from jaxpfl.algorithms.parts.local_work import LocalWork, gradients, sgd
from jaxpfl.algorithms.parts.servers import increment
from jaxpfl.algorithms.parts.split_models import Parts, masks, part_task
from jaxpfl.core import trees
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
from jaxpfl.core.types import Array, Key, Metrics, PyTree, Scalar, Splits
from jaxpfl.models import Task
from jaxpfl.similarity import admm, graphs
from jaxpfl.similarity.graphs import Graph
from jaxpfl.support.errors import JaxpflError, unknown_name

SCALINGS = ("sum", "mean")


@struct.dataclass
class NetworkHyper(SgdHyper):
    """Hyper-parameters of the network lasso."""

    lam: Scalar = hyper(0.03, "lambda, weight of |z_i - z_j| on every edge")
    rho: Scalar = hyper(
        1.0, "initial penalty of ADMM (lr times the paper's value); affects how fast ADMM converges", positive=True
    )


class NetworkState(NamedTuple):
    """State of the server.

    Attributes:
      shared: x, the shared parameters.
      z: the clients' own parameters as flat vectors, in the order of the federation's clients, [m, d].
      fixed: the parameters that are not trained.
      warm: ADMM's warm start: the difference between the z of each edge's two clients, and its multiplier, both
        [edges, d]. If a difference is exactly zero, the two clients have equal z.
    """

    shared: PyTree
    z: Array
    fixed: PyTree
    warm: admm.Warm


class Sent(NamedTuple):
    """Message to all clients: the shared and the fixed parameters."""

    shared: PyTree
    fixed: PyTree


def clusters(graph: Graph, state: NetworkState) -> np.ndarray:
    """Cluster of each client, [m]; clusters are numbered from 0 in the order of their first clients.

    The clusters are the connected components after removing all edges between clients with different z. Without
    personal parameters, they are the connected components of the whole graph.
    """
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
    """Network lasso: personal models with a penalty on the differences between neighbors in a graph of the clients.

    The personalized model of client n is M x + N z_n: x are the shared parameters, z_n are the client's own, and the
    matrices M and N place them in the model. If no parameter is personal, the global model is x; otherwise there is
    none.

    The server receives each upload individually, and does not use a server optimizer. New clients receive the mean of
    all z. The metrics of a round are ``admm_steps``, the residuals ``admm_primal`` and ``admm_dual`` (each divided by
    the norm of the clients' deviations from their mean), and ``fused_edges``, the fraction of edges whose clients have
    equal z. In addition to the models, the server stores two vectors of length d for each edge.

    Implements: Zhao et al., equation (1); Zhao et al., equation (2); Zhao et al., equation (5);
      Zhao et al., Algorithm 1; Zhao et al., Algorithm 2; Zhao et al., Algorithm 5.
    Reference: Zhao et al., Figure 4.

    Args:
      task: the task; any model is supported.
      work: the local work in a round; ``work.graph`` is the client graph.
      p: order of the norm of the differences, 1, 2 or infinity. With p = 2, two clients' vectors z become equal as a
        whole; with p = 1, single entries of z may become equal.
      shared, personal: patterns for the paths of the shared parameters (``shared``) and of the personal ones
        (``personal``), as in `split_models.masks`. By default all parameters are personal, as in the original paper.
      scaling: factor on the losses f_n: "sum" for 1, or "mean" for the paper's 1 / m with m clients.
      admm_steps: maximum number of ADMM steps in a round.
      tolerance: largest residual at which ADMM stops.

    Raises:
      JaxpflError: if the graph is missing or has a different number of clients, p or the scaling is not one of the
        allowed values, a pattern matches no parameter, no parameter is trained, ``admm_steps`` is below one, local work
        is in epochs, or the tolerance is outside (0, 1).
    """
    admm.check_norm(p)
    if scaling not in SCALINGS:
        raise unknown_name("scaling", scaling, SCALINGS)
    if work.epochs is not None:
        raise JaxpflError("network-lasso requires equally many steps of all clients: set local_steps, not local_epochs")
    if admm_steps < 1:
        raise JaxpflError(f"network-lasso.admm_steps must be >= 1, got {admm_steps}")
    if not 0 < tolerance < 1:
        raise JaxpflError(f"network-lasso.tolerance must be > 0 and < 1, got {tolerance}")
    graph = work.graph
    if graph is None:
        raise JaxpflError("network-lasso requires a graph of the clients: set LocalWork.graph")
    if graph.nodes != work.num_clients:
        raise JaxpflError(f"the graph must have {work.num_clients} nodes, one for each client, got {graph.nodes}")
    mask = masks("network-lasso", task, shared, personal)
    start = jax.eval_shape(lambda key: mask.split(task.init(key)), jax.random.key(0))
    flat, unravel = ravel_pytree(jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), start.personal))
    # For a larger graph, conjugate gradients solve the linear system, and no spectrum is computed.
    spectrum = graphs.spectrum(graph) if admm.prefers_spectrum(graph) else None

    def model(message: Message) -> PyTree:
        return Parts(message.shared.shared, unravel(message.per_client), message.shared.fixed).model()

    def update(
        key: Key, hp: NetworkHyper, ctx: ClientContext, message: Message, state: tuple[()], splits: Splits
    ) -> tuple[tuple[()], Upload, Metrics]:
        rate = hp.lr * hp.decay(ctx.round, work.steps)
        old, _ = trees.split_by_path(model(message), mask.is_trained)
        rest = part_task(task, message.shared.fixed)
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
        own = jax.vmap(lambda tree: ravel_pytree(mask.personal_part(tree))[0])(uploads.total)
        scale = 1.0 if scaling == "sum" else 1 / graph.nodes
        # Slots without an upload have the out-of-range index m, which mode "drop" skips.
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
        x = optax.apply_updates(state.shared, mask.shared_part(uploads.summed().mean()))
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

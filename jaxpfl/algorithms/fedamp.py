r"""FedAMP: each client is regularized toward its cloud model, a weighted mean of all clients' models.

The server keeps the clients' models w_1 ... w_m. With :math:`A(d^2) = 1 - e^{-d^2 / \sigma}`, client i's cloud model is

.. math:: u_i = \Big(1 - \sum_{j \ne i} \xi_{ij}\Big) w_i + \sum_{j \ne i} \xi_{ij} w_j, \qquad
   \xi_{ij} = \alpha A'(\|w_i - w_j\|^2) = \frac{\alpha}{\sigma} e^{-\|w_i - w_j\|^2 / \sigma}

Client i takes tau local steps from its own model to minimize

.. math:: f_i(w) + \frac{\lambda}{2 \alpha} \|w - u_i\|^2

where f_i is the client's loss. The hyper-parameters are alpha, sigma and lambda. The result is the client's new w_i.
The client uploads the difference w_i - u_i, and the server adds u_i.

The weight of w_i in u_i must not be negative. The paper ensures this by a small alpha. Here, if the weights xi_ij of
the other clients sum to more than one, they are divided by their sum. All models are equal at first. Cloud models also
contain the last models of clients outside the cohort.

The method performs poorly if sigma does not fit the distances between the models, which grow with the size of the model
and with the learning rate. With a small sigma each client trains alone; with a large sigma all clients are regularized
toward nearly the same model. With small cohorts, clients are regularized toward the initial model, because the clients
that have not yet taken part still have this model. The server stores m models, and computes the distance of every pair
in every round.

The defaults of sigma and lambda are taken from PFLlib, although PFLlib penalizes the norm of w - u_i instead of its
square. PFLlib's alpha of 1 keeps each client near its old model. The default alpha was the best on held-out examples of
three data sets (``benchmarks/defaults.py``). With an alpha of 100 or more, the weight lambda / alpha is so small that
clients train alone.

Reference: Huang et al. 2021, "Personalized Cross-Silo Federated Learning on Non-IID Data",
https://arxiv.org/abs/2007.03797.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import struct

from jaxpfl.algorithms.parts.hyper import SgdHyper, hyper
from jaxpfl.algorithms.parts.local_work import LocalWork, gradients, sgd
from jaxpfl.algorithms.parts.servers import increment
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


@struct.dataclass
class FedAMPHyper(SgdHyper):
    """Hyper-parameters of FedAMP."""

    alpha: Scalar = hyper(10.0, "alpha, step toward similar models", positive=True, is_step=True)
    sigma: Scalar = hyper(1.0, "sigma, squared distance beyond which models count as dissimilar", positive=True)
    lam: Scalar = hyper(1.0, "lambda in the proximal term (lambda/(2 alpha)) |w - u|^2 of a client's loss")


class Models(NamedTuple):
    """Server state: all clients' models, in the order of the federation's clients; leaves [m, ...]."""

    models: PyTree


def clouds(hp: FedAMPHyper, models: PyTree) -> PyTree:
    """Compute the cloud model of each client, leaves [m, ...]."""
    leaves = jax.tree.leaves(models)

    def products(leaf: Array) -> Array:
        # Subtracting the mean avoids cancellation in the squared distances of nearly equal models.
        apart = (leaf - leaf.mean(axis=0)).reshape(len(leaf), -1)
        return apart @ apart.T

    gram = sum(map(products, leaves[1:]), products(leaves[0]))
    lengths = jnp.diagonal(gram)
    squares = jnp.maximum(lengths[:, None] + lengths - 2 * gram, 0)
    xi = hp.alpha / hp.sigma * jnp.exp(-squares / hp.sigma)
    xi = jnp.where(jnp.eye(len(gram), dtype=bool), 0, xi)
    xi = xi / jnp.maximum(xi.sum(axis=1, keepdims=True), 1)
    weights = xi + jnp.diag(1 - xi.sum(axis=1))
    return jax.tree.map(lambda leaf: jnp.tensordot(weights, leaf, axes=1), models)


def fedamp(task: Task, work: LocalWork) -> Algorithm:
    """FedAMP: each personal model is regularized toward a weighted mean in which similar clients have more weight.

    The personalized model is the client's own w_i. There is no global model.

    The server receives each upload individually, and does not use a server optimizer. A new client starts from the mean
    of the clients' models and is regularized toward this mean.

    Args:
      task: the task; any model is supported.
      work: the local work in a round.
    """

    def update(
        key: Key, hp: FedAMPHyper, ctx: ClientContext, message: Message, own: PyTree, splits: Splits
    ) -> tuple[PyTree, Upload, Metrics]:
        cloud, rate = message.per_client, hp.lr * hp.decay(ctx.round, work.steps)
        pulled = {"anchor": cloud, "prox": hp.lam / hp.alpha, "weight_decay": hp.weight_decay}
        new, metrics = sgd(work, task, key, ctx, splits.train, own, rate=rate, **pulled)
        return new, increment(new, cloud), metrics

    client = Client(
        init=lambda key, hp, ctx, message: message.per_client,
        update=update,
        personalize=lambda key, hp, ctx, message, own, splits: own,
        predict=lambda hp, own, x: task.model.apply(own, x),
        gradients=gradients(work.steps),
    )

    def server_init(key: Key, hp: FedAMPHyper, ctx: ServerContext) -> Models:
        return Models(jax.tree.map(lambda a: jnp.broadcast_to(a, (ctx.num_clients, *a.shape)), task.init(key)))

    def server_update(
        key: Key, hp: FedAMPHyper, ctx: ServerContext, state: Models, uploads: Stacked
    ) -> tuple[Models, Metrics]:
        def put(old: Array, cloud: Array, change: Array) -> Array:
            new = trees.take_rows(cloud, uploads.rows) + change
            return old.at[uploads.rows].set(new.astype(old.dtype), mode="drop")

        return Models(jax.tree.map(put, state.models, clouds(hp, state.models), uploads.total)), {}

    server = Server(
        init=server_init,
        broadcast=lambda key, hp, ctx, state: Message((), clouds(hp, state.models)),
        update=server_update,
        welcome=lambda key, hp, ctx, state: Message((), jax.tree.map(lambda a: a.mean(axis=0), state.models)),
    )
    return Algorithm((client,), server, work.steps, Reduction.STACK)

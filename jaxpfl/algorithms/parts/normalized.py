r"""FedNova's normalised averaging, for clients that take different numbers of local steps.

With :math:`\Delta_i` the model update of client i after :math:`\tau_i` SGD steps (fewer of a straggler, or of a client
with few examples where work is in epochs) and :math:`p_i` its share of the weights, the server adds

.. math:: \Bigl( \sum_i p_i \tau_i \Bigr) \sum_i p_i \frac{\Delta_i}{\tau_i}

in place of :math:`\sum_i p_i \Delta_i`, which would weigh clients by their steps too and so converge to the minimiser
of another objective. Where all take as many steps they are the same. Weight decay counts as part of the gradient.

Reference: Wang et al. 2020, "Tackling the Objective Inconsistency Problem in Heterogeneous Federated Optimization",
https://arxiv.org/abs/2007.07481, equation (10) for SGD without momentum.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
import optax

from jaxpfl.algorithms.parts.local_work import LocalWork, taken
from jaxpfl.core import trees
from jaxpfl.core.protocol import (
    Algorithm,
    Client,
    ClientContext,
    Message,
    Reduced,
    Server,
    ServerContext,
    Upload,
    wrapped_client,
    wrapped_server,
)
from jaxpfl.core.types import Array, ClientData, Key, Metrics, PyTree, Splits
from jaxpfl.support.errors import JaxpflError


class Normalized(NamedTuple):
    """Upload of a client, both weighted: its model update for each of its steps, and the number of its steps, []."""

    change: PyTree
    steps: PyTree


def normalized(method: str, algorithm: Algorithm, work: LocalWork) -> Algorithm:
    """An algorithm that averages model updates of one weight, by FedNova.

    Args:
      method: its name in an error.
      algorithm: one whose clients take the steps of ``work``.
      work: the local work in a round.

    Raises:
      JaxpflError: for another client optimizer than plain SGD, whose steps do not count the same.
    """
    if work.optimizer != "sgd":
        raise JaxpflError(f"{method}.fednova divides by the steps of plain sgd, not {work.optimizer}")
    clients = tuple(_client(client, work) for client in algorithm.clients)
    increments = Normalized(change=algorithm.increments, steps=False)
    return algorithm._replace(clients=clients, server=_server(algorithm.server), increments=increments)


def _steps(work: LocalWork, ctx: ClientContext, data: ClientData) -> Array:
    own, limit = work.own_steps, taken(work.steps, ctx.step_limit)
    if own is not None:
        limit = jnp.minimum(limit, own.steps(data.size))
    return jnp.maximum(jnp.asarray(limit, jnp.result_type(float)), 1)


def _client(inner: Client, work: LocalWork) -> Client:
    def update(
        key: Key, hp: PyTree, ctx: ClientContext, message: Message, state: PyTree, splits: Splits
    ) -> tuple[PyTree, Upload, Metrics]:
        state, upload, metrics = inner.update(key, hp, ctx, message, state, splits)
        steps = _steps(work, ctx, splits.train)
        total = Normalized(optax.tree.scale(1 / steps, upload.total), upload.weight * steps)
        return state, upload._replace(total=total), metrics

    return wrapped_client(inner, update=update)


def _server(inner: Server) -> Server:
    def update(key: Key, hp: PyTree, ctx: ServerContext, state: PyTree, reduced: Reduced) -> tuple[PyTree, Metrics]:
        total: Normalized = reduced.total
        steps = trees.prefix_divide(total.steps, reduced.weight)
        change = optax.tree.scale(steps, total.change)
        return inner.update(key, hp, ctx, state, reduced._replace(total=change))

    return wrapped_server(inner, init=inner.init, update=update, state=lambda state: state)

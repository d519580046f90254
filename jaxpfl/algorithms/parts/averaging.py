"""Servers that average the clients' model updates, and the uploads for them."""

from __future__ import annotations

from collections.abc import Callable

import jax.numpy as jnp
import optax

from jaxpfl.core.protocol import Message, Reduced, Server, ServerContext, Upload
from jaxpfl.core.protocol_checks import check_shapes
from jaxpfl.core.types import Array, Key, Metrics, PyTree, Scalar
from jaxpfl.models import Task


def averaging_server(task: Task) -> Server:
    """Server of one global model, as `mean_server`."""
    return mean_server(task.init, lambda hp, mu, x: task.model.apply(mu, x))


def mean_server(
    init: Callable[[Key], PyTree], predict_global: Callable[[PyTree, PyTree, PyTree], Array] | None = None
) -> Server:
    """Server with ``mu <- mu + sum_i weight_i (w_i - mu) / sum_i weight_i``; uploads are `increment`s.

    Args:
      init: ``key -> mu``: a model, a part of one, or several.
      predict_global: as `Server.predict_global`; None where mu is not one whole model.
    """

    def update(key: Key, hp: PyTree, ctx: ServerContext, mu: PyTree, reduced: Reduced) -> tuple[PyTree, Metrics]:
        check_shapes("Upload.total", reduced.total, mu, like="Message.shared")
        return optax.apply_updates(mu, reduced.mean()), {}

    return Server(
        init=lambda key, hp, ctx: init(key),
        broadcast=lambda key, hp, ctx, mu: Message(mu),
        update=update,
        predict_global=predict_global,
    )


def increment(new: PyTree, old: PyTree, weight: Scalar | None = None) -> Upload:
    """Upload of the model update ``new - old`` with that weight; without one, of weight 1."""
    change = optax.tree.sub(new, old)
    if weight is None:
        return Upload(change, jnp.ones(()))
    return Upload(optax.tree.scale(weight, change), weight)


def share_of_all(reduced: Reduced, ctx: ServerContext) -> Array:
    """Share |S| / m of contributors: times their mean update, the change of a mean over ALL m clients, []."""
    return reduced.contributors.astype(jnp.result_type(float)) / ctx.num_clients

"""What crosses the network in a round."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxpfl import trees
from jaxpfl.engine.state import RunState, server_context
from jaxpfl.participation import Participation
from jaxpfl.protocol import ALL_STEPS, Algorithm, ClientContext, Message
from jaxpfl.types import Federation, PyTree


def bytes_per_client(
    algorithm: Algorithm, participation: Participation, state: RunState, hp: PyTree, federation: Federation
) -> tuple[int, int]:
    """Bytes that one client uploads and receives in one round (parameters as they are, weights left out).

    Args:
      state, hp, federation: of one run, as shapes; the federation is the first group's.
    """

    def exchange(state: RunState, hp: PyTree, federation: Federation) -> tuple[PyTree, PyTree]:
        key, zero = jax.random.key(0), jnp.int32(0)
        message = algorithm.server.broadcast(key, hp, server_context(participation, zero), state.server)
        own, splits, per_client = jax.tree.map(
            lambda a: a[0], (state.clients[0], federation.splits, message.per_client)
        )
        received = Message(message.shared, per_client)
        ctx = ClientContext(zero, zero, zero, ALL_STEPS, key)
        _, upload, _ = algorithm.clients[0].update(key, hp, ctx, received, own, splits)
        return upload.total, received

    up, down = jax.eval_shape(exchange, state, hp, federation)
    return trees.num_bytes(up), trees.num_bytes(down)

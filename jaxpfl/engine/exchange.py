"""Properties of a client's round, found by tracing it: bytes sent, and whether uploads depend on earlier rounds."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.extend.core
import jax.numpy as jnp

from jaxpfl.core import trees
from jaxpfl.core.participation import Participation
from jaxpfl.core.protocol import ALL_STEPS, Algorithm, ClientContext, Message, Upload
from jaxpfl.core.types import Array, Federation, PyTree
from jaxpfl.engine import programs
from jaxpfl.engine.state import RunState, server_context


class ClientMemory(NamedTuple):
    """Values that a client keeps between rounds.

    Attributes:
      state: the client's state.
      participations: number of rounds in which the client was in the cohort, [].
      idle_rounds: number of rounds in which the client trained while not in the cohort, [].
    """

    state: PyTree
    participations: Array
    idle_rounds: Array


def bytes_per_client(
    algorithm: Algorithm, participation: Participation, state: RunState, hp: PyTree, federation: Federation
) -> tuple[int, int]:
    """Bytes that one client uploads and receives in one round, without compression and without `Upload.weight`.

    Both numbers are zero for a pooled method, because the cost of collecting the examples is not counted.

    Args:
      algorithm: the method.
      participation: sampling of the cohorts.
      state: state of one run, as shapes.
      hp: hyper-parameters of one run.
      federation: data of the first group of clients.
    """
    if algorithm.pooled:
        return 0, 0

    def exchange(state: RunState, hp: PyTree, federation: Federation) -> tuple[PyTree, PyTree]:
        _, upload, received = client_round(
            algorithm, participation, 0, client_memory(state, 0), state.server, hp, federation
        )
        return upload.total, received

    up, down = programs.shapes(exchange, state, hp, federation)
    return trees.num_bytes(up), trees.num_bytes(down)


def remembers(
    algorithm: Algorithm,
    participation: Participation,
    state: RunState,
    hp: PyTree,
    federations: tuple[Federation, ...],
) -> bool:
    """True if a client's upload depends on values that the client keeps between rounds (`ClientMemory`).

    These values include the number of rounds in which the client has worked, because this number determines at which
    example the next mini-batch begins. The dependence is read from the traced program. An operation with a nested
    program, such as a loop, counts as depending on all of its inputs.

    Args:
      algorithm: the method.
      participation: sampling of the cohorts.
      state: state of one run, as shapes.
      hp: hyper-parameters of one run.
      federations: data of each group of clients.
    """

    def depends(group: int) -> bool:
        def upload(memory: ClientMemory, server: PyTree, hp: PyTree, federation: Federation) -> Upload:
            return client_round(algorithm, participation, group, memory, server, hp, federation)[1]

        memory = jax.eval_shape(lambda state: client_memory(state, group), state)
        program = jax.make_jaxpr(upload)(memory, state.server, hp, federations[group]).jaxpr
        # Backward pass over the equations: collect every variable on which the outputs depend.
        needed = _variables(program.outvars)
        for equation in reversed(program.eqns):
            if needed & _variables(equation.outvars):
                needed |= _variables(equation.invars)
        return bool(needed & _variables(program.invars[: len(jax.tree.leaves(memory))]))

    return any(map(depends, range(len(algorithm.clients))))


def client_round(
    algorithm: Algorithm,
    participation: Participation,
    group: int,
    memory: ClientMemory,
    server: PyTree,
    hp: PyTree,
    federation: Federation,
) -> tuple[PyTree, Upload, Message]:
    """Run round 0 for the first client of a group; return the new state, the upload, and the message it received."""
    key, zero = jax.random.key(0), jnp.int32(0)
    message = algorithm.server.broadcast(key, hp, server_context(participation, zero), server)
    splits, per_client = federation.splits.client(0), jax.tree.map(lambda a: a[0], message.per_client)
    received = Message(message.shared, per_client)
    idle_rounds = memory.idle_rounds if algorithm.idle_cap else 0
    ctx = ClientContext(zero, zero, memory.participations, ALL_STEPS, key, idle_rounds)
    new, upload, _ = algorithm.clients[group].update(key, hp, ctx, received, memory.state, splits)
    return new, upload, received


def client_memory(state: RunState, group: int) -> ClientMemory:
    """Values that the first client of a group has before its first round."""
    return ClientMemory(jax.tree.map(lambda a: a[0], state.clients[group]), jnp.int32(0), jnp.int32(0))


def _variables(atoms: list) -> set:
    return {atom for atom in atoms if not isinstance(atom, jax.extend.core.Literal)}

"""Programs of streamed clients: the draw of a cohort, apart from its round, and the round on a stack of its rows.

The round is `make_round`'s, on a stack of as many rows as the cohort has slots, with the clients' own ids and m as the
number of clients: the streams, masks and the order of sums are those of a stack of all clients.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxpfl.core.participation import Participation
from jaxpfl.core.protocol import Algorithm
from jaxpfl.core.randomness import Purpose, stream
from jaxpfl.core.types import Array, Key, Metrics, PyTree
from jaxpfl.engine import refusals
from jaxpfl.engine.groups import Group
from jaxpfl.engine.round import Clients, RoundPlan, RunValues, make_round
from jaxpfl.engine.state import Counts, RunState


class Held(NamedTuple):
    """States and counts of some clients, leaves [rows, ...]."""

    clients: PyTree
    counts: Counts


class Drawn(NamedTuple):
    """A cohort: rows of the clients, [K] (m where a slot is empty), and the number left out, if it is counted."""

    rows: Array
    left_out: Array | None


def refusal(algorithm: Algorithm, participation: Participation, per_client: PyTree) -> str:
    """Reason why an algorithm's clients cannot be streamed; empty if they can.

    Args:
      algorithm: the method.
      participation: the sampling of cohorts.
      per_client: shapes of the messages to single clients.
    """
    if algorithm.pooled:
        return "one client trains"
    if why := refusals.of_slots(algorithm):
        return why
    why = refusals.of_uploads(algorithm) or refusals.of_messages(per_client)
    if why and participation.everyone:
        return f"{why}, and all clients take part in every round, so that all would lie on the devices"
    if algorithm.idle_cap and not participation.everyone:
        return "its clients train outside the cohort too"
    return ""


def stack_of(rows: int, devices: int) -> Group:
    """The stack of some rows of clients."""
    return Group(np.arange(rows), -(-rows // devices) * devices, rows, True)


def make_draw(participation: Participation) -> Callable[[Key, Array, Array], Drawn]:
    """Build ``(released key, round, client ids [m]) -> Drawn``, the draw of `make_round`."""

    def draw(released: Key, round: Array, ids: Array) -> Drawn:
        key = stream(released, Purpose.PARTICIPATION, round)
        left_out = participation.left_out
        return Drawn(participation.rows(released, round, ids), None if left_out is None else left_out(key, ids))

    return draw


def make_streamed(
    algorithm: Algorithm, plan: RoundPlan
) -> Callable[[tuple[RunState, Held], RunValues, Clients, Drawn, Array], tuple[RunState, Metrics]]:
    """Build a round on the stack of a cohort's rows.

    Args:
      algorithm: the method.
      plan: with the participation of all m clients, and the cohort's rows as its one group.

    Returns:
      ``((state, before), values, clients, drawn, source) -> (state, metrics)``. The clients of state are the cohort's
      rows as they are stored; where source, [rows] int32, is not negative, the row of that place in ``before``, the
      round before, is newer. ``drawn`` has rows of the stack.
    """
    participation = plan.participation

    def one_round(
        run: tuple[RunState, Held], values: RunValues, clients: Clients, drawn: Drawn, source: Array
    ) -> tuple[RunState, Metrics]:
        state, before = run

        def newest(stored: Array, new: Array) -> Array:
            is_new = (source >= 0).reshape(-1, *[1] * (stored.ndim - 1))
            return jnp.where(is_new, new[jnp.maximum(source, 0)], stored)

        rows, counts = jax.tree.map(newest, Held(state.clients[0], state.counts), before)
        given = participation._replace(
            sample=lambda key, ids: drawn.rows,
            turns=None,
            left_out=None if participation.left_out is None else lambda key, ids: drawn.left_out,
        )
        return make_round(algorithm, plan._replace(participation=given))(
            state._replace(clients=(rows,), counts=counts), values, clients
        )

    return one_round

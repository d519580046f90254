"""One federated round as one pure function: draw the cohort, let it work, sum, update the server, write back."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxpfl import trees
from jaxpfl.engine.cohort import Outcome, Spread, run_cohort
from jaxpfl.participation import Participation
from jaxpfl.protocol import ALL_STEPS, Algorithm, ClientContext, Reduced, ServerContext, Upload
from jaxpfl.randomness import Purpose, stream
from jaxpfl.types import Array, Federation, Key, Metrics, PyTree, Splits


class RunState(NamedTuple):
    """Everything that a run carries from round to round; it is the whole checkpoint.

    On several devices m' is m rounded up to a multiple of their number, and the last m' - m rows are nobody's;
    otherwise m' = m.

    Attributes:
      server: the server's state.
      clients: the clients' states, leaves [m', ...].
      participations: [m'] int32, rounds in which the client was in the cohort.
      diverged: [m'] int32, of these, rounds whose upload was dropped: because it or the client's new state was not
        finite, or because the server's next state would not have been.
      round: [] int32, finished rounds.
      key: the run's key.
    """

    server: PyTree
    clients: PyTree
    participations: Array
    diverged: Array
    round: Array
    key: Key


def init_state(
    algorithm: Algorithm, participation: Participation, key: Key, hp: PyTree, federation: Federation, rows: int
) -> RunState:
    """The state before the first round, of ``rows`` = m' clients. Clients start from the round-0 broadcast."""
    server, client = algorithm.server, algorithm.client
    ctx = server_context(participation, jnp.int32(0))
    state = server.init(stream(key, Purpose.SERVER_INIT), hp, ctx)
    message = server.broadcast(stream(key, Purpose.BROADCAST, 0), hp, ctx, state)

    def init_client(client_id: Array) -> PyTree:
        zero = jnp.int32(0)
        client_ctx = ClientContext(zero, client_id, zero, ALL_STEPS, stream(key, Purpose.BATCHES, client_id))
        return client.init(stream(key, Purpose.CLIENT_INIT, client_id), hp, client_ctx, message)

    ids = jnp.asarray(federation.client_ids)[: participation.num_clients]
    clients = jax.vmap(init_client)(jnp.pad(ids, (0, rows - ids.shape[0]), mode="edge"))
    zeros = jnp.zeros(rows, jnp.int32)
    return RunState(state, clients, zeros, zeros, jnp.int32(0), key)


def server_context(participation: Participation, round: Array) -> ServerContext:
    return ServerContext(round, participation.num_clients, participation.expected_cohort)


def make_round(
    algorithm: Algorithm, participation: Participation, *, block: int, spread: Spread | None = None
) -> Callable[[RunState, PyTree, Federation], tuple[RunState, Metrics]]:
    """Builds ``(state, hp, federation) -> (state, metrics)``.

    The metrics are the clients' means over those whose work was kept, the server's own, and ``participants`` and
    ``diverged``, the number of clients in the cohort and of those dropped.
    """
    client, server = algorithm.client, algorithm.server

    def one_round(state: RunState, hp: PyTree, federation: Federation) -> tuple[RunState, Metrics]:
        num_clients = participation.num_clients
        ids = jnp.asarray(federation.client_ids)
        rows = participation.sample(stream(state.key, Purpose.PARTICIPATION, state.round), ids[:num_clients])
        ctx = server_context(participation, state.round)
        message = server.broadcast(stream(state.key, Purpose.BROADCAST, state.round), hp, ctx, state.server)

        def work(present: Array, own: tuple[PyTree, Array, Array], data: tuple[Splits, Array]) -> Outcome:
            old, participations, diverged = own
            splits, client_id = data
            client_ctx = ClientContext(
                state.round,
                client_id,
                participations,
                ALL_STEPS,
                stream(state.key, Purpose.BATCHES, client_id),
            )
            key = stream(state.key, Purpose.LOCAL_WORK, state.round, client_id)
            new, upload, metrics = client.update(key, hp, client_ctx, message, old, splits)
            packed = trees.pack(upload)
            finite = trees.all_finite((new, packed))
            keep = present & finite
            summed = (packed, jnp.ones((), jnp.int32), metrics)
            summed = trees.where(keep, summed, jax.tree.map(jnp.zeros_like, summed))
            kept_state = (trees.where(keep, new, old), participations + present, diverged + (present & ~finite))
            return Outcome(kept_state, summed, ())

        own = (state.clients, state.participations, state.diverged)
        (clients, participations, diverged), (packed, contributors, sums), _ = run_cohort(
            work,
            rows,
            own,
            (federation.splits, ids),
            num_clients=num_clients,
            block=block,
            everyone=participation.everyone,
            spread=spread,
        )
        total: Upload = packed.unpack()
        reduced = Reduced(total.total, total.weight, contributors)
        server_key = stream(state.key, Purpose.SERVER_UPDATE, state.round)
        new_server, server_metrics = server.update(server_key, hp, ctx, state.server, reduced)
        # Finite uploads may still overflow in the sum: the server then keeps its state, and all of them are lost.
        sound = trees.all_finite(new_server)
        new_server = trees.where(sound, new_server, state.server)
        present = participations - state.participations
        diverged = jnp.where(sound, diverged, state.diverged + present)
        # Where everybody diverged there is nothing to average: NaN, not a perfect zero.
        kept = jnp.where(reduced.contributors > 0, reduced.contributors, jnp.nan)
        metrics = {name: total / kept for name, total in sums.items()} | server_metrics
        metrics |= {"participants": present.sum(), "diverged": (diverged - state.diverged).sum()}
        return RunState(new_server, clients, participations, diverged, state.round + 1, state.key), metrics

    return one_round


def make_rounds(
    one_round: Callable[[RunState, PyTree, Federation], tuple[RunState, Metrics]], capacity: int
) -> Callable[[RunState, PyTree, Federation, Array], tuple[RunState, Metrics]]:
    """Builds ``(state, hp, federation, rounds) -> (state, history)``: ``rounds <= capacity`` rounds in one loop.

    The number of rounds is traced, so calls of every length share one compiled program; the history's leaves are
    [capacity], written up to ``rounds``. (A ``lax.scan`` would compile once more for the last, shorter call.)
    """
    # Wrapped once, the round is traced once: eval_shape below and the loop share the cached trace.
    one_round = jax.jit(one_round, inline=True)

    def rounds_fn(state: RunState, hp: PyTree, federation: Federation, rounds: Array) -> tuple[RunState, Metrics]:
        _, shapes = jax.eval_shape(one_round, state, hp, federation)
        history = {name: jnp.zeros(capacity, leaf.dtype) for name, leaf in shapes.items()}

        def body(t: Array, loop: tuple[RunState, Metrics]) -> tuple[RunState, Metrics]:
            state, history = loop
            state, metrics = one_round(state, hp, federation)
            put = partial(jax.lax.dynamic_update_index_in_dim, index=t, axis=0)
            return state, {name: put(history[name], value) for name, value in metrics.items()}

        return jax.lax.fori_loop(0, rounds, body, (state, history))

    return rounds_fn

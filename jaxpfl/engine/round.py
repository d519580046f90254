"""A federated round as a pure function: sample the cohort, train its clients, sum their uploads, and update the server.

The second half of the module computes a round's simulated time, from each client's local steps and speed.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxpfl.core import protocol, trees
from jaxpfl.core.participation import (
    RELIABLE,
    Availability,
    FailureRates,
    Participation,
    TimeModel,
    resolve_time_model,
)
from jaxpfl.core.protocol import (
    Algorithm,
    Client,
    ClientContext,
    Message,
    Reduced,
    Reduction,
    Server,
    ServerContext,
    Stacked,
    Upload,
)
from jaxpfl.core.randomness import Purpose, stream
from jaxpfl.core.types import Array, Key, Metrics, PyTree, Scalar, Splits
from jaxpfl.engine import in_flight
from jaxpfl.engine.cohort import Clients, Group, ModelAxis, Outcome, Spread, gather, lay, run_cohort
from jaxpfl.engine.state import LIMB, Counts, RunState, server_context

BITS = ("upload_bits_high", "upload_bits_low")
"""Names of two metrics that are the high and the low part of one number, the uploaded bits (`state.whole`)."""


class RoundPlan(NamedTuple):
    """Static settings of a round.

    Attributes:
      participation: sampling of the cohort.
      availability: dropout and stragglers. Their rates are arguments of the round.
      groups: group of clients for each entry of ``algorithm.clients``.
      block: number of clients that a device runs in one vectorized operation.
      spread: distribution of clients over several devices; None for one device.
      model: mesh axis over which one client's arrays are sharded; None if each device stores whole arrays.
    """

    participation: Participation
    groups: tuple[Group, ...]
    block: int
    spread: Spread | None = None
    availability: Availability = RELIABLE
    model: ModelAxis | None = None


class RunValues(NamedTuple):
    """Traced values of a run: hyper-parameters, and rates of dropout and stragglers."""

    hp: PyTree
    rates: FailureRates


def one_round(
    algorithm: Algorithm, plan: RoundPlan, state: RunState, values: RunValues, shared: Clients
) -> tuple[RunState, Metrics]:
    """Perform one round.

    In asynchronous rounds (`in_flight`), the cohort consists of the clients whose uploads arrive in the round. The
    round's metrics are:

    - the clients' metrics, averaged over the clients whose work was not discarded, and the server's metrics;
    - ``participants``, the number of clients in the cohort;
    - ``diverged``, the number of clients whose work was discarded because the work or the server's update was not
      finite;
    - ``dropped``, the number of clients that dropped out, if there is a dropout rate;
    - ``left_out``, the number of drawn clients for which the cohort had no room, if the sampling can leave out clients;
    - ``upload_bits_high`` and ``upload_bits_low``, which together give the number of bits of the uploads that reached
      the server, if the algorithm counts bits (`BITS`);
    - ``round_seconds``, the simulated duration, if there is a time model;
    - ``idle``, the number of clients that trained outside the cohort, and ``idle_...``, their average metrics, if the
      method trains such clients.
    """
    groups, server = plan.groups, algorithm.server
    idles = algorithm.idle_cap > 0 and not plan.participation.everyone
    (hp, rates), federations, participation = values, shared.federations, plan.participation
    if (ids := shared.ids) is None:
        of_groups = zip(federations, groups, strict=True)
        ids = gather([group.members_of(jnp.asarray(f.client_ids)) for f, group in of_groups], groups)
    draw_key = stream(state.released, Purpose.PARTICIPATION, state.round)
    ctx = server_context(participation, state.round)
    message = broadcast(server, state.key, hp, ctx, state.server)
    message = Message(lay(plan.model, message.shared), shared.received(message.per_client))
    sent, flights, arrivals = message.shared, state.in_flight, None
    if algorithm.in_flight is None:
        rows = participation.rows(state.released, state.round, ids)
    else:
        assert flights is not None
        availability = plan.availability.replace_rates(rates)
        sizes = groups[0].members_of(jnp.asarray(federations[0].train.size))
        ahead = seconds_ahead(algorithm, availability, ids, sizes, state, sent)
        sent = in_flight.dispatched(flights, draw_key, ids, state.round, sent, ahead)
        flights, arrivals = in_flight.landed(sent, participation.capacity, ids.shape[0])
        rows = arrivals.rows

    clients, counts = [], state.counts
    sums, idle_sums, uploads = [], [], []
    for client, group, old, federation in zip(algorithm.clients, groups, state.clients, federations, strict=True):
        # Counts are in the order of the only group's stack or, with several groups, of the federation.
        own_rows, before = group.cohort(rows), counts if group.only else group.take(counts)
        data = (federation.splits, jnp.asarray(federation.client_ids))
        outcome = run_cohort(
            partial(take_part, algorithm, client, plan.availability, plan.model, participation.capacity),
            ((state.key, state.released), state.round, hp, rates, sent),
            own_rows,
            (old, before),
            (*data, group.take(message.per_client), group.take(arrivals and arrivals.slots)),
            num_clients=group.end,
            block=plan.block,
            everyone=participation.everyone,
            spread=plan.spread,
        )
        sums.append(outcome.summed)
        if algorithm.reduction is Reduction.STACK:
            of_slots = shared.places(group.clients(own_rows), participation.num_clients)
            uploads.append((outcome.kept, of_slots))
        if idles:
            rested = outcome.state[1].participations == before.participations
            outcome = run_cohort(
                partial(_work_alone, algorithm, client, plan.availability, plan.model),
                ((state.key, state.released), state.round, hp, rates),
                _rows_where(rested & (before.idle_streak < algorithm.idle_cap), group),
                outcome.state,
                data,
                num_clients=group.end,
                block=plan.block,
                everyone=False,
                spread=plan.spread and plan.spread._replace(even=False),
            )
            idle_sums.append(outcome.summed)
        new, after = outcome.state
        clients.append(new)
        counts = after if group.only else group.put(counts, after)

    packed, contributors, done, tally = _add(sums)
    if algorithm.reduction is Reduction.STACK:
        reduced = _side_by_side(uploads, participation.num_clients)
    else:
        total: Upload = packed.unpack()
        reduced = Reduced(total.total, total.weight, contributors)
    new_server, sound, server_metrics = update_server(
        server, plan.model, state.released, hp, ctx, state.server, reduced, message.shared
    )
    present = counts.participations - state.counts.participations
    lost = jnp.maximum(counts.diverged, state.counts.diverged + present)
    counts = counts.replace_diverged(jnp.where(sound, counts.diverged, lost))
    metrics = done.means() | server_metrics
    metrics |= {"participants": tally.clients, "diverged": jnp.where(sound, tally.diverged, tally.clients)}
    if idles:
        idle, alone = _add(idle_sums)
        metrics |= {f"idle_{name}": value for name, value in alone.means().items()} | {"idle": idle.clients}
        metrics["diverged"] += idle.diverged
    if rates.dropout is not None:
        metrics["dropped"] = tally.dropped
    if algorithm.counts_bits:
        metrics |= dict(zip(BITS, counts.upload_bits_since(state.counts), strict=True))
    if participation.left_out is not None:
        metrics["left_out"] = participation.left_out(draw_key, ids)
    up = trees.num_bytes(reduced.total)
    if isinstance(reduced, Stacked):
        up //= reduced.valid.shape[0]
    if arrivals is not None:
        in_flight.check(message, up)
    if plan.availability.time_model is not None and arrivals is not None:
        metrics["round_seconds"] = arrivals.seconds
    elif plan.availability.time_model is not None:
        clock = resolve_time_model(plan.availability.time_model)
        of_rows = groups[0].take(ids) if len(groups) == 1 else ids  # reordered to the rows of the counts
        worked = Counts(counts.table - state.counts.table)
        metrics["round_seconds"] = synchronous_seconds(clock, algorithm, of_rows, ids.shape[0], worked, up, message)
    state = state._replace(server=new_server, clients=tuple(clients), counts=counts, in_flight=flights)
    return state._replace(round=state.round + 1), metrics


def broadcast(server: Server, key: Key, hp: PyTree, ctx: ServerContext, state: PyTree) -> Message:
    """The server's message in a round; ``key`` is the run's key."""
    return server.broadcast(stream(key, Purpose.BROADCAST, ctx.round), hp, ctx, state)


def update_server(
    server: Server,
    model: ModelAxis | None,
    released: Key,
    hp: PyTree,
    ctx: ServerContext,
    state: PyTree,
    reduced: Reduced | Stacked,
    shared: PyTree,
) -> tuple[PyTree, Array, Metrics]:
    """The server's state after a round, whether the update was finite, and the server's metrics.

    The update may overflow on finite uploads. The server then keeps its state and discards all uploads.

    Args:
      server: the method's server.
      model: mesh axis over which the server's arrays are sharded, as in `RoundPlan`.
      released: key for the noise of private runs (`RunState.released`).
      hp: hyper-parameters.
      ctx: the server's context in the round.
      state: the server's state before the round.
      reduced: the cohort's uploads.
      shared: `Message.shared` of the round.
    """
    given = (stream(released, Purpose.SERVER_UPDATE, ctx.round), hp, ctx, state, reduced)
    new, metrics = protocol.call_server(server, *given, shared=shared)
    sound = trees.all_finite(new)
    return lay(model, trees.where(sound, new, state)), sound, metrics


class _Done(NamedTuple):
    """Number of clients whose work was not discarded, and the sums of their metrics."""

    clients: Array
    metrics: Metrics

    def means(self) -> Metrics:
        # If every client diverged, the mean is undefined: NaN, because 0 would look like a perfect loss.
        clients = jnp.where(self.clients > 0, self.clients, jnp.nan)
        return {name: total / clients for name, total in self.metrics.items()}


class _Tally(NamedTuple):
    """Numbers of clients, each [] int32.

    Attributes:
      clients: clients that worked.
      diverged: clients whose work was discarded because it was not finite.
      dropped: clients that dropped out, so that their upload was lost.
    """

    clients: Array
    diverged: Array
    dropped: Array

    @classmethod
    def one(cls, present: Array, counts: Counts) -> _Tally:
        """Tally of one client, given the increments of the client's counts in a round."""
        given = jnp.ones((), jnp.int32), counts.diverged, counts.dropped
        return cls(*(jnp.where(present, number, 0) for number in given))


def take_part(
    algorithm: Algorithm,
    client: Client,
    availability: Availability,
    model: ModelAxis | None,
    slots: int,
    shared: tuple[tuple[Key, Key], Array, PyTree, FailureRates, PyTree],
    present: Array,
    own: tuple[PyTree, Counts],
    data: tuple[Splits, Array, PyTree, Array | None],
) -> Outcome:
    """Run one round for a client of the cohort, whose state and counts are ``own``.

    ``Outcome.summed`` is a tuple of four: the packed upload; 1 if the upload arrived, otherwise 0; a `_Done`; and a
    `_Tally`. For a method whose server needs individual uploads, the first two are in ``Outcome.kept`` instead.

    In asynchronous rounds, the last item of ``shared`` is an `InFlight` instead of a message, and the last item of
    ``data`` is the client's slot in the `InFlight`.
    """
    (run_key, released), round, hp, rates, sent = shared
    availability = availability.replace_rates(rates)
    (old, counts), (splits, client_id, per_client, slot) = own, data
    now = round
    if slot is not None:
        sent, round = in_flight.received(sent, slot)
    limit = step_limit(algorithm, availability, run_key, round, client_id, splits.train.size)
    ctx = _context(algorithm, counts, run_key, round, client_id, limit)
    if slot is not None:
        ctx = ctx._replace(staleness=now - round)
    key = stream(released, Purpose.LOCAL_WORK, round, client_id)
    message, old = Message(lay(model, sent), per_client), lay(model, old)
    new, upload, metrics = protocol.call_update(client, key, hp, ctx, message, old, splits)
    new, packed = lay(model, (new, trees.pack(upload._replace(failed=None, bits=None))))
    failed = upload.failed
    usable = summable(packed, slots)
    finite = trees.all_finite(new) & usable
    if failed is not None:
        finite &= ~failed
    keep = present & finite
    sends = keep if failed is None else present & usable
    arrived = sends & ~availability.drops_out(run_key, round, client_id)
    # Select with `where` instead of multiplying by zero, so that an upload that is not finite adds no NaN to the sum.
    packed, done = (
        trees.where(condition, tree, jax.tree.map(jnp.zeros_like, tree))
        for condition, tree in ((arrived, packed), (keep, _Done(jnp.ones((), jnp.int32), metrics)))
    )
    count = client.gradients and client.gradients.update
    added = Counts.row(
        participations=1,
        uploads=arrived,
        diverged=~finite,
        dropped=sends & ~arrived,
        idle_streak=-counts.idle_streak,
        steps=jnp.minimum(limit, algorithm.local_steps),
        gradients=protocol.call_gradients(count, limit, message) if count else 0,
        upload_bits=0 if upload.bits is None else jnp.where(arrived, upload.bits, 0),
    )
    state = (trees.where(keep, new, old), trees.where(present, counts.plus(added), counts))
    if algorithm.reduction is Reduction.STACK:
        return Outcome(state, ((), (), done, _Tally.one(present, added)), (packed, arrived))
    return Outcome(state, (packed, arrived.astype(jnp.int32), done, _Tally.one(present, added)), ())


def summable(upload: PyTree, slots: int) -> Array:
    """True if a sum of ``slots`` such uploads would be finite and have finite squares, [] bool.

    Any other upload is discarded, because it could make the whole cohort's sum infinite. The squares matter because
    server optimizers store them.
    """

    bounded = [jnp.array(True)]
    for leaf in jax.tree.leaves(upload):
        if jnp.issubdtype(leaf.dtype, jnp.inexact):
            root = math.sqrt(jnp.finfo(jnp.promote_types(leaf.dtype, jnp.float32)).max)
            bounded.append((jnp.abs(leaf) <= min(root, float(jnp.finfo(leaf.dtype).max)) / slots).all())
    return jnp.stack(bounded).all()


def _work_alone(
    algorithm: Algorithm,
    client: Client,
    availability: Availability,
    model: ModelAxis | None,
    shared: tuple[tuple[Key, Key], Array, PyTree, FailureRates],
    present: Array,
    own: tuple[PyTree, Counts],
    data: tuple[Splits, Array],
) -> Outcome:
    """A client's round outside the cohort, from state and counts ``own``; ``Outcome.summed`` is ``(_Tally, _Done)``."""
    (run_key, released), round, hp, rates = shared
    availability = availability.replace_rates(rates)
    (old, counts), (splits, client_id) = own, data
    limit = step_limit(algorithm, availability, run_key, round, client_id, splits.train.size)
    ctx = _context(algorithm, counts, run_key, round, client_id, limit)
    # In each round, a client is either in the cohort or outside it, so both kinds of work can use the same stream.
    old = lay(model, old)
    new, metrics = protocol.call_idle(
        client, stream(released, Purpose.LOCAL_WORK, round, client_id), hp, ctx, old, splits
    )
    new = lay(model, new)
    finite = trees.all_finite(new)
    keep = present & finite
    done = _Done(jnp.ones((), jnp.int32), metrics)
    count = client.gradients and client.gradients.idle
    added = Counts.row(
        diverged=~finite,
        idle_rounds=1,
        idle_streak=1,
        steps=jnp.minimum(limit, algorithm.local_steps),
        gradients=protocol.call_gradients(count, limit) if count else 0,
    )
    state = (trees.where(keep, new, old), Counts(counts.table + jnp.where(present, added.table, 0)))
    done = trees.where(keep, done, jax.tree.map(jnp.zeros_like, done))
    return Outcome(state, (_Tally.one(present, added), done), ())


def _context(
    algorithm: Algorithm, counts: Counts, run_key: Key, round: Array, client_id: Array, limit: Scalar
) -> ClientContext:
    idle_rounds = counts.idle_rounds if algorithm.idle_cap else 0
    batch_key = stream(run_key, Purpose.BATCHES, client_id)
    return ClientContext(round, client_id, counts.participations, limit, batch_key, idle_rounds)


def _rows_where(condition: Array, group: Group) -> Array:
    """Rows of the group's clients that satisfy a condition, sorted and padded with ``group.end``, [size].

    Args:
      condition: for each row of the group's stack, whether its client satisfies the condition, [rows] bool.
      group: group of clients.
    """
    rows = group.every()
    return jnp.sort(jnp.where(group.take_every(condition), rows, group.end))


def _add(sums: list[PyTree]) -> PyTree:
    """Sum trees of all groups leaf by leaf."""
    return sums[0] if len(sums) == 1 else jax.tree.map(lambda *parts: sum(parts[1:], parts[0]), *sums)


def _side_by_side(uploads: list[tuple[PyTree, Array]], num_clients: int) -> Stacked:
    """Concatenate the uploads from the slots of all groups, and the rows of the clients in these slots."""
    kept, rows = jax.tree.map(lambda *parts: jnp.concatenate(parts), *uploads)
    packed, arrived = kept
    upload: Upload = packed.unpack()
    return Stacked(upload.total, upload.weight, arrived, jnp.where(arrived, rows, num_clients))


def several_rounds(
    algorithm: Algorithm,
    plan: RoundPlan,
    capacity: int,
    state: RunState,
    values: RunValues,
    clients: Clients,
    rounds: Array,
) -> tuple[RunState, Metrics]:
    """Perform up to ``capacity`` rounds in a loop; return the state and the history of the metrics.

    The number of rounds is traced, so calls with any number of rounds share one compiled program. (A ``lax.scan`` would
    be compiled again for the last, shorter call.) The history's leaves are [capacity]; entries from ``rounds`` on are
    zero.
    """
    # With `jit`, the round is traced only once: eval_shape below and the loop share the cached trace.
    perform = jax.jit(partial(one_round, algorithm, plan), inline=True)
    _, shapes = jax.eval_shape(perform, state, values, clients)
    history = {name: jnp.zeros(capacity, leaf.dtype) for name, leaf in shapes.items()}

    def body(t: Array, loop: tuple[RunState, Metrics]) -> tuple[RunState, Metrics]:
        state, history = loop
        state, metrics = perform(state, values, clients)
        put = partial(jax.lax.dynamic_update_index_in_dim, index=t, axis=0)
        return state, {name: put(history[name], value) for name, value in metrics.items()}

    return jax.lax.fori_loop(0, rounds, body, (state, history))


def step_limit(
    algorithm: Algorithm, availability: Availability, run_key: Key, round: Array, client_id: Array, size: Array
) -> Scalar:
    """Maximum number of a client's local steps in a round; a Python integer if it is the same for all clients.

    Args:
      algorithm: the method.
      availability: kinds and rates of failures.
      run_key: the run's key.
      round: round in which the client begins.
      client_id: the client's id.
      size: the client's number of training examples.
    """
    own = algorithm.own_steps
    steps = algorithm.local_steps if own is None else jnp.minimum(own.steps(size), algorithm.local_steps)
    limit = availability.step_limit(run_key, round, client_id, steps)
    return limit if isinstance(steps, int) else jnp.minimum(limit, steps)


def synchronous_seconds(
    clock: TimeModel, algorithm: Algorithm, ids: Array, clients: int, worked: Counts, up: int, message: Message
) -> Array:
    """Simulated duration of a synchronous round in seconds, [] float32: the time of its slowest client.

    The duration is zero if the cohort is empty.

    Args:
      clock: speeds of the clients.
      algorithm: the method. If it does not count gradients, each local step counts as one gradient.
      ids: ids of the clients whose counts are in ``worked``, in the same order, [m] or [m'].
      clients: number m of clients.
      worked: increments of the clients' counts in the round, in the m' rows of a `RunState`, [m'].
      up: bytes of an upload without compression.
      message: the server's broadcast.
    """
    took_part = worked.participations > 0
    work = worked.gradients if algorithm.counts_gradients else worked.steps
    down = trees.num_bytes(message.shared) + trees.num_bytes(message.per_client) // clients
    sent: Scalar = up
    if algorithm.counts_bits:
        high, low = worked.table[..., 8:].astype(jnp.float32).T
        sent = (high * LIMB + low) / 8
    padded = jnp.pad(ids, (0, took_part.shape[0] - ids.shape[0]))
    return jnp.where(took_part, clock.seconds(padded, work, sent, down), 0).max().astype(jnp.float32)


def seconds_ahead(
    algorithm: Algorithm, availability: Availability, ids: Array, sizes: Array, state: RunState, shared: PyTree
) -> Callable[[Array], Array]:
    """Build the function ``rows [M] -> seconds [M]``: the time from the round's broadcast to each of M clients'
    uploads.

    Without a time model, every client takes one second.

    Args:
      algorithm: the method. Its uploads must be as long as the server's message.
      availability: kinds and rates of failures.
      ids: the clients' ids, [m].
      sizes: the clients' numbers of training examples, [m].
      state: the run's state before the round.
      shared: `Message.shared` of the round.
    """
    if availability.time_model is None:
        return lambda rows: jnp.ones(rows.shape, jnp.float32)
    clock, (client,) = resolve_time_model(availability.time_model), algorithm.clients
    sent = trees.num_bytes(shared)

    def gradients(client_id: Array, size: Array) -> Array:
        limit = step_limit(algorithm, availability, state.key, state.round, client_id, size)
        if client.gradients is None:
            return jnp.minimum(limit, algorithm.local_steps)
        return jnp.asarray(client.gradients.update(limit, Message(shared)))

    def seconds(rows: Array) -> Array:
        work = jax.vmap(gradients)(ids[rows], sizes[rows])
        return clock.seconds(ids[rows], work, sent, sent).astype(jnp.float32)

    return seconds

"""A federated round as a pure function: sample the cohort, train, sum, update the server, write states back.

Behind it the simulated time of a round: the steps that a client takes, and the seconds of its work.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxpfl.core import protocol_checks, trees
from jaxpfl.core.participation import (
    RELIABLE,
    Availability,
    FailureRates,
    Participation,
    TimeModel,
    resolve_time_model,
)
from jaxpfl.core.protocol import Algorithm, Client, ClientContext, Message, Reduced, Reduction, Stacked, Upload
from jaxpfl.core.randomness import Purpose, stream
from jaxpfl.core.types import Array, Key, Metrics, PyTree, Scalar, Splits
from jaxpfl.engine import in_flight
from jaxpfl.engine.cohort import ModelAxis, Outcome, Spread, lay, run_cohort
from jaxpfl.engine.groups import Clients, Group
from jaxpfl.engine.state import LIMB, Counts, RunState, server_context

BITS = ("upload_bits_high", "upload_bits_low")
"""The two metrics of a round that are parts of one number (`state.whole`)."""


class RoundPlan(NamedTuple):
    """Static settings of a round, beside the algorithm's functions.

    Attributes:
      participation: the sampling of the cohort.
      availability: dropout and stragglers; their rates are arguments of the round.
      groups: the clients of each entry of ``algorithm.clients``.
      block: the number of clients that a device runs in one vectorised operation.
      spread: the distribution of clients over several devices; None for one.
      model: the devices that hold one client's arrays together; None if each holds whole ones.
    """

    participation: Participation
    groups: tuple[Group, ...]
    block: int
    spread: Spread | None = None
    availability: Availability = RELIABLE
    model: ModelAxis | None = None


class RunValues(NamedTuple):
    """Traced values of a run: its hyper-parameters, and the rates of its clients' failures."""

    hp: PyTree
    rates: FailureRates


OneRound = Callable[[RunState, RunValues, Clients], tuple[RunState, Metrics]]
"""``(state, values, clients) -> (state, metrics)``."""


def make_round(algorithm: Algorithm, plan: RoundPlan) -> OneRound:
    """Build a round.

    The metrics are the clients' means, over the clients whose work was kept; the server's own; and ``participants`` and
    ``diverged``, the numbers of clients in the cohort and of clients whose work was lost; under dropout also
    ``dropped``, and ``left_out`` if the draw may leave out clients for lack of slots. `BITS`, if counted, are summed
    over the uploads that reached the server. With a time model, ``round_seconds`` is the simulated time. In
    asynchronous rounds (`in_flight`) the cohort is the clients that arrive.
    If clients outside the cohort train alone, ``idle`` is their number and ``idle_...`` the means over them.
    """
    groups, server = plan.groups, algorithm.server
    idles = algorithm.idle_cap > 0 and not plan.participation.everyone

    def one_round(state: RunState, values: RunValues, shared: Clients) -> tuple[RunState, Metrics]:
        (hp, rates), federations, participation = values, shared.federations, plan.participation
        ids = shared.all_ids(groups)
        draw_key = stream(state.released, Purpose.PARTICIPATION, state.round)
        ctx = server_context(participation, state.round)
        message = server.broadcast(stream(state.key, Purpose.BROADCAST, state.round), hp, ctx, state.server)
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
            own_rows, before = group.cohort(rows), group.take_counts(counts)
            data = (federation.splits, jnp.asarray(federation.client_ids))
            outcome = run_cohort(
                partial(_take_part, algorithm, client, plan.availability, plan.model, participation.capacity),
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
            counts = group.put(counts, after)

        packed, contributors, done, tally = _add(sums)
        if algorithm.reduction is Reduction.STACK:
            reduced = _side_by_side(uploads, participation.num_clients)
        else:
            total: Upload = packed.unpack()
            reduced = Reduced(total.total, total.weight, contributors)
        server_key = stream(state.released, Purpose.SERVER_UPDATE, state.round)
        given = (server_key, hp, ctx, state.server, reduced)
        new_server, server_metrics = protocol_checks.call_server(server, *given, shared=message.shared)
        # A server may overflow on finite uploads: it then keeps its state, and all of them are lost.
        sound = trees.all_finite(new_server)
        new_server = lay(plan.model, trees.where(sound, new_server, state.server))
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
            of_rows = groups[0].take(ids) if len(groups) == 1 else ids  # as counts are
            worked = Counts(counts.table - state.counts.table)
            metrics["round_seconds"] = synchronous_seconds(clock, algorithm, of_rows, ids.shape[0], worked, up, message)
        state = state._replace(server=new_server, clients=tuple(clients), counts=counts, in_flight=flights)
        return state._replace(round=state.round + 1), metrics

    return one_round


class _Done(NamedTuple):
    """Outcome of some clients' work: the number that kept it, and the sums of their metrics."""

    clients: Array
    metrics: Metrics

    def means(self) -> Metrics:
        # If every client diverged there is nothing to average: NaN, not a perfect zero.
        clients = jnp.where(self.clients > 0, self.clients, jnp.nan)
        return {name: total / clients for name, total in self.metrics.items()}


class _Tally(NamedTuple):
    """Some clients: all that worked, those whose work was dropped, and those whose upload was lost, each [] int32."""

    clients: Array
    diverged: Array
    dropped: Array

    @classmethod
    def one(cls, present: Array, counts: Counts) -> _Tally:
        """One client's, of the increment of a round."""
        given = jnp.ones((), jnp.int32), counts.diverged, counts.dropped
        return cls(*(jnp.where(present, number, 0) for number in given))


def _take_part(
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
    """One client's round in the cohort. Summed: (packed upload, 1 if it arrived, outcome, tally).

    Of asynchronous rounds, what is sent are the `InFlight` clients, and the last of the data is this one's slot.
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
    new, upload, metrics = protocol_checks.call_update(client, key, hp, ctx, message, old, splits)
    new, packed = lay(model, (new, trees.pack(upload._replace(failed=None, bits=None))))
    failed = upload.failed
    usable = _summable(packed, slots)
    finite = trees.all_finite(new) & usable
    if failed is not None:
        finite &= ~failed
    keep = present & finite
    sends = keep if failed is None else present & usable
    arrived = sends & ~availability.drops_out(run_key, round, client_id)
    # Selected, not multiplied: an upload that is not finite must leave no NaN in the sum.
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
        gradients=protocol_checks.call_gradients(count, limit, message) if count else 0,
        upload_bits=0 if upload.bits is None else jnp.where(arrived, upload.bits, 0),
    )
    state = (trees.where(keep, new, old), trees.where(present, counts.plus(added), counts))
    if algorithm.reduction is Reduction.STACK:
        return Outcome(state, ((), (), done, _Tally.one(present, added)), (packed, arrived))
    return Outcome(state, (packed, arrived.astype(jnp.int32), done, _Tally.one(present, added)), ())


def _summable(upload: PyTree, slots: int) -> Array:
    """True if a sum of ``slots`` such uploads and its squares, which server optimizers keep, are finite, [] bool.

    An upload that is finite by itself could otherwise make the whole cohort's sum infinite.
    """

    def bounded(leaf: Array) -> Array:
        root = math.sqrt(jnp.finfo(jnp.promote_types(leaf.dtype, jnp.float32)).max)
        return (jnp.abs(leaf) <= min(root, float(jnp.finfo(leaf.dtype).max)) / slots).all()

    numbers = [leaf for leaf in jax.tree.leaves(upload) if jnp.issubdtype(leaf.dtype, jnp.inexact)]
    return jnp.stack([jnp.array(True), *map(bounded, numbers)]).all()


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
    """One client's round outside the cohort. Summed: (tally, outcome)."""
    (run_key, released), round, hp, rates = shared
    availability = availability.replace_rates(rates)
    (old, counts), (splits, client_id) = own, data
    limit = step_limit(algorithm, availability, run_key, round, client_id, splits.train.size)
    ctx = _context(algorithm, counts, run_key, round, client_id, limit)
    # A client is in the cohort or outside it, so its work has one stream in a round.
    old = lay(model, old)
    new, metrics = protocol_checks.call_idle(
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
        gradients=protocol_checks.call_gradients(count, limit) if count else 0,
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
    """Rows of the group's clients that meet the condition, [rows], sorted, [size]; then ``end`` in all other places."""
    rows = group.every()
    return jnp.sort(jnp.where(group.take_every(condition), rows, group.end))


def _add(sums: list[PyTree]) -> PyTree:
    """The sum over groups."""
    return sums[0] if len(sums) == 1 else jax.tree.map(lambda *parts: sum(parts[1:], parts[0]), *sums)


def _side_by_side(uploads: list[tuple[PyTree, Array]], num_clients: int) -> Stacked:
    """Uploads of all groups' slots, with their clients."""
    kept, rows = jax.tree.map(lambda *parts: jnp.concatenate(parts), *uploads)
    packed, arrived = kept
    upload: Upload = jax.vmap(trees.Packed.unpack)(packed)
    return Stacked(upload.total, upload.weight, arrived, jnp.where(arrived, rows, num_clients))


def make_rounds(
    one_round: OneRound, capacity: int
) -> Callable[[RunState, RunValues, Clients, Array], tuple[RunState, Metrics]]:
    """Build ``(state, values, clients, rounds) -> (state, history)`` for up to ``capacity`` rounds in one loop.

    The number of rounds is traced, so calls of every length share one compiled program; the history's leaves are
    [capacity], written up to ``rounds``. (A ``lax.scan`` would compile once more for the last, shorter call.)
    """
    # Wrapped once, the round is traced once: eval_shape below and the loop share the cached trace.
    one_round = jax.jit(one_round, inline=True)

    def rounds_fn(state: RunState, values: RunValues, clients: Clients, rounds: Array) -> tuple[RunState, Metrics]:
        _, shapes = jax.eval_shape(one_round, state, values, clients)
        history = {name: jnp.zeros(capacity, leaf.dtype) for name, leaf in shapes.items()}

        def body(t: Array, loop: tuple[RunState, Metrics]) -> tuple[RunState, Metrics]:
            state, history = loop
            state, metrics = one_round(state, values, clients)
            put = partial(jax.lax.dynamic_update_index_in_dim, index=t, axis=0)
            return state, {name: put(history[name], value) for name, value in metrics.items()}

        return jax.lax.fori_loop(0, rounds, body, (state, history))

    return rounds_fn


def step_limit(
    algorithm: Algorithm, availability: Availability, run_key: Key, round: Array, client_id: Array, size: Array
) -> Scalar:
    """Upper limit on a client's local steps; static where it is and all clients take as many.

    Args:
      algorithm: the method.
      availability: kinds and rates of failures.
      run_key: the run's key.
      round: the round in which the client begins.
      client_id: the client's id.
      size: its number of training examples.
    """
    own = algorithm.own_steps
    steps = algorithm.local_steps if own is None else jnp.minimum(own.steps(size), algorithm.local_steps)
    limit = availability.step_limit(run_key, round, client_id, steps)
    return limit if isinstance(steps, int) else jnp.minimum(limit, steps)


def synchronous_seconds(
    clock: TimeModel, algorithm: Algorithm, ids: Array, clients: int, worked: Counts, up: int, message: Message
) -> Array:
    """Simulated seconds of a round, the time of its slowest client; zero for an empty cohort, [] float32.

    Args:
      clock: the clients' speeds.
      algorithm: the method; without declared gradients each of its steps counts as one.
      ids: the clients' ids, in the order of the counts, [m] or [m'].
      clients: m.
      worked: the clients' work in the round, [m'].
      up: bytes of an upload that is not compressed.
      message: the broadcast.
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
    """Build ``rows [M] -> seconds [M]``, the time from broadcast to upload for clients that begin in a round.

    Without a time model all take one second, whatever they do.

    Args:
      algorithm: the method; its uploads are as long as what its server sends.
      availability: kinds and rates of failures.
      ids: the clients' ids, [m].
      sizes: their numbers of training examples, [m].
      state: the run's state, before the round in which they begin.
      shared: `Message.shared`.
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

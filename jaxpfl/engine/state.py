"""State of runs between rounds, and the axis of runs, by which one program trains several seeds and settings."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from jaxpfl.core import protocol
from jaxpfl.core.participation import Participation
from jaxpfl.core.protocol import ALL_STEPS, Algorithm, Client, ClientContext, Message, Server, ServerContext
from jaxpfl.core.randomness import Purpose, stream
from jaxpfl.core.types import Array, Key, PyTree, Scalar
from jaxpfl.engine import in_flight
from jaxpfl.engine.cohort import Clients, Group, ModelAxis, lay
from jaxpfl.engine.in_flight import InFlight
from jaxpfl.support.errors import JaxpflError

COLUMNS = 10
"""Columns of `Counts.table`."""
LIMB = 2**12
"""Base in which a number that is too large for int32 is stored as two int32 numbers. Sums are exact for up to 2^25
clients and for numbers up to 2^43."""


def whole(high: Array | np.ndarray, low: Array | np.ndarray) -> np.ndarray:
    """Combine the two parts of numbers that are too large for int32: ``high * 2^12 + low``, as NumPy int64."""
    return np.asarray(high, np.int64) * LIMB + np.asarray(low, np.int64)


def _column(place: int) -> property:
    return property(lambda counts: counts.table[..., place])


@struct.dataclass
class Counts:
    """Counts of each client's work so far.

    All counts are in one table, so that a round reads and writes one row for each client.

    Attributes:
      table: counts, [..., 10] int32. The properties below are its columns, each [...] ([m'] in a `RunState`). The last
        two columns are the high and the low part of one number, see `whole`.
    """

    table: Array

    @classmethod
    def row(
        cls,
        *,
        participations: Scalar = 0,
        uploads: Scalar = 0,
        diverged: Scalar = 0,
        dropped: Scalar = 0,
        idle_rounds: Scalar = 0,
        idle_streak: Scalar = 0,
        steps: Scalar = 0,
        gradients: Scalar = 0,
        upload_bits: Scalar = 0,
    ) -> Counts:
        """One client's counts, or the increments of its counts in a round."""
        high, low = jnp.divmod(jnp.asarray(upload_bits, jnp.int32), LIMB)
        columns = (participations, uploads, diverged, dropped, idle_rounds, idle_streak, steps, gradients, high, low)
        return cls(jnp.stack([jnp.asarray(column, jnp.int32) for column in columns]))

    @classmethod
    def zeros(cls, rows: int) -> Counts:
        """Counts of ``rows`` clients that have not worked yet."""
        return cls(jnp.zeros((rows, COLUMNS), jnp.int32))

    participations = _column(0)
    """Rounds in which the client was in the cohort."""
    uploads = _column(1)
    """Rounds in which the client's upload reached the server."""
    diverged = _column(2)
    """Rounds whose work was discarded because the upload, the client's new state or the server's new state was not
    finite."""
    dropped = _column(3)
    """Rounds in which the client dropped out after its local work, so that its upload was lost."""
    idle_rounds = _column(4)
    """Rounds outside the cohort in which the client trained alone."""
    idle_streak = _column(5)
    """Consecutive idle rounds since the client was last in the cohort."""
    steps = _column(6)
    """Local steps, in the cohort or alone. A complete round counts tau steps, whatever else the method computes."""
    gradients = _column(7)
    """Gradients evaluated in training (`protocol.Gradients`); zero if the method does not count gradients."""

    @property
    def upload_bits(self) -> np.ndarray:
        """Bits of the client's uploads that reached the server, int64 on the host; zero unless
        `Algorithm.counts_bits`."""
        return whole(self.table[..., 8], self.table[..., 9])

    def plus(self, added: Counts) -> Counts:
        """The counts plus the increments of a round."""
        table = self.table + added.table
        carry, low = jnp.divmod(table[..., 9], LIMB)
        return Counts(table.at[..., 8].add(carry).at[..., 9].set(low))

    def upload_bits_since(self, before: Counts) -> tuple[Array, Array]:
        """Total bits of all clients' uploads since ``before``, as a high and a low part (`whole`), each [] int32."""
        high, low = (self.table - before.table)[..., 8:].T
        # Six bits at a time: the sum of half a million clients' low parts could exceed int32.
        upper, lower = (part.sum(axis=-1) for part in jnp.divmod(low, 64))
        carry, rest = jnp.divmod(upper, LIMB // 64)
        return high.sum(axis=-1) + carry, rest * 64 + lower

    def replace_diverged(self, diverged: Array) -> Counts:
        """The same counts, with the column ``diverged`` replaced."""
        return Counts(self.table.at[..., 2].set(diverged))


class GradientCounts(NamedTuple):
    """Gradients that each client has evaluated, in the unit of `protocol.Gradients`.

    Attributes:
      training: gradients in all rounds so far, inside and outside the cohort, [S, m]. A straggler counts only the steps
        that it took.
      personalization: gradients for the personalized model, computed once after training, [m].
    """

    training: np.ndarray
    personalization: np.ndarray


class RunState(NamedTuple):
    """Complete state of a run between rounds. A checkpoint stores it.

    The number of rows m' is m, rounded up to a multiple of the number of devices; the rows from m on are unused. If
    each device holds only its own clients' data, the rows may be in another order, with the unused rows at the end of
    each device's part (`Group.places`). A trimmed state has its rows in the order of the federation.

    Attributes:
      server: the server's state.
      clients: the clients' states: one tree for each group of clients. Its leaves are [m', ...]; here m and m' count
        only the group's clients and rows.
      counts: counts of the clients' work, [m']. If there is one group, they are in the order of its rows; if there are
        several groups, they are in the order of the federation.
      round: number of finished rounds, [] int32.
      key: the run's key.
      noise: key for the cohorts, the local work and the noise of a private algorithm (`noise_keys`); None if the
        algorithm is not private. The privacy claim relies on the randomness of this key.
      in_flight: clients at work between asynchronous rounds; None if rounds are synchronous.
    """

    server: PyTree
    clients: tuple[PyTree, ...]
    counts: Counts
    round: Array
    key: Key
    noise: Key | None = None
    in_flight: InFlight | None = None

    @property
    def released(self) -> Key:
        """Key for the randomness of cohorts, local work and the server's update: `noise` if the run is private."""
        return self.key if self.noise is None else self.noise

    @property
    def participations(self) -> Array:
        """Rounds in which each client was in the cohort, [m']."""
        return self.counts.participations

    @property
    def diverged(self) -> Array:
        """Rounds in which each client's work was discarded, [m']; see `Counts.diverged`."""
        return self.counts.diverged


def init_state(
    algorithm: Algorithm,
    participation: Participation,
    groups: tuple[Group, ...],
    rows: int,
    block: int | None,
    model: ModelAxis | None,
    keys: tuple[Key, Key | None],
    hp: PyTree,
    clients: Clients,
) -> RunState:
    """State of one run before the first round.

    Clients start from the message that the server broadcasts in round 0.

    Args:
      algorithm: the method.
      participation: sampling of the cohorts.
      groups: groups of clients with the same architecture, each with the rows of its members.
      rows: number of rows m', which is m rounded up to a multiple of the number of devices.
      block: number of clients whose states are computed at a time; None for all.
      model: mesh axis over which one client's arrays are sharded, as in `RoundPlan`.
      keys: the run's key, and the noise key, which is None if the algorithm is not private.
      hp: hyper-parameters of the run.
      clients: the clients' data.
    """
    (key, noise), server = keys, algorithm.server
    ctx = server_context(participation, jnp.int32(0))
    state, message = init_server(server, key, hp, ctx, model)
    protocol.check_message(message, groups[0].num_clients if clients.among is None else participation.num_clients)
    per_client, start = clients.received(message.per_client), stream(key, Purpose.CLIENT_INIT)

    def init_one(client: Client, client_id: Array, own: PyTree) -> PyTree:
        return lay(model, init_client(client, start, key, hp, client_id, Message(message.shared, own)))

    states = []
    for client, group, federation in zip(algorithm.clients, groups, clients.federations, strict=True):
        ids = jnp.asarray(federation.client_ids)
        if group.places is None:
            ids = jnp.pad(ids[: group.size], (0, group.rows - group.size), mode="edge")
        given = ids, group.take(per_client)
        every = jax.vmap(partial(init_one, client))
        states.append(every(*given) if block is None else _map_blocks(every, given, min(block, group.rows)))
    flights = None
    if algorithm.in_flight is not None:
        at_once = in_flight.concurrency(algorithm, participation)
        flights = in_flight.nobody(at_once, groups[0].num_clients, message.shared)
    return RunState(state, tuple(states), Counts.zeros(rows), jnp.int32(0), key, noise, flights)


def init_server(
    server: Server, key: Key, hp: PyTree, ctx: ServerContext, model: ModelAxis | None = None
) -> tuple[PyTree, Message]:
    """The server's state before round 0, and its message in round 0, from which clients start."""
    state = lay(model, server.init(stream(key, Purpose.SERVER_INIT), hp, ctx))
    return state, server.broadcast(stream(key, Purpose.BROADCAST, 0), hp, ctx, state)


def init_client(client: Client, start: Key, key: Key, hp: PyTree, client_id: Array, message: Message) -> PyTree:
    """A client's state before its first round.

    Args:
      client: the client's functions.
      start: key for initial parameters, which is the same for all clients of a run.
      key: key for the order of the client's mini-batches; in a simulation, the run's key.
      hp: hyper-parameters of the run.
      client_id: the client's id.
      message: the message of round 0.
    """
    ctx = ClientContext(jnp.int32(0), client_id, jnp.int32(0), ALL_STEPS, stream(key, Purpose.BATCHES, client_id))
    return client.init(start, hp, ctx, message)


def _map_blocks(every: Callable[..., PyTree], given: tuple[PyTree, ...], block: int) -> PyTree:
    """Compute ``every(*given)`` for arrays [n, ...] in ``given``, ``block`` rows at a time."""
    rows = jax.tree.leaves(given)[0].shape[0]

    def write(i: Array, made: PyTree) -> PyTree:
        # The last block overlaps the one before it, so that all blocks have the same size.
        start = jnp.minimum(i * block, rows - block)
        part = every(*jax.tree.map(lambda a: jax.lax.dynamic_slice_in_dim(a, start, block), given))
        return jax.tree.map(lambda a, b: jax.lax.dynamic_update_slice_in_dim(a, b, start, 0), made, part)

    shapes = jax.eval_shape(every, *given)
    return jax.lax.fori_loop(0, -(-rows // block), write, jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes))


def keyless(state: RunState) -> RunState:
    """The state with its random keys as plain arrays (key data), so that it can be stored."""

    def data(key: Key) -> Array:
        return jax.random.key_data(key) if jnp.issubdtype(key.dtype, jax.dtypes.prng_key) else key

    key, noise = jax.tree.map(data, (state.key, state.noise))
    return state._replace(key=key, noise=noise)


def resize_rows(state: RunState, rows: Sequence[int | np.ndarray], of_all: int | np.ndarray) -> RunState:
    """Cut, reorder or zero-pad the client rows of a state [S, ...].

    Args:
      state: state with a leading axis of runs.
      rows: for each group's stack, either the new number of rows, or the indices of the rows to keep, in their new
        order.
      of_all: new number of rows, or indices of the rows, of the counts of all clients.
    """

    def resize(a: Any, rows: int | np.ndarray) -> Any:
        if isinstance(rows, np.ndarray):
            return a[:, rows]
        if a.shape[1] == rows:
            return a
        pad = np.pad if isinstance(a, np.ndarray) else jnp.pad
        return pad(a[:, :rows], [(0, 0), (0, max(rows - a.shape[1], 0))] + [(0, 0)] * (a.ndim - 2))

    clients = [
        jax.tree.map(lambda a, own=own: resize(a, own), stacked)
        for own, stacked in zip(rows, state.clients, strict=True)
    ]
    return state._replace(clients=tuple(clients), counts=jax.tree.map(lambda a: resize(a, of_all), state.counts))


def server_context(participation: Participation, round: Scalar) -> ServerContext:
    """Context of the server in a round."""
    return ServerContext(round, participation.num_clients, participation.expected_cohort)


def check_values(name: str, value: Any, runs: int) -> None:
    """Check that a value is one number, or one number for each run, [S].

    Raises:
      JaxpflError: if the value is a list whose length is not the number of runs.
    """
    if np.ndim(value) and len(value) != runs:
        raise JaxpflError(f"{name} must be one value, or a value for each of {runs} seeds, got {len(value)} values")


def rows_of(values: PyTree, runs: int) -> PyTree:
    """Broadcast leaves [] or [S] to one value for each run, [S].

    Raises:
      JaxpflError: if a leaf is a list of another length; the message names the leaf.
    """
    for path, value in jax.tree.leaves_with_path(values):
        check_values(jax.tree_util.keystr(path, simple=True), value, runs)
    return jax.tree.map(lambda value: jnp.broadcast_to(value, (runs,)), values)


def check_distinct(seeds: Sequence[int], values: PyTree) -> None:
    """Check that no two runs have the same seed and the same traced values.

    Args:
      seeds: seeds of the runs, [S].
      values: traced values of the runs, leaves [S].

    Raises:
      JaxpflError: if two runs agree in both; the message names the seed.
    """
    leaves, seen = [np.asarray(leaf).tolist() for leaf in jax.tree.leaves(values)], set()
    for i, seed in enumerate(map(int, seeds)):
        run = (seed, *(leaf[i] for leaf in leaves))
        if run in seen:
            raise JaxpflError(
                f"seed {seed} is given twice for the same hyper-parameters, so both runs would be equal: give each "
                "its own seed"
            )
        seen.add(run)


def number(value: Any) -> jax.Array:
    """Convert a hyper-parameter, [] or [S], to a weakly typed device array, as JAX converts Python numbers.

    Python numbers, NumPy numbers of type float64 or int64, and lists of these then compile to the same program. Other
    NumPy numbers and a `jax.Array` keep their dtype.
    """
    if isinstance(value, jax.Array) or np.asarray(value).dtype not in (np.float64, np.int64):
        return jnp.asarray(value)
    if not np.ndim(value):
        return jnp.asarray(np.asarray(value).item())
    array = jnp.asarray(value)
    # An array made of NumPy numbers has no weak type, but `set` keeps the weak type of the array that it writes to.
    like = jnp.asarray(0.0 if jnp.issubdtype(array.dtype, jnp.floating) else 0)
    return jnp.broadcast_to(like, array.shape).at[...].set(array)


def over_runs(
    one: Callable[..., Any], first: PyTree, hp: PyTree, *shared: PyTree, vectorised: bool, in_place: bool = False
) -> PyTree:
    """Map ``one(first, hp, *shared)`` over the leading axis of ``first`` and ``hp``, which is the axis of runs.

    Args:
      one: program of one run.
      first: first argument of each run, leaves [S, ...].
      hp: second argument of each run, leaves [S, ...].
      shared: further arguments, which are the same for all runs.
      vectorised: whether to vectorize the runs; otherwise they run one after the other.
      in_place: whether ``one`` returns a pair whose first element is the new value of ``first``. If so, and if the runs
        are not vectorized, the new values are written into the buffer of the old values.
    """
    count = jax.tree.leaves(first)[0].shape[0]
    if count == 1:  # without a batch axis, the client's matrix products do not become batched products
        squeezed = jax.tree.map(lambda a: a[0], (first, hp))
        return jax.tree.map(lambda a: a[None], one(*squeezed, *shared))
    if vectorised:
        return jax.vmap(lambda first, hp: one(first, hp, *shared))(first, hp)
    if not in_place:
        return jax.lax.map(lambda both: one(*both, *shared), (first, hp))

    def body(states: PyTree, run: tuple[Array, PyTree]) -> tuple[PyTree, PyTree]:
        i, hp = run
        new, result = one(jax.tree.map(lambda a: a[i], states), hp, *shared)
        return jax.tree.map(lambda a, v: a.at[i].set(v), states, new), result

    return jax.lax.scan(body, first, (jnp.arange(count), hp))

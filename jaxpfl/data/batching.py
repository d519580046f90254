"""Mini-batch sampling inside the compiled round, for ONE client (also under ``vmap`` and ``lax.map``).

A draw returns POSITIONS in the client's data, which depend only on the client's key and number of examples. A batch has
a slot for each position; a client with too few examples leaves slots empty (not valid).

There are three kinds of draws. Let n_i be the client's number of examples, b_i = min(batch size, n_i), and p the number
of rounds in which the client has trained before:

- ``"epoch"`` (default): the client's examples in a random order, with a new order for each epoch. Step t of a round
  takes the positions (p * steps + t) * b_i + j, j < b_i, of the concatenated epochs. A round therefore continues the
  epoch of the client's previous round. Every example is used exactly once per epoch, and a batch may contain the end of
  one epoch and the beginning of the next.
- ``"step"``: each step takes b_i distinct examples, drawn anew.
- ``"replacement"``: each step takes b_i examples, drawn uniformly with replacement.

A random order of [0, n) can be evaluated at single positions, at a cost that does not grow with n. For at most `SHORT`
examples, an order is made by sorting random words. A word has 26 random bits followed by the index, so two examples tie
with probability 1.5e-8. For more examples, an order is computed by a swap-or-not network. Round r of the network has a
shift K_r in [0, n) and a random bit for each pair {x, (K_r - x) mod n}; where the bit is set, the two positions are
swapped (Hoang, Morris and Rogaway, "An enciphering scheme based on a card shuffle", CRYPTO 2012). No round needs a
table, a sort, or a loop whose length depends on data.

A round of the network moves a position with probability 1/2. If it does, the new position is uniform. After R rounds,
the distribution of one position, or of a pair of positions, is within about 2^-R of uniform (2e-10 for R = 32). The
distribution of the whole order, for a small n, is within sqrt(n!) 2^-R of uniform. For every n, even or odd, more
rounds bring it closer to uniform. For Feistel networks this is false, for example for n = 5 and n = 7.

An order depends only on the key and on n, and not on padding, other clients, or the positions that are read.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Literal, NamedTuple, TypeAlias, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxpfl.core import trees
from jaxpfl.core.protocol import LocalEpochs
from jaxpfl.core.types import EQUAL, Array, ClientData, Key, PyTree, Scalar
from jaxpfl.data.passes import switch_length
from jaxpfl.support.errors import JaxpflError, unknown_name

Draw: TypeAlias = Literal["epoch", "step", "replacement"]

SHORT = 64
"""Largest number of examples whose order is made by sorting; for so few examples, the network takes ten times as
long."""
ROUNDS = 32
_GOLDEN = np.uint32(0x9E3779B9)  # 2^32 / golden ratio: consecutive multiples differ in many bits
_MIX = np.uint32(0x7FEB352D), np.uint32(0x846CA68B)  # multipliers of Wellons' 32-bit hash with the lowest bias
MAX_CLIENT_EXAMPLES = 2**23
"""Largest number of examples of a client for which the 32-bit arithmetic of `_cursor` is exact."""
_BOUNDS = 16, SHORT, MAX_CLIENT_EXAMPLES
"""Largest numbers of examples of a client in each `DrawClass`. Tiny clients have their own class because they need many
epochs but only short sorts.
"""
_AT_ONCE = 8
"""Number of clients in a class that are drawn together; with 16 or 32, empty slots in the last group would cost too
much."""


class Sizes(NamedTuple):
    """Static bounds on the lengths of random permutations. They determine the compiled program, but change no
    permutation.

    Attributes:
      short: bound on all lengths up to `SHORT`; 0 if there are none.
      long: whether there may be lengths above `SHORT`.
    """

    short: int
    long: bool

    @classmethod
    def cover(cls, sizes: np.ndarray) -> Sizes:
        """Make bounds for lengths. ``short`` is rounded up to a power of two, so similar lengths share programs."""
        short = int(sizes[sizes <= SHORT].max(initial=0))
        return cls(2 ** (short - 1).bit_length() if short else 0, bool(sizes.max(initial=0) > SHORT))


ANY = Sizes(SHORT, True)


class DrawClass(NamedTuple):
    """Clients of similar size, whose draws are compiled separately.

    Attributes:
      largest: bound on the number of examples of a client in the class.
      max_epochs, sizes: as in `Batching`, but only for the clients in this class.
    """

    largest: int
    max_epochs: int
    sizes: Sizes


@dataclasses.dataclass(frozen=True)
class Batching:
    """Static parameters of the draws, made by `plan_batches`; hashable.

    Attributes:
      steps: local steps per round.
      batch_size: slots in a batch: the requested size, or the largest client's number of examples if that is smaller.
      draw: "epoch", "step" or "replacement", as defined in the module's docstring.
      max_epochs: largest number of epochs from which any client draws in one round (1 unless draw is "epoch").
      full: whether every batch is the client's whole data set, so that no draw is needed.
      ragged: whether some client has fewer examples than a batch has slots.
      sizes: bounds on the clients' numbers of examples.
      own: rule by which a client's number of steps (at most ``steps``) depends on the client's size; None if all
        clients take ``steps`` steps.
      classes: size classes, ascending, or () if all clients are drawn by one program. Classes do not change the draws.
    """

    steps: int
    batch_size: int
    draw: str
    max_epochs: int
    full: bool
    ragged: bool
    sizes: Sizes = ANY
    own: LocalEpochs | None = None
    classes: tuple[DrawClass, ...] = ()

    def advance(self, size: Array) -> Scalar:
        """Number of steps by which one round advances the epoch sequence of a client with ``size`` examples."""
        return self.steps if self.own is None else jnp.minimum(self.own.draws(size), self.steps)


def plan_batches(
    sizes: np.ndarray, steps: int, batch_size: int, draw: str = "epoch", own: LocalEpochs | None = None
) -> Batching:
    """Plan the draws: compute their static parameters on the host.

    Args:
      sizes: number of training examples of each client, without padding, [m] (the plan must not depend on padding).
      steps: local steps per round, at least 1.
      batch_size: examples per step, at least 1; a client with fewer examples uses all of them.
      draw: "epoch", "step" or "replacement", as defined in the module's docstring.
      own: local work in epochs, so that clients with fewer examples take fewer than ``steps`` steps; None for ``steps``
        steps at every client.

    Raises:
      JaxpflError: if the draw is unknown, no client has an example, a client has more than 2**23 examples, or a round
        draws too many examples.
    """
    sizes = np.asarray(sizes, dtype=np.int64)
    if draw not in get_args(Draw):
        raise unknown_name("draw", draw, get_args(Draw))
    largest = int(sizes.max(initial=0))
    if largest < 1:
        raise JaxpflError("no client has training examples to draw batches from")
    if largest > MAX_CLIENT_EXAMPLES:
        raise JaxpflError(f"a client has {largest} examples; at most {MAX_CLIENT_EXAMPLES} are supported")
    slots = min(batch_size, largest)
    if steps * slots >= 2**31 - MAX_CLIENT_EXAMPLES:
        raise JaxpflError(f"local steps x batch size must be < {2**31 - MAX_CLIENT_EXAMPLES}, got {steps} x {slots}")
    full = slots == largest and draw != "replacement"
    sizes_drawn, epochs = sizes[sizes > 0], np.ones(1, int)
    each = steps if own is None else np.minimum(own.batches * own.on_host(sizes_drawn), steps)
    if draw == "epoch" and not full:
        # A round starts at a multiple of gcd(steps * b_i, n_i). So if an epoch is an integer number of rounds, no round
        # draws from two epochs.
        per_round = each * np.minimum(sizes_drawn, slots)
        latest_start = sizes_drawn - np.gcd(per_round, sizes_drawn)
        epochs = (latest_start + per_round - 1) // sizes_drawn + 1
    ragged = bool(sizes.min() < slots)
    classes = _classes(sizes_drawn, epochs) if draw != "replacement" and not full else ()
    return Batching(steps, slots, draw, int(epochs.max()), full, ragged, Sizes.cover(sizes), own, classes)


def _classes(sizes: np.ndarray, epochs: np.ndarray) -> tuple[DrawClass, ...]:
    """Size classes for clients with these sizes and epochs per round; () if one class is enough."""

    def class_of(bound: int, own: np.ndarray) -> DrawClass:
        return DrawClass(bound, int(np.broadcast_to(epochs, sizes.shape)[own].max()), Sizes.cover(sizes[own]))

    def sorted_by(classes: list[DrawClass]) -> int:  # total number of words that all clients sort
        below = np.searchsorted([of.largest for of in classes], sizes[sizes <= SHORT])
        return sum(int((below == nth).sum()) * of.max_epochs * of.sizes.short for nth, of in enumerate(classes))

    place = np.searchsorted(_BOUNDS, sizes)
    classes = [class_of(bound, place == nth) for nth, bound in enumerate(_BOUNDS) if (place == nth).any()]
    if len(classes) > 1 and classes[1].sizes.short:
        together = [class_of(SHORT, sizes <= SHORT), *classes[2:]]
        classes = together if sorted_by(together) <= EQUAL * sorted_by(classes) else classes
    return tuple(classes) if len(classes) > 1 else ()


def draw_batches(batching: Batching, key: Key, participations: Scalar, size: Array) -> tuple[Array, Array]:
    """Draw the batches of one client's round.

    Args:
      batching: plan made by `plan_batches`.
      key: the client's key for draws, which is the same in every round. ``participations`` makes the rounds differ.
      participations: number of rounds in which this client has trained before, [] integer. The position in the sequence
        of epochs or steps is computed without 32-bit overflow as long as participations * steps < 2**32.
      size: number of the client's examples n_i, [] int32. If the number is 0, as in an empty slot of a cohort, no slot
        of a batch is valid.

    Returns:
      indices: positions in the client's data, [steps, batch_size] int32; 0 where not valid.
      valid: mask of the slots, [steps, batch_size] bool; false for the slots j >= min(batch_size, n_i).
      If ``batching.full``, both are placeholders [steps, 0]: `take` uses all examples without a gather.
    """
    if batching.full:
        nothing = jnp.zeros((batching.steps, 0), jnp.int32)
        return nothing, nothing.astype(bool)
    size = jnp.asarray(size, jnp.int32)
    participations = jnp.asarray(participations).astype(jnp.uint32)

    alike = partial(_indices, batching, key, participations, size)

    def class_indices(largest: int) -> Array:
        (of,) = (of for of in batching.classes if of.largest == largest)
        own = dataclasses.replace(batching, max_epochs=of.max_epochs, sizes=of.sizes)
        return _indices(own, key, participations, size)

    def indices_by_size() -> Array:
        return switch_length(class_indices, size, tuple(of.largest for of in batching.classes), at_once=_AT_ONCE)

    # On an accelerator, drawing for the whole cohort at once takes no longer than a few steps of the loop over classes.
    indices = lax.platform_dependent(cpu=indices_by_size, default=alike) if batching.classes else alike()
    used = jnp.minimum(size, batching.batch_size)
    valid = jnp.broadcast_to(jnp.arange(batching.batch_size) < used, indices.shape)
    return jnp.where(valid, indices, 0), valid


def take(data: ClientData, indices: Array, valid: Array, batching: Batching) -> tuple[PyTree, Array, Array]:
    """Gather the examples of one step, or (unless ``batching.full``) of all steps at once.

    Args:
      data: one client's data.
      indices, valid: results of `draw_batches` for one step, [batch_size], or for all steps, [steps, batch_size].
      batching: plan that `draw_batches` used.

    Returns:
      x: inputs, [batch_size, ...]; zero where not valid. Inputs are set to zero BEFORE the model, because masking the
        model's outputs could still give NaN gradients.
      y: labels, [batch_size].
      valid: mask of the real examples, [batch_size] bool.
      For all steps at once, each result has a leading axis [steps].
    """
    if batching.full:
        indices = jnp.arange(min(batching.batch_size, data.capacity), dtype=jnp.int32)
        valid = indices < data.size
        indices = jnp.where(valid, indices, 0) if batching.ragged else indices
    # A client without examples starts at example 0 of the store, so every position is in bounds.
    places = data.start + indices
    x, y = jax.tree.map(
        lambda leaf: leaf.at[places].get(mode="promise_in_bounds", wrap_negative_indices=False), data.examples[:2]
    )
    if batching.ragged:
        x, y = jax.tree.map(lambda leaf: trees.where_rows(valid, leaf), (x, y))
    return x, y, valid


def rows_beside(beside: PyTree, indices: Array, valid: Array, batching: Batching) -> PyTree:
    """Gather the rows that belong to one step's examples. Returns leaves [batch_size, ...], zero where not valid.

    Args:
      beside: tree with one row for each of the client's examples, leaves [capacity, ...].
      indices: the step's indices from `draw_batches`, [batch_size]; not used if ``batching.full``.
      valid: mask of the valid examples as `take` returns it, [batch_size].
      batching: plan that `draw_batches` used.
    """
    if batching.full:
        rows = jax.tree.map(lambda leaf: leaf[: batching.batch_size], beside)
    else:
        rows = jax.tree.map(lambda leaf: leaf[indices], beside)
    return jax.tree.map(lambda leaf: trees.where_rows(valid, leaf), rows) if batching.ragged else rows


def _indices(batching: Batching, key: Key, participations: Array, size: Array) -> Array:
    """Indices [steps, batch_size] for one client's round; arbitrary where a slot is not valid."""
    if batching.draw != "epoch":
        first = participations * jnp.asarray(batching.advance(size)).astype(jnp.uint32)
        steps = first + jnp.arange(batching.steps, dtype=jnp.uint32)
        return jax.vmap(lambda step: _step_indices(batching, jax.random.fold_in(key, step), size))(steps)
    examples, used = jnp.maximum(size, 1), jnp.minimum(size, batching.batch_size)  # an empty slot has size 0
    per_round = batching.advance(size) * used
    first_epoch, first_offset = _cursor(participations, per_round, examples)
    step = jnp.arange(batching.steps, dtype=jnp.int32)[:, None]
    slot = jnp.arange(batching.batch_size, dtype=jnp.int32)[None, :]
    place = first_offset + step * used + slot
    if batching.max_epochs == 1:  # positions beyond the epoch are in slots that are not valid, and are clipped
        return order_at(
            jax.random.fold_in(key, first_epoch), examples, jnp.minimum(place, examples - 1), batching.sizes
        )
    epochs = first_epoch + jnp.arange(batching.max_epochs, dtype=jnp.uint32)
    keys = jax.vmap(jax.random.fold_in, (None, 0))(key, epochs)
    nth = jnp.minimum(place // examples, batching.max_epochs - 1)
    return orders_at(keys, examples, nth, place % examples, batching.sizes)


def _step_indices(batching: Batching, key: Key, size: Array) -> Array:
    """Indices [batch_size] of one "step" or "replacement" draw; arbitrary where a slot is not valid."""
    span = jnp.maximum(size, 1)
    if batching.draw == "step":
        place = jnp.minimum(jnp.arange(batching.batch_size, dtype=jnp.int32), span - 1)
        return order_at(key, span, place, batching.sizes)
    return jax.random.randint(key, (batching.batch_size,), 0, span, jnp.int32)


def _cursor(participations: Array, per_round: Array, examples: Array) -> tuple[Array, Array]:
    """Quotient (uint32) and remainder (int32) of participations * per_round divided by examples, in 32 bits.

    The product itself would overflow after about 1e6 rounds of 60 x 32 examples. Horner's rule on the base-256 digits
    of participations keeps every remainder term below 256 * examples + 255 * examples < 2**32.
    """
    examples = examples.astype(jnp.uint32)
    whole, rest = jnp.divmod(per_round.astype(jnp.uint32), examples)
    quotient = remainder = jnp.uint32(0)
    for shift in (24, 16, 8, 0):
        digit = (participations >> shift) & jnp.uint32(255)
        term = remainder * 256 + digit * rest
        quotient = quotient * 256 + term // examples
        remainder = term % examples
    return participations * whole + quotient, remainder.astype(jnp.int32)


def order_at(key: Key, size: Array, place: Array, sizes: Sizes = ANY) -> Array:
    """Read one random order (permutation) of [0, n) at some positions.

    Args:
      key: key of the order.
      size: length n of the order, [] int32, from 1 to 2^24.
      place: positions, [...] int32 in [0, n).
      sizes: static bounds of n.

    Returns:
      The entries of the order at these positions, [...] int32 in [0, n); distinct for distinct positions.
    """

    def network() -> Array:
        shifts, salts = _rounds(key, size)
        return _all_rounds(lambda r, x: _swap_or_not(x, shifts[r], salts[r], size), place)

    # Under ``vmap`` this also runs for long orders, whose positions exceed the table; the result is then not used.
    return _either(lambda: _sorted(key, size, sizes.short).at[place].get(mode="clip"), network, size, sizes)


def orders_at(keys: Key, size: Array, nth: Array, place: Array, sizes: Sizes = ANY) -> Array:
    """Read several random orders (permutations) of [0, n) at some positions.

    Args:
      keys: one key for each order, [E]. An order uses 64 words of memory.
      size, place, sizes: as in `order_at`.
      nth: index of the order to read at each position, int32 in [0, E), in the shape of ``place``.

    Returns:
      [...] int32, equal to ``order_at(keys[e], size, place)`` wherever nth is e.
    """

    def network() -> Array:
        shifts, salts = jax.vmap(_rounds, (0, None), 1)(keys, size)

        def step(r: Array, x: Array) -> Array:
            shift, salt = (
                row.at[nth].get(mode="promise_in_bounds", wrap_negative_indices=False) for row in (shifts[r], salts[r])
            )
            return _swap_or_not(x, shift, salt, size)

        return _all_rounds(step, place)

    def short() -> Array:
        table = jax.vmap(lambda key: _sorted(key, size, sizes.short))(keys)
        return table.at[nth, place].get(mode="clip")

    return _either(short, network, size, sizes)


def _either(short: Callable[[], Array], long: Callable[[], Array], size: Array, sizes: Sizes) -> Array:
    """Choose the short or the long algorithm by size; under ``vmap``, both run if both kinds of size may occur."""
    if not (sizes.short and sizes.long):
        return long() if sizes.long else short()
    return lax.cond(size <= SHORT, short, long)


def _sorted(key: Key, size: Array, capacity: int) -> Array:
    """Draw a permutation of 0 ... n - 1 by sorting random numbers, [capacity] int32; entries from n on are padding."""
    index, last = jnp.arange(capacity, dtype=jnp.uint32), np.uint32(SHORT - 1)
    # The first words drawn from a key do not depend on the number of words.
    words = jnp.where(index < size.astype(jnp.uint32), jax.random.bits(key, (capacity,), jnp.uint32), ~np.uint32(0))
    return (lax.sort((words & ~last) | index, is_stable=False) & last).astype(jnp.int32)


def _rounds(key: Key, size: Array) -> tuple[Array, Array]:
    """Return two arrays [ROUNDS], hashed from the key: each round's shift in [0, n), int32, and salt, uint32."""
    words = jax.random.bits(key, (2,), jnp.uint32)
    hashed = _mixed(words[0] + jnp.arange(ROUNDS, dtype=jnp.uint32) * _GOLDEN)
    # The upper half of the 64-bit product hashed * n, computed byte by byte: sums stay below 2^32 for n <= 2^24.
    shift = jnp.zeros_like(hashed)
    for low in (0, 8, 16, 24):
        shift = (((hashed >> low) & 255) * size.astype(jnp.uint32) + shift) >> 8
    return shift.astype(jnp.int32), _mixed(words[1] ^ hashed)


def _all_rounds(step: Callable[[Array, Array], Array], place: Array) -> Array:
    """Run the swap-or-not network on the positions ``place``. On an accelerator, eight rounds are one operation, which
    would be slower on a CPU.
    """
    loop = partial(lax.fori_loop, 0, ROUNDS, step)
    return lax.platform_dependent(place, cpu=loop, default=partial(loop, unroll=8))


def _swap_or_not(place: Array, shift: Array, salt: Array, size: Array) -> Array:
    """Run one round of the network on the positions ``place``. A position and its partner share a bit, which depends on
    the larger of the two.
    """
    partner = shift - place
    partner = jnp.where(partner < 0, partner + size, partner)
    bits = (jnp.maximum(place, partner).astype(jnp.uint32) ^ salt) * _MIX[0]
    bits = (bits ^ (bits >> 15)) * _MIX[1]
    return jnp.where(bits >> 31 == 1, partner, place)


def _mixed(word: Array) -> Array:
    word = (word ^ (word >> 16)) * _MIX[0]
    word = (word ^ (word >> 15)) * _MIX[1]
    return word ^ (word >> 16)

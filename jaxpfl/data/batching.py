"""Mini-batch sampling inside the compiled round, for ONE client (it works under ``vmap`` and ``lax.map``).

A draw is over POSITIONS in the client's padded data, and never depends on the padding: every score is one
draw per example from ``jax.random.bits(key, (capacity,))``, whose first n values are the same for every
capacity >= n (``jax.random.permutation`` does not have this property), and padded examples sort last.

The three draws, with n_i the client's examples, b_i = min(batch size, n_i) and p its earlier participations:

- ``"epoch"`` (default): the client's examples in a random order, a new one each epoch. Step t of a round
  takes positions (p * steps + t) * b_i + j for j < b_i of that endless sequence, so rounds continue the
  epoch, every example is used exactly once per epoch, and a batch may end one epoch and begin the next.
- ``"step"``: each step takes b_i distinct examples, drawn anew.
- ``"replacement"``: each step takes b_i examples drawn uniformly with replacement.
"""

from __future__ import annotations

import dataclasses
from typing import Literal, TypeAlias, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxpfl.errors import JaxpflError, unknown_name
from jaxpfl.types import Array, ClientData, Key, PyTree, Scalar

Draw: TypeAlias = Literal["epoch", "step", "replacement"]

MAX_CLIENT_EXAMPLES = 2**23
"""The cursor's arithmetic is exact in 32 bits up to here (see `_cursor`)."""

_INDEX_BITS = 12
_INDEX_MASK = np.uint32(2**_INDEX_BITS - 1)


@dataclasses.dataclass(frozen=True)
class Batching:
    """Static parameters of the draws, made by `plan_batches`. Hashable.

    Attributes:
      steps: local steps of one round.
      batch_size: slots of a batch: the requested size, or the largest client's number of examples if smaller.
      draw: "epoch", "step" or "replacement".
      max_epochs: largest number of epochs that any client touches in one round (1 unless draw is "epoch").
      full: every batch is the client's whole data set, so nothing is drawn at all.
      ragged: some client has fewer examples than a batch has slots.
    """

    steps: int
    batch_size: int
    draw: str
    max_epochs: int
    full: bool
    ragged: bool


def plan_batches(sizes: np.ndarray, steps: int, batch_size: int, draw: str = "epoch") -> Batching:
    """Plan the draws: their static parameters, computed on the host.

    Args:
      sizes: [m] number of training examples of each client, without padding (the plan must not depend on it).
      steps: local steps of one round, at least 1.
      batch_size: examples of a step, at least 1; a client with fewer uses all of its own.
      draw: see the module's docstring.

    Raises:
      JaxpflError: for an unknown draw, a count below 1, no examples at all, or more than 2**23 in one client.
    """
    sizes = np.asarray(sizes, dtype=np.int64)
    if draw not in get_args(Draw):
        raise unknown_name("draw", draw, get_args(Draw))
    for name, value in (("local steps", steps), ("batch size", batch_size)):
        if value < 1:
            raise JaxpflError(f"{name} must be at least 1, got {value}")
    largest = int(sizes.max(initial=0))
    if largest < 1:
        raise JaxpflError("no client has a training example: nothing to draw batches from")
    if largest > MAX_CLIENT_EXAMPLES:
        raise JaxpflError(f"a client has {largest} examples; at most {MAX_CLIENT_EXAMPLES} are supported")
    slots = min(batch_size, largest)
    if steps * slots >= 2**31 - MAX_CLIENT_EXAMPLES:
        raise JaxpflError(f"{steps} local steps of {slots} examples are too many for one round")
    full = slots == largest and draw != "replacement"
    max_epochs = _most_epochs(sizes[sizes > 0], steps, slots) if draw == "epoch" and not full else 1
    ragged = bool(sizes.min() < slots)
    return Batching(steps, slots, draw, max_epochs, full, ragged)


def draw_batches(batching: Batching, key: Key, participations: Scalar, mask: Array) -> tuple[Array, Array]:
    """Draw the batches of one client's round.

    Args:
      batching: the plan.
      key: the client's OWN stream for draws, the same in every round (the round enters by participations).
      participations: [] integer, the number of rounds in which this client has trained before. Exact as long as
        the client's steps, participations * steps, stay below 2**32.
      mask: [capacity] bool, true for real examples, which come first. A client without examples (an empty
        slot of a cohort) gets batches without a valid slot.

    Returns:
      indices: [steps, batch_size] int32 places in the client's data, 0 where not valid.
      valid: [steps, batch_size] bool, false for the slots j >= min(batch_size, n_i).
      If ``batching.full``, both are placeholders [steps, 0]: `take` uses all examples without a gather.
    """
    if batching.full:
        nothing = jnp.zeros((batching.steps, 0), jnp.int32)
        return nothing, nothing.astype(bool)
    size = mask.sum(dtype=jnp.int32)
    used = jnp.minimum(size, batching.batch_size)
    participations = jnp.asarray(participations).astype(jnp.uint32)
    if batching.draw == "epoch":
        indices = _epoch_indices(batching, key, participations, mask, size, used)
    else:
        first = participations * jnp.uint32(batching.steps)
        keys = jax.vmap(jax.random.fold_in, (None, 0))(key, first + jnp.arange(batching.steps, dtype=jnp.uint32))
        if batching.draw == "step":
            # top_k of floats has a fast path on a CPU: 12 us for 20 of 1200, while sorting them takes 50.
            scores = jax.vmap(lambda k: jax.random.uniform(k, mask.shape, jnp.float32))(keys)
            indices = lax.top_k(jnp.where(mask, scores, -jnp.inf), batching.batch_size)[1]
        else:
            span = jnp.maximum(size, 1)
            indices = jax.vmap(lambda k: jax.random.randint(k, (batching.batch_size,), 0, span, jnp.int32))(keys)
    valid = jnp.broadcast_to(jnp.arange(batching.batch_size) < used, indices.shape)
    return jnp.where(valid, indices, 0), valid


def take(data: ClientData, indices: Array, valid: Array, batching: Batching) -> tuple[PyTree, Array, Array]:
    """Gather the examples of one step, or (unless ``batching.full``) of all steps at once.

    Args:
      data: one client's data.
      indices, valid: [batch_size], one row of `draw_batches`; or all its rows, [steps, batch_size].
      batching: the same plan.

    Returns:
      x: [batch_size, ...] with zeros where not valid (BEFORE the model: selecting behind it still gives NaN
        gradients); y: [batch_size]; valid: [batch_size] bool. For all steps, each with a leading [steps].
    """
    if batching.full:
        # Real examples come first, so cutting to the largest client's count loses none and sheds the padding.
        x, y, valid = jax.tree.map(lambda leaf: leaf[: batching.batch_size], tuple(data))
    else:
        x, y = jax.tree.map(
            lambda leaf: leaf.at[indices].get(mode="promise_in_bounds", wrap_negative_indices=False),
            (data.x, data.y),
        )
    if batching.ragged:
        x, y = jax.tree.map(lambda leaf: _zero_unless(valid, leaf), (x, y))
    return x, y, valid


def take_all(data: ClientData) -> tuple[PyTree, Array, Array]:
    """All of one client's examples as one batch of n slots: x [n, ...] with zeros where padded, y [n], valid [n]."""
    x, y = jax.tree.map(lambda leaf: _zero_unless(data.mask, leaf), (data.x, data.y))
    return x, y, data.mask


def permutation(key: Key, mask: Array) -> Array:
    """Random permutation of one client's real examples, followed by the padded ones.

    The order is by (20 random bits, index). Up to 4096 examples both are packed into one uint32, as sorting
    single words is three to four times faster on a CPU than sorting pairs, as ``argsort`` does; beyond that pairs
    are sorted, with the same result. Two examples tie in their 20 bits with probability 1e-6 (then the lower index
    goes first), so the order of two examples is biased by 5e-7, which is negligible for training.

    Args:
      key: key of this order.
      mask: [capacity] bool, true for real examples, which come first.

    Returns:
      [capacity] int32. The first n_i entries do not depend on the capacity.
    """
    capacity = mask.shape[0]
    scores = jnp.where(mask, jax.random.bits(key, (capacity,), jnp.uint32) | _INDEX_MASK, ~jnp.uint32(0))
    index = jnp.arange(capacity, dtype=jnp.uint32)
    if capacity <= 2**_INDEX_BITS:
        packed = lax.sort((scores ^ _INDEX_MASK) | index, is_stable=False)
        return (packed & _INDEX_MASK).astype(jnp.int32)
    return lax.sort((scores, index), num_keys=1, is_stable=True)[1].astype(jnp.int32)


def _epoch_indices(batching: Batching, key: Key, participations: Array, mask: Array, size: Array, used: Array) -> Array:
    """Indices [steps, batch_size] of the "epoch" draw; arbitrary where a slot is not valid."""
    examples = jnp.maximum(size, 1)  # an empty slot must not divide by zero
    first_epoch, first_offset = _cursor(participations, batching.steps * used, examples)
    step = jnp.arange(batching.steps, dtype=jnp.int32)[:, None]
    slot = jnp.arange(batching.batch_size, dtype=jnp.int32)[None, :]
    place = first_offset + step * used + slot

    def order(nth: Array) -> Array:
        return permutation(jax.random.fold_in(key, first_epoch + nth.astype(jnp.uint32)), mask)

    if batching.max_epochs == 1:
        return order(jnp.int32(0))[place % examples]
    last = (first_offset + batching.steps * used - 1) // examples
    # Under lax.map, epochs that this client does not reach in this round cost nothing.
    orders = lax.map(
        lambda nth: lax.cond(nth <= last, order, lambda _: jnp.zeros(mask.shape, jnp.int32), nth),
        jnp.arange(batching.max_epochs, dtype=jnp.int32),
    )
    return orders[place // examples, place % examples]


def _cursor(participations: Array, per_round: Array, examples: Array) -> tuple[Array, Array]:
    """Quotient (uint32) and remainder (int32) of participations * per_round by examples, in 32 bits.

    The product itself overflows after about 1e6 rounds of 60 x 32 examples. Horner's rule on the base-256
    digits of participations keeps every remainder term below 256 * examples + 255 * examples < 2**32.
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


def _most_epochs(sizes: np.ndarray, steps: int, slots: int) -> int:
    """Largest number of epochs that a round of any client touches.

    A round starts at a multiple of gcd(steps * b_i, n_i), so that if an epoch is a whole number of rounds, no round
    touches a second one.
    """
    per_round = steps * np.minimum(sizes, slots)
    latest_start = sizes - np.gcd(per_round, sizes)
    return int(((latest_start + per_round - 1) // sizes + 1).max())


def _zero_unless(valid: Array, leaf: Array) -> Array:
    valid = valid.reshape(valid.shape + (1,) * (leaf.ndim - valid.ndim))
    return jnp.where(valid, leaf, jnp.zeros((), leaf.dtype))

r"""Compressed uploads for any method: a wrapper around its `Algorithm`.

Let :math:`\Delta_i` be the increment that client i would upload with weight :math:`w_i` (``total / weight``). Let e_i
be the client's error-feedback memory, initially zero, and C a compressor. Then

.. math:: p = \Delta_i + e_i, \qquad \text{sent} = C(p), \qquad e_i^+ = p - C(p)

and the server receives the decoded message :math:`w_i C(p)` instead of :math:`w_i \Delta_i`. Without error feedback,
e_i is always zero. (`compressors` explains which compressors use error feedback.) With error feedback, the sum of all
messages differs from the sum of the increments only by the last memory, even if C is biased. The memory contains
increments without their weight, so a client's weight scales its message but not its memory.

Messages. All numbers below one leaf of ``Upload.weight`` form one vector and one message. The vector is usually the
whole upload; if each of k models has its own weight (IFCA), each model is a message. A part of the upload with weight
zero is not sent and costs nothing. The part's memory is kept until the client next contributes to this part, so that no
cluster receives an update meant for another cluster. The weights themselves are not counted (as in
`Simulation.bytes_per_client`). Some entries are sent and counted uncompressed: numbers that are not floating-point, and
numbers that are not increments (`Algorithm.increments`), because error feedback would add up their values over rounds.
Top-k selects among all numbers of a vector. Small changes of a model are therefore sent late if the vector also
contains larger numbers, such as SCAFFOLD's control variates, which are gradients.

Memory. The memory is part of the client's state. A client outside the cohort keeps its memory. A client whose results
are not finite uploads nothing and keeps its old memory. A client whose upload is lost does not notice the loss and
keeps its new memory, so the message is never sent again.

Randomness. Each client and round has its own random stream for compression, separate from the stream for training. A
run with ``lossless`` therefore has the same results as a run without a compressor, except for rounding differences
because XLA compiles a different program.

Privacy. Under a privacy mechanism, the compressor is applied to the client's private upload (its clipped increment with
its own share of the noise), and is therefore post-processing. Compressed uploads must be decoded before they can be
summed, so other clients' noise adds no protection; `privacy.plan_of` accounts for this. Error feedback is then not
allowed, because the memory of a client that failed would reveal information about its data.

References: Karimireddy et al. 2019, "Error feedback fixes SignSGD and other gradient compression schemes"; Zhao et al.,
section III.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxpfl.core import trees
from jaxpfl.core.protocol import Algorithm, Client, ClientContext, Message, Upload, wrapped_client
from jaxpfl.core.randomness import Purpose, stream
from jaxpfl.core.types import Array, Key, Metrics, PyTree, Scalar, Splits
from jaxpfl.support.errors import JaxpflError
from jaxpfl.uploads.compression.compressors import Compressor
from jaxpfl.uploads.compression.quantizers import Compressed

MOST_NUMBERS = 2**31 // 66
"""Largest number of entries in an upload. The upload's length in bits, at most 66 per entry, must fit in an int32."""


class Held(NamedTuple):
    """A client's state: the method's state, and the error-feedback memory.

    The memory has one array for each leaf of the weight; without error feedback, it is ().
    """

    own: PyTree
    memory: PyTree


class _Message(NamedTuple):
    """Result of sending one part of an upload: the total that the server receives, the new memory and the bits sent."""

    total: Array
    memory: PyTree
    bits: Array


def compressed(
    algorithm: Algorithm, compressor: Compressor, splits: Splits, *, feedback: bool | None = None
) -> Algorithm:
    """Wrap an algorithm so that its clients compress their uploads and count the bits (`Upload.bits`).

    Args:
      algorithm: any method, with or without a privacy mechanism.
      compressor: compressor for every message.
      splits: splits of one client, as arrays or shapes, from which the shape of its upload is derived.
      feedback: whether to use error feedback; None for the compressor's default (`Compressor.feeds_back`).

    Raises:
      JaxpflError: when traced, if an upload has more than `MOST_NUMBERS` entries.
    """
    if feedback is None:
        feedback = compressor.feeds_back
    given = compressor, splits, feedback, algorithm.increments
    return algorithm._replace(clients=tuple(_client(client, *given) for client in algorithm.clients), counts_bits=True)


def _client(inner: Client, compressor: Compressor, splits: Splits, feedback: bool, increments: PyTree) -> Client:
    def init(key: Key, hp: PyTree, ctx: ClientContext, message: Message) -> Held:
        own = inner.init(key, hp, ctx, message)
        if not feedback:
            return Held(own, ())

        def vectors(splits: Splits) -> list[Array]:
            _, upload, _ = inner.update(key, hp, ctx, message, own, splits)
            return [_vector(weight, part) for weight, part in _parts(upload.weight, _select(increments, upload.total))]

        return Held(own, [jnp.zeros(part.shape, part.dtype) for part in jax.eval_shape(vectors, splits)])

    def update(
        key: Key, hp: PyTree, ctx: ClientContext, message: Message, state: Held, splits: Splits
    ) -> tuple[Held, Upload, Metrics]:
        own, upload, metrics = inner.update(key, hp, ctx, message, state.own, splits)
        coding = stream(key, Purpose.UPLOAD_CODE)
        sent, memory = _compress(partial(_send, compressor, ctx.round), coding, upload, increments, state.memory)
        return Held(own, memory), sent, metrics

    return wrapped_client(
        inner, init=init, update=update, state=lambda held: held.own, keep=lambda held, own: held._replace(own=own)
    )


def _compress(
    send: Callable[[Key, Array, Array, Array, PyTree], _Message],
    key: Key,
    upload: Upload,
    increments: PyTree,
    memory: PyTree,
) -> tuple[Upload, PyTree]:
    """Compress an upload; return the decoded upload and the new memory of each part, () without error feedback."""
    coded, rest = _select(increments, upload.total), _select(increments, upload.total, others=True)
    totals, changes, others = (
        _parts(upload.weight, tree) for tree in (coded, trees.prefix_divide(coded, upload.weight), rest)
    )
    numbers = sum(_vector(weight, part).size for weight, part in totals)
    if numbers > MOST_NUMBERS:
        raise JaxpflError(f"an upload of {numbers} numbers cannot be compressed: the limit is {MOST_NUMBERS}")
    parts, kept, bits = [], [], jnp.int32(0)
    for number, ((weight, total), (_, change), (_, other)) in enumerate(zip(totals, changes, others, strict=True)):
        part_key, before = jax.random.fold_in(key, number), memory[number] if memory else ()
        given = (weight, _vector(weight, total), _vector(weight, change), before)
        if not given[1].size:
            message = _Message(given[1], before, jnp.int32(0))
        elif weight.ndim:
            message = jax.vmap(send)(jax.random.split(part_key, weight.shape[0]), *given)
        else:
            message = send(part_key, *given)
        parts.append(_put(total, message.total))
        kept.append(message.memory)
        bits += message.bits.sum() + _other_bits(weight, other)
    total = trees.merge(jax.tree.unflatten(jax.tree.structure(upload.weight), parts), rest)
    return upload._replace(total=total, bits=bits), kept if memory else ()


def _send(
    compressor: Compressor, round: Scalar, key: Key, weight: Array, total: Array, increment: Array, memory: PyTree
) -> _Message:
    """Simulate sending one message.

    Args:
      compressor: compressor of the message.
      round: index of the round.
      key: random key of the message.
      weight, total, increment: the client's weight [], its total [d], and the increment total / weight [d].
      memory: error-feedback memory, [d]; () without error feedback.
    """
    if isinstance(memory, tuple):
        sent, after = compressor.compress(key, round, increment), ()
    else:
        sent, after = feed_back(partial(compressor.fed_back, key, round), memory, increment)
    # If an entry is received unchanged, the original total is used: dividing by the weight and multiplying again would
    # round twice.
    read = jnp.where(sent.value == increment, total, weight * sent.value)
    says = weight > 0
    # A total that is not finite is passed on, so that the engine detects it.
    read = jnp.where(jnp.isfinite(total).all(), jnp.where(says, read, 0), total)
    return _Message(read, trees.where(says, after, memory), jnp.where(says, sent.bits, 0))


def feed_back(compressor: Callable[[Array], Compressed], memory: Array, x: Array) -> tuple[Compressed, Array]:
    """Compress x [d] plus the memory [d]; return the message and the new memory [d]."""
    wanted = x + memory
    sent = compressor(wanted)
    return sent, wanted - sent.value


def _parts(weight: PyTree, tree: PyTree) -> list[tuple[Array, PyTree]]:
    """Pair each leaf of the weight with the part of the tree below it."""
    weights, structure = jax.tree.flatten(weight)
    return list(zip(weights, structure.flatten_up_to(tree), strict=True))


def _select(increments: PyTree, total: PyTree, *, others: bool = False) -> PyTree:
    """Select the floating-point increments of an upload, or with ``others`` all other leaves.

    Leaves that are not selected become None.
    """

    def keep(coded: bool, part: PyTree) -> PyTree:
        return jax.tree.map(lambda a: a if (coded and jnp.issubdtype(a.dtype, jnp.inexact)) != others else None, part)

    return jax.tree.map(keep, increments, total)


def _vector(weight: Array, part: PyTree) -> Array:
    """Concatenate the numbers of a part to one vector, [d]; [k, d] for a weight [k]."""
    leaves = [leaf.reshape(*weight.shape, -1) for leaf in jax.tree.leaves(part)]
    return jnp.concatenate(leaves, axis=-1) if leaves else jnp.zeros((*weight.shape, 0))


def _put(part: PyTree, vector: Array) -> PyTree:
    """Invert `_vector`: put the numbers of a vector into a tree with the structure of ``part``."""
    leaves, structure = jax.tree.flatten(part)
    start = 0
    for place, leaf in enumerate(leaves):
        end = start + leaf.size // max(1, vector.size // vector.shape[-1])
        leaves[place] = vector[..., start:end].reshape(leaf.shape).astype(leaf.dtype)
        start = end
    return jax.tree.unflatten(structure, leaves)


def _other_bits(weight: Array, part: PyTree) -> Array:
    """Number of bits of a part's uncompressed entries, which are sent only where the weight is positive."""
    # The bits of all k rows together are divided by k and multiplied by the number of rows with a positive weight.
    each = sum(8 * leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(part))
    return each // max(1, weight.size) * (weight > 0).sum(dtype=jnp.int32)

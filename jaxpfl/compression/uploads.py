r"""Compressed uploads for any method: a wrapper around its `Algorithm`.

With :math:`\Delta_i` the increment that client i would upload with weight :math:`w_i` (total over weight), e_i its
memory and C a compressor,

.. math:: p = \Delta_i + e_i, \qquad \text{sent} = C(p), \qquad e_i^+ = p - C(p)

and the server gets :math:`w_i C(p)` in place of :math:`w_i \Delta_i`: what the decoder of the message would give it.
Without error feedback e_i is zero; `compressors` says when that is better. The memory is of increments without their
weight, so that a client's weight scales what it sends and never what it has kept.

What a message is. All numbers below one entry of ``Upload.weight`` are one vector and one message: mostly the whole
upload, whatever its parts; with a weight for each of k models (IFCA), each model's part. (One vector has one scale:
beside SCAFFOLD's control variates, which are gradients, its model's small change is what top-k leaves for later.) A
part whose weight is zero is not sent: it costs nothing, and its memory waits until the client next has something to say
about that part, so that no cluster gets what was meant for another. Weights themselves are not counted (as in
`Simulation.bytes_per_client`); entries that are no floating-point numbers are sent and counted as they are.

What happens to the memory. It is part of the client's state, so it follows the engine's rules: a client outside the
cohort keeps it; one whose work is not finite uploads nothing and keeps the memory that it had; one whose upload is lost
on the way does not know, and keeps the memory that it made (what it sent is then lost for good).

Randomness is keyed by client and round, apart from that of training: a run with ``lossless`` has the numbers of one
without a compressor (up to how XLA rounds another program).

Formal guarantees: under a privacy mechanism the compressor comes after it, on what the client would upload (its
increment clipped, with its own share of the noise), and so is post-processing of that client's own noisy upload. What
it is not is a sum: compressed uploads cannot be added before they are read, and the other clients' noise hides nothing;
`privacy.plan_of` accounts for that. There is no error feedback then: what a client whose work failed keeps of its
memory would tell of its data.

References: Karimireddy et al. 2019, "Error feedback fixes SignSGD and other gradient compression schemes"; Zhao et al.,
section III.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxpfl import trees
from jaxpfl.compression import error_feedback
from jaxpfl.compression.compressors import Compressor
from jaxpfl.errors import JaxpflError
from jaxpfl.protocol import ALL_STEPS, Algorithm, Client, ClientContext, Message, Upload
from jaxpfl.types import Array, Key, Metrics, PyTree, Scalar, Splits

MOST_NUMBERS = 2**31 // 66
"""Numbers in an upload whose bits an int32 is sure to hold, 64 bits and some each."""


class Held(NamedTuple):
    """A client's state: the method's own, and what its messages have left out, one array for each weight (else ())."""

    own: PyTree
    memory: PyTree


class _Message(NamedTuple):
    """What one message makes of its part of the upload: the total that the server reads, the memory, and the bits."""

    total: Array
    memory: PyTree
    bits: Array


def compressed(
    algorithm: Algorithm, compressor: Compressor, splits: Splits, *, feedback: bool | None = None
) -> Algorithm:
    """The algorithm whose clients compress their uploads and say how many bits they take (`Upload.bits`).

    Args:
      algorithm: any method, or one behind a privacy mechanism.
      compressor: of every message.
      splits: one client's, as arrays or shapes; for the shape of its upload.
      feedback: whether clients remember what their messages leave out; None for the compressor's own choice, which is
        to do so unless it is unbiased.

    Raises:
      JaxpflError: when it is traced, for an upload of more than `MOST_NUMBERS`.
    """
    if feedback is None:
        feedback = compressor.feeds_back
    clients = tuple(_client(client, compressor, splits, feedback) for client in algorithm.clients)
    return algorithm._replace(clients=clients, counts_bits=True)


def _client(inner: Client, compressor: Compressor, splits: Splits, feedback: bool) -> Client:
    def init(key: Key, hp: PyTree, ctx: ClientContext, message: Message) -> Held:
        own = inner.init(key, hp, ctx, message)
        if not feedback:
            return Held(own, ())

        def vectors(splits: Splits) -> list[Array]:
            _, upload, _ = inner.update(key, hp, ctx, message, own, splits)
            return [_vector(weight, part) for weight, part in _parts(upload.weight, upload.total)]

        return Held(own, [jnp.zeros(part.shape, part.dtype) for part in jax.eval_shape(vectors, splits)])

    def update(
        key: Key, hp: PyTree, ctx: ClientContext, message: Message, state: Held, splits: Splits
    ) -> tuple[Held, Upload, Metrics]:
        own, upload, metrics = inner.update(key, hp, ctx, message, state.own, splits)
        # Local steps take fold_in(key, step), a privacy mechanism's noise takes ALL_STEPS; there is no such step.
        coding = jax.random.fold_in(key, ALL_STEPS - 1)
        sent, memory = _compress(partial(_send, compressor, ctx.round), coding, upload, state.memory)
        return Held(own, memory), sent, metrics

    def personalize(key: Key, hp: PyTree, ctx: ClientContext, message: Message, state: Held, splits: Splits) -> PyTree:
        return inner.personalize(key, hp, ctx, message, state.own, splits)

    def idle(key: Key, hp: PyTree, ctx: ClientContext, state: Held, splits: Splits) -> tuple[Held, Metrics]:
        assert inner.idle is not None
        own, metrics = inner.idle(key, hp, ctx, state.own, splits)
        return Held(own, state.memory), metrics

    def cluster(hp: PyTree, message: Message, state: Held, splits: Splits) -> Array:
        assert inner.cluster is not None
        return inner.cluster(hp, message, state.own, splits)

    return inner._replace(
        init=init,
        update=update,
        personalize=personalize,
        idle=inner.idle and idle,
        cluster=inner.cluster and cluster,
    )


def _compress(
    send: Callable[[Key, Array, Array, Array, PyTree], _Message], key: Key, upload: Upload, memory: PyTree
) -> tuple[Upload, PyTree]:
    """The upload as the server reads it, and the memory of all its parts; ``memory`` is () without error feedback."""
    totals = _parts(upload.weight, upload.total)
    increments = _parts(upload.weight, trees.prefix_divide(upload.total, upload.weight))
    numbers = sum(_vector(weight, part).size for weight, part in totals)
    if numbers > MOST_NUMBERS:
        raise JaxpflError(f"an upload of {numbers} numbers cannot be compressed: its bits are counted up to 2^31")
    parts, kept, bits = [], [], jnp.int32(0)
    for number, ((weight, total), (_, increment)) in enumerate(zip(totals, increments, strict=True)):
        part_key, before = jax.random.fold_in(key, number), memory[number] if memory else ()
        given = (weight, _vector(weight, total), _vector(weight, increment), before)
        if weight.ndim:
            message = jax.vmap(send)(jax.random.split(part_key, weight.shape[0]), *given)
        else:
            message = send(part_key, *given)
        parts.append(_put(total, message.total))
        kept.append(message.memory)
        bits += message.bits.sum() + _other_bits(weight, total)
    total = jax.tree.unflatten(jax.tree.structure(upload.weight), parts)
    return upload._replace(total=total, bits=bits), kept if memory else ()


def _send(
    compressor: Compressor, round: Scalar, key: Key, weight: Array, total: Array, increment: Array, memory: PyTree
) -> _Message:
    """One message: of weight [], of total and increment [d], under a memory [d] or ()."""
    if isinstance(memory, tuple):
        sent, after = compressor.compress(key, round, increment), ()
    else:
        sent, after = error_feedback.compress(partial(compressor.fed_back, key, round), memory, increment)
    # What arrives as it was keeps its product with the weight: dividing and multiplying would round it twice.
    read = jnp.where(sent.value == increment, total, weight * sent.value)
    says = weight > 0
    # What is not finite goes as it is, for the engine to find.
    read = jnp.where(jnp.isfinite(total).all(), jnp.where(says, read, 0), total)
    return _Message(read, trees.where(says, after, memory), jnp.where(says, sent.bits, 0))


def _parts(weight: PyTree, tree: PyTree) -> list[tuple[Array, PyTree]]:
    """Each weight with what of a tree it belongs to."""
    weights, structure = jax.tree.flatten(weight)
    return list(zip(weights, structure.flatten_up_to(tree), strict=True))


def _is_number(leaf: Array) -> bool:
    return jnp.issubdtype(leaf.dtype, jnp.inexact)


def _vector(weight: Array, part: PyTree) -> Array:
    """The numbers of a part, [d]; below a weight [k], [k, d]."""
    leaves = [leaf.reshape(*weight.shape, -1) for leaf in jax.tree.leaves(part) if _is_number(leaf)]
    return jnp.concatenate(leaves, axis=-1)


def _put(part: PyTree, vector: Array) -> PyTree:
    """The part with other numbers."""
    leaves, structure = jax.tree.flatten(part)
    start = 0
    for place, leaf in enumerate(leaves):
        if _is_number(leaf):
            end = start + leaf.size // max(1, vector.size // vector.shape[-1])
            leaves[place] = vector[..., start:end].reshape(leaf.shape).astype(leaf.dtype)
            start = end
    return jax.tree.unflatten(structure, leaves)


def _other_bits(weight: Array, part: PyTree) -> Array:
    """Bits of a part's entries that are no numbers of this kind, for each weight that is not zero."""
    each = sum(8 * leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(part) if not _is_number(leaf))
    return each // max(1, weight.size) * (weight > 0).sum(dtype=jnp.int32)

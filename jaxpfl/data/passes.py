"""Computations over a client's examples chunk by chunk, and padded lengths for clients of different sizes.

`total` and `each` apply a function to chunks of examples. A short chunk has `ClientData.chunk` examples, and a long
chunk four times as many. A client with n_i examples needs ceil(n_i / chunk) short chunks; every four of them are
replaced by one long chunk. If clients are nearly equal in size, a chunk holds all of a client's examples, and there is
no loop.

Under ``vmap`` over clients whose examples are in the same arrays, the chunks of all clients form one list. Each loop
step computes several chunks of this list: as many as together have the size of one short chunk per client. A client
with many examples therefore only adds its own chunks to the list, and other clients need no padding.

The division into chunks changes only the order of additions in a result. Results are not differentiable.

If a computation needs all of a client's examples at once, `size_classes` chooses a few static lengths so that clients
are padded only a little.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_batching import custom_vmap
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun

from jaxpfl.core.types import EQUAL, Array, ClientData, PyTree, Store

OfChunk = Callable[[PyTree, Array, Array], PyTree]
"""Function of one chunk, ``(x [c, ...], y [c], valid [c]) -> tree``; x and y are zero where not valid."""


_SEVERAL = 4, 1
"""Lengths of chunks, in units of `ClientData.chunk`. There are long chunks because a convolution of only 8 images takes
a third longer per image."""


def total(of: OfChunk, data: ClientData) -> PyTree:
    """Sum ``of`` over one client's chunks; ``of`` must return a sum over a chunk's valid examples."""
    length = _length(data)
    if data.capacity <= length:
        return of(*_chunk(data.examples, data.start, data.size, 0, length))
    return _chunk_results(
        of, data, lambda old, client, first, new: old.at[client].add(new, mode="drop"), lambda a: a.shape
    )


def each(of: OfChunk, data: ClientData) -> PyTree:
    """Compute one row per example of a client: leaves [`ClientData.capacity`, ...]; rows of padding are arbitrary.

    Args:
      of: function of a chunk of c examples that returns one row per example, [c, ...] per leaf.
      data: one client's data.
    """
    length = _length(data)
    if data.capacity <= length:
        return of(*_chunk(data.examples, data.start, data.size, 0, length))

    def put(old: Array, client: Array, first: Array, new: Array) -> Array:
        places = first[..., None] + jnp.arange(new.shape[client.ndim], dtype=jnp.int32)
        return old.at[client[..., None], places].set(new, mode="drop")

    return _chunk_results(of, data, put, lambda a: (data.capacity, *a.shape[1:]))


def _length(data: ClientData) -> int:
    return max(min(data.chunk, data.capacity), 1)


def _chunk(examples: Store, start: Array, size: Array, first: Any, length: int) -> tuple[PyTree, Array, Array]:
    """Gather a chunk of the client's examples that begins with example ``first``."""
    own = first + jnp.arange(length, dtype=jnp.int32)
    valid = own < size

    def gathered(leaf: Array) -> Array:
        if not leaf.shape[0]:  # without rows, even the padding's index 0 below would be out of bounds
            return jnp.zeros((length, *leaf.shape[1:]), leaf.dtype)
        rows = _rows(leaf, jnp.where(valid, start + own, 0))
        return jnp.where(valid.reshape(-1, *[1] * (leaf.ndim - 1)), rows, jnp.zeros((), leaf.dtype))

    x, y = jax.tree.map(gathered, examples[:2])
    return x, y, valid


def _rows(a: Array, rows: Array) -> Array:
    return a.at[rows].get(mode="promise_in_bounds", wrap_negative_indices=False)


class _Chunks(NamedTuple):
    """Chunks of one length, for one or several clients.

    Attributes:
      length: examples in a chunk, static.
      first: number of the client's examples before the first chunk of this length.
      number: number of chunks.
    """

    length: int
    first: Array
    number: Array


def _chunks(data: ClientData, size: Array) -> list[_Chunks]:
    """Cover a client's examples by as many long chunks as fit, followed by short chunks."""
    short = _length(data)
    rest, first, found = -(-size // short), jnp.zeros_like(size), []
    for several in _SEVERAL:
        if several == 1 or several * short < data.capacity:
            number = rest // several
            found.append(_Chunks(several * short, first, number))
            first, rest = first + number * several * short, rest - number * several
    return found


def _chunk_results(
    of: OfChunk,
    data: ClientData,
    put: Callable[[Array, Array, Array, Array], Array],
    shape: Callable[[Any], tuple[int, ...]],
) -> PyTree:
    """Combine the results of all of a client's chunks.

    Args:
      of: function applied to each chunk (see `OfChunk`).
      data: one client's data.
      put: function ``(combined, client, first, result) -> combined`` that writes or adds a chunk's ``result`` into
        ``combined`` [clients, *shape]. ``client`` is the index of the client, and ``first`` the index of the chunk's
        first example. For several chunks at once, ``client``, ``first`` and ``result`` have a leading axis.
      shape: function that maps the result of one chunk to the shape of a client's combined result.
    """
    lengths = [chunks.length for chunks in _chunks(data, data.size)]
    given = [
        jax.eval_shape(lambda data, n=n: _chunk(data.examples, data.start, data.size, 0, n), data) for n in lengths
    ]
    # The vmap rule below runs after this trace has ended, so arrays that the function closes over are passed to it.
    traced = [jax.make_jaxpr(of, return_shape=True)(*one) for one in given]
    result = traced[-1][1]

    def chunk_result(
        nth: int, examples: Store, start: Array, size: Array, first: Array, held: list[Array]
    ) -> list[Array]:
        leaves = jax.tree.leaves(_chunk(examples, start, size, first, lengths[nth]))
        return jaxpr_as_fun(ClosedJaxpr(traced[nth][0].jaxpr, held))(*leaves)

    def nothing(clients: int) -> list[Array]:
        return [jnp.zeros((clients, *shape(leaf)), leaf.dtype) for leaf in jax.tree.leaves(result)]

    def alone(examples: Store, start: Array, size: Array, held: list[list[Array]]) -> list[Array]:
        done = nothing(1)
        for nth, chunks in enumerate(_chunks(data, size)):

            def body(t: Array, done: list[Array], nth: int = nth, chunks: _Chunks = chunks) -> list[Array]:
                first = chunks.first + t * chunks.length
                new = chunk_result(nth, examples, start, size, first, held[nth])
                return [put(a, jnp.int32(0), first, b) for a, b in zip(done, new, strict=True)]

            done = jax.lax.fori_loop(0, chunks.number, body, done)
        return [a[0] for a in done]

    passed = custom_vmap(alone)

    @passed.def_vmap
    def together(
        clients: int, mapped: list[Any], examples: Store, start: Array, size: Array, held: list[list[Array]]
    ) -> tuple[list[Array], list[bool]]:
        of_examples, of_start, of_size, of_held = mapped
        every = [True] * len(jax.tree.leaves(result))
        held_axes = jax.tree.map(lambda by_client: 0 if by_client else None, of_held)
        if any(jax.tree.leaves(of_examples)) or not (of_start and of_size):
            axes = jax.tree.map(lambda axis: 0 if axis else None, tuple(mapped))
            return jax.vmap(alone, in_axes=axes)(examples, start, size, held), every
        done = nothing(clients)
        for nth, chunks in enumerate(_chunks(data, size)):
            several = max(1, clients * lengths[-1] // chunks.length)
            ends = jnp.cumsum(chunks.number)

            def body(
                t: Array, done: list[Array], nth: int = nth, chunks: _Chunks = chunks, several: int = several,
                ends: Array = ends,
            ) -> list[Array]:  # fmt: skip
                place = t * several + jnp.arange(several, dtype=jnp.int32)
                there = place < ends[-1]
                client = jnp.minimum((place[:, None] >= ends).sum(axis=1), clients - 1)
                first = chunks.first[client] + (place - (ends - chunks.number)[client]) * chunks.length
                own = [
                    _rows(a, client) if by_client else a for a, by_client in zip(held[nth], of_held[nth], strict=True)
                ]
                of_each = jax.vmap(partial(chunk_result, nth), in_axes=(None, 0, 0, 0, held_axes[nth]))
                new = of_each(examples, start[client], jnp.where(there, size[client], 0), first, own)
                beyond = jnp.where(there, client, clients)  # out of bounds, so that `put` drops the result
                return [put(a, beyond, first, b) for a, b in zip(done, new, strict=True)]

            done = jax.lax.fori_loop(0, -(-ends[-1] // several), body, done)
        return done, every

    consts = [list(closed.consts) for closed, _ in traced]
    return jax.tree.unflatten(jax.tree.structure(result), passed(data.examples, data.start, data.size, consts))


MOST = 8
"""Largest number of size classes, because each class is compiled separately."""
_STEP = 1.1
"""Ratio between neighboring sizes in the search for classes."""
_TOGETHER = 256
"""Number of examples, over clients of one length, that are computed together."""


def size_classes(sizes: np.ndarray) -> tuple[int, ...]:
    """Choose static lengths (ascending) to which clients of the given sizes are padded, so that padding is small.

    Each client is padded to the smallest length that is large enough. The result has as few lengths as possible such
    that the sum of the padded sizes is at most `EQUAL` (a factor) times the sum of the sizes. If this needs more than
    `MOST` lengths, the result is the best choice of `MOST` lengths. To limit the search, sizes are divided into ranges
    whose ends have the ratio `_STEP`, and only the largest size in each range can become a length.

    Examples:
      >>> size_classes(np.array([30, 40, 40])), size_classes(np.array([30, 40, 5000]))
      ((40,), (40, 5000))
    """
    ordered = np.sort(np.maximum(np.asarray(sizes, np.int64), 1))
    if not len(ordered):
        return (1,)
    last = np.flatnonzero(np.diff(np.floor(np.log(ordered) / np.log(_STEP)), append=np.inf))
    lengths, upto = ordered[last], last + 1  # largest size in each step, and number of clients up to this size
    before = np.append(0, upto)
    cost, cuts = lengths * upto, []
    while cost[-1] > EQUAL * ordered.sum() and len(cuts) + 1 < MOST:
        # Cost of all classes up to step j if the last class begins at step i: each client in the last class costs
        # lengths[j].
        through = np.append(np.inf, cost)[:, None] + lengths * (upto - before[:, None])
        through[np.tri(len(through), len(lengths), -1, bool)] = np.inf
        cuts.append(through.argmin(axis=0))
        cost = through.min(axis=0)
    ends, at = [], len(lengths) - 1
    for cut in reversed(cuts):
        ends.append(at)
        at = int(cut[at]) - 1
    return tuple(int(lengths[end]) for end in reversed([*ends, at]))


def class_of(sizes: np.ndarray, lengths: tuple[int, ...]) -> list[np.ndarray]:
    """Return, for each length, the indices of the sizes for which it is the smallest length that is large enough."""
    found = np.searchsorted(lengths, sizes)
    return [np.flatnonzero(found == i) for i in range(len(lengths))]


def switch_length(
    of: Callable[[int], PyTree], size: Array, lengths: tuple[int, ...], *, at_once: int | None = None
) -> PyTree:
    """Evaluate ``of`` at the smallest static length that is large enough for a client.

    Under ``vmap``, ``lax.switch`` would evaluate all lengths for every client. Here, clients are instead sorted by
    length and evaluated length by length, several short clients together. The result is not differentiable in reverse
    mode, unless there is only one length.

    Args:
      of: function ``length -> tree``; the trees for all lengths must have the same shapes.
      size: number of examples, [] int32, at most the last length.
      lengths: static lengths, ascending.
      at_once: number of clients of one length that are evaluated together; by default, so many that they have
        `_TOGETHER` examples in total.
    """
    if len(lengths) == 1:
        return of(lengths[0])
    # ``vmap`` calls the function again after this trace has ended, so arrays that it closes over are passed to it.
    traced = [jax.make_jaxpr(partial(of, length), return_shape=True)() for length in lengths]
    result = traced[0][1]
    held = [list(closed.consts) for closed, _ in traced]

    def length_result(nth: int, held: list[Array]) -> list[Array]:
        return jaxpr_as_fun(ClosedJaxpr(traced[nth][0].jaxpr, held))()

    def class_at(size: Array) -> Array:
        return (size[..., None] > jnp.asarray(lengths[:-1])).sum(axis=-1)

    def alone(size: Array, held: list[list[Array]]) -> list[Array]:
        branches = [lambda held, nth=nth: length_result(nth, held[nth]) for nth in range(len(lengths))]
        return jax.lax.switch(class_at(size), branches, held)

    chosen = custom_vmap(alone)

    @chosen.def_vmap
    def together(
        clients: int, mapped: list[Any], size: Array, held: list[list[Array]]
    ) -> tuple[list[Array], list[bool]]:
        every = [True] * len(jax.tree.leaves(result))
        of_size, of_held = mapped
        axes = jax.tree.map(lambda by_client: 0 if by_client else None, of_held)
        if not of_size:
            return jax.vmap(alone, in_axes=(None, axes))(size, held), every
        classes = class_at(size)
        order = jnp.argsort(classes)
        counts = (classes[:, None] == jnp.arange(len(lengths))).sum(axis=0)
        begins = jnp.cumsum(counts) - counts
        done = [jnp.zeros((clients, *leaf.shape), leaf.dtype) for leaf in jax.tree.leaves(result)]
        for nth, length in enumerate(lengths):
            several = max(1, min(clients, _TOGETHER // length if at_once is None else at_once))

            def body(t: Array, done: list[Array], nth: int = nth, several: int = several) -> list[Array]:
                own = t * several + jnp.arange(several)
                client = order[jnp.minimum(begins[nth] + own, clients - 1)]
                rows = [a[client] if yes else a for a, yes in zip(held[nth], of_held[nth], strict=True)]
                new = jax.vmap(lambda _, rows: length_result(nth, rows), in_axes=(0, axes[nth]))(client, rows)
                into = jnp.where(own < counts[nth], client, clients)  # out of bounds, so that the result is dropped
                return [a.at[into].set(b, mode="drop") for a, b in zip(done, new, strict=True)]

            done = jax.lax.fori_loop(0, -(-counts[nth] // several), body, done)
        return done, every

    return jax.tree.unflatten(jax.tree.structure(result), chosen(size, held))

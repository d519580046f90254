"""Passes over all of a client's examples, in chunks whose number follows the client's own size.

A chunk has a static length (`ClientData.chunk`), or is four times as long where a client has as many examples: one of
n_i examples takes ceil(n_i / chunk) of them, of which each four are one. Where clients are nearly equal a pass is one
chunk, without a loop. Under ``vmap`` over clients of one store, the chunks of all of them are a list for each length,
from which as many are computed at once as short ones would be of one for each client: a client with many examples then
costs what these cost, not that much for each of its neighbours.

Results do not depend on the chunks, up to the order of additions. They are not differentiable.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.custom_batching import custom_vmap
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun

from jaxpfl.core.types import Array, ClientData, Examples, PyTree

OfChunk = Callable[[PyTree, Array, Array], PyTree]
"""``(x [c, ...], y [c], valid [c]) -> tree``; x and y are zero where not valid."""


_SEVERAL = 4, 1
"""Lengths of a pass's chunks, in `ClientData.chunk`: a convolution of eight images takes a third longer for each."""


def total(of: OfChunk, data: ClientData) -> PyTree:
    """Sum over one client's chunks of a function that sums over the valid examples of one."""
    length = _length(data)
    if data.capacity <= length:
        return of(*_chunk(data.examples, data.start, data.size, 0, length))
    return _in_chunks(of, data, lambda old, client, first, new: old.at[client].add(new, mode="drop"), lambda a: a.shape)


def each(of: OfChunk, data: ClientData) -> PyTree:
    """One row for each of one client's examples, a tree of [capacity, ...]; arbitrary where padded.

    Args:
      of: returns a row for each example of a chunk, a tree of [c, ...].
      data: of one client.
    """
    length = _length(data)
    if data.capacity <= length:
        return of(*_chunk(data.examples, data.start, data.size, 0, length))

    def put(old: Array, client: Array, first: Array, new: Array) -> Array:
        places = first[..., None] + jnp.arange(new.shape[client.ndim], dtype=jnp.int32)
        return old.at[client[..., None], places].set(new, mode="drop")

    return _in_chunks(of, data, put, lambda a: (data.capacity, *a.shape[1:]))


def _length(data: ClientData) -> int:
    return max(min(data.chunk, data.capacity), 1)


def _chunk(examples: Examples, start: Array, size: Array, first: Any, length: int) -> tuple[PyTree, Array, Array]:
    """Examples of the client from its ``first`` on."""
    own = first + jnp.arange(length, dtype=jnp.int32)
    valid = own < size

    def gathered(leaf: Array) -> Array:
        if not leaf.shape[0]:
            return jnp.zeros((length, *leaf.shape[1:]), leaf.dtype)
        rows = _rows(leaf, jnp.where(valid, start + own, 0))
        return jnp.where(valid.reshape(-1, *[1] * (leaf.ndim - 1)), rows, jnp.zeros((), leaf.dtype))

    x, y = jax.tree.map(gathered, tuple(examples))
    return x, y, valid


def _rows(a: Array, rows: Array) -> Array:
    return a.at[rows].get(mode="promise_in_bounds", wrap_negative_indices=False)


class _Chunks(NamedTuple):
    """Chunks of one length of a client, or of several clients.

    Attributes:
      length: static.
      first: the client's examples before the first of them.
      number: of them.
    """

    length: int
    first: Array
    number: Array


def _chunks(data: ClientData, size: Array) -> list[_Chunks]:
    """The chunks of a client, the longest first: as many as there are examples for, the rest by shorter ones."""
    short = _length(data)
    rest, first, found = -(-size // short), jnp.zeros_like(size), []
    for several in _SEVERAL:
        if several == 1 or several * short < data.capacity:
            number = rest // several
            found.append(_Chunks(several * short, first, number))
            first, rest = first + number * several * short, rest - number * several
    return found


def _in_chunks(
    of: OfChunk,
    data: ClientData,
    put: Callable[[Array, Array, Array, Array], Array],
    shape: Callable[[Any], tuple[int, ...]],
) -> PyTree:
    """Results of all chunks, put together.

    Args:
      put: ``(together [b, *shape], client, first example, result of that chunk) -> together``, for one chunk or for
        several at once.
      shape: that of one client's together, of the result of a chunk.
    """
    lengths = [chunks.length for chunks in _chunks(data, data.size)]
    given = [
        jax.eval_shape(lambda data, n=n: _chunk(data.examples, data.start, data.size, 0, n), data) for n in lengths
    ]
    # The rule below runs after this trace: what the function holds of it must be handed over.
    traced = [jax.make_jaxpr(of, return_shape=True)(*one) for one in given]
    result = traced[-1][1]

    def of_one(nth: int, examples: Examples, start: Array, size: Array, first: Array, held: list[Array]) -> list[Array]:
        leaves = jax.tree.leaves(_chunk(examples, start, size, first, lengths[nth]))
        return jaxpr_as_fun(ClosedJaxpr(traced[nth][0].jaxpr, held))(*leaves)

    def nothing(clients: int) -> list[Array]:
        return [jnp.zeros((clients, *shape(leaf)), leaf.dtype) for leaf in jax.tree.leaves(result)]

    def alone(examples: Examples, start: Array, size: Array, held: list[list[Array]]) -> list[Array]:
        done = nothing(1)
        for nth, chunks in enumerate(_chunks(data, size)):

            def body(t: Array, done: list[Array], nth: int = nth, chunks: _Chunks = chunks) -> list[Array]:
                first = chunks.first + t * chunks.length
                new = of_one(nth, examples, start, size, first, held[nth])
                return [put(a, jnp.int32(0), first, b) for a, b in zip(done, new, strict=True)]

            done = jax.lax.fori_loop(0, chunks.number, body, done)
        return [a[0] for a in done]

    passed = custom_vmap(alone)

    @passed.def_vmap
    def together(
        clients: int, mapped: list[Any], examples: Examples, start: Array, size: Array, held: list[list[Array]]
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
                of_each = jax.vmap(partial(of_one, nth), in_axes=(None, 0, 0, 0, held_axes[nth]))
                new = of_each(examples, start[client], jnp.where(there, size[client], 0), first, own)
                beyond = jnp.where(there, client, clients)  # dropped
                return [put(a, beyond, first, b) for a, b in zip(done, new, strict=True)]

            done = jax.lax.fori_loop(0, -(-ends[-1] // several), body, done)
        return done, every

    consts = [list(closed.consts) for closed, _ in traced]
    return jax.tree.unflatten(jax.tree.structure(result), passed(data.examples, data.start, data.size, consts))

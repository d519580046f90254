"""Passes over all of a client's examples, in chunks whose number follows the client's own size.

A chunk has a static length (`ClientData.chunk`), and a client of n_i examples takes ceil(n_i / chunk) of them. Where
clients are nearly equal a pass is one chunk, without a loop. Under ``vmap`` over clients of one store, the chunks of
all of them are one list, from which as many are computed at once as there are clients: a client with many examples then
costs what these cost, not that much for each of its neighbours.

Results do not depend on the chunks, up to the order of additions. They are not differentiable.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_batching import custom_vmap
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun

from jaxpfl.types import Array, ClientData, Examples, PyTree

OfChunk = Callable[[PyTree, Array, Array], PyTree]
"""``(x [c, ...], y [c], valid [c]) -> tree``; x and y are zero where not valid."""


def total(of: OfChunk, data: ClientData) -> PyTree:
    """Sum over one client's chunks of a function that sums over the valid examples of one."""
    length = _length(data)
    if data.capacity <= length:
        return of(*_chunk(data.examples, data.start, data.size, 0, length))
    return _in_chunks(of, data, length, lambda old, client, nth, new: old.at[client].add(new, mode="drop"), ())


def each(of: OfChunk, data: ClientData) -> PyTree:
    """One row for each of one client's examples, a tree of [capacity, ...]; arbitrary where padded.

    Args:
      of: returns a row for each example of a chunk, a tree of [c, ...].
      data: of one client.
    """
    length = _length(data)
    if data.capacity <= length:
        return of(*_chunk(data.examples, data.start, data.size, 0, length))
    chunks = -(-data.capacity // length)
    rows = _in_chunks(
        of, data, length, lambda old, client, nth, new: old.at[client, nth].set(new, mode="drop"), (chunks,)
    )
    return jax.tree.map(lambda a: a.reshape(-1, *a.shape[2:])[: data.capacity], rows)


def _length(data: ClientData) -> int:
    return max(min(data.chunk, data.capacity), 1)


def _chunk(examples: Examples, start: Array, size: Array, nth: Any, length: int) -> tuple[PyTree, Array, Array]:
    """Examples of the client's nth chunk."""
    own = nth * length + jnp.arange(length, dtype=jnp.int32)
    valid = own < size

    def gathered(leaf: Array) -> Array:
        if not leaf.shape[0]:
            return jnp.zeros((length, *leaf.shape[1:]), leaf.dtype)
        rows = leaf.at[jnp.where(valid, start + own, 0)].get(mode="promise_in_bounds", wrap_negative_indices=False)
        return jnp.where(valid.reshape(-1, *[1] * (leaf.ndim - 1)), rows, jnp.zeros((), leaf.dtype))

    x, y = jax.tree.map(gathered, tuple(examples))
    return x, y, valid


def _in_chunks(
    of: OfChunk,
    data: ClientData,
    length: int,
    put: Callable[[Array, Array, Array, Array], Array],
    shape: tuple[int, ...],
) -> PyTree:
    """Results of all chunks, put together.

    Args:
      put: ``(together [b, *shape, ...], client, nth, result of that chunk) -> together``, for several chunks at once.
      shape: leading axes of what one client's results are put into.
    """
    given = jax.eval_shape(lambda data: _chunk(data.examples, data.start, data.size, 0, length), data)
    # The rule below runs after this trace: what the function holds of it must be handed over.
    closed, result = jax.make_jaxpr(of, return_shape=True)(*given)

    def of_one(examples: Examples, start: Array, size: Array, nth: Array, held: list[Array]) -> list[Array]:
        leaves = jax.tree.leaves(_chunk(examples, start, size, nth, length))
        return jaxpr_as_fun(ClosedJaxpr(closed.jaxpr, held))(*leaves)

    def nothing(clients: int) -> list[Array]:
        return [jnp.zeros((clients, *shape, *leaf.shape), leaf.dtype) for leaf in jax.tree.leaves(result)]

    def alone(examples: Examples, start: Array, size: Array, held: list[Array]) -> list[Array]:
        def body(nth: Array, done: list[Array]) -> list[Array]:
            new = of_one(examples, start, size, nth, held)
            return [put(a, jnp.int32(0), nth, b) for a, b in zip(done, new, strict=True)]

        return [a[0] for a in jax.lax.fori_loop(0, -(-size // length), body, nothing(1))]

    passed = custom_vmap(alone)

    @passed.def_vmap
    def together(
        clients: int, mapped: list[Any], examples: Examples, start: Array, size: Array, held: list[Array]
    ) -> tuple[list[Array], list[bool]]:
        of_examples, of_start, of_size, of_held = mapped
        every = [True] * len(jax.tree.leaves(result))
        if any(jax.tree.leaves(of_examples)) or not (of_start and of_size):
            axes = jax.tree.map(lambda axis: 0 if axis else None, tuple(mapped))
            return jax.vmap(alone, in_axes=axes)(examples, start, size, held), every
        counts = -(-size // length)
        ends = jnp.cumsum(counts)

        def body(t: Array, done: list[Array]) -> list[Array]:
            place = t * clients + jnp.arange(clients, dtype=jnp.int32)
            there = place < ends[-1]
            client = jnp.minimum((place[:, None] >= ends).sum(axis=1), clients - 1)
            nth = place - (ends - counts)[client]
            own = [a[client] if by_client else a for a, by_client in zip(held, of_held, strict=True)]
            axes = (None, 0, 0, 0, [0 if by_client else None for by_client in of_held])
            new = jax.vmap(of_one, in_axes=axes)(examples, start[client], jnp.where(there, size[client], 0), nth, own)
            beyond = jnp.where(there, client, clients)  # dropped
            return [put(a, beyond, nth, b) for a, b in zip(done, new, strict=True)]

        return jax.lax.fori_loop(0, -(-ends[-1] // clients), body, nothing(clients)), every

    return jax.tree.unflatten(jax.tree.structure(result), passed(data.examples, data.start, data.size, closed.consts))

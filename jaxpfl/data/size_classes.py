"""Classes of client sizes: a few static lengths, so that ragged clients are padded to little more than their own."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_batching import custom_vmap
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun

from jaxpfl.core.types import EQUAL, Array, PyTree

MOST = 8
"""Most classes: each is compiled."""
_STEP = 1.1
"""Ratio of the sizes that the search for classes tells apart."""
_TOGETHER = 256
"""Examples that clients of one length have together when several are computed at once."""


def size_classes(sizes: np.ndarray) -> tuple[int, ...]:
    """Lengths for clients of these sizes, ascending, by which all clients together are padded least.

    The fewest lengths by which they are padded to less than `EQUAL` times their sizes in all, or the best `MOST`. Each
    is the size of some client; they are found by dynamic programming over the clients in order of size.

    Examples:
      >>> size_classes(np.array([30, 40, 40])), size_classes(np.array([30, 40, 5000]))
      ((40,), (40, 5000))
    """
    ordered = np.sort(np.maximum(np.asarray(sizes, np.int64), 1))
    if not len(ordered):
        return (1,)
    last = np.flatnonzero(np.diff(np.floor(np.log(ordered) / np.log(_STEP)), append=np.inf))
    lengths, upto = ordered[last], last + 1  # the largest of each step, and the number of clients up to it
    before = np.append(0, upto)
    cost, cuts = lengths * upto, []
    while cost[-1] > EQUAL * ordered.sum() and len(cuts) + 1 < MOST:
        # Up to step j, of which the last class begins behind step i - 1: that costs lengths[j] a client.
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
    """Places of the sizes that each length is the least to hold, one array for each length."""
    found = np.searchsorted(lengths, sizes)
    return [np.flatnonzero(found == i) for i in range(len(lengths))]


def at_own_length(
    of: Callable[[int], PyTree], size: Array, lengths: tuple[int, ...], *, at_once: int | None = None
) -> PyTree:
    """Result of a function at the least of some static lengths that holds a client's size.

    Under ``vmap`` clients are put in order of their lengths where there are several, and computed length by length,
    short ones several at once, as all lengths would otherwise be computed for each client. It is then not
    differentiable in reverse.

    Args:
      of: ``length -> tree``; its result has the same shapes for all lengths.
      size: [] int32, at most the last of the lengths.
      lengths: ascending.
      at_once: clients of one length that are computed at once; None for as many as have `_TOGETHER` examples.
    """
    if len(lengths) == 1:
        return of(lengths[0])
    # What the function holds of this trace must be handed over: it is called again when clients are mapped over.
    traced = [jax.make_jaxpr(partial(of, length), return_shape=True)() for length in lengths]
    result = traced[0][1]
    held = [list(closed.consts) for closed, _ in traced]

    def at(nth: int, held: list[Array]) -> list[Array]:
        return jaxpr_as_fun(ClosedJaxpr(traced[nth][0].jaxpr, held))()

    def class_at(size: Array) -> Array:
        return (size[..., None] > jnp.asarray(lengths[:-1])).sum(axis=-1)

    def alone(size: Array, held: list[list[Array]]) -> list[Array]:
        branches = [lambda held, nth=nth: at(nth, held[nth]) for nth in range(len(lengths))]
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
                new = jax.vmap(lambda _, rows: at(nth, rows), in_axes=(0, axes[nth]))(client, rows)
                into = jnp.where(own < counts[nth], client, clients)  # beyond: dropped
                return [a.at[into].set(b, mode="drop") for a, b in zip(done, new, strict=True)]

            done = jax.lax.fori_loop(0, -(-counts[nth] // several), body, done)
        return done, every

    return jax.tree.unflatten(jax.tree.structure(result), chosen(size, held))

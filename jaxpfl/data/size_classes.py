"""Classes of client sizes: a few static lengths, so that ragged clients are padded to little more than their own."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_batching import sequential_vmap
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun

from jaxpfl.types import EQUAL, Array, PyTree

FACTOR = 4
"""Ratio of sizes within a class: a client is padded to less than this times its own size."""
MOST = 6
"""Most classes: each is compiled. The smallest clients are in one with those up to 1 / 1024 of the largest."""


def size_classes(sizes: np.ndarray) -> tuple[int, ...]:
    """Lengths for clients of these sizes, ascending: the largest of each class, from the largest client downwards.

    Examples:
      >>> size_classes(np.array([30, 40, 40])), size_classes(np.array([30, 40, 5000]))
      ((40,), (40, 5000))
    """
    left = np.asarray(sizes, np.int64)
    lengths = [max(int(left.max(initial=0)), 1)]
    if lengths[0] * len(left) <= EQUAL * left.sum():
        return (lengths[0],)
    while len(lengths) < MOST:
        left = left[left * FACTOR <= lengths[-1]]
        if not left.any():
            break
        lengths.append(int(left.max()))
    return tuple(reversed(lengths))


def class_of(sizes: np.ndarray, lengths: tuple[int, ...]) -> list[np.ndarray]:
    """Places of the sizes that each length is the least to hold, one array for each length."""
    found = np.searchsorted(lengths, sizes)
    return [np.flatnonzero(found == i) for i in range(len(lengths))]


def at_own_length(of: Callable[[int], PyTree], size: Array, lengths: tuple[int, ...]) -> PyTree:
    """Result of a function at the least of some static lengths that holds a client's size.

    Under ``vmap`` clients run one after the other where there are several lengths, as all of them would otherwise be
    computed for each client. It is then not differentiable in reverse.

    Args:
      of: ``length -> tree``; its result has the same shapes for all lengths.
      size: [] int32, at most the last of the lengths.
      lengths: ascending.
    """
    if len(lengths) == 1:
        return of(lengths[0])

    def choose(size: Array) -> PyTree:
        place = (size > jnp.asarray(lengths[:-1])).sum()
        return jax.lax.switch(place, [partial(of, length) for length in lengths])

    # What the function holds of this trace must be handed over: it is called again when clients are mapped over.
    closed, result = jax.make_jaxpr(choose, return_shape=True)(size)
    leaves = sequential_vmap(lambda size, held: jaxpr_as_fun(ClosedJaxpr(closed.jaxpr, held))(size))
    return jax.tree.unflatten(jax.tree.structure(result), leaves(size, closed.consts))

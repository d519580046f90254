"""The axis of runs: several seeds and settings in one program."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxpfl.core.types import Array, PyTree
from jaxpfl.support.errors import JaxpflError


def check_values(name: str, value: Any, runs: int) -> None:
    """Refuse anything but a number, or one for each of the runs, [S].

    Raises:
      JaxpflError.
    """
    if np.ndim(value) and len(value) != runs:
        raise JaxpflError(f"{name} has {len(value)} values for {runs} runs: give one seed for each value")


def rows_of(values: PyTree, runs: int) -> PyTree:
    """One value for each of the runs, leaves [S], of leaves [] or [S].

    Raises:
      JaxpflError: as `check_values`, by the name of the leaf.
    """

    def rows(path: tuple[Any, ...], value: Any) -> jax.Array:
        check_values(jax.tree_util.keystr(path, simple=True), value, runs)
        return jnp.broadcast_to(value, (runs,))

    return jax.tree.map_with_path(rows, values)


def check_distinct(seeds: Sequence[int], values: PyTree) -> None:
    """Refuse two runs with the same seed and traced values, leaves [S].

    Raises:
      JaxpflError: naming the seed.
    """
    leaves, seen = [np.asarray(leaf).tolist() for leaf in jax.tree.leaves(values)], set()
    for i, seed in enumerate(map(int, seeds)):
        run = (seed, *(leaf[i] for leaf in leaves))
        if run in seen:
            raise JaxpflError(
                f"seed {seed} is given twice for the same hyper-parameters, and both runs would be equal: give each "
                "another seed"
            )
        seen.add(run)


def number(value: Any) -> jax.Array:
    """A hyper-parameter on the device, as JAX takes a Python number: it adopts the type of what it meets.

    Python and NumPy numbers, and one for each run, [] or [S], then give the same programs. A `jax.Array` keeps its own
    type.
    """
    if isinstance(value, jax.Array) or np.asarray(value).dtype not in (np.float64, np.int64):
        return jnp.asarray(value)
    if not np.ndim(value):
        return jnp.asarray(np.asarray(value).item())
    array = jnp.asarray(value)
    like = jnp.asarray(0.0 if jnp.issubdtype(array.dtype, jnp.floating) else 0)
    return jnp.broadcast_to(like, array.shape).at[...].set(array)


def over_runs(one: Callable[..., Any], *, vectorised: bool, in_place: bool = False) -> Callable[..., Any]:
    """``one(per run, hp, shared...)`` for a leading axis of runs on its first two arguments.

    Args:
      one: the program of one run.
      vectorised: true for runs as one vectorised axis; else they run in turn.
      in_place: true if ``one`` returns (its next first argument, anything): runs in turn then write into one buffer.
    """

    def runs(first: PyTree, hp: PyTree, *shared: PyTree) -> PyTree:
        count = jax.tree.leaves(first)[0].shape[0]
        if count == 1:  # without a batch axis the client's products stay plain ones
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

    return runs

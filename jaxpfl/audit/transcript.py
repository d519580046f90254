"""Transcript of a run's releases, round by round: the input of a method's server, including noise and divisor."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxpfl.core.protocol import Algorithm, Reduced, Server, Stacked, Upload
from jaxpfl.core.types import Array, PyTree
from jaxpfl.engine import RunState, Simulation
from jaxpfl.priors.gaussian_mixture import Mixture
from jaxpfl.support.errors import JaxpflError


class Seen(NamedTuple):
    """Server state: the method's own, and the last round's release.

    Attributes:
      total: the sum of the uploads behind the mechanism; for a method that is private by itself, the center of its new
        server state.
      weight: the divisor, [].
    """

    state: PyTree
    total: PyTree
    weight: Array


class Round(NamedTuple):
    """A round of S runs, on the host.

    Attributes:
      state: after it.
      history: the engine's metrics, each [S].
      leaves: the released total, by name: [S, entries] each, float64.
      weight: the divisor, [S].
    """

    state: RunState
    history: dict[str, np.ndarray]
    leaves: dict[str, np.ndarray]
    weight: np.ndarray


def recorded(algorithm: Algorithm, upload: Upload) -> Algorithm:
    """Wrap an algorithm so that its server records its last input.

    Args:
      upload: shapes and types of a client's.
    """
    inner = algorithm.server
    nothing = jax.tree.map(lambda a: jnp.zeros(a.shape, jnp.result_type(float)), upload.total)

    def init(key, hp, ctx) -> Seen:
        return Seen(inner.init(key, hp, ctx), nothing, jnp.zeros(()))

    def update(key, hp, ctx, seen: Seen, reduced: Reduced | Stacked):
        state, metrics = inner.update(key, hp, ctx, seen.state, reduced)
        if isinstance(reduced, Stacked):
            shared = inner.broadcast(key, hp, ctx, state).shared
            if not isinstance(shared, Mixture):
                raise JaxpflError("an audit reads sums of uploads, and AdaMix's mixture: this method has neither")
            return Seen(
                state, jax.tree.map(lambda mu: jnp.tensordot(shared.p, mu, 1), shared.mu), jnp.ones(())
            ), metrics
        # The model's own type may be too narrow for the noise's last digits.
        total = jax.tree.map(lambda a: a.astype(jnp.result_type(float)), reduced.total)
        (weight,) = jax.tree.leaves(reduced.weight)
        return Seen(state, total, jnp.asarray(weight, jnp.result_type(float))), metrics

    def broadcast(key, hp, ctx, seen: Seen):
        return inner.broadcast(key, hp, ctx, seen.state)

    return algorithm._replace(server=Server(init, broadcast, update))


def rounds(simulation: Simulation, state: RunState, count: int) -> Iterator[Round]:
    """Run ``count`` rounds and yield the release of each. The state is donated."""
    for _ in range(count):
        state, history = simulation.advance(state, 1)
        (seen,) = [node for node in jax.tree.leaves(state.server, is_leaf=_is_seen) if _is_seen(node)]
        yield Round(
            state,
            {name: np.asarray(values)[:, 0] for name, values in history.items()},
            by_name(seen.total, runs=True),
            np.asarray(seen.weight, np.float64),
        )


def by_name(tree: PyTree, *, runs: bool = False) -> dict[str, np.ndarray]:
    """Leaves by path, each as a vector of float64, or [S, entries] with a leading axis of runs."""
    return {
        jax.tree_util.keystr(path, simple=True, separator="/") or "upload": np.asarray(leaf, np.float64).reshape(
            *np.shape(leaf)[: int(runs)], -1
        )
        for path, leaf in jax.tree.leaves_with_path(tree)
    }


def _is_seen(node: Any) -> bool:
    return isinstance(node, Seen)

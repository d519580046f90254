r"""Canaries: clients with a detectable upload, included in a run by a fair coin.

A canary's upload has its own direction, a norm far beyond the clipping norm and a large weight, and changes its sign
between rounds by the Thue-Morse sequence (+ - - + - + + - ...): clipped, it changes the sum by C, and if two rounds
share their noise, the noise cancels in their difference while the canary does not. A claim covers any upload of a
client. If the coin excludes it, the run is the neighbour under the claim's relation: no upload (add-or-remove-one), a
zero upload (zero-out), or its opposite (replace-one).

With noise in every step a canary's gradients are such vectors, as its noise is added to each of them; if excluded, it
has no examples, so that the number of its noisy steps may not depend on them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxpfl.algorithms import LocalWork
from jaxpfl.audit.subject import Change
from jaxpfl.core import trees
from jaxpfl.core.participation import Availability
from jaxpfl.core.protocol import Algorithm, Client, Upload
from jaxpfl.core.randomness import Purpose, stream
from jaxpfl.core.types import Array, Key, PyTree, Scalar
from jaxpfl.privacy import Relation

_LENGTH, _WEIGHT = 100.0, 8.0
_UNIT: dict[Relation, float] = {"add-or-remove-one": 0.0, "zero-out": 0.0, "replace-one": -1.0}
"""The canary's upload if its coin excludes it, relative to the one if included."""


class Canaries(NamedTuple):
    """The canaries of a run.

    Attributes:
      ids: of the clients, [n].
      relation: determines their upload if excluded by their coin.
      even: whether the direction's length is divided equally among leaves; else among entries. The former detects
        faults in small leaves, the latter separates many canaries.
    """

    ids: np.ndarray
    relation: Relation
    even: bool

    def has(self, client_id: Array) -> Array:
        """True if a client is a canary, [] bool."""
        return (client_id == jnp.asarray(self.ids)).any()

    def direction(self, client_id: Scalar, like: PyTree) -> PyTree:
        """A canary's direction: random signs in a tree of the given shapes, of length 1."""
        leaves, structure = jax.tree.flatten(like)
        size = sum(leaf.size for leaf in leaves)

        def part(place: int, leaf: Any) -> Array:
            share = leaf.size * len(leaves) if self.even else size
            return (_signs(client_id, place, leaf.shape) / np.sqrt(max(share, 1))).astype(leaf.dtype)

        return jax.tree.unflatten(structure, [part(place, leaf) for place, leaf in enumerate(leaves)])

    def tosses(self, run_keys: Array) -> np.ndarray:
        """Coins of the canaries in each run, [S, n] bool."""
        each = jax.vmap(lambda key, i: coin(stream(key, Purpose.BATCHES, i)), (None, 0))
        return np.asarray(jax.vmap(each, (0, None))(run_keys, jnp.asarray(self.ids)))

    def availability(self, usual: Availability) -> Availability:
        """The clients' availability, with excluded canaries that send nothing (add-or-remove-one)."""
        if self.relation != "add-or-remove-one":
            return usual

        canaries = self

        class Missing(Availability):
            def drops_out(self, run_key: Key, round: Array, client_id: Array) -> Array:
                there = coin(stream(run_key, Purpose.BATCHES, client_id))
                return (canaries.has(client_id) & ~there) | usual.drops_out(run_key, round, client_id)

        return Missing(**vars(usual))


def coin(batch_key: Key) -> Array:
    """A client's coin, [] bool, the same in every round of a run: a bit of its key, which is as random as a draw."""
    return jax.random.key_data(batch_key).ravel()[-1] % 2 == 1


def _signs(client_id: Scalar, place: int, shape: tuple[int, ...]) -> Array:
    """1 or -1 for every entry, by a hash (the finaliser of MurmurHash3), which compiles in a tenth of a draw's time."""
    seed = jnp.asarray(client_id).astype(jnp.uint32) * np.uint32(0x9E3779B1) + np.uint32(place * 0x85EBCA77 % 2**32)
    bits = jnp.arange(math.prod(shape), dtype=jnp.uint32) * np.uint32(0xC2B2AE3D) + seed
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35), (16, 1)):
        bits = (bits ^ (bits >> shift)) * np.uint32(factor)
    return (1.0 - 2.0 * (bits % 2)).reshape(shape)


def sign(round: Scalar) -> Array:
    """The Thue-Morse sequence, 1 or -1."""
    return 1 - 2 * (jax.lax.population_count(jnp.asarray(round, jnp.int32)) % 2)


def with_canaries(canaries: Canaries, clipping_norm: float, rebuild: Callable[[LocalWork], Algorithm] | None) -> Change:
    """Transformation that puts the canaries into an algorithm.

    Args:
      clipping_norm: C.
      rebuild: for noise in every step, builds the algorithm for other work, whose gradients are replaced.
    """

    def change(algorithm: Algorithm, work: LocalWork) -> Algorithm:
        def changed(number: int) -> Client:
            usual = algorithm.clients[number]

            def update(key, hp, ctx, message, state, splits):
                side = jnp.where(coin(ctx.batch_key), 1.0, _UNIT[canaries.relation]) * sign(ctx.round)
                length = _LENGTH * clipping_norm * side

                def vector(like: PyTree) -> PyTree:
                    direction = canaries.direction(ctx.client_id, like)
                    return jax.tree.map(lambda a: (length * a).astype(a.dtype), direction)

                real = usual.update(key, hp, ctx, message, state, splits)
                if rebuild is None:
                    upload: Upload = real[1]
                    total = jax.tree.map(lambda a: _WEIGHT * a, vector(upload.total))
                    weight = jax.tree.map(lambda a: jnp.full_like(a, _WEIGHT), upload.weight)
                    chosen = (real[0], upload._replace(total=total, weight=weight), real[2])
                else:  # a step is against the gradient
                    steered = _Steered(*_values(work), steer=lambda g: jax.tree.map(jnp.negative, vector(g)))
                    size = jnp.where(coin(ctx.batch_key), splits.train.size, 0)
                    own = splits._replace(train=replace(splits.train, size=size))
                    chosen = rebuild(steered).clients[number].update(key, hp, ctx, message, state, own)
                return trees.where(canaries.has(ctx.client_id), chosen, real)

            return usual._replace(update=update)

        return algorithm._replace(clients=tuple(map(changed, range(len(algorithm.clients)))))

    return change


@dataclass(frozen=True, eq=False)
class _Steered(LocalWork):
    """Local work with replaced gradients of the uploaded parameters."""

    steer: Callable[[PyTree], PyTree] = lambda gradient: gradient

    def released(self, key: Key, gradient: PyTree) -> PyTree:
        return super().released(key, self.steer(gradient))


def _values(work: LocalWork) -> list[Any]:
    return [getattr(work, each.name) for each in fields(LocalWork)]

"""Randomness by name: every draw has a key that says what it is for, in which round and for which client.

``key = fold_in(run key, purpose, round, client id)``. A client's stream therefore does not depend on its slot in the
cohort, on who else takes part, on how clients are chunked or on the number of devices.
"""

from __future__ import annotations

from enum import IntEnum

import jax
import jax.numpy as jnp

from jaxpfl.types import Array, Key, Scalar


class Purpose(IntEnum):
    """What a stream of randomness is for. The numbers are part of the results: never renumber, only append."""

    SERVER_INIT = 0
    CLIENT_INIT = 1
    PARTICIPATION = 2
    LOCAL_WORK = 3
    BATCHES = 4
    SERVER_UPDATE = 5
    PERSONALIZE = 6
    BROADCAST = 7
    PERSONALIZE_BATCHES = 8
    STRAGGLERS = 9
    DROPOUT = 10
    ADAPT = 11


def stream(run_key: Key, purpose: Purpose, *names: Scalar) -> Key:
    """The key of one named stream: ``fold_in`` of the purpose and then of each name (round, client id, ...)."""
    key = jax.random.fold_in(run_key, int(purpose))
    for name in names:
        key = jax.random.fold_in(key, name)
    return key


def client_scores(key: Key, client_ids: Array) -> Array:
    """One uniform score in [0, 1) for each client, [m]; a client's score depends on the key and its id alone."""
    return jax.vmap(lambda i: jax.random.uniform(jax.random.fold_in(key, i), dtype=jnp.float32))(client_ids)

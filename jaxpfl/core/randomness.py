"""Named random streams: the key of every draw is derived from its purpose, its round and its client.

``key = fold_in(run key, purpose, round, client id)``. A client's stream therefore does not depend on its slot in the
cohort, on who else takes part, on how clients are chunked or on the number of devices.
"""

from __future__ import annotations

import hashlib
import re
from enum import IntEnum

import jax
import jax.numpy as jnp
import numpy as np

from jaxpfl.core.types import Array, Key, Scalar

_ADDRESS = re.compile(r" at 0x[0-9a-f]+")


class Purpose(IntEnum):
    """Purpose of a random stream. The numbers are part of the results: never renumber, only append."""

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
    NOISE = 12
    ATTACKERS = 13
    SPEEDS = 14
    CYCLE = 15

    # Local steps t = 0, 1, ... are folded into the same key: these numbers count down from the top, beyond any step.
    RELEASE_NOISE = 2**31 - 1
    SCALE_NOISE = 2**31 - 2
    EXAMPLES = 2**31 - 3
    UPLOAD_CODE = SCALE_NOISE  # folded into a round's key; for a scale's noise, into a step's
    ATTACK_NOISE = 2**31 - 4
    AUGMENTATION = 2**31 - 5


def stream(run_key: Key, purpose: Purpose, *names: Scalar) -> Key:
    """Key of a named stream, by ``fold_in`` with the purpose and then each name (round, client id, ...)."""
    key = jax.random.fold_in(run_key, int(purpose))
    for name in names:
        key = jax.random.fold_in(key, name)
    return key


def named(key: Key, *names: object) -> Key:
    """Key for a stream with arbitrary data as its name: the first 16 bytes of the text's SHA-256 are folded in.

    Streams of different names are independent, up to a collision of the hash.

    Args:
      names: arrays, or objects whose ``repr`` is the same in every process; memory addresses in it are ignored.
    """
    for word in words_of(*names):
        key = jax.random.fold_in(key, word)
    return key


def words_of(*names: object) -> np.ndarray:
    """The hash of some names that `named` folds in, [4] uint32."""
    text = "\0".join(_ADDRESS.sub("", repr(name)) for name in map(_short, names))
    return np.frombuffer(hashlib.sha256(text.encode()).digest()[:16], "<u4").astype(np.uint32)


def _short(name: object) -> object:
    """The shape, dtype and checksum of an array, whose ``repr`` omits most of it; other names as they are."""
    if not isinstance(name, np.ndarray | jax.Array):
        return name
    array = np.asarray(name)
    return array.shape, str(array.dtype), hashlib.sha256(array.tobytes()).hexdigest()


def numbered(key: Key, *numbers: Scalar) -> Key:
    """Key of a stream named by numbers, traced or not: their bits, folded in."""
    for number in numbers:
        number = jnp.asarray(number, jnp.result_type(float))
        for word in jnp.ravel(jax.lax.bitcast_convert_type(number, jnp.uint32)):
            key = jax.random.fold_in(key, word)
    return key


def client_scores(key: Key, client_ids: Array) -> Array:
    """One uniform score in [0, 1) per client, [m], which depends on the key and the client's id alone."""
    return jax.vmap(lambda i: jax.random.uniform(jax.random.fold_in(key, i), dtype=jnp.float32))(client_ids)

"""Named random streams: the key of every draw is derived from the draw's purpose, round and client.

``key = fold_in(run key, purpose, round, client id)``. A client's stream therefore does not depend on its slot in the
cohort, on the other clients in the cohort, on how clients are chunked or on the number of devices.
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
    """Purpose of a random stream. Results depend on the numbers: add new purposes, but never change a number."""

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

    # The numbers of local steps, t = 0, 1, ..., are folded into the same keys as the purposes below. These purposes
    # therefore count down from 2^31 - 1, which no step reaches.
    RELEASE_NOISE = 2**31 - 1
    SCALE_NOISE = 2**31 - 2
    EXAMPLES = 2**31 - 3
    UPLOAD_CODE = SCALE_NOISE  # no clash: UPLOAD_CODE is folded into a round's key, SCALE_NOISE into a step's key
    ATTACK_NOISE = 2**31 - 4
    AUGMENTATION = 2**31 - 5


def stream(run_key: Key, purpose: Purpose, *names: Scalar) -> Key:
    """Derive a stream's key by folding the purpose and then each name (round, client id, ...) into the run's key."""
    key = jax.random.fold_in(run_key, int(purpose))
    for name in names:
        key = jax.random.fold_in(key, name)
    return key


def named(key: Key, *names: object) -> Key:
    """Derive the key of a stream that is named by arbitrary data.

    The first 16 bytes of the names' SHA-256 hash are folded into ``key``. Streams with different names are independent
    unless these hashes collide.

    Args:
      names: arrays, or objects whose ``repr`` is the same in every process. Memory addresses in a ``repr`` are ignored.
    """
    for word in words_of(*names):
        key = jax.random.fold_in(key, word)
    return key


def words_of(*names: object) -> np.ndarray:
    """Hash the names of a stream to the words [4] uint32 that `named` folds into a key."""
    text = "\0".join(_ADDRESS.sub("", repr(name)) for name in map(_short, names))
    return np.frombuffer(hashlib.sha256(text.encode()).digest()[:16], "<u4").astype(np.uint32)


def _short(name: object) -> object:
    """Replace an array by its shape, dtype and checksum, because the ``repr`` of a long array omits most entries."""
    if not isinstance(name, np.ndarray | jax.Array):
        return name
    array = np.asarray(name)
    return array.shape, str(array.dtype), hashlib.sha256(array.tobytes()).hexdigest()


def numbered(key: Key, *numbers: Scalar) -> Key:
    """Derive a stream's key by folding the bits of some numbers, traced or not, into ``key``."""
    for number in numbers:
        number = jnp.asarray(number, jnp.result_type(float))
        for word in jnp.ravel(jax.lax.bitcast_convert_type(number, jnp.uint32)):
            key = jax.random.fold_in(key, word)
    return key


def client_scores(key: Key, client_ids: Array) -> Array:
    """Draw a uniform score in [0, 1) for each client, [m]; a score depends only on the key and the client's id."""
    return jax.vmap(lambda i: jax.random.uniform(jax.random.fold_in(key, i), dtype=jnp.float32))(client_ids)

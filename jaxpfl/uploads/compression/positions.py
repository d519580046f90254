"""Code of the positions of the sent entries: their number and the gaps between them, in the Elias gamma code."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from jaxpfl.core.types import Array
from jaxpfl.support.errors import JaxpflError
from jaxpfl.uploads.compression import elias
from jaxpfl.uploads.compression.bits import Reader


def count_bits(sent: Array) -> Array:
    """Exact length of ``encode(flatnonzero(sent))``, [] int32; sent is [d] bool and may be traced."""
    place = jnp.arange(1, sent.shape[0] + 1, dtype=jnp.int32)
    last = jax.lax.cummax(jnp.where(sent, place, 0))
    gaps = place - jnp.concatenate([jnp.zeros(1, jnp.int32), last[:-1]])
    return elias.lengths(sent.sum(dtype=jnp.int32) + 1) + jnp.where(sent, elias.lengths(gaps), 0).sum()


def encode(places: np.ndarray) -> np.ndarray:
    """Increasing positions [n], from 0, as bits."""
    return elias.encode(np.concatenate([[len(places) + 1], np.diff(places, prepend=-1)]))


def decode(reader: Reader, d: int) -> np.ndarray:
    """The next positions, [n] int64.

    Raises:
      JaxpflError: if a position is outside 0 ... d - 1.
    """
    number = elias.decode_one(reader) - 1
    if number > d:
        raise JaxpflError(f"the message has {number} entries, expected at most {d}")
    places = np.cumsum(elias.decode(reader, number)) - 1
    if number and places[-1] >= d:
        raise JaxpflError(f"the message has entry {places[-1]}, expected at most {d - 1}")
    return places

"""Random orders of [0, n), evaluated at single positions at a cost that does not grow with n.

The functions also work under ``vmap`` and ``lax.map``. Up to `SHORT` examples, an order comes from sorting random
words. A word has 26 random bits followed by the index, so two examples tie with probability 1.5e-8. Above `SHORT`, an
order comes from a swap-or-not network. Round r of the network has a shift K_r in [0, n) and a random bit for each pair
{x, (K_r - x) mod n}; where the bit is set, the two positions are swapped (Hoang, Morris and Rogaway, "An enciphering
scheme based on a card shuffle", CRYPTO 2012). No round needs a table, a sort, or a loop whose length depends on data.

A round moves a position with probability 1/2, and then to a uniform position. After R rounds, one position, or a pair
of positions, is within about 2^-R of uniform (R = 32: 2e-10); the whole order of a small n is within sqrt(n!) 2^-R.
More rounds help for every n, even or odd. This is not so for Feistel networks (n = 5, 7).

An order depends only on its key and on n: not on padding, other clients, or the positions that are read.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxpfl.core.types import Array, Key

SHORT = 64
"""Largest order that is sorted: for a few positions in a small order, the network takes ten times as long."""
ROUNDS = 32
_GOLDEN = np.uint32(0x9E3779B9)  # 2^32 / golden ratio: consecutive multiples differ in many bits
_MIX = np.uint32(0x7FEB352D), np.uint32(0x846CA68B)  # multipliers of Wellons' 32-bit hash with the lowest bias


class Sizes(NamedTuple):
    """Static bounds of the sizes that orders may have. They decide what is compiled, and do not change an order.

    Attributes:
      short: bound on the sizes up to `SHORT`; 0 if there are no such sizes.
      long: whether there may be larger sizes.
    """

    short: int
    long: bool

    @classmethod
    def cover(cls, sizes: np.ndarray) -> Sizes:
        """Bounds of these sizes. ``short`` is rounded up to a power of two, so that similar sizes share programs."""
        short = int(sizes[sizes <= SHORT].max(initial=0))
        return cls(2 ** (short - 1).bit_length() if short else 0, bool(sizes.max(initial=0) > SHORT))


ANY = Sizes(SHORT, True)


def order_at(key: Key, size: Array, place: Array, sizes: Sizes = ANY) -> Array:
    """Read one random order of [0, n) at some positions.

    Args:
      key: key of the order.
      size: [] int32, n >= 1, at most 2^24.
      place: [...] int32 in [0, n).
      sizes: static bounds of n.

    Returns:
      [...] int32 in [0, n): distinct for distinct positions.
    """

    def network() -> Array:
        shifts, salts = _rounds(key, size)
        return lax.fori_loop(0, ROUNDS, lambda r, x: _swap_or_not(x, shifts[r], salts[r], size), place)

    # Under ``vmap`` this also runs for long orders, whose positions exceed the table; the result is then not used.
    return _either(lambda: _sorted(key, size, sizes.short).at[place].get(mode="clip"), network, size, sizes)


def orders_at(keys: Key, size: Array, nth: Array, place: Array, sizes: Sizes = ANY) -> Array:
    """Read several random orders of [0, n) at some positions.

    Args:
      keys: [E], one key for each order; each order takes 64 words of memory.
      size, place, sizes: as in `order_at`.
      nth: int32 in [0, E), index of the order to read at each position, in the shape of ``place``.

    Returns:
      [...] int32, equal to ``order_at(keys[e], size, place)`` wherever nth is e.
    """

    def network() -> Array:
        shifts, salts = jax.vmap(_rounds, (0, None), 1)(keys, size)

        def row_values(row: Array) -> Array:
            return row.at[nth].get(mode="promise_in_bounds", wrap_negative_indices=False)

        def step(r: Array, x: Array) -> Array:
            return _swap_or_not(x, row_values(shifts[r]), row_values(salts[r]), size)

        return lax.fori_loop(0, ROUNDS, step, place)

    def short() -> Array:
        table = jax.vmap(lambda key: _sorted(key, size, sizes.short))(keys)
        return table.at[nth, place].get(mode="clip")

    return _either(short, network, size, sizes)


def _either(short: Callable[[], Array], long: Callable[[], Array], size: Array, sizes: Sizes) -> Array:
    """Choose the short or the long algorithm by size; if both sizes may occur, both run under ``vmap``."""
    if not (sizes.short and sizes.long):
        return long() if sizes.long else short()
    return lax.cond(size <= SHORT, short, long)


def _sorted(key: Key, size: Array, capacity: int) -> Array:
    """Sort random words into an order of [0, n), followed by padding: [capacity] int32, equal for any capacity >= n."""
    index, last = jnp.arange(capacity, dtype=jnp.uint32), np.uint32(SHORT - 1)
    # A key's first words do not depend on how many words are drawn.
    words = jnp.where(index < size.astype(jnp.uint32), jax.random.bits(key, (capacity,), jnp.uint32), ~np.uint32(0))
    return (lax.sort((words & ~last) | index, is_stable=False) & last).astype(jnp.int32)


def _rounds(key: Key, size: Array) -> tuple[Array, Array]:
    """Return each round's shift in [0, n), int32, and salt, uint32: two arrays [ROUNDS], hashed from two words."""
    words = jax.random.bits(key, (2,), jnp.uint32)
    hashed = _mixed(words[0] + jnp.arange(ROUNDS, dtype=jnp.uint32) * _GOLDEN)
    # The upper half of the 64-bit product hashed * n, computed byte by byte: sums stay below 2^32 for n <= 2^24.
    shift = jnp.zeros_like(hashed)
    for low in (0, 8, 16, 24):
        shift = (((hashed >> low) & 255) * size.astype(jnp.uint32) + shift) >> 8
    return shift.astype(jnp.int32), _mixed(words[1] ^ hashed)


def _swap_or_not(place: Array, shift: Array, salt: Array, size: Array) -> Array:
    """Run one round. A position and its partner see the same bit, because the bit depends on the larger of the two."""
    partner = shift - place
    partner = jnp.where(partner < 0, partner + size, partner)
    bits = (jnp.maximum(place, partner).astype(jnp.uint32) ^ salt) * _MIX[0]
    bits = (bits ^ (bits >> 15)) * _MIX[1]
    return jnp.where(bits >> 31 == 1, partner, place)


def _mixed(word: Array) -> Array:
    word = (word ^ (word >> 16)) * _MIX[0]
    word = (word ^ (word >> 15)) * _MIX[1]
    return word ^ (word >> 16)

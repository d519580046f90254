"""What every compressor gives: the vector that the receiver reads, and how many bits it was sent in."""

from __future__ import annotations

from typing import NamedTuple

from jaxpfl.types import Array


class Compressed(NamedTuple):
    """``value`` [d] as received, and the exact number of ``bits`` [] int32 of its message."""

    value: Array
    bits: Array

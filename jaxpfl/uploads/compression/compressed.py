"""Output of a compressor: the vector as received, and the length of its message in bits."""

from __future__ import annotations

from typing import NamedTuple

from jaxpfl.core.types import Array


class Compressed(NamedTuple):
    """``value`` [d] as received, and the exact number of ``bits`` [] int32 of its message."""

    value: Array
    bits: Array

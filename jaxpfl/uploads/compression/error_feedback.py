r"""Error feedback: the compression error of a message is added to the next one.

.. math:: p = x + e, \qquad \text{sent} = C(p), \qquad e^+ = p - C(p)

The sum of all messages then differs from the sum of the x by the last memory alone, however biased C is. The memory is
part of each client's state and starts at zero.

Reference: Karimireddy et al. 2019, "Error feedback fixes SignSGD and other gradient compression schemes".
"""

from __future__ import annotations

from collections.abc import Callable

from jaxpfl.core.types import Array
from jaxpfl.uploads.compression.compressed import Compressed


def compress(compressor: Callable[[Array], Compressed], memory: Array, x: Array) -> tuple[Compressed, Array]:
    """Compressed x [d] given the memory [d], and the next memory [d]."""
    wanted = x + memory
    sent = compressor(wanted)
    return sent, wanted - sent.value

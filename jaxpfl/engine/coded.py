"""Compressed uploads of a run, given its data and its privacy mechanism."""

from __future__ import annotations

import jax

from jaxpfl.compression import Compressor, compressed
from jaxpfl.privacy import Mechanism, Refusal, check_compressible
from jaxpfl.protocol import Algorithm
from jaxpfl.types import Federation


def compress_uploads(
    algorithm: Algorithm, compressor: Compressor, federation: Federation, privacy: Mechanism | None
) -> Algorithm:
    """Compress the uploads of an algorithm, after its privacy mechanism if there is one.

    Raises:
      JaxpflError: if a client cannot compress after the mechanism, or for error feedback of private uploads.
    """
    if privacy is not None:
        check_compressible(privacy.noise)
        if compressor.feedback:
            raise Refusal.PRIVATE_FEEDBACK.error()
    splits = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape[1:], a.dtype), federation.splits)
    return compressed(algorithm, compressor, splits, feedback=None if privacy is None else False)

"""Compressed uploads of a run, given its data and its privacy mechanism."""

from __future__ import annotations

from dataclasses import replace

import jax
import numpy as np

from jaxpfl.core.protocol import Algorithm
from jaxpfl.core.types import ClientData, Federation, Splits
from jaxpfl.privacy import Mechanism, Refusal, check_compressible
from jaxpfl.uploads.compression import Compressor, compressed


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
    return compressed(algorithm, compressor, one_client(federation), feedback=None if privacy is None else False)


def one_client(federation: Federation) -> Splits:
    """Shapes of one client's view of its data."""
    return Splits(*map(_shapes_of_one, federation.splits))


def _shapes_of_one(split: ClientData) -> ClientData:
    """Shapes of one client's view; made without a trace, as every fit asks for them."""
    number = jax.ShapeDtypeStruct((), np.int32)
    examples = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), split.examples)
    return replace(split, examples=examples, start=number, size=number)

"""Compression of uploads: quantizers, the total-variation update, codes and error feedback."""

from jaxpfl.uploads.compression import codes, quantizers, total_variation
from jaxpfl.uploads.compression.compressors import COMPRESSORS, Compressor, resolve
from jaxpfl.uploads.compression.quantizers import Compressed
from jaxpfl.uploads.compression.uploads import compressed, feed_back

__all__ = [
    "COMPRESSORS",
    "Compressed",
    "Compressor",
    "codes",
    "compressed",
    "feed_back",
    "quantizers",
    "resolve",
    "total_variation",
]

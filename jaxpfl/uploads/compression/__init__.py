"""Compression of uploads: quantisers, the total-variation update, codes, and error feedback."""

from jaxpfl.uploads.compression import (
    codebook,
    elias,
    error_feedback,
    fixed_width,
    positions,
    qsgd,
    quantizers,
    run_length,
    top_k,
    total_variation,
)
from jaxpfl.uploads.compression.compressed import Compressed
from jaxpfl.uploads.compression.compressors import COMPRESSORS, Compressor, resolve
from jaxpfl.uploads.compression.uploads import compressed

__all__ = [
    "COMPRESSORS",
    "Compressed",
    "Compressor",
    "codebook",
    "compressed",
    "elias",
    "error_feedback",
    "fixed_width",
    "positions",
    "qsgd",
    "quantizers",
    "resolve",
    "run_length",
    "top_k",
    "total_variation",
]

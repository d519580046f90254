"""What makes messages short: quantisers, the total-variation update, codes, error feedback."""

from jaxpfl.compression import (
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
from jaxpfl.compression.compressed import Compressed

__all__ = [
    "Compressed",
    "codebook",
    "elias",
    "error_feedback",
    "fixed_width",
    "positions",
    "qsgd",
    "quantizers",
    "run_length",
    "top_k",
    "total_variation",
]

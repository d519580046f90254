"""What makes messages short: quantisers."""

from jaxpfl.compression import quantizers

__all__ = ["quantizers"]

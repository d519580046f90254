"""Common parts of the image networks: the accepted shapes, and the batch-minor layout of their computation."""

from __future__ import annotations

import jax.numpy as jnp

from jaxpfl.core.types import Array
from jaxpfl.support.errors import JaxpflError


def check_image_shape(network: str, shape: tuple[int, ...], minimum: int) -> None:
    """Refuse an input shape other than [H, W] or [H, W, C] with H and W of at least ``minimum``."""
    if len(shape) not in (2, 3) or min(shape[:2]) < minimum:
        raise JaxpflError(
            f"this {network} needs images [H, W] or [H, W, C] of at least {minimum} x {minimum}, got {tuple(shape)}"
        )


def batch_minor(x: Array) -> Array:
    """Transpose [N, H, W, C], or [N, H, W] for one channel, to [C, H, W, N], the layout of `convolution`."""
    if x.ndim == 3:
        x = x[..., None]
    return jnp.transpose(x, (3, 1, 2, 0))

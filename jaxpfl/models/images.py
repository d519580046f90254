"""What the networks on images share: which shapes they take, and the batch-minor layout that they compute in."""

from __future__ import annotations

import jax.numpy as jnp

from jaxpfl.errors import JaxpflError
from jaxpfl.types import Array


def check_image_shape(network: str, shape: tuple[int, ...], minimum: int) -> None:
    """Refuses an input shape that is not [H, W] or [H, W, C] with H and W of at least ``minimum``."""
    if len(shape) not in (2, 3) or min(shape[:2]) < minimum:
        raise JaxpflError(
            f"this {network} needs images [H, W] or [H, W, C] of at least {minimum} x {minimum}, got {tuple(shape)}"
        )


def batch_minor(x: Array) -> Array:
    """[N, H, W, C], or [N, H, W] for one channel, -> [C, H, W, N], the layout of `jaxpfl.models.convolution`."""
    if x.ndim == 3:
        x = x[..., None]
    return jnp.transpose(x, (3, 1, 2, 0))

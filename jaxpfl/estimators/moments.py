"""Mean and scatter of the messages that were sent, with or without a client's own."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp

from jaxpfl.core.types import Array


class Moments(NamedTuple):
    """Number [], mean [...] and sum of squared deviations [...] of K messages [...].

    Squares are summed about the mean: a difference of two large sums would cancel in single precision.
    """

    number: Array
    mean: Array
    scatter: Array

    @property
    def variance(self) -> Array:
        """Unbiased variance, [...]; zero for fewer than two messages."""
        return self.scatter / jnp.maximum(self.number - 1, 1)


def moments(messages: Array, sent: Array) -> Moments:
    """Moments of the messages [m, ...] that were sent, [m] bool."""
    chosen = sent.reshape(-1, *[1] * (messages.ndim - 1))
    number = sent.sum().astype(messages.dtype)
    mean = jnp.where(chosen, messages, 0).sum(axis=0) / jnp.maximum(number, 1)
    return Moments(number, mean, jnp.where(chosen, (messages - mean) ** 2, 0).sum(axis=0))


def without(all_sent: Moments, message: Array, sent: Array) -> Moments:
    """Moments of the other clients' messages: all but one client's, if it was sent."""
    number = all_sent.number - 1
    deviation = message - all_sent.mean
    others = jnp.maximum(number, 1)
    mean = all_sent.mean - deviation / others
    scatter = jnp.maximum(all_sent.scatter - deviation**2 * all_sent.number / others, 0)
    left_out = Moments(number, jnp.where(number > 0, mean, 0), jnp.where(number > 0, scatter, 0))
    return Moments(*(jnp.where(sent, a, b) for a, b in zip(left_out, all_sent, strict=True)))

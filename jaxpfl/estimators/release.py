"""How a client's mean leaves it: as it is, in a few bits, or private by itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxpfl.compression import quantizers
from jaxpfl.privacy import clipping
from jaxpfl.privacy import discrete_gaussian as discrete
from jaxpfl.privacy import local_dp as local
from jaxpfl.privacy.noise import add_gaussian
from jaxpfl.randomness import numbered
from jaxpfl.types import Array, Key, Scalar


class Release(NamedTuple):
    """A random map of a client's mean, unbiased where the mean is in range (what is not is clipped).

    Attributes:
      send: ``(key, mean [d]) -> message [d]``.
      variance: the most that it adds to the variance of one entry, sigma_q^2, [].
      bits: of one entry.
    """

    send: Callable[[Key, Array], Array]
    variance: Scalar
    bits: int


EXACT = Release(lambda key, mean: mean, 0.0, 32)
"""The mean itself."""


def quantized(b: Scalar, bits: int) -> Release:
    """Each entry clipped to [-b, b] and rounded at random to k bits (`compression.quantizers`)."""
    return Release(lambda key, mean: quantizers.quantize(key, mean, b, bits), quantizers.variance_bound(b, bits), bits)


def gaussian(b: Scalar, stddev: Scalar) -> Release:
    """Each entry clipped to [-b, b], with N(0, stddev^2) added; private as `privacy.local.gaussian` says."""
    return Release(lambda key, mean: local.gaussian(key, mean, b, stddev), jnp.square(stddev), 32)


def gaussian_vector(radius: Scalar, stddev: Scalar) -> Release:
    """The mean clipped to an L2 norm of ``radius``, with N(0, stddev^2 I) added.

    Formal guarantees: the message, all its entries together, is (eps, delta)-LDP where ``stddev`` is
    ``analytic_gaussian_stddev(eps, delta, 2 radius)``, whatever the mean: one that is not finite counts as zero.
    """

    def send(key: Key, mean: Array) -> Array:
        return add_gaussian(numbered(key, radius, stddev), clipping.clip(mean, radius)[0], stddev)

    return Release(send, jnp.square(stddev), 32)


def one_bit(b: Scalar, epsilon: Scalar) -> Release:
    """A number clipped to [-b, b] as one of two values (`privacy.local.one_bit`): one bit, pure eps-LDP.

    For one dimension: every entry of a longer mean would spend eps.
    """
    spread = b / jnp.tanh(jnp.asarray(epsilon) / 2)
    return Release(lambda key, mean: local.one_bit(key, mean, b, epsilon), jnp.square(spread), 1)


def discrete_gaussian(b: Scalar, bits: int, noise: discrete.Table) -> Release:
    """A number clipped to [-b, b], rounded at random to k bits, with whole noise added: private and short at once.

    Formal guarantees: (eps, delta)-LDP of one entry, where the noise's standard deviation is
    ``privacy.discrete_gaussian.stddev(eps, delta, 2^bits - 1)``; exactly, as that module says.
    """
    step = 2 * b / (2**bits - 1)

    def send(key: Key, mean: Array) -> Array:
        of_level, of_noise = jax.random.split(numbered(key, b, bits, noise.variance))
        level = quantizers.levels(of_level, jnp.nan_to_num(mean), b, bits)
        return quantizers.values(level + discrete.sample(of_noise, mean.shape, noise), b, bits)

    variance = quantizers.variance_bound(b, bits) + step**2 * noise.variance
    return Release(send, variance, noise.message_bits(2**bits))

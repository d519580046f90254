"""Release mechanisms of a client's mean: exact, quantised, or locally private."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxpfl.core.randomness import numbered
from jaxpfl.core.types import Array, Key, Scalar
from jaxpfl.privacy import clipping
from jaxpfl.privacy import discrete_gaussian as discrete
from jaxpfl.privacy import local_dp as local
from jaxpfl.privacy.noise import add_gaussian
from jaxpfl.uploads.compression import quantizers


class Release(NamedTuple):
    """A randomised release of a client's mean, unbiased if the mean is in range (otherwise it is clipped).

    Attributes:
      send: ``(key, mean [d]) -> message [d]``.
      variance: sigma_q^2, an upper bound on the variance that it adds to one entry, [].
      bits: per entry.
    """

    send: Callable[[Key, Array], Array]
    variance: Scalar
    bits: int


EXACT = Release(lambda key, mean: mean, 0.0, 32)
"""Release of the mean itself."""


def quantized(b: Scalar, bits: int) -> Release:
    """Entries clipped to [-b, b] and randomly rounded to k bits (`compression.quantizers`).

    Implements: Ozkara et al. 2023, Theorem 2; Ozkara et al. 2023, equation (23).
    """
    return Release(lambda key, mean: quantizers.quantize(key, mean, b, bits), quantizers.variance_bound(b, bits), bits)


def gaussian(b: Scalar, stddev: Scalar) -> Release:
    """Entries clipped to [-b, b], with N(0, stddev^2) noise; private as stated in `privacy.local_dp.gaussian`.

    Implements: Ozkara et al. 2023, Theorem 2; Ozkara et al. 2023, equation (27).
    """
    return Release(lambda key, mean: local.gaussian(key, mean, b, stddev), jnp.square(stddev), 32)


def gaussian_vector(radius: Scalar, stddev: Scalar) -> Release:
    """The mean clipped to an L2 norm of ``radius``, with N(0, stddev^2 I) noise.

    Formal guarantees: the message, all its entries together, is (eps, delta)-LDP where ``stddev`` is
    ``analytic_gaussian_stddev(eps, delta, 2 radius)``, whatever the mean: one that is not finite counts as zero.
    """

    def send(key: Key, mean: Array) -> Array:
        return add_gaussian(numbered(key, radius, stddev), clipping.clip(mean, radius)[0], stddev)

    return Release(send, jnp.square(stddev), 32)


def one_bit(b: Scalar, epsilon: Scalar) -> Release:
    """A number clipped to [-b, b] and sent as one of two values (`privacy.local_dp.one_bit`): one bit, pure eps-LDP.

    It is for one dimension: every entry of a longer mean would spend eps.
    """
    spread = b / jnp.tanh(jnp.asarray(epsilon) / 2)
    return Release(lambda key, mean: local.one_bit(key, mean, b, epsilon), jnp.square(spread), 1)


def discrete_gaussian(b: Scalar, bits: int, noise: discrete.Table) -> Release:
    """A number clipped to [-b, b], randomly rounded to k bits, with integer noise: private and short at once.

    Formal guarantees: (eps, delta)-LDP of one entry, where the noise's standard deviation is
    ``privacy.discrete_gaussian.stddev(eps, delta, 2^bits - 1)``; exactly, as that module says.

    Implements: Ozkara et al. 2023, Remark 4.
    """
    step = 2 * b / (2**bits - 1)

    def send(key: Key, mean: Array) -> Array:
        of_level, of_noise = jax.random.split(numbered(key, b, bits, noise.variance))
        level = quantizers.levels(of_level, jnp.nan_to_num(mean), b, bits)
        return quantizers.values(level + discrete.sample(of_noise, mean.shape, noise), b, bits)

    variance = quantizers.variance_bound(b, bits) + step**2 * noise.variance
    return Release(send, variance, noise.message_bits(2**bits))

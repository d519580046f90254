"""Mechanisms that release a client's mean (exactly, quantized, or under local privacy), and clipping radii.

A radius is a bound that the clients' means exceed with small probability. Every mechanism except `EXACT` clips means to
the radius, so a privacy guarantee also holds for means beyond the radius. Only accuracy suffers, because clipping adds
bias.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxpfl.core.randomness import numbered
from jaxpfl.core.types import Array, Key, Scalar
from jaxpfl.privacy import discrete_gaussian as discrete
from jaxpfl.privacy import local_dp as local
from jaxpfl.privacy import noise
from jaxpfl.privacy.noise import add_gaussian
from jaxpfl.uploads.compression import quantizers


class Release(NamedTuple):
    """A randomized release of a client's mean, which is unbiased unless the mean is clipped.

    Attributes:
      send: function ``(key, mean [d]) -> message [d]`` that releases a mean.
      variance: upper bound sigma_q^2 on the variance that the release adds to one entry, [].
      bits: number of bits per entry.
    """

    send: Callable[[Key, Array], Array]
    variance: Scalar
    bits: int


EXACT = Release(lambda key, mean: mean, 0.0, 32)
"""Release of the mean without change."""


def quantized(b: Scalar, bits: int) -> Release:
    """Clip entries to [-b, b] and round them randomly to ``bits`` bits (`jaxpfl.uploads.compression.quantizers`).

    Implements: Ozkara et al. 2023, Theorem 2; Ozkara et al. 2023, equation (23).
    """
    return Release(lambda key, mean: quantizers.quantize(key, mean, b, bits), quantizers.variance_bound(b, bits), bits)


def gaussian(b: Scalar, stddev: Scalar) -> Release:
    """Clip entries to [-b, b] and add N(0, stddev^2) noise; `privacy.local_dp.gaussian` states the guarantee.

    Implements: Ozkara et al. 2023, Theorem 2; Ozkara et al. 2023, equation (27).
    """
    return Release(lambda key, mean: local.gaussian(key, mean, b, stddev), jnp.square(stddev), 32)


def gaussian_vector(radius: Scalar, stddev: Scalar) -> Release:
    """Clip the mean to an L2 norm of ``radius`` and add N(0, stddev^2 I) noise.

    Formal guarantees: the whole message is (eps, delta)-LDP if ``stddev`` is ``analytic_gaussian_stddev(eps, delta, 2
    radius)``. This holds for any mean, because a mean that is not finite is replaced by zero.
    """

    def send(key: Key, mean: Array) -> Array:
        return add_gaussian(numbered(key, radius, stddev), noise.clip(mean, radius)[0], stddev, "a client's message")

    return Release(send, jnp.square(stddev), 32)


def one_bit(b: Scalar, epsilon: Scalar) -> Release:
    """Clip a number to [-b, b] and send one of two values (`privacy.local_dp.one_bit`): one bit, pure eps-LDP.

    Use this release only in one dimension: with more entries, each entry would spend eps.
    """
    spread = b / jnp.tanh(jnp.asarray(epsilon) / 2)
    return Release(lambda key, mean: local.one_bit(key, mean, b, epsilon), jnp.square(spread), 1)


def discrete_gaussian(b: Scalar, bits: int, noise: discrete.Table) -> Release:
    """Clip a number to [-b, b], round it randomly to ``bits`` bits and add integer noise: a private and short message.

    Formal guarantees: the release is (eps, delta)-LDP for one entry if the noise has the standard deviation
    ``privacy.discrete_gaussian.stddev(eps, delta, 2^bits - 1)``; the module `privacy.discrete_gaussian` states the
    accuracy of this calibration.

    Implements: Ozkara et al. 2023, Remark 4.
    """
    step = 2 * b / (2**bits - 1)

    def send(key: Key, mean: Array) -> Array:
        of_level, of_noise = jax.random.split(numbered(key, b, bits, noise.variance))
        level = quantizers.levels(of_level, jnp.nan_to_num(mean), b, bits)
        return quantizers.values(level + discrete.sample(of_noise, mean.shape, noise), b, bits)

    variance = quantizers.variance_bound(b, bits) + step**2 * noise.variance
    return Release(send, variance, noise.message_bits(2**bits))


def gaussian_radius(r: Scalar, variance: Scalar, clients: Scalar, samples: Scalar) -> Array:
    r"""Radius in one dimension, for means N(mu, variance) with |mu| <= r:

    .. math:: b = r + \sqrt{variance}\; \Phi^{-1}\Big(1 - \frac{1}{m^2 n}\Big)

    All m means lie in [-b, b] with probability at least 1 - 2/(mn). The radius in Theorem 2 of Ozkara et al. 2023 is
    `printed_radius`. It comes from a tail bound that lacks a factor of 2 in its exponent.

    Args:
      r: bound on |mu|.
      variance: variance of a client's mean about mu: the variance st2 of the theta_i plus s2 = sx2 / n.
      clients: number of clients m.
      samples: number n of samples per client.
    """
    return r - jnp.sqrt(variance) * jax.scipy.special.ndtri(_tail(clients, samples))


def printed_radius(r: Scalar, st: Scalar, s: Scalar, clients: Scalar, samples: Scalar) -> Array:
    """Radius b as printed in the paper: ``r + (st + s) sqrt(log(m^2 n))``, with the standard deviations st and s.

    st is the standard deviation of the clients' means theta_i, and s = sx / sqrt(n) their samples' standard error.

    Implements: Ozkara et al. 2023, Theorem 2.
    """
    return r + (st + s) * jnp.sqrt(-jnp.log(_tail(clients, samples)))


def norm_radius(r: Scalar, variance: Scalar, dim: int, clients: Scalar, samples: Scalar) -> Array:
    r"""Radius in L2 norm in d dimensions, for means N(0, variance I) about points of norm at most r:

    .. math:: R = r + \sqrt{variance} \big( \sqrt{d} + \sqrt{2 \log(m^2 n)} \big)

    All m means have a norm of at most R with probability at least 1 - 1/(mn), because a chi variable exceeds sqrt(d) +
    t with probability at most exp(-t^2/2). The radius in Lemma 3 of Ozkara et al. 2023 is larger; see `lemma_3`.
    """
    return r + jnp.sqrt(variance) * (jnp.sqrt(float(dim)) + jnp.sqrt(-2 * jnp.log(_tail(clients, samples))))


def lemma_3(r: Scalar, variance: Scalar, dim: int, clients: Scalar, samples: Scalar) -> Array:
    """Radius of the paper's Lemma 3, ``r + sqrt(variance) (4 sqrt(d) + 2 sqrt(log(m^2 n)))``, larger than
    `norm_radius`.

    Implements: Ozkara et al. 2023, Lemma 3; Ozkara et al. 2023, equations (43) to (45).
    """
    return r + jnp.sqrt(variance) * (4 * jnp.sqrt(float(dim)) + 2 * jnp.sqrt(-jnp.log(_tail(clients, samples))))


def _tail(clients: Scalar, samples: Scalar) -> Array:
    """Tail probability 1 / (m^2 n), but at most 1/4, because it would be 1 for m = n = 1."""
    return jnp.minimum(1.0 / (jnp.asarray(clients, float) ** 2 * samples), 0.25)

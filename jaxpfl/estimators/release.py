"""Release mechanisms of a client's mean: exact, quantised, or locally private; and the radii of their clipping.

Radii are high-probability bounds on the clients' means, to which they are clipped before release. Only accuracy depends
on these, never privacy: every mechanism clips, and clipping adds bias.
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
    """A randomised release of a client's mean, unbiased if the mean is in range (otherwise it is clipped).

    Attributes:
      send: ``(key, mean [d]) -> message [d]``.
      variance: sigma_q^2, an upper bound on the variance that it adds to one entry, [].
      bits: bits per entry.
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
        return add_gaussian(numbered(key, radius, stddev), noise.clip(mean, radius)[0], stddev, "a client's message")

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


def gaussian_radius(r: Scalar, variance: Scalar, clients: Scalar, samples: Scalar) -> Array:
    r"""Radius in one dimension, for means N(mu, variance) with |mu| <= r:

    .. math:: b = r + \sqrt{variance}\; \Phi^{-1}\Big(1 - \frac{1}{m^2 n}\Big)

    All m lie in [-b, b] with probability at least 1 - 2/(mn). The paper (Theorem 2) has
    :math:`r + (st + s) \sqrt{\log(m^2 n)}`, `printed_radius`, whose tail bound lacks the factor 2 in the exponent.

    Args:
      variance: st2 + s2.
    """
    return r - jnp.sqrt(variance) * jax.scipy.special.ndtri(_tail(clients, samples))


def printed_radius(r: Scalar, st: Scalar, s: Scalar, clients: Scalar, samples: Scalar) -> Array:
    """Theorem 2's radius b, from the standard deviations st and s = sx / sqrt(n).

    Implements: Ozkara et al. 2023, Theorem 2.
    """
    return r + (st + s) * jnp.sqrt(-jnp.log(_tail(clients, samples)))


def norm_radius(r: Scalar, variance: Scalar, dim: int, clients: Scalar, samples: Scalar) -> Array:
    r"""Radius in L2 norm in d dimensions, for N(0, variance I) about points of norm at most r:

    .. math:: R = r + \sqrt{variance} \big( \sqrt{d} + \sqrt{2 \log(m^2 n)} \big)

    All m are within R with probability at least 1 - 1/(mn), as a chi variable exceeds sqrt(d) + t with probability at
    most exp(-t^2/2). Lemma 3 of the paper is looser, `lemma_3`.
    """
    return r + jnp.sqrt(variance) * (jnp.sqrt(float(dim)) + jnp.sqrt(-2 * jnp.log(_tail(clients, samples))))


def lemma_3(r: Scalar, variance: Scalar, dim: int, clients: Scalar, samples: Scalar) -> Array:
    """Lemma 3's radius, ``r + sqrt(variance) (4 sqrt(d) + 2 sqrt(log(m^2 n)))``: valid, and looser than `norm_radius`.

    Implements: Ozkara et al. 2023, Lemma 3; Ozkara et al. 2023, equations (43) to (45).
    """
    return r + jnp.sqrt(variance) * (4 * jnp.sqrt(float(dim)) + 2 * jnp.sqrt(-jnp.log(_tail(clients, samples))))


def _tail(clients: Scalar, samples: Scalar) -> Array:
    """1 / (m^2 n), kept below 1/2 for m = n = 1."""
    return jnp.minimum(1.0 / (jnp.asarray(clients, float) ** 2 * samples), 0.25)

r"""k-bit quantisation of a number in [-b, b]: stochastic rounding to 2^k levels.

.. math:: z = \frac{(x + b) L}{2 b}, \qquad L = 2^k - 1, \qquad
   q(x) = \frac{2b}{L} \big( \lfloor z \rfloor + \mathrm{Bernoulli}(z - \lfloor z \rfloor) \big) - b

For x in [-b, b]: E q(x) = x, and Var q(x) = (2b/L)^2 f (1 - f) <= b^2 / L^2, with f the fractional part of z. Numbers
outside are clipped first.

Reference: Ozkara et al. 2023, equations (20) to (22).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxpfl.core.types import Array, Key, Scalar
from jaxpfl.support.errors import JaxpflError
from jaxpfl.uploads.compression.binary_scale import exponent, times_power

MOST_BITS = 16
"""Above it, neighbouring levels would differ by no more than the rounding error of single precision."""

_TERMS = 64


def check_bits(bits: int) -> int:
    """The number of bits, if the quantiser supports it.

    Raises:
      JaxpflError: below 1 or above `MOST_BITS`.
    """
    if not 1 <= bits <= MOST_BITS:
        raise JaxpflError(f"bits must be a whole number between 1 and {MOST_BITS}, got {bits}")
    return bits


def levels(key: Key, x: Array, b: Scalar, bits: int) -> Array:
    """Level of each entry, the content of the message: 0 ... 2^bits - 1, as int32 of x's shape."""
    check_bits(bits)
    top = 2**bits - 1
    b, e = _about_one(jnp.asarray(b, x.dtype))
    x = times_power(x, -e)
    z = (jnp.clip(x, -b, b) + b) * (top / (2 * b))
    return jnp.clip(rounded(key, z), 0, top).astype(jnp.int32)


def rounded(key: Key, z: Array) -> Array:
    """Stochastic rounding: each entry rounded down or up to an integer whose expectation is z."""
    below = jnp.floor(z)
    return below + (jax.random.uniform(key, z.shape, z.dtype) < z - below)


def values(sent: Array, b: Scalar, bits: int) -> Array:
    """Numbers in [-b, b] of the given levels."""
    b, e = _about_one(1.0 * jnp.asarray(b))
    return times_power(sent * (2 * b / (2**bits - 1)) - b, e)


def quantize(key: Key, x: Array, b: Scalar, bits: int) -> Array:
    """Quantised x: equal to x in expectation if it lies in [-b, b].

    Raises:
      JaxpflError: as in `check_bits`.
    """
    return values(levels(key, x, b, bits), b, bits)


def variance_bound(b: Scalar, bits: int) -> Array:
    """Largest variance of an entry, ``b^2 / L^2``, []."""
    return jnp.square(b / (2 ** check_bits(bits) - 1))


def normal_variance(mean: Scalar, variance: Scalar, b: Scalar, bits: int) -> Array:
    r"""Expected variance of an entry for x ~ N(mean, variance), neglecting clipping to [-b, b].

    With h = 2b/L, from the Fourier series f (1 - f) = 1/6 - sum_k cos(2 pi k f) / (pi k)^2,

    .. math:: E\,Var = h^2 \Big[ \frac16 - \sum_{k \ge 1} \frac{\cos(2 \pi k (mean + b) / h)}{\pi^2 k^2}
       e^{-2 \pi^2 k^2 variance / h^2} \Big]

    truncated after 64 terms: exact to 1e-7 of h^2 for standard deviations above h / 70, to 0.0016 otherwise.
    """
    step = 2 * b / (2 ** check_bits(bits) - 1)
    k = jnp.arange(1, _TERMS + 1)
    phase = 2 * jnp.pi * jnp.mod(k * ((mean + b) / step), 1)
    terms = jnp.cos(phase) * jnp.exp(-2 * (jnp.pi * k) ** 2 * variance / step**2) / (jnp.pi * k) ** 2
    return step**2 * (1 / 6 - terms.sum())


def _about_one(b: Array) -> tuple[Array, Array]:
    """b scaled by a power of two to about one, and the power's exponent: 2 b and 1 / b may be out of range."""
    e = exponent(b)
    return times_power(b, -e), e

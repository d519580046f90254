r"""Quantizers and sparsifiers of vectors, with the exact lengths of their messages.

`quantize`: k-bit quantization of a number in [-b, b], by stochastic rounding to 2^k levels.

.. math:: z = \frac{(x + b) L}{2 b}, \qquad L = 2^k - 1, \qquad
   q(x) = \frac{2b}{L} \big( \lfloor z \rfloor + \mathrm{Bernoulli}(z - \lfloor z \rfloor) \big) - b

For x in [-b, b], E q(x) = x and Var q(x) = (2b/L)^2 f (1 - f) <= b^2 / L^2, where f is the fractional part of z.
Numbers outside [-b, b] are clipped first. `uniform` uses b = max |x|, so that no number is clipped and the result is
unbiased. b is sent in 32 bits.

`sign`: the result is :math:`(\|x\|_1 / d) \operatorname{sign}(x)`. The message has one bit per entry and the scale (32
bits). `sign` is biased and needs error feedback.

`qsgd`: stochastic rounding of the entries to multiples of :math:`\|x\|_2 / s`. Most entries become zero and take no
bits.

.. math:: l_i = \lfloor z_i \rfloor + \mathrm{Bernoulli}(z_i - \lfloor z_i \rfloor), \quad
   z_i = \frac{s |x_i|}{\|x\|_2}, \qquad Q(x)_i = \frac{\|x\|_2}{s} \operatorname{sign}(x_i)\, l_i

E Q(x) = x, and :math:`E \|Q(x) - x\|^2 \le \min(d / s^2, \sqrt d / s) \|x\|^2`. The message is the norm (32 bits), the
positions of the nonzero entries, and for each of them a sign bit and l_i in the Elias gamma code.

`top_k`: the k entries of largest magnitude are kept, and all other entries become zero. The message consists of the
positions and the values (32 bits each) of the nonzero entries.

`codebook`: each entry becomes the nearest of k numbers, which Lloyd's algorithm fits. A vector with at most k distinct
numbers is returned exactly. As in the run-length code, numbers are equal if their bits are equal, so zero and minus
zero are distinct. With more than k distinct numbers, subnormal numbers may be treated as zero. The message is the
run-length code, whose table contains the codebook.

Vectors are scaled by powers of two, to keep sums, squares and reciprocals in the range of floating-point numbers.
Multiplication by a power of two is exact, so the scaling changes no bit of a result, unless intermediate values would
otherwise overflow or underflow. Underflow matters too, because on most devices XLA flushes subnormal numbers, such as
1 / 3e38, to zero.

References: Ozkara et al. 2023, equations (20) to (22) (`quantize`); Karimireddy et al. 2019 (`sign`); Alistarh et al.
2017, section 3 (`qsgd`; they encode integers by Elias's recursive code, which is longer for integers below 16); Zhao et
al., section III (`codebook` with k = 3 and 4).
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxpfl.core.types import Array, Key, Scalar
from jaxpfl.support.errors import JaxpflError
from jaxpfl.uploads.compression.codes import FLOAT, elias_bits, position_bits, run_bits

MOST_BITS = 16
"""Largest number of bits. With more bits, the distance between levels would be as small as float32 rounding error."""

_TERMS = 64
"""Number of terms of the series in `normal_variance`."""
STEPS = 20
"""Default number of steps of Lloyd's algorithm; enough for few centers in one dimension."""


class Compressed(NamedTuple):
    """The vector that the receiver decodes, [d], and the exact length of its message in bits, [] int32."""

    value: Array
    bits: Array


def check_bits(bits: int) -> int:
    """Return the number of bits if the quantizer supports it.

    Raises:
      JaxpflError: if the number is below 1 or above `MOST_BITS`.
    """
    if not 1 <= bits <= MOST_BITS:
        raise JaxpflError(f"bits must be a whole number between 1 and {MOST_BITS}, got {bits}")
    return bits


def levels(key: Key, x: Array, b: Scalar, bits: int) -> Array:
    """Quantize each entry of x to a level from 0 to 2^bits - 1, int32 in the shape of x, for the message.

    Raises:
      JaxpflError: if the number of bits is not supported; see `check_bits`.
    """
    check_bits(bits)
    top = 2**bits - 1
    b, e = _about_one(jnp.asarray(b, x.dtype))
    x = times_power(x, -e)
    z = (jnp.clip(x, -b, b) + b) * (top / (2 * b))
    return jnp.clip(rounded(key, z), 0, top).astype(jnp.int32)


def rounded(key: Key, z: Array) -> Array:
    """Round each entry down or up at random to an integer whose expectation is z."""
    below = jnp.floor(z)
    return below + (jax.random.uniform(key, z.shape, z.dtype) < z - below)


def values(sent: Array, b: Scalar, bits: int) -> Array:
    """Decode the levels ``sent`` to numbers in [-b, b]."""
    b, e = _about_one(1.0 * jnp.asarray(b))
    return times_power(sent * (2 * b / (2**bits - 1)) - b, e)


def quantize(key: Key, x: Array, b: Scalar, bits: int) -> Array:
    """Quantize x to 2^bits levels; entries in [-b, b] are preserved in expectation.

    Raises:
      JaxpflError: if the number of bits is not supported; see `check_bits`.
    """
    return values(levels(key, x, b, bits), b, bits)


def variance_bound(b: Scalar, bits: int) -> Array:
    """Upper bound ``b^2 / L^2`` on the variance of a quantized entry, where L = 2^bits - 1, [].

    Raises:
      JaxpflError: if the number of bits is not supported; see `check_bits`.
    """
    return jnp.square(b / (2 ** check_bits(bits) - 1))


def normal_variance(mean: Scalar, variance: Scalar, b: Scalar, bits: int) -> Array:
    r"""Expected quantization variance of an entry x ~ N(mean, variance), if clipping to [-b, b] is neglected.

    Let L = 2^bits - 1, and let h = 2b / L be the distance between levels. The quantization variance of an entry x is
    h^2 f (1 - f), where f is the fractional part of (x + b) / h. From the Fourier series f (1 - f) = 1/6 - sum_k
    cos(2 pi k f) / (pi k)^2, the expected variance is

    .. math:: E\,Var = h^2 \Big[ \frac16 - \sum_{k \ge 1} \frac{\cos(2 \pi k (mean + b) / h)}{\pi^2 k^2}
       e^{-2 \pi^2 k^2 variance / h^2} \Big]

    The series is truncated after 64 terms. The error is at most 1e-7 h^2 if the standard deviation of x is above
    h / 70, and at most 0.0016 h^2 otherwise.

    Raises:
      JaxpflError: if the number of bits is not supported; see `check_bits`.
    """
    step = 2 * b / (2 ** check_bits(bits) - 1)
    k = jnp.arange(1, _TERMS + 1)
    phase = 2 * jnp.pi * jnp.mod(k * ((mean + b) / step), 1)
    terms = jnp.cos(phase) * jnp.exp(-2 * (jnp.pi * k) ** 2 * variance / step**2) / (jnp.pi * k) ** 2
    return step**2 * (1 / 6 - terms.sum())


def _about_one(b: Array) -> tuple[Array, Array]:
    """Scale b by a power of two to about one; return the scaled b and the exponent.

    Without scaling, 2 b or 1 / b may be out of the range of floating-point numbers.
    """
    e = exponent(b)
    return times_power(b, -e), e


def sign(x: Array) -> Compressed:
    """Compress x [d] to the sign of each entry, times the mean absolute value; zero counts as positive."""
    e = exponent(x)
    scale = times_power(jnp.abs(times_power(x, -e)).mean(), e)  # without scaling, the sum may overflow
    return Compressed(jnp.where(x < 0, -scale, scale), jnp.int32(FLOAT + x.shape[0]))


def uniform(key: Key, x: Array, bits: int) -> Compressed:
    """Round x [d] stochastically to 2^bits levels between ``-max |x|`` and ``max |x|``.

    Raises:
      JaxpflError: if the number of bits is not supported; see `check_bits`.
    """
    scale = jnp.abs(x).max()
    value = quantize(key, x, jnp.where(scale == 0, 1, scale), bits)
    # If all entries are zero, the message contains a scale of zero, and the receiver decodes zeros.
    return Compressed(jnp.where(scale == 0, 0, value), jnp.int32(FLOAT + bits * x.shape[0]))


def qsgd(key: Key, x: Array, s: int) -> Compressed:
    """Compute QSGD's ``Q(x)`` for x [d]. The result is not finite if x is not finite or the norm of x overflows.

    Implements: Zhao et al., section III, codes.

    Args:
      key: key of the stochastic rounding.
      x: the vector to send.
      s: number of levels besides zero, at least 1.
    """
    norm, levels = quantize_qsgd(key, x, s)
    return Compressed(dequantize_qsgd(norm, levels, s), qsgd_bits(levels))


def quantize_qsgd(key: Key, x: Array, s: int) -> tuple[Array, Array]:
    """Compute the content of QSGD's message: the norm [] and the signed levels [d] int32."""
    # Squares of small or large numbers underflow or overflow; squares of numbers about one do not.
    e = exponent(x)
    share = times_power(x, -e)
    length = jnp.sqrt((share**2).sum())
    z = s * jnp.abs(share) / jnp.where(length > 0, length, 1)
    return times_power(length, e), (jnp.sign(x) * rounded(key, z)).astype(jnp.int32)


def dequantize_qsgd(norm: Array, levels: Array, s: int) -> Array:
    """Decode ``Q(x)`` [d] from the content of QSGD's message."""
    return norm * (levels / s)


def qsgd_bits(levels: Array) -> Array:
    """Exact length in bits, [] int32, of QSGD's message with signed levels [d], which may be traced."""
    sent = levels != 0
    each = jnp.where(sent, 1 + elias_bits(jnp.abs(levels)), 0)
    return FLOAT + position_bits(sent) + each.sum()


def top_k(x: Array, k: int) -> Compressed:
    """Set all entries of x [d] to zero, except the k entries of largest magnitude; in a tie, the first are kept."""
    places = jax.lax.top_k(jnp.abs(x), k)[1]
    value = jnp.zeros_like(x).at[places].set(x[places])
    return Compressed(value, top_k_bits(value))


def top_k_bits(value: Array) -> Array:
    """Exact length in bits, [] int32, of the message of a sparse vector [d], which may be traced."""
    # Compare the bits except the sign, because a comparison of floats would treat subnormal numbers as zero.
    sent = jax.lax.bitcast_convert_type(value.astype(jnp.float32), jnp.uint32) << 1 != 0
    return position_bits(sent) + FLOAT * sent.sum(dtype=jnp.int32)


def codebook(x: Array, k: int, steps: int = STEPS) -> Compressed:
    """Quantize x [d]: each entry becomes the nearest of k centers; NaN if x is not finite.

    Implements: Zhao et al., section III, codes.
    """
    value = jnp.where(jnp.isfinite(x).all(), nearest(x, codebook_centers(x, k, steps)), jnp.nan)
    return Compressed(value, run_bits(value))


def codebook_centers(x: Array, k: int, steps: int = STEPS) -> Array:
    """Fit a codebook, [k] in ascending order, by Lloyd's algorithm.

    The initial centers are k distinct entries, evenly spaced in rank.
    """
    ordered = jnp.sort(_ranks(x))
    new = jnp.append(True, ordered[1:] != ordered[:-1])
    distinct = new.sum()
    # The r-th distinct number is the first entry at which the count of distinct numbers reaches r.
    wanted = jnp.arange(k) * distinct // k + 1
    start = _numbers(ordered[jnp.searchsorted(jnp.cumsum(new), wanted)], x.dtype)
    e = room(x)  # deviations of huge numbers, and their sums, may overflow
    scaled = times_power(x, -e)

    def step(_: int, at: Array) -> Array:
        member = _place(scaled, at)[:, None] == jnp.arange(k)
        # Averaging deviations from the center avoids rounding: the mean of equal entries is exactly their value.
        apart = jnp.where(member, scaled[:, None] - at, 0).sum(axis=0)
        return at + apart / jnp.maximum(member.sum(axis=0), 1).astype(x.dtype)

    found = times_power(jax.lax.fori_loop(0, steps, step, times_power(start, -e)), e)
    return jnp.where(distinct <= k, start, found)


def nearest(x: Array, centers: Array) -> Array:
    """Replace each entry by the nearest of the ascending centers [k]; in a tie, by the lower center."""
    return centers[_place(x, centers)]


def _place(x: Array, centers: Array) -> Array:
    low, high = _ranks(centers[:-1]), _ranks(centers[1:])
    # If two centers are neighboring floats, their midpoint rounds to one of them. It must not be the higher.
    below = jnp.minimum(_ranks(centers[:-1] / 2 + centers[1:] / 2), high - 1)
    return jnp.searchsorted(jnp.maximum(low, below), _ranks(x))


def _ranks(x: Array) -> Array:
    """Map each bit pattern of a float to an integer, so that the integers have the order of the floats.

    The integers are compared instead of the floats, because XLA treats subnormal floats as zeros in comparisons.
    """
    pattern = jax.lax.bitcast_convert_type(x, f"int{8 * x.dtype.itemsize}")
    return _mirrored(pattern)


def _numbers(ranks: Array, dtype: jnp.dtype) -> Array:
    """Map ranks back to floats; the inverse of `_ranks`."""
    return jax.lax.bitcast_convert_type(_mirrored(ranks), dtype)


def _mirrored(pattern: Array) -> Array:
    """Reverse the order of negative numbers' bit patterns, because these patterns grow with the magnitude.

    The function is its own inverse.
    """
    return jnp.where(pattern < 0, pattern ^ jnp.iinfo(pattern.dtype).max, pattern)


def exponent(x: Array) -> Array:
    """Exponent e, [] int32, such that the largest magnitude in x lies in [2^e, 2^(e + 1)).

    The exponent is clipped so that both 2^e and 2^-e are normal numbers. In float32, the magnitude may thus be up to
    2^128 (or not finite) for e = 126, and down to zero for e = -126.
    """
    info = jnp.finfo(x.dtype)
    pattern = jax.lax.bitcast_convert_type(jnp.abs(x).max(), _integers(x))
    most = int(info.maxexp) - 2
    return jnp.clip((pattern >> info.nmant).astype(jnp.int32) - (most + 1), -most, most)


def times_power(x: Array, e: Scalar) -> Array:
    """Compute ``x * 2^e`` in the shape of x, for e in the range of `exponent`."""
    info = jnp.finfo(x.dtype)
    pattern = (jnp.asarray(e, jnp.int32) + (int(info.maxexp) - 1)).astype(_integers(x)) << info.nmant
    return x * jax.lax.bitcast_convert_type(pattern, x.dtype)


def room(x: Array) -> Array:
    """Exponent e, [] int32, such that sums of many entries of ``x / 2^e`` stay finite.

    The exponent is 0 unless entries are huge, so that scaling takes no digits from small entries.
    """
    most = int(jnp.finfo(x.dtype).maxexp)
    return jnp.where(exponent(x) >= most - most // 4, most // 4, 0)


def _integers(x: Array) -> jnp.dtype:
    return jnp.dtype(f"int{jnp.finfo(x.dtype).bits}")

r"""Discrete Gaussian mechanism: integers with integer noise, private in a message of few bits.

The noise is :math:`P(X = k) \propto e^{-k^2 / (2 \sigma^2)}` on the integers. The sum of X and a number in {0, ..., L}
(a level of a quantiser) is private at sensitivity L.

Exact: the relation of eps, delta and sigma (sums over the integers, for every shift up to the sensitivity), and the
sampler's probabilities, which are multiples of 2^-64 within 2^-64 of the true ones, truncated where the tails hold less
than 2^-64. The resulting change of the distribution is at most `Table.distance`; a mechanism at that distance from an
(eps, delta)-DP one is (eps, delta + (1 + e^eps) distance)-DP, which `stddev` takes into account. Not exact: random bits
come from JAX's generator, which is not cryptographic (for simulation), and the sampling time is constant only as far as
the hardware's is.

Reference: Canonne, Kamath and Steinke 2020, "The discrete Gaussian for differential privacy".
"""

from __future__ import annotations

import math
from decimal import Decimal, localcontext
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxpfl.core import checks
from jaxpfl.core.types import Array, Key
from jaxpfl.privacy import noise
from jaxpfl.support.errors import JaxpflError

MOST_STDDEV = 2.0**14
"""Largest sigma in steps; tables have 19 entries per unit of it."""

_REACH = 9.5
"""Number of standard deviations beyond which the tails hold less than 2^-64."""


class Table(NamedTuple):
    """A sampler of the discrete Gaussian on -K ... K.

    Attributes:
      high, low: the upper and lower 32 bits of 2^64 P(X <= k) for k = -K ... K - 1, [2K] uint32.
      variance: the variance of X, exactly as sampled.
      distance: bound on the total variation between the sampled and the true distribution.
    """

    high: Array
    low: Array
    variance: float
    distance: float

    @property
    def largest(self) -> int:
        """K, the largest value."""
        return self.high.shape[0] // 2

    def message_bits(self, levels: int) -> int:
        """Number of bits of a message: a number in 0 ... levels - 1 with noise added."""
        return (levels + 2 * self.largest - 1).bit_length()


def table(stddev: float) -> Table:
    """Sampler for a standard deviation sigma (in steps), computed on the host with 40 decimal digits.

    Raises:
      JaxpflError: unless sigma is positive and at most `MOST_STDDEV`.
    """
    checks.positive("stddev", stddev)
    if stddev > MOST_STDDEV:
        raise JaxpflError(f"stddev must be at most {MOST_STDDEV:g} steps, got {stddev}: quantise to fewer bits")
    largest = math.ceil(_REACH * stddev) + 1
    with localcontext() as context:
        context.prec = 40
        scale = 2 * Decimal(stddev) ** 2
        half = [(-Decimal(k * k) / scale).exp() for k in range(largest + 1)]
        weights = half[:0:-1] + half
        total, so_far, thresholds = sum(weights), Decimal(0), []
        for weight in weights[:-1]:
            so_far += weight
            thresholds.append(min(int(so_far / total * 2**64), 2**64 - 1))
    exact = np.array([0, *thresholds, 2**64], dtype=object)
    probability = np.array(exact[1:] - exact[:-1], float) / 2.0**64
    variance = float(probability @ np.arange(-largest, largest + 1, dtype=float) ** 2)
    parts = np.array([divmod(t, 2**32) for t in thresholds], np.uint32)
    return Table(jnp.asarray(parts[:, 0]), jnp.asarray(parts[:, 1]), variance, (2 * largest + 2) * 2.0**-64)


def sample(key: Key, shape: tuple[int, ...], of: Table) -> Array:
    """Independent draws, int32: 64 random bits each and a binary search, whose steps do not depend on the result.

    Implements: Ozkara et al. 2023, Remark 4.
    """
    noise.enter("a client's message", key, math.prod(shape), jnp.sqrt(of.variance))
    of_high, of_low = jax.random.split(key)
    high, low = noise.bits(of_high, shape), noise.bits(of_low, shape)
    size = of.high.shape[0]

    def halve(_: Array, at: tuple[Array, Array]) -> tuple[Array, Array]:
        first, last = at  # the number of thresholds <= u lies within first ... last
        middle = (first + last) // 2
        place = jnp.minimum(middle, size - 1)
        below = (of.high[place] < high) | ((of.high[place] == high) & (of.low[place] <= low))
        go_on = first < last
        return jnp.where(go_on & below, middle + 1, first), jnp.where(go_on & ~below, middle, last)

    bounds = jnp.zeros(shape, jnp.int32), jnp.full(shape, size, jnp.int32)
    steps = size.bit_length() + 1
    return jax.lax.fori_loop(0, steps, halve, bounds)[0] - of.largest


def delta(stddev: float, epsilon: float, sensitivity: int) -> float:
    r"""Least delta for eps: the maximum over all shifts D = 1 ... sensitivity of

    .. math:: P\Big(X < \frac{D}{2} - \frac{\epsilon \sigma^2}{D}\Big)
       - e^\epsilon P\Big(X < -\frac{D}{2} - \frac{\epsilon \sigma^2}{D}\Big)

    (Canonne et al., Theorem 7, evaluated at every shift, because on the integers the expression is not monotone in D.)

    Raises:
      JaxpflError: unless sigma, eps and the sensitivity are positive.
    """
    checks.positive("stddev", stddev)
    checks.positive("epsilon", epsilon)
    checks.count("sensitivity", sensitivity)
    shifts = np.arange(1, sensitivity + 1, dtype=float)
    # Far enough that even the smallest relevant probabilities are summed from their own tail.
    reach = math.ceil(38 * stddev) + 1
    k = np.arange(-reach, reach + 1, dtype=float)
    weights = np.exp(-(k**2) / (2 * stddev**2))
    below = np.concatenate([[0.0], np.cumsum(weights)]) / weights.sum()

    def less_than(x: np.ndarray) -> np.ndarray:
        return below[np.clip(np.ceil(x).astype(int) + reach, 0, len(weights))]

    offset = epsilon * stddev**2 / shifts
    # e^700 is the largest that float64 holds; the tail that it multiplies is zero long before.
    found = less_than(shifts / 2 - offset) - np.exp(min(epsilon, 700.0)) * less_than(-shifts / 2 - offset)
    return float(max(found.max(), 0.0))


def stddev(epsilon: float, delta_: float, sensitivity: int) -> float:
    """Least sigma (to a relative 1e-6) with which a message, as sampled, is (eps, delta)-DP.

    Raises:
      JaxpflError: unless eps is positive and delta in (0, 1), or if sigma would exceed `MOST_STDDEV`.
    """
    checks.positive("epsilon", epsilon)
    checks.probability("delta", delta_)

    def room(sigma: float) -> float:
        return (1 + math.exp(min(epsilon, 700.0))) * (2 * (math.ceil(_REACH * sigma) + 1) + 2) * 2.0**-64

    def enough(sigma: float) -> bool:
        return delta(sigma, epsilon, sensitivity) + room(sigma) <= delta_

    low, high = 1e-2, 1.0
    while not enough(high):
        if room(high) > delta_:
            raise JaxpflError(f"epsilon {epsilon:g} is too large for delta {delta_:g}: 64-bit sampling is less precise")
        if high > MOST_STDDEV:
            raise JaxpflError(
                f"epsilon {epsilon:g} at {sensitivity} steps needs a stddev above {MOST_STDDEV:g} steps: "
                "quantise to fewer bits"
            )
        low, high = high, 2 * high
    while high - low > 1e-6 * high:
        middle = (low + high) / 2
        low, high = (low, middle) if enough(middle) else (middle, high)
    return high

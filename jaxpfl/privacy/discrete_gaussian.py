r"""Discrete Gaussian mechanism: integer noise on integers, for private messages of few bits.

The noise X has :math:`P(X = k) \propto e^{-k^2 / (2 \sigma^2)}` on the integers. The noise is added to a number in {0,
..., L} (a quantizer's level), which has sensitivity L.

Delta is computed exactly from eps and sigma: it is the maximum, over all shifts up to the sensitivity, of a sum over
the integers. The error of the sampler is known: its probabilities are multiples of 2^-64, within 2^-64 of the true
probabilities, and its range ends where the tails have a mass below 2^-64. The total variation distance between the
sampled and the true distribution is at most `Table.distance`. A mechanism at that distance from an (eps, delta)-DP
mechanism is (eps, delta + (1 + e^eps) distance)-DP. `stddev` takes this into account.

The guarantee has two limitations. Random bits come from JAX's generator, which is not cryptographic, so the sampler is
for simulation only. The sampling time is constant only if the hardware executes each step in constant time.

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
"""Largest sigma, in quantizer steps; a table has about 19 sigma entries."""

_REACH = 9.5
"""Distance in standard deviations beyond which the tails have a mass below 2^-64."""


class Table(NamedTuple):
    """Table for sampling the discrete Gaussian on -K ... K by inversion.

    Attributes:
      high, low: upper and lower 32 bits of 2^64 P(X <= k) for k = -K ... K - 1, [2K] uint32.
      variance: variance of X as sampled.
      distance: bound on the total variation between the sampled and the true distribution.
    """

    high: Array
    low: Array
    variance: float
    distance: float

    @property
    def largest(self) -> int:
        """Largest absolute value K of the noise."""
        return self.high.shape[0] // 2

    def message_bits(self, levels: int) -> int:
        """Number of bits of a message: a number in 0 ... levels - 1 plus noise."""
        return (levels + 2 * self.largest - 1).bit_length()


def table(stddev: float) -> Table:
    """Table for a standard deviation sigma (in quantizer steps), computed on the host with 40 decimal digits.

    Raises:
      JaxpflError: unless sigma is positive and at most `MOST_STDDEV`.
    """
    checks.positive("stddev", stddev)
    if stddev > MOST_STDDEV:
        raise JaxpflError(f"stddev must be at most {MOST_STDDEV:g} steps, got {stddev}: quantize to fewer bits")
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
    """Draw independent int32 values from the table ``of``, by inversion of 64 random bits each.

    The binary search takes the same number of steps for every result.

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
    r"""Smallest delta for eps. With discrete Gaussian X, this is the maximum, over all shifts D = 1 ... sensitivity, of

    .. math:: P\Big(X < \frac{D}{2} - \frac{\epsilon \sigma^2}{D}\Big)
       - e^\epsilon P\Big(X < -\frac{D}{2} - \frac{\epsilon \sigma^2}{D}\Big)

    (Canonne et al. 2020, Theorem 7). The maximum is over all shifts because the expression is not monotone in D.

    Raises:
      JaxpflError: unless sigma, eps and the sensitivity are positive.
    """
    checks.positive("stddev", stddev)
    checks.positive("epsilon", epsilon)
    checks.count("sensitivity", sensitivity)
    shifts = np.arange(1, sensitivity + 1, dtype=float)
    # Beyond 38 standard deviations the weights are below float64's smallest normal number.
    reach = math.ceil(38 * stddev) + 1
    k = np.arange(-reach, reach + 1, dtype=float)
    weights = np.exp(-(k**2) / (2 * stddev**2))
    below = np.concatenate([[0.0], np.cumsum(weights)]) / weights.sum()

    def less_than(x: np.ndarray) -> np.ndarray:
        return below[np.clip(np.ceil(x).astype(int) + reach, 0, len(weights))]

    offset = epsilon * stddev**2 / shifts
    # e^eps would overflow float64 above 709. The cap can only overstate delta.
    found = less_than(shifts / 2 - offset) - np.exp(min(epsilon, 700.0)) * less_than(-shifts / 2 - offset)
    return float(max(found.max(), 0.0))


def stddev(epsilon: float, delta_: float, sensitivity: int) -> float:
    """Smallest sigma (to a relative error of 1e-6) for which a message with noise from `sample` is (eps, delta)-DP.

    Raises:
      JaxpflError: if eps is not positive, if delta is outside (0, 1), if eps is too large for the sampler's precision,
        or if sigma would exceed twice `MOST_STDDEV`.
    """
    checks.positive("epsilon", epsilon)
    checks.probability("delta", delta_)

    # Increase of delta by the sampler's distance from the true distribution.
    def room(sigma: float) -> float:
        return (1 + math.exp(min(epsilon, 700.0))) * (2 * (math.ceil(_REACH * sigma) + 1) + 2) * 2.0**-64

    def enough(sigma: float) -> bool:
        return delta(sigma, epsilon, sensitivity) + room(sigma) <= delta_

    low, high = 1e-2, 1.0
    while not enough(high):
        if room(high) > delta_:
            raise JaxpflError(f"epsilon is too large for delta {delta_:g} and 64 random bits, got {epsilon:g}")
        if high > MOST_STDDEV:
            raise JaxpflError(
                f"epsilon {epsilon:g} with sensitivity {sensitivity} requires a stddev above {MOST_STDDEV:g}: quantize "
                "to fewer bits"
            )
        low, high = high, 2 * high
    while high - low > 1e-6 * high:
        middle = (low + high) / 2
        low, high = (low, middle) if enough(middle) else (middle, high)
    return high

r"""Local differential privacy: each client's message is private against everyone who reads it.

In the local model any two values of one client are neighbors, so a value clipped to a ball of radius b has sensitivity
2 b. Clipping is part of each mechanism, because a guarantee must not depend on the data's range.

Standard deviations are computed on the host in float64. The mechanisms are pure JAX functions that work under jit and
vmap. Each mechanism draws from a random stream that depends on the key and on the mechanism's parameters. Two messages
of a client with the same key therefore have independent noise if their budgets or clipping bounds differ.

Implements: Ozkara et al. 2023, Definition 1.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np

from jaxpfl.core import checks
from jaxpfl.core.randomness import numbered
from jaxpfl.core.types import Array, Key, Scalar
from jaxpfl.privacy import noise
from jaxpfl.privacy.noise import add_gaussian


def analytic_gaussian_stddev(epsilon: float, delta: float, sensitivity: float) -> float:
    r"""Analytic calibration: smallest standard deviation that makes a Gaussian mechanism (eps, delta)-DP.

    In units of the sensitivity, the standard deviation :math:`\sigma` solves

    .. math:: \Phi\Bigl(\frac{1}{2\sigma} - \epsilon\sigma\Bigr)
       - e^\epsilon \Phi\Bigl(-\frac{1}{2\sigma} - \epsilon\sigma\Bigr) = \delta

    This condition is necessary and sufficient for every eps > 0, in any dimension (Balle and Wang 2018, Theorem 8).
    dp-accounting solves the equation to a relative error of 1e-10 for eps >= 1e-4.

    Args:
      epsilon, delta: guarantee for one message.
      sensitivity: largest L2 distance between two values; 2 b for local messages clipped to norm b.

    Raises:
      JaxpflError: unless eps and the sensitivity are positive and finite, and delta is in (0, 1).
    """
    checks.positive("epsilon", epsilon)
    checks.probability("delta", delta)
    checks.positive("sensitivity", sensitivity)
    from dp_accounting import get_sigma_gaussian

    with np.errstate(divide="ignore"):  # the search may evaluate log(0) if delta underflows
        return sensitivity * float(get_sigma_gaussian(epsilon, delta))


def printed_gaussian_stddev(epsilon: float, delta: float, bound: float) -> float:
    r"""Classical calibration for a message in [-b, b], as in the paper, for comparison:

    .. math:: \sigma_q = \frac{b}{\epsilon} \sqrt{8 \log(2 / \delta)}

    This calibration assumes a sensitivity of 2 b. It is sound only in one dimension and for eps < 1: for larger eps the
    guarantee is unproven, and for each coordinate of a vector the noise is too small. `analytic_gaussian_stddev` with
    sensitivity 2 b gives a smaller standard deviation and is always sound.

    Reference: Ozkara et al. 2023, section 2 and Theorem 2.

    Implements: Ozkara et al. 2023, equations (24) to (26).

    Raises:
      JaxpflError: as in `analytic_gaussian_stddev`.
    """
    checks.positive("epsilon", epsilon)
    checks.probability("delta", delta)
    checks.positive("bound", bound)
    return bound / epsilon * math.sqrt(8 * math.log(2 / delta))


def gaussian(key: Key, x: Array, bound: Scalar, stddev: Scalar) -> Array:
    """Gaussian mechanism: clip each entry of ``x`` to [-b, b] and add N(0, stddev^2).

    The result is unbiased for the clipped entry.

    Formal guarantees: one message (one entry of ``x``) is (eps, delta)-LDP if ``stddev`` is
    ``analytic_gaussian_stddev(eps, delta, 2 b)``, even if the entry is not finite. A client that sends several entries
    spends (eps, delta) for each of them. For a vector, clip its L2 norm instead.

    Implements: Ozkara et al. 2023, equations (24) to (26).

    Args:
      x: values to send, with any shape and a floating type.
      bound: bound b, positive.
      stddev: standard deviation of the noise.
    """
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    return add_gaussian(numbered(key, bound, stddev), bounded(wide, bound), stddev, "a client's message").astype(
        x.dtype
    )


def one_bit(key: Key, x: Array, bound: Scalar, epsilon: Scalar) -> Array:
    r"""One-bit mechanism: replace each entry x, clipped to [-b, b], by one of two values with expectation x:

    .. math:: \pm b\,c, \quad c = \frac{e^\epsilon + 1}{e^\epsilon - 1}, \qquad
       P(+ b\,c) = \frac12 \Bigl(1 + \frac{x}{b\,c}\Bigr)

    A message takes one bit. The variance of a message, :math:`b^2 c^2 - x^2`, is below the Gaussian mechanism's.

    Formal guarantees: one message (one entry of ``x``) is pure eps-LDP, even if the entry is not finite. For every
    input, the probability of each value lies between 1/(e^eps + 1) and e^eps/(e^eps + 1). The ratio of these two bounds
    is exactly e^eps. The sampled probabilities are multiples of 2^-23 in float32 (2^-52 in float64). The smaller of the
    two probabilities is rounded up, so rounding never raises the ratio, and the smaller probability is never zero. For
    eps above 15.9 (36 in float64), a message is therefore as private as for eps = 15.9 (36). A client that sends
    several entries spends eps for each entry.

    Args:
      x: values to send, with any shape and a floating type.
      bound: bound b, positive.
      epsilon: eps for one message, positive; may be traced.

    Returns:
      The messages, with the shape and type of ``x``.

    Reference: Duchi, Jordan and Wainwright 2018, section 3.2; Ozkara et al. 2023, Theorem 4 for [0, 1].
    """
    value = jnp.asarray(bound / jnp.tanh(epsilon / 2), x.dtype)
    return jnp.where(_positive(numbered(key, bound, epsilon), bounded(x, bound) / bound, epsilon), value, -value)


def one_bit_unit(key: Key, x: Array, epsilon: Scalar) -> Array:
    r"""One-bit mechanism on [0, 1]: replace each entry x, clipped to [0, 1], by one of two values with expectation x:

    .. math:: \frac{-1}{e^\epsilon - 1} \text{ with probability }
       \frac{e^\epsilon}{e^\epsilon + 1} - x \frac{e^\epsilon - 1}{e^\epsilon + 1}, \quad
       \text{else } \frac{e^\epsilon}{e^\epsilon - 1}

    This is `one_bit` for 2 x - 1 with b = 1, mapped back to [0, 1]. NaN counts as 1/2.

    Formal guarantees: as for `one_bit`.

    Implements: Ozkara et al. 2023, equation (7); Ozkara et al. 2023, Remark 6;
      Ozkara et al. 2023, equations (33) to (36).

    Args:
      x: values to send, with any shape and a floating type.
      epsilon: eps for one message, positive; may be traced.

    Reference: Ozkara et al. 2023, section 2 (7) and Theorem 4.
    """
    low = jnp.asarray(-1 / jnp.expm1(epsilon), x.dtype)
    return jnp.where(_positive(numbered(key, epsilon), bounded(2 * x - 1, 1), epsilon), 1 - low, low)


def bounded(x: Array, bound: Scalar) -> Array:
    """Clip each entry of ``x`` to [-b, b]; NaN becomes zero."""
    return jnp.clip(jnp.where(jnp.isnan(x), 0, x), -bound, bound)


def _positive(key: Key, x: Array, epsilon: Scalar) -> Array:
    """Draw True with probability (1 + x tanh(eps/2)) / 2, for x in [-1, 1].

    The less probable outcome has the probability p = |x| sigmoid(-eps) + (1 - |x|) / 2. This outcome is drawn if
    ``uniform <= p``. Uniforms are multiples of the generator's step, so the sampled probability is the next multiple
    above p, capped at one half. If p underflows to zero (for |x| = 1 and eps above 88 in float32), the sampled
    probability is one step. p is computed by this formula because the equivalent (1 - |x| tanh(eps/2)) / 2 would be
    inaccurate for large eps.
    """
    noise.enter("a client's bit", key, x.size, jnp.nan)
    dtype = jnp.promote_types(x.dtype, jnp.float32)
    size = jnp.abs(x.astype(dtype))
    against = size * jax.nn.sigmoid(-jnp.asarray(epsilon, dtype)) + (1 - size) / 2
    against = jnp.minimum(against, 0.5 - jnp.finfo(dtype).eps)
    return (noise.uniform(key, x.shape, dtype) <= against) ^ (x >= 0)

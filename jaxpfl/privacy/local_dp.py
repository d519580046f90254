r"""Local differential privacy: each client's message is private by itself, whoever reads it.

ANY two values that one client may hold are neighbours (the local model has no other relation), so the sensitivity of a
value clipped to a ball of radius b is 2 b. Clipping is part of each mechanism: a guarantee may not depend on data being
in range with high probability.

The standard deviations are computed on the host, in float64. The mechanisms are pure JAX functions that jit and vmap.
Each draws from a stream named by its key and parameters, so that messages of one client under two budgets, or clipped
to two bounds, share no noise.

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
    r"""Analytic calibration: least standard deviation that makes a Gaussian mechanism (eps, delta)-DP.

    With :math:`\sigma` in units of the sensitivity it solves

    .. math:: \Phi\Bigl(\frac{1}{2\sigma} - \epsilon\sigma\Bigr)
       - e^\epsilon \Phi\Bigl(-\frac{1}{2\sigma} - \epsilon\sigma\Bigr) = \delta

    which is exact for every eps > 0, in any dimension. Reference: Balle and Wang 2018, Theorem 8; solved by
    dp-accounting to a relative error of 1e-10 for eps >= 1e-4.

    Args:
      epsilon, delta: guarantee of one message.
      sensitivity: the largest L2 distance between two values; 2 b for local messages clipped to a norm of b.

    Raises:
      JaxpflError: unless eps and the sensitivity are positive and finite, and delta is in (0, 1).
    """
    checks.positive("epsilon", epsilon)
    checks.probability("delta", delta)
    checks.positive("sensitivity", sensitivity)
    from dp_accounting import get_sigma_gaussian

    with np.errstate(divide="ignore"):  # log(0), if delta underflows during the search for a bracket
        return sensitivity * float(get_sigma_gaussian(epsilon, delta))


def printed_gaussian_stddev(epsilon: float, delta: float, bound: float) -> float:
    r"""Classical calibration of a message in [-b, b], as in the paper, for comparison:

    .. math:: \sigma_q = \frac{b}{\epsilon} \sqrt{8 \log(2 / \delta)}

    It assumes a sensitivity of 2 b, and is sound in one dimension and for eps < 1 only: for each coordinate of a vector
    it is too small, and for larger eps it is unproven. `analytic_gaussian_stddev` with a sensitivity of 2 b is smaller
    and always sound. Reference: Ozkara et al. 2023, section 2 and Theorem 2.

    Implements: Ozkara et al. 2023, equations (24) to (26).

    Raises:
      JaxpflError: as in `analytic_gaussian_stddev`.
    """
    checks.positive("epsilon", epsilon)
    checks.probability("delta", delta)
    checks.positive("bound", bound)
    return bound / epsilon * math.sqrt(8 * math.log(2 / delta))


def gaussian(key: Key, x: Array, bound: Scalar, stddev: Scalar) -> Array:
    """Gaussian mechanism: each entry of ``x`` clipped to [-b, b], plus N(0, stddev^2), unbiased for the clipped entry.

    Formal guarantees: one message (one entry of ``x``) is (eps, delta)-LDP if ``stddev`` is
    ``analytic_gaussian_stddev(eps, delta, 2 b)``, for every entry, even if not finite. A client that sends several
    entries spends this for each; for a vector, clip its L2 norm instead.

    Implements: Ozkara et al. 2023, equations (24) to (26).

    Args:
      x: any shape, floating.
      bound: b, positive.
      stddev: standard deviation of the noise.
    """
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    return add_gaussian(numbered(key, bound, stddev), bounded(wide, bound), stddev, "a client's message").astype(
        x.dtype
    )


def one_bit(key: Key, x: Array, bound: Scalar, epsilon: Scalar) -> Array:
    r"""One-bit mechanism: each entry x of ``x``, clipped to [-b, b], becomes one of two values whose mean is x:

    .. math:: \pm b\,c, \quad c = \frac{e^\epsilon + 1}{e^\epsilon - 1}, \qquad
       P(+) = \frac12 \Bigl(1 + \frac{x}{b\,c}\Bigr)

    Its variance, :math:`b^2 c^2 - x^2`, is below the Gaussian mechanism's, and it takes one bit.

    Formal guarantees: one message (one entry of ``x``) is pure eps-LDP, for every entry, even if not finite: over
    all inputs the probability of each value lies between 1/(e^eps + 1) and e^eps/(e^eps + 1), whose ratio is exactly
    e^eps. The drawn probabilities are multiples of 2^-23 in float32 (2^-52 in float64); the smaller of the two is
    rounded up to the next, so that no rounding raises the ratio, and is never zero: for eps above 15.9 (36 in float64)
    a message is as private as at that eps. A client that sends several entries spends eps for each.

    Args:
      x: any shape, floating.
      bound: b, positive.
      epsilon: eps of one message, positive; may be traced.

    Returns:
      The messages, with the shape and type of ``x``.

    Reference: Duchi, Jordan and Wainwright 2018, section 3.2; Ozkara et al. 2023, Theorem 4 for [0, 1].
    """
    value = jnp.asarray(bound / jnp.tanh(epsilon / 2), x.dtype)
    return jnp.where(_positive(numbered(key, bound, epsilon), bounded(x, bound) / bound, epsilon), value, -value)


def one_bit_unit(key: Key, x: Array, epsilon: Scalar) -> Array:
    r"""Message (7) of the paper: each entry x, clipped to [0, 1], becomes one of two values with mean x:

    .. math:: \frac{-1}{e^\epsilon - 1} \text{ with probability }
       \frac{e^\epsilon}{e^\epsilon + 1} - x \frac{e^\epsilon - 1}{e^\epsilon + 1}, \quad
       \text{else } \frac{e^\epsilon}{e^\epsilon - 1}

    It is `one_bit` of 2 x - 1 on [-1, 1], mapped back. NaN counts as 1/2.

    Formal guarantees: the same as for `one_bit`.

    Implements: Ozkara et al. 2023, equation (7); Ozkara et al. 2023, Remark 6;
      Ozkara et al. 2023, equations (33) to (36).

    Args:
      x: any shape, floating.
      epsilon: eps of one message, positive; may be traced.

    Reference: Ozkara et al. 2023, section 2 (7) and Theorem 4.
    """
    low = jnp.asarray(-1 / jnp.expm1(epsilon), x.dtype)
    return jnp.where(_positive(numbered(key, epsilon), bounded(2 * x - 1, 1), epsilon), 1 - low, low)


def bounded(x: Array, bound: Scalar) -> Array:
    """``x`` clipped to [-b, b] entry by entry; NaN becomes zero."""
    return jnp.clip(jnp.where(jnp.isnan(x), 0, x), -bound, bound)


def _positive(key: Key, x: Array, epsilon: Scalar) -> Array:
    """True with probability (1 + x tanh(eps/2)) / 2, for x in [-1, 1].

    The less probable outcome is drawn as ``uniform <= p``: uniforms are multiples of the generator's step, so its
    probability is the next multiple above p, but never above one half. If p underflows to zero, as a sigmoid does at
    eps 88, one step remains. Written as a convex combination, p is accurate to its last bits for large eps too, unlike
    1 - tanh.
    """
    noise.enter("a client's bit", key, x.size, jnp.nan)
    dtype = jnp.promote_types(x.dtype, jnp.float32)
    size = jnp.abs(x.astype(dtype))
    against = size * jax.nn.sigmoid(-jnp.asarray(epsilon, dtype)) + (1 - size) / 2
    against = jnp.minimum(against, 0.5 - jnp.finfo(dtype).eps)
    return (noise.uniform(key, x.shape, dtype) <= against) ^ (x >= 0)

r"""Intervals for one client's theta_i: how sure it can be of its personalised estimate.

All functions are for one entry and broadcast. ``a`` is the weight of the client's own mean, ``s2`` its variance.

- `known`: the errors of the Gaussian model with known variances are exactly normal, so these intervals cover exactly.
- `morris`: mu and st2 are learned from the same clients, maybe few; the intervals are wider for that.
- `robust`: the theta_i need not be Gaussian. Their distribution enters only by its variance, and the interval covers at
  least with its probability on average over the clients, whatever that distribution.
- `beta`: for Bernoulli clients, quantiles of the Beta posterior that has the estimated mean and variance.

References: Morris 1983, "Parametric empirical Bayes inference"; Armstrong, Kolesar and Plagborg-Moller 2022, "Robust
empirical Bayes confidence intervals".
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxpfl.types import Array, Scalar

_HALVINGS = 60
_POINTS = 4096
_TINY = 1e-30


def known(estimate: Array, mse: Scalar, level: Scalar) -> tuple[Array, Array]:
    """``estimate -/+ z sqrt(mse)``, with the exact error of `gaussian_closed_form`."""
    reach = -jax.scipy.special.ndtri((1 - level) / 2) * jnp.sqrt(mse)
    return estimate - reach, estimate + reach


def morris(own: Array, s2: Scalar, level: Scalar) -> tuple[Array, Array]:
    r"""For m >= 4 clients of equal size, with mu and st2 unknown: their posterior means, with flat priors on both.

    With B = s2 / (s2 + st2) and S the summed squares of the means about their own, B given the means has the density
    :math:`\propto B^{(\nu - 2)/2 - 1} e^{-B S / (2 s^2)}` on (0, 1), with nu = (m - 1) d, and

    .. math:: E\,\theta_i = \bar X_i - E B (\bar X_i - M), \qquad
       Var\,\theta_i = s^2 \Big(1 - \frac{m-1}{m} E B\Big) + Var B\, (\bar X_i - M)^2

    The intervals are those of normal distributions with these moments.

    Args:
      own: the clients' own means, [m, d].
      s2: their variance, known (or pooled from many samples).
    """
    m, d = own.shape
    mean = own.mean(axis=0)
    scatter = ((own - mean) ** 2).sum()
    shape, rate = ((m - 1) * d - 2) / 2, scatter / (2 * jnp.maximum(s2, _TINY))
    # Where B is likely: about the Gamma distribution's bulk, and up to 1.
    bulk, spread = shape / jnp.maximum(rate, _TINY), jnp.sqrt(shape) / jnp.maximum(rate, _TINY)
    top = jnp.minimum(1.0, bulk + 12 * spread)
    low = jnp.maximum(0.0, jnp.minimum(bulk, 1.0) - 12 * spread)
    B = low + (top - low) * (jnp.arange(_POINTS) + 0.5) / _POINTS
    # About the largest term, which is at the bulk's top or before it: differences of small numbers, not of large ones.
    peak = jnp.clip((shape - 1) / jnp.maximum(rate, _TINY), low, top)
    ratio = B / jnp.maximum(peak, _TINY)
    p = jax.nn.softmax((shape - 1) * jnp.log(ratio) - rate * peak * (ratio - 1))
    shrink = p @ B
    variance = s2 * (1 - (m - 1) / m * shrink) + (p @ (B - shrink) ** 2) * (own - mean) ** 2
    return known(own - shrink * (own - mean), variance, level)


def robust(estimate: Array, a: Scalar, s2: Scalar, st2: Scalar, level: Scalar) -> tuple[Array, Array]:
    """``estimate -/+ cva(t) a sqrt(s2)``: t = ((1 - a)/a)^2 st2 / s2 is the mean square of the estimate's bias, in
    standard deviations of its own, for theta_i about a known mean of whose distribution only st2 is known."""
    deviation = a * jnp.sqrt(s2)
    t = jnp.where(deviation > 0, (1 - a) ** 2 * st2 / jnp.where(deviation > 0, deviation, 1) ** 2, jnp.inf)
    # Without any spread of its own, the estimate is off by its bias alone: Chebyshev.
    chebyshev = (1 - a) * jnp.sqrt(st2 / (1 - level))
    reach = jnp.where(deviation > 0, critical_value(jnp.where(deviation > 0, t, 0), 1 - level) * deviation, chebyshev)
    return estimate - reach, estimate + reach


def critical_value(t: Scalar, alpha: Scalar) -> Array:
    """cva: the chi with ``worst_miss(t, chi) = alpha``, by bisection."""
    t, alpha = jnp.broadcast_arrays(jnp.asarray(t, float), jnp.asarray(alpha, float))
    low = -jax.scipy.special.ndtri(alpha / 2)
    return _bisect(lambda chi: worst_miss(t, chi) > alpha, low, jnp.sqrt((1 + t) / alpha))


def worst_miss(t: Array, chi: Array) -> Array:
    r"""The largest probability that |Z + b| > chi over all distributions of b with mean square t, Z standard normal.

    With r(u) = P(|Z + sqrt u| > chi), convex and then concave in u: the value at t of its concave envelope, which is r
    beyond the point whose tangent passes through (0, r(0)), and that tangent before it.
    """

    def miss(u: Array) -> Array:
        root = jnp.sqrt(u)
        return jax.scipy.special.ndtr(root - chi) + jax.scipy.special.ndtr(-root - chi)

    def slope(u: Array) -> Array:
        root = jnp.sqrt(jnp.maximum(u, 1e-12))
        pdf = jax.scipy.stats.norm.pdf
        return (pdf(root - chi) - pdf(-root - chi)) / (2 * root)

    # Before the tangent's point the chord from 0 is less steep than r itself.
    before = lambda u: slope(u) * u > miss(u) - miss(jnp.zeros_like(u))  # noqa: E731
    # Below chi = sqrt(3), r is concave from the start, and the envelope is r.
    touch = jnp.where(chi > jnp.sqrt(3.0), _bisect(before, chi**2 / 16, (chi + 3) ** 2 + 0 * t), 0)
    chord = miss(jnp.zeros_like(t)) + t / jnp.where(touch > 0, touch, 1) * (miss(touch) - miss(jnp.zeros_like(t)))
    return jnp.where(t < touch, chord, miss(t))


def beta(mu: Scalar, v: Scalar, share: Array, size: Array, level: Scalar) -> tuple[Array, Array]:
    """For Bernoulli clients: quantiles of Beta(alpha + Z, beta + n - Z), with the prior of mean mu and variance v.

    Where v is 0 all probabilities are mu; where it is mu (1 - mu) the prior says nothing: alpha, beta are kept above
    1e-3.
    """
    most = mu * (1 - mu)
    total = jnp.clip(jnp.where(v > 0, most / jnp.where(v > 0, v, 1) - 1, 1e6), 2e-3, 1e6)
    alpha = jnp.maximum(mu * total, 1e-3) + share * size
    other = jnp.maximum((1 - mu) * total, 1e-3) + (1 - share) * size

    def quantile(p: Scalar) -> Array:
        below = lambda x: jax.scipy.special.betainc(alpha, other, x) < p  # noqa: E731
        return _bisect(below, jnp.zeros_like(alpha), jnp.ones_like(alpha))

    return quantile((1 - level) / 2), quantile((1 + level) / 2)


def _bisect(below, low: Array, high: Array) -> Array:
    """The point where ``below`` turns from true to false."""
    low, high = jnp.broadcast_arrays(low, high)

    def halve(_: Array, at: tuple[Array, Array]) -> tuple[Array, Array]:
        middle = (at[0] + at[1]) / 2
        up = below(middle)
        return jnp.where(up, middle, at[0]), jnp.where(up, at[1], middle)

    low, high = jax.lax.fori_loop(0, _HALVINGS, halve, (low, high))
    return (low + high) / 2

r"""Confidence and credible intervals for one client's theta_i around its personalised estimate.

All functions are for one entry and broadcast. ``a`` is the weight of the client's own mean, ``s2`` its variance.

- `known`: the Gaussian model with known variances; its errors are exactly normal, so the coverage is exact.
- `robust`: theta_i of any distribution, of which only the variance enters. The coverage is at least nominal on average
  over the clients, whatever the distribution.
- `beta`: Bernoulli clients, by quantiles of the posterior under a known Beta prior.

`learned_gaussian`, `learned_bernoulli` and `learned_poisson` have intervals for a population learned from the same
clients.

Reference: Armstrong, Kolesar and Plagborg-Moller 2022, "Robust empirical Bayes confidence intervals".
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxpfl.core.types import Array, Scalar

_HALVINGS = 60


def known(estimate: Array, mse: Scalar, level: Scalar) -> tuple[Array, Array]:
    """Interval ``estimate -/+ z sqrt(mse)``, with the exact error of `gaussian_closed_form`."""
    reach = _normal(level) * jnp.sqrt(mse)
    return estimate - reach, estimate + reach


def robust(estimate: Array, a: Scalar, s2: Scalar, st2: Scalar, level: Scalar) -> tuple[Array, Array]:
    """Interval ``estimate -/+ cva(t) a sqrt(s2)`` that is robust to the distribution of the theta_i.

    t = ((1 - a)/a)^2 st2 / s2 is the mean square of the estimate's bias in units of its standard deviation, for theta_i
    about a known mean, of whose distribution only the variance st2 is known.
    """
    deviation = a * jnp.sqrt(s2)
    t = jnp.where(deviation > 0, (1 - a) ** 2 * st2 / jnp.where(deviation > 0, deviation, 1) ** 2, jnp.inf)
    # An estimate without variance errs by its bias alone: Chebyshev.
    chebyshev = (1 - a) * jnp.sqrt(st2 / (1 - level))
    reach = jnp.where(deviation > 0, critical_value(jnp.where(deviation > 0, t, 0), 1 - level) * deviation, chebyshev)
    return estimate - reach, estimate + reach


def critical_value(t: Scalar, alpha: Scalar) -> Array:
    """Critical value cva: the chi with ``worst_miss(t, chi) = alpha``, by bisection."""
    t, alpha = jnp.broadcast_arrays(jnp.asarray(t, float), jnp.asarray(alpha, float))
    low = -jax.scipy.special.ndtri(alpha / 2)
    return bisect(lambda chi: worst_miss(t, chi) > alpha, low, jnp.sqrt((1 + t) / alpha))


def worst_miss(t: Array, chi: Array) -> Array:
    r"""Largest probability of |Z + b| > chi over all distributions of b with mean square t, for standard normal Z.

    It is the value at t of the concave envelope of r(u) = P(|Z + sqrt u| > chi), which is convex and then concave in u:
    r beyond the point whose tangent passes through (0, r(0)), and that tangent before it.
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
    touch = jnp.where(chi > jnp.sqrt(3.0), bisect(before, chi**2 / 16, (chi + 3) ** 2 + 0 * t), 0)
    chord = miss(jnp.zeros_like(t)) + t / jnp.where(touch > 0, touch, 1) * (miss(touch) - miss(jnp.zeros_like(t)))
    return jnp.where(t < touch, chord, miss(t))


def beta(mu: Scalar, v: Scalar, share: Array, size: Array, level: Scalar) -> tuple[Array, Array]:
    """Posterior quantiles of a Bernoulli client under a known prior, of Beta(alpha + Z, beta + n - Z).

    For v = 0 all probabilities equal mu; at v = mu (1 - mu) both parameters tend to zero and are kept above 1e-3.

    Args:
      mu, v: the prior's mean and variance.
      share: the clients' shares of ones, Z / n.
      size: n.
    """
    most = mu * (1 - mu)
    total = jnp.clip(jnp.where(v > 0, most / jnp.where(v > 0, v, 1) - 1, 1e6), 2e-3, 1e6)
    alpha = jnp.maximum(mu * total, 1e-3) + share * size
    other = jnp.maximum((1 - mu) * total, 1e-3) + (1 - share) * size

    def quantile(p: Scalar) -> Array:
        below = lambda x: jax.scipy.special.betainc(alpha, other, x) < p  # noqa: E731
        return bisect(below, jnp.zeros_like(alpha), jnp.ones_like(alpha))

    return quantile((1 - level) / 2), quantile((1 + level) / 2)


def _normal(level: Scalar) -> Array:
    return -jax.scipy.special.ndtri((1 - level) / 2)


def bisect(below, low: Array, high: Array, halvings: int = _HALVINGS) -> Array:
    """The point at which ``below`` turns from true to false, to the distance of low and high by 2^halvings."""
    low, high = jnp.broadcast_arrays(low, high)

    def halve(_: Array, at: tuple[Array, Array]) -> tuple[Array, Array]:
        middle = (at[0] + at[1]) / 2
        up = below(middle)
        return jnp.where(up, middle, at[0]), jnp.where(up, at[1], middle)

    low, high = jax.lax.fori_loop(0, halvings, halve, (low, high))
    return (low + high) / 2

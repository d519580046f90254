r"""Marginal likelihoods of counts under a Beta or a Gamma prior, for large counts in single precision too.

Terms of :math:`\log \Gamma(a + n) - \log \Gamma(a)` are of the order n log n, and their sum of the order one. Here the
largest terms are summed by hand. With a = mu s and b = (1 - mu) s, and the posterior mean p' = (a + z) / (s + n),
Stirling's leading terms of a Beta-binomial are, beside the binomial likelihood at z / n,

.. math:: -n\, \mathrm{KL}(z/n \,\|\, p') - s\, \mathrm{KL}(\mu \,\|\, p')

and for a count z in an exposure e under Gamma(mu s, s), with :math:`\lambda' = (\mu s + z) / (s + e)` and the
divergence of Poisson distributions, :math:`-e\, \mathrm{KL}(z/e \| \lambda') - s\, \mathrm{KL}(\mu \| \lambda')`. The
arguments of a divergence are near each other where its factor is large, and their difference is known without
subtracting them. What is left of Stirling's series is small.
"""

from __future__ import annotations

import math

import jax.numpy as jnp
from jax.scipy.special import gammaln, xlogy

from jaxpfl.core.types import Array
from jaxpfl.estimators.rising import SHIFT, stirling

_LARGE = 16.0


def beta_binomial(z: Array, n: Array, mu: Array, size: Array) -> Array:
    """Log probability of z successes in n trials under Beta(mu size, (1 - mu) size), less that of the binomial z / n.

    Broadcasts its arguments.
    """
    z, n, mu, size = jnp.broadcast_arrays(z, n, mu, size)
    a, b = mu * size, (1 - mu) * size
    whole = size + 2 * SHIFT
    first, second = (a + SHIFT) / whole, (b + SHIFT) / whole
    total = whole + n
    p, q = (a + SHIFT + z) / total, (b + SHIFT + (n - z)) / total
    off = jnp.where(z < n / 2, z / n - first, second - (n - z) / n)
    left, right = whole / total * off, n / total * off  # of z / n and of the prior's mean to p
    of_data = n * (_gap(z / n, p, left) + _gap((n - z) / n, q, -left))
    of_prior = whole * (_gap(first, p, -right) + _gap(second, q, right))
    return -of_data - of_prior + _ends(a, z) + _ends(b, n - z) - _ends(size, n, 2 * SHIFT)


def gamma_poisson(z: Array, e: Array, mu: Array, size: Array) -> Array:
    """Log probability of a count z in an exposure e under Gamma(mu size, size), less that of the Poisson rate z / e.

    Broadcasts its arguments.
    """
    z, e, mu, size = jnp.broadcast_arrays(z, e, mu, size)
    a = mu * size
    more = SHIFT / mu
    whole = size + more  # of which mu is the mean that the shape a + SHIFT has
    off = z / e - mu
    left, right = whole / (whole + e) * off, e / (whole + e) * off
    rate = (a + SHIFT + z) / (whole + e)
    main = -e * _gap(z / e, rate, left) - whole * _gap(mu, rate, -right)
    shifted = (a + SHIFT) * jnp.log1p(e / whole) - a * jnp.log1p(e / size) + z * jnp.log1p(more / (size + e))
    return main + shifted + _ends(a, z)


def log_saturated_binomial(z: Array, n: Array) -> Array:
    """Log probability of z successes in n trials of the probability z / n."""
    return _over(n) - _over(z) - _over(n - z)


def log_saturated_poisson(z: Array) -> Array:
    """Log probability of a count z under the Poisson distribution of mean z."""
    return -_over(z)


def binomial(z: Array, n: Array, p: Array) -> Array:
    """Log probability of z successes in n trials of probability p, less that at z / n; broadcasts."""
    z, n, p = jnp.broadcast_arrays(z, n, p)
    off = z / n - p
    return -n * (_gap(z / n, p, off) + _gap((n - z) / n, 1 - p, -off))


def poisson(z: Array, e: Array, rate: Array) -> Array:
    """Log probability of a count z in an exposure e at a rate, less that at z / e; broadcasts."""
    z, e, rate = jnp.broadcast_arrays(z, e, rate)
    return -e * _gap(z / e, rate, z / e - rate)


def _gap(p: Array, q: Array, off: Array) -> Array:
    """p log(p / q) - p + q, where p - q is ``off`` with all its digits; q where p is zero."""
    some = p > 0
    below = jnp.where(q > 0, q, 1)
    u = jnp.where(some, off / below, 0)
    u = jnp.maximum(u, -1 + jnp.finfo(u.dtype).epsneg)
    found = below * ((1 + u) * jnp.log1p(u) - u)
    return jnp.where(some, jnp.where(q > 0, found, jnp.inf), q)


def _ends(a: Array, n: Array, shift: int = SHIFT) -> Array:
    """Part of log Gamma(a + n) / Gamma(a) that Stirling's leading terms lack, but for n."""
    y = a + shift
    return stirling(y + n) - stirling(y) - jnp.log1p(n / y) / 2 - sum(jnp.log1p(n / (a + k)) for k in range(shift))


def _over(n: Array) -> Array:
    """log n! - n log n + n, of at least zero."""
    large = n > _LARGE
    far = jnp.where(large, n, _LARGE)
    few = jnp.where(large, 0, n)
    return jnp.where(large, stirling(far) + jnp.log(2 * math.pi * far) / 2, gammaln(few + 1) - xlogy(few, few) + few)

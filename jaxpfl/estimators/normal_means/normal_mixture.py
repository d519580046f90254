r"""Mixtures of normals as priors, atoms among them, and their posteriors given :math:`x \sim N(\theta, s^2)`.

Component k, N(c_k, t_k^2) with the weight pi_k, has the marginal N(c_k, t_k^2 + s^2) and the posterior

.. math:: N\Big(c_k + \frac{t_k^2}{t_k^2 + s^2} (x - c_k),\; \frac{t_k^2 s^2}{t_k^2 + s^2}\Big)

with a weight in proportion to pi_k times its marginal density. t_k = 0 is an atom.
"""

from __future__ import annotations

from typing import NamedTuple, Self

import jax
import jax.numpy as jnp
from jax.scipy.special import erfc, logsumexp, ndtr

from jaxpfl.core import full_precision
from jaxpfl.core.types import Array, Key
from jaxpfl.estimators.normal_means.tails import log_density, log_sum

REACH = 9.0
"""Standard deviations beyond which a normal has no mass in double precision."""
_FEW = 3  # components that are quicker one by one than along an axis


class NormalMixture(NamedTuple):
    """A mixture of K normals.

    Attributes:
      weights: pi_k, [K], which sum to one.
      means: c_k, [K].
      sds: t_k, [K]; zero for an atom.
    """

    weights: Array
    means: Array
    sds: Array

    @property
    @full_precision.products
    def mean(self) -> Array:
        """Mean of the prior, []."""
        return self.weights @ self.means

    @property
    @full_precision.products
    def sd(self) -> Array:
        """Standard deviation of the prior, []."""
        return jnp.sqrt(self.weights @ (self.sds**2 + (self.means - self.mean) ** 2))

    def log_components(self, x: Array, s: Array) -> Array:
        """Log marginal density of x under every component, [..., K]."""
        spread = jnp.hypot(s[..., None], self.sds)
        return log_density((x[..., None] - self.means) / spread) - jnp.log(spread)

    def log_marginal(self, x: Array, s: Array) -> Array:
        """Log marginal density of x, [...]."""
        if len(self.weights) > _FEW:
            return logsumexp(self.log_components(x, s) + _log(self.weights), axis=-1)
        parts = []
        for weight, center, sd in zip(_log(self.weights), self.means, self.sds, strict=True):
            spread = jnp.hypot(s, sd)
            parts.append(log_density((x - center) / spread) - jnp.log(spread) + weight)
        return log_sum(parts)

    @full_precision.products
    def marginal_below(self, t: Array, s: Array) -> Array:
        """Marginal probability that an estimate of standard error s is at most t, [...]."""
        spread = jnp.hypot(s[..., None], self.sds)
        return ndtr((t[..., None] - self.means) / spread) @ self.weights

    def moments(self, x: Array, s: Array) -> tuple[Array, Array]:
        """Posterior mean and standard deviation, [...] each."""
        p, centers, deviations = self.posterior(x, s)
        mean = (p * centers).sum(axis=-1)
        return mean, jnp.sqrt((p * (deviations**2 + (centers - mean[..., None]) ** 2)).sum(axis=-1))

    def below(self, t: Array, x: Array, s: Array, *, strictly: bool = False) -> Array:
        """Posterior probability that theta is at most t, or below it, [...]."""
        p, centers, deviations = self.posterior(x, s)
        off = t[..., None] - centers
        smooth = deviations > 0
        share = erfc(-(0.5**0.5) * off / jnp.where(smooth, deviations, 1)) / 2  # four times as fast as ndtr
        return (p * jnp.where(smooth, share, off > 0 if strictly else off >= 0)).sum(axis=-1)

    def bracket(self, x: Array, s: Array) -> tuple[Array, Array]:
        """Numbers between which theta lies, given x, but for a probability below the rounding error."""
        p, centers, deviations = self.posterior(x, s)
        low, high = centers - REACH * deviations, centers + REACH * deviations
        margin = jnp.finfo(x.dtype).eps * (1 + REACH) * jnp.maximum(jnp.abs(low), jnp.abs(high))
        return jnp.where(p > 0, low - margin, jnp.inf).min(-1), jnp.where(p > 0, high + margin, -jnp.inf).max(-1)

    def nearest_atom(self, t: Array) -> Array:
        """The place of the atom nearest to t, [...]; infinite if the prior has none."""
        atoms = jnp.where((self.sds == 0) & (self.weights > 0), self.means, jnp.inf)
        return atoms[jnp.abs(t[..., None] - atoms).argmin(axis=-1)]

    def sample(self, key: Key, x: Array, s: Array) -> Array:
        """One posterior draw of every theta, [...]."""
        of_kind, of_place = jax.random.split(key)
        p, centers, deviations = self.posterior(x, s)
        kind = jax.random.categorical(of_kind, _log(p))[..., None]
        center, deviation = (jnp.take_along_axis(of, kind, axis=-1)[..., 0] for of in (centers, deviations))
        return center + deviation * jax.random.normal(of_place, x.shape, x.dtype)

    def draw(self, key: Key, shape: tuple[int, ...]) -> Array:
        """Draws from the prior itself, [shape]."""
        of_kind, of_place = jax.random.split(key)
        kind = jax.random.categorical(of_kind, _log(self.weights), shape=shape)
        return self.means[kind] + self.sds[kind] * jax.random.normal(of_place, shape, self.means.dtype)

    def mirrored(self) -> Self:
        """The prior of -theta."""
        return self._replace(means=-self.means)

    def posterior(self, x: Array, s: Array) -> tuple[Array, Array, Array]:
        """Weights, means and standard deviations of the posterior's components, [..., K] each."""
        p = jax.nn.softmax(self.log_components(x, s) + _log(self.weights), axis=-1)
        spread = jnp.hypot(s[..., None], self.sds)
        centers = self.means + (self.sds / spread) ** 2 * (x[..., None] - self.means)
        return p, centers, self.sds * (s[..., None] / spread)


def _log(weights: Array) -> Array:
    return jnp.where(weights > 0, jnp.log(jnp.where(weights > 0, weights, 1)), -jnp.inf)

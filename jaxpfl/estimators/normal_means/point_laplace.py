r"""A spike and a Laplace slab as prior, and its posterior given :math:`x \sim N(\theta, s^2)`.

theta - c is zero with probability pi_0, and otherwise Laplace with scale b. With u = (x - c) / s and r = s / b, the two
halves of the slab have the marginal densities

.. math:: \frac{1}{2b} \phi(u)\, M(r \mp u), \qquad M(t) = \Phi(-t) / \phi(t),

and theta - c given x is in the upper one N(x - c - s r, s^2) truncated to (0, inf); the lower one is its mirror image.

Reference: Johnstone and Silverman 2004, "Needles and straw in haystacks: Empirical Bayes estimates of possibly sparse
sequences", section 2.3.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.scipy.special import ndtr

from jaxpfl.core.types import Array, Key
from jaxpfl.estimators.intervals import bisect
from jaxpfl.estimators.normal_means import tails
from jaxpfl.estimators.normal_means.normal_mixture import REACH


class PointLaplace(NamedTuple):
    """A spike and a Laplace slab.

    Attributes:
      null: pi_0, [].
      center: c, [].
      scale: b, [], above zero.
    """

    null: Array
    center: Array
    scale: Array

    @property
    def mean(self) -> Array:
        """Mean of the prior, []."""
        return self.center

    @property
    def sd(self) -> Array:
        """Standard deviation of the prior, []."""
        return self.scale * jnp.sqrt(2 * (1 - self.null))

    def log_marginal(self, x: Array, s: Array) -> Array:
        """Log marginal density of x, [...]."""
        return tails.log_sum(self._log_parts(x, s))

    def marginal_below(self, t: Array, s: Array) -> Array:
        """Marginal probability that an estimate of standard error s is at most t, [...]."""
        u, r = (t - self.center) / s, s / self.scale
        upper, lower = (jnp.exp(_log_half(sign * u, r)) for sign in (1, -1))
        # By parts: E Phi(u - theta / s) over the slab.
        return ndtr(u) + (1 - self.null) / 2 * (lower - upper)

    def moments(self, x: Array, s: Array) -> tuple[Array, Array]:
        """Posterior mean and standard deviation, [...] each."""
        none, up, down = self._shares(x, s)
        upper, lower = (tails.truncated(end) for end in self._ends(x, s))
        mean = up * upper.excess - down * lower.excess  # in units of s
        within = up * upper.variance + down * lower.variance
        between = none * mean**2 + up * (upper.excess - mean) ** 2 + down * (lower.excess + mean) ** 2
        return self.center + s * mean, s * jnp.sqrt(within + between)

    def below(self, t: Array, x: Array, s: Array, *, strictly: bool = False) -> Array:
        """Posterior probability that theta is at most t, or below it, [...]."""
        (none, up, down), (above_end, below_end) = self._shares(x, s), self._ends(x, s)
        at = (t - self.center) / s
        above = tails.share_beyond(above_end, jnp.maximum(at, 0))
        under = tails.share_beyond(below_end, jnp.maximum(-at, 0))
        atom = at > 0 if strictly else at >= 0
        return none * atom + up * jnp.where(at > 0, 1 - above, 0) + down * jnp.where(at < 0, under, 1)

    def bracket(self, x: Array, s: Array) -> tuple[Array, Array]:
        """Numbers between which theta lies, given x, but for a probability below the rounding error."""
        reach = REACH * s
        shift = s * (s / self.scale)
        return (
            jnp.minimum(self.center, jnp.minimum(x + shift, self.center)) - reach,
            jnp.maximum(self.center, jnp.maximum(x - shift, self.center)) + reach,
        )

    def nearest_atom(self, t: Array) -> Array:
        """The place of the spike, [...]; infinite without one."""
        return jnp.broadcast_to(jnp.where(self.null > 0, self.center, jnp.inf), t.shape)

    def sample(self, key: Key, x: Array, s: Array) -> Array:
        """One posterior draw of every theta, [...]."""
        of_part, of_place = jax.random.split(key)
        part = jax.random.categorical(of_part, jnp.stack(self._log_parts(x, s), axis=-1))
        left = jax.random.uniform(of_place, x.shape, x.dtype)
        up, down = self._ends(x, s)
        end = jnp.where(part == 1, up, down)
        reach = REACH + jnp.maximum(-end, 0)
        more = bisect(lambda more: tails.share_beyond(end, more) > left, jnp.zeros_like(x), reach)
        return self.center + jnp.where(part == 0, 0, jnp.where(part == 1, more, -more) * s)

    def draw(self, key: Key, shape: tuple[int, ...]) -> Array:
        """Draws from the prior itself, [shape]."""
        of_part, of_place = jax.random.split(key)
        slab = self.scale * jax.random.laplace(of_place, shape, self.scale.dtype)
        return self.center + jnp.where(jax.random.bernoulli(of_part, self.null, shape), 0, slab)

    def mirrored(self) -> PointLaplace:
        """The prior of -theta."""
        return self._replace(center=-self.center)

    def _log_parts(self, x: Array, s: Array) -> tuple[Array, Array, Array]:
        """Log of weight times marginal density of the spike, and the slab's upper and lower half, [...] each."""
        u, r = (x - self.center) / s, s / self.scale
        slab = jnp.log1p(-self.null) - jnp.log(2 * self.scale)
        spike = jnp.log(self.null) + tails.log_density(u) - jnp.log(s)
        return spike, slab + _log_half(u, r), slab + _log_half(-u, r)

    def _shares(self, x: Array, s: Array) -> list[Array]:
        """Posterior probabilities of the spike and both halves, [...] each."""
        parts = self._log_parts(x, s)
        whole = tails.log_sum(parts)
        return [jnp.exp(part - whole) for part in parts]

    def _ends(self, x: Array, s: Array) -> tuple[Array, Array]:
        """Distance of the truncation from each half's center in units of s, positive where the center is cut off."""
        u, r = (x - self.center) / s, s / self.scale
        return r - u, r + u


def _log_half(u: Array, r: Array) -> Array:
    """Logarithm of phi(u) M(r - u), of which either factor may leave the range of floats."""
    t = r - u
    far = jnp.minimum(t, 0)  # exp(r^2/2 - r u) Phi(-t) where t < 0
    near = jnp.maximum(t, 0)
    return jnp.where(t > 0, -(u**2) / 2 + tails.log_mills(near), r * (r / 2 - u) + tails.log_above(far))

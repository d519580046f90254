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
from jax.scipy.special import logsumexp, ndtr

from jaxpfl.estimators.intervals import bisect
from jaxpfl.estimators.normal_means import tails
from jaxpfl.estimators.normal_means.normal_mixture import REACH
from jaxpfl.types import Array, Key


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
        return logsumexp(self._log_parts(x, s), axis=-1)

    def marginal_below(self, t: Array, s: Array) -> Array:
        """Marginal probability that an estimate of standard error s is at most t, [...]."""
        u, r = (t - self.center) / s, s / self.scale
        upper, lower = (jnp.exp(_log_half(sign * u, r)) for sign in (1, -1))
        # By parts: E Phi(u - theta / s) over the slab.
        return ndtr(u) + (1 - self.null) / 2 * (lower - upper)

    def moments(self, x: Array, s: Array) -> tuple[Array, Array]:
        """Posterior mean and standard deviation, [...] each."""
        p, ends = self._shares(x, s), self._ends(x, s)
        of = [tails.truncated(end) for end in ends]
        centers = jnp.stack([jnp.zeros_like(x), s * of[0].excess, -s * of[1].excess], axis=-1)
        variances = jnp.stack([jnp.zeros_like(x), of[0].variance, of[1].variance], axis=-1)
        mean = (p * centers).sum(axis=-1)
        within = (p * variances).sum(axis=-1)
        between = (p * ((centers - mean[..., None]) / s[..., None]) ** 2).sum(axis=-1)
        return self.center + mean, s * jnp.sqrt(within + between)

    def below(self, t: Array, x: Array, s: Array, *, strictly: bool = False) -> Array:
        """Posterior probability that theta is at most t, or below it, [...]."""
        p, (up, down) = self._shares(x, s), self._ends(x, s)
        at = (t - self.center) / s
        above = tails.share_beyond(up, jnp.maximum(at, 0))
        under = tails.share_beyond(down, jnp.maximum(-at, 0))
        atom = at > 0 if strictly else at >= 0
        return p[..., 0] * atom + p[..., 1] * jnp.where(at > 0, 1 - above, 0) + p[..., 2] * jnp.where(at < 0, under, 1)

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
        part = jax.random.categorical(of_part, self._log_parts(x, s))
        left = jax.random.uniform(of_place, x.shape, x.dtype)
        up, down = self._ends(x, s)
        end = jnp.where(part == 1, up, down)
        reach = REACH + jnp.maximum(-end, 0)
        more = bisect(lambda more: tails.share_beyond(end, more) > left, jnp.zeros_like(x), reach)
        return self.center + jnp.where(part == 0, 0, jnp.where(part == 1, more, -more) * s)

    def _log_parts(self, x: Array, s: Array) -> Array:
        """Log of weight times marginal density of the spike, and the slab's upper and lower half, [..., 3]."""
        u, r = (x - self.center) / s, s / self.scale
        slab = jnp.log1p(-self.null) - jnp.log(2 * self.scale)
        parts = [
            jnp.log(self.null) + tails.log_density(u) - jnp.log(s),
            slab + _log_half(u, r),
            slab + _log_half(-u, r),
        ]
        return jnp.stack(parts, axis=-1)

    def _shares(self, x: Array, s: Array) -> Array:
        return jax.nn.softmax(self._log_parts(x, s), axis=-1)

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

"""Posteriors of normal means under a fitted prior, and questions to them."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.scipy.special import ndtri

from jaxpfl.core.types import Array, Key, Scalar
from jaxpfl.estimators import inputs
from jaxpfl.estimators.frames import Labels, frame
from jaxpfl.estimators.intervals import bisect
from jaxpfl.estimators.normal_means.normal_mixture import NormalMixture
from jaxpfl.estimators.normal_means.point_laplace import PointLaplace
from jaxpfl.estimators.normal_means.refits import Refits

AT_ONCE = 4096
"""Clients whose posteriors, of as many components as the prior, are in memory at once."""


class NormalMeans(NamedTuple):
    """Empirical Bayes posteriors of m clients' means. The prior counts as known: its own uncertainty is left out.

    Attributes:
      x, s: the estimates and their standard errors, [m] each.
      prior: the fitted one.
      mean: posterior means, the personalised estimates, [m].
      sd: posterior standard deviations, [m].
      lfsr: local false sign rates, min(P(theta <= 0), P(theta >= 0)), [m].
      shrinkage: 1 - sd^2 / s^2, [m]: the share of a small change of x that the posterior mean does not follow, and
        s^2 / (s^2 + t^2) under a normal prior. Below zero where the mean moves by more than x, as between two atoms.
      log_marginal: log likelihood of all estimates, [].
      slack: for the priors whose weights are on a grid, by how much at most the mean log likelihood of a client is
        below that of the grid's best weights, []; else zero.
      labels: of the clients, where they came in a frame.
    """

    x: Array
    s: Array
    prior: NormalMixture | PointLaplace | Refits
    mean: Array
    sd: Array
    lfsr: Array
    shrinkage: Array
    log_marginal: Array
    slack: Array
    labels: Labels | None = None

    def to_frame(self, level: float | None = None) -> Any:
        """A pandas frame of what is known of each client; with the ends of the intervals where a level is given."""
        return frame(self, len(self.x), level)

    def below(self, t: Array | Scalar) -> Array:
        """Posterior probability that theta is at most t ([] or [m]), [m]."""
        at = jnp.broadcast_to(jnp.asarray(t, self.x.dtype), self.x.shape)
        return in_blocks(lambda t, x, s: self.prior.below(t, x, s), at, self.x, self.s)

    def quantile(self, p: Scalar) -> Array:
        """Posterior quantile, the least t with P(theta <= t) >= p, [m]."""
        inputs.inside("p", p)

        def of(x: Array, s: Array) -> Array:
            near = bisect(lambda t: self.prior.below(t, x, s) < p, *self.prior.bracket(x, s))
            # Of an atom the place itself: beside it by a rounding error, an interval would miss it.
            atom = self.prior.nearest_atom(near)
            there = (self.prior.below(atom, x, s, strictly=True) < p) & (self.prior.below(atom, x, s) >= p)
            return jnp.where(there, atom, near)

        return in_blocks(of, self.x, self.s)

    def interval(self, level: Scalar = 0.95) -> tuple[Array, Array]:
        """Ends of the equal-tailed credible intervals, [m] each.

        They are right on average over clients if the prior is of the fitted family and the clients are many;
        `robust_intervals` do not ask for the first, `learned_gaussian` not for the second.
        """
        inputs.level(level)
        return self.quantile((1 - level) / 2), self.quantile((1 + level) / 2)

    def sample(self, key: Key) -> Array:
        """One draw of every client's mean from its posterior, [m]."""
        return self.prior.sample(key, self.x, self.s)

    @property
    def risk(self) -> Array:
        """Stein's unbiased estimate of the mean squared error of `mean`, [], without the cost of fitting the prior."""
        return self.risks.mean()

    @property
    def risks(self) -> Array:
        """Terms of `risk`, (mean - x)^2 + 2 sd^2 - s^2, as sd^2 / s^2 is the derivative of the posterior mean, [m]."""
        return (self.mean - self.x) ** 2 + 2 * self.sd**2 - self.s**2

    @property
    def scores(self) -> Array:
        """Normal scores of the estimates under their fitted marginal distributions: N(0, 1) if the prior holds, [m]."""
        below = in_blocks(self.prior.marginal_below, self.x, self.s)
        above = in_blocks(self.prior.mirrored().marginal_below, -self.x, self.s)
        tail = jnp.maximum(jnp.minimum(below, above), jnp.finfo(below.dtype).tiny)  # far out both round to zero
        return jnp.where(below < above, 1, -1) * ndtri(tail)


def posterior(prior: NormalMixture | PointLaplace | Refits, x: Array, s: Array, slack: Scalar = 0.0) -> NormalMeans:
    """Posteriors under a known prior, for clients new to it as well."""

    def of(x: Array, s: Array) -> tuple[Array, ...]:
        zero = jnp.zeros_like(x)
        # Complementary sides each by itself: 1 - P would round a small probability away.
        sign = jnp.minimum(prior.below(zero, x, s), prior.mirrored().below(zero, -x, s))
        return *prior.moments(x, s), sign, prior.log_marginal(x, s)

    mean, sd, lfsr, fit = in_blocks(of, x, s)
    return NormalMeans(x, s, prior, mean, sd, lfsr, 1 - (sd / s) ** 2, fit.sum(), jnp.asarray(slack, x.dtype))


def in_blocks(function, *arrays: Array):
    """A function of [n] arrays over all m clients, `AT_ONCE` of them at a time."""
    m = len(arrays[0])
    if m <= AT_ONCE:
        return function(*arrays)
    return jax.tree.map(
        lambda of: of.reshape(-1)[:m],
        jax.lax.map(
            lambda block: function(*block),
            tuple(jnp.pad(of, (0, -m % AT_ONCE), mode="edge").reshape(-1, AT_ONCE) for of in arrays),
        ),
    )

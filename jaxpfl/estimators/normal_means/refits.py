r"""Priors that were fitted again and again, mixed as far as each client's posterior:

.. math:: \frac1B \sum_b p(\theta_i \mid x_i, G_b).

Both classes stand for a prior in `NormalMeans`. Every refit has the same weight for every client, whatever its
likelihood, so that this is no mixture of priors.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxpfl.core import full_precision
from jaxpfl.core.types import Array, Key
from jaxpfl.estimators.normal_means.normal_mixture import NormalMixture
from jaxpfl.estimators.normal_means.point_laplace import PointLaplace


class Refits(NamedTuple):
    """Any priors.

    Attributes:
      priors: a `NormalMixture` or `PointLaplace` whose leaves have a leading [B].
    """

    priors: NormalMixture | PointLaplace

    @property
    def mean(self) -> Array:
        """Mean over refits of the prior's mean, []."""
        return jax.vmap(lambda prior: prior.mean)(self.priors).mean()

    @property
    def sd(self) -> Array:
        """Root of the mean over refits of the prior's variance, []."""
        return jnp.sqrt(jax.vmap(lambda prior: prior.sd**2)(self.priors).mean())

    def below(self, t: Array, x: Array, s: Array, *, strictly: bool = False) -> Array:
        """Posterior probability that theta is at most t, or below it, [...]."""
        return self._each(lambda prior: prior.below(t, x, s, strictly=strictly)).mean(axis=0)

    def bracket(self, x: Array, s: Array) -> tuple[Array, Array]:
        """Numbers between which theta lies, given x, but for a probability below the rounding error."""
        low, high = self._each(lambda prior: prior.bracket(x, s))
        return low.min(axis=0), high.max(axis=0)

    def nearest_atom(self, t: Array) -> Array:
        """The place of the atom nearest to t, [...]; infinite if no prior has one."""
        atoms = self._each(lambda prior: prior.nearest_atom(t))
        near = jnp.abs(t - atoms).argmin(axis=0)
        return jnp.take_along_axis(atoms, near[None], axis=0)[0]

    def moments(self, x: Array, s: Array) -> tuple[Array, Array]:
        """Posterior mean and standard deviation, [...] each."""
        means, sds = self._each(lambda prior: prior.moments(x, s))
        mean = means.mean(axis=0)
        return mean, jnp.sqrt((sds**2 + (means - mean) ** 2).mean(axis=0))

    def log_marginal(self, x: Array, s: Array) -> Array:
        """Log of the mean marginal density of x, [...]."""
        each = self._each(lambda prior: prior.log_marginal(x, s))
        return jax.scipy.special.logsumexp(each, axis=0) - jnp.log(len(each))

    def marginal_below(self, t: Array, s: Array) -> Array:
        """Mean marginal probability that an estimate of standard error s is at most t, [...]."""
        return self._each(lambda prior: prior.marginal_below(t, s)).mean(axis=0)

    def sample(self, key: Key, x: Array, s: Array) -> Array:
        """One posterior draw of every theta under one of the priors, [...]."""
        of_refit, of_theta = jax.random.split(key)
        chosen = jax.random.randint(of_refit, (), 0, len(jax.tree.leaves(self.priors)[0]))
        return jax.tree.map(lambda leaf: leaf[chosen], self.priors).sample(of_theta, x, s)

    def mirrored(self) -> Refits:
        """The priors of -theta."""
        return Refits(self.priors.mirrored())

    def _each(self, function: Any) -> Any:
        return jax.vmap(function)(self.priors)


class GridRefits(NormalMixture):
    """Normal mixtures of the same components, of which only the weights [B, K] differ."""

    @property
    @full_precision.products
    def mean(self) -> Array:
        """Mean over refits of the prior's mean, []."""
        return (self.weights @ self.means).mean()

    @property
    @full_precision.products
    def sd(self) -> Array:
        """Root of the mean over refits of the prior's variance, []."""
        means = self.weights @ self.means
        return jnp.sqrt((self.weights @ (self.sds**2 + self.means**2) - means**2).mean())

    def log_marginal(self, x: Array, s: Array) -> Array:
        """Log of the mean marginal density of x, [...]."""
        return self._mean_prior().log_marginal(x, s)

    def marginal_below(self, t: Array, s: Array) -> Array:
        """Mean marginal probability that an estimate of standard error s is at most t, [...]."""
        return self._mean_prior().marginal_below(t, s)

    def sample(self, key: Key, x: Array, s: Array) -> Array:
        """One posterior draw of every theta under one of the priors, [...]."""
        of_refit, of_theta = jax.random.split(key)
        chosen = jax.random.randint(of_refit, (), 0, len(self.weights))
        return NormalMixture(self.weights[chosen], self.means, self.sds).sample(of_theta, x, s)

    def nearest_atom(self, t: Array) -> Array:
        """The place of the atom nearest to t, [...]; infinite if no prior has one."""
        return self._mean_prior().nearest_atom(t)

    @full_precision.products
    def posterior(self, x: Array, s: Array) -> tuple[Array, Array, Array]:
        """Mean weights over refits, means and standard deviations of the posterior's components, [..., K] each."""
        logs = self.log_components(x, s)
        L = jnp.exp(logs - logs.max(axis=-1, keepdims=True))
        # The mean over b of pi_bk L_k / (L pi_b): two products of matrices.
        _, centers, deviations = self._mean_prior().posterior(x, s)
        tiny = jnp.finfo(L.dtype).tiny
        return L * ((1 / jnp.maximum(L @ self.weights.T, tiny)) @ self.weights) / len(self.weights), centers, deviations

    def _mean_prior(self) -> NormalMixture:
        return NormalMixture(self.weights.mean(axis=0), self.means, self.sds)

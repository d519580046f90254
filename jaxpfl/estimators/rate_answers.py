"""Posteriors of probabilities and of rates, under a Beta or a Gamma prior or a mixture, and questions to them."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax.scipy.special import betainc, gammainc, logsumexp

from jaxpfl.estimators import inputs
from jaxpfl.estimators.frames import Labels, frame
from jaxpfl.estimators.intervals import bisect
from jaxpfl.estimators.normal_means.answer import in_blocks
from jaxpfl.types import Array, Scalar


class Rates(NamedTuple):
    """Posteriors of m clients' probabilities or rates. The prior counts as known.

    Attributes:
      events, size: successes and trials, or counts and exposure, [m] each.
      bounded: whether they are probabilities.
      prior_mean: mu, [].
      prior_size: n_0 or e_0, []; infinite without spread.
      mean: posterior means, [m].
      sd: posterior standard deviations, [m].
      shrinkage: n_0 / (n_0 + n_i), [m].
      log_marginal: log likelihood of all counts, []; with weights of mean one where some were given.
      labels: of the clients, where they came in a frame.
    """

    events: Array
    size: Array
    bounded: bool | Array
    prior_mean: Array
    prior_size: Array
    mean: Array
    sd: Array
    shrinkage: Array
    log_marginal: Array
    labels: Labels | None = None

    def to_frame(self, level: float | None = None) -> Any:
        """A pandas frame of what is known of each client; with the ends of the intervals where a level is given."""
        return frame(self, len(self.mean), level)

    def quantile(self, p: Scalar) -> Array:
        """Posterior quantile, [m]."""
        inputs.inside("p", p)
        finite = jnp.where(jnp.isinf(self.prior_size), 1, self.prior_size)
        first = finite * self.prior_mean + self.events
        rest = finite * (1 - self.prior_mean) + self.size - self.events
        scale = finite + self.size

        def below(t: Array) -> Array:
            share = betainc(first, jnp.where(self.bounded, rest, 1), jnp.clip(t, 0, 1))
            return jnp.where(self.bounded, share, gammainc(first, t * scale)) < p

        most = jnp.where(self.bounded, 1, self.mean + 40 * self.sd + 40 / scale)
        found = bisect(below, jnp.zeros_like(self.mean), most)
        return jnp.where(jnp.isinf(self.prior_size), self.prior_mean, found)

    def interval(self, level: Scalar = 0.95) -> tuple[Array, Array]:
        """Ends of the equal-tailed credible intervals, [m] each; `learned_bernoulli` and `learned_poisson`
        do not take the prior for known."""
        inputs.level(level)
        return self.quantile((1 - level) / 2), self.quantile((1 + level) / 2)


class Mixture(Protocol):
    """Mixture of K components, as far as posteriors need it; z and n are a client's counts."""

    @property
    def weights(self) -> Array:
        """pi_k, [K], which sum to one."""
        ...

    @property
    def means(self) -> Array:
        """Means of the components, [K]."""
        ...

    def log_constant(self, z: Array, n: Array, /) -> Array:
        """Part of the log probability of the counts that no component changes, [...]."""
        ...

    def log_components(self, z: Array, n: Array, /) -> Array:
        """The rest of it under every component, [..., K]."""
        ...

    def components(self, z: Array, n: Array, /) -> tuple[Array, Array]:
        """Posterior means and variances of every component, [..., K] each."""
        ...

    def quantile(self, p: Scalar, shares: Array, z: Array, n: Array, /) -> Array:
        """Posterior quantile from the components' shares [..., K], [...]."""
        ...


class RateMixture(NamedTuple):
    """Posteriors of m clients' probabilities, or rates, under a mixture. The prior counts as known.

    Attributes:
      events, size: successes and trials, or counts and exposure, [m] each.
      prior: the fitted one.
      mean: posterior means, [m].
      sd: posterior standard deviations, [m].
      log_marginal: log likelihood of all counts, [].
      slack: for atoms, by how much at most the mean log likelihood of a client is below that of the grid's best
        weights, []; else zero.
      labels: of the clients, where they came in a frame.
    """

    events: Array
    size: Array
    prior: Any
    mean: Array
    sd: Array
    log_marginal: Array
    slack: Array
    labels: Labels | None = None

    def to_frame(self, level: float | None = None) -> Any:
        """A pandas frame of what is known of each client; with the ends of the intervals where a level is given."""
        return frame(self, len(self.mean), level)

    def membership(self) -> Array:
        """Posterior probabilities of the components, [m, K]."""
        return shares_of(self.prior, self.events, self.size)

    def quantile(self, p: Scalar) -> Array:
        """Posterior quantile, [m]."""
        inputs.inside("p", p)

        def of(z: Array, n: Array) -> Array:
            return self.prior.quantile(p, shares_of(self.prior, z, n), z, n)

        return in_blocks(of, self.events, self.size)

    def interval(self, level: Scalar = 0.95) -> tuple[Array, Array]:
        """Ends of the equal-tailed credible intervals, [m] each."""
        inputs.level(level)
        return self.quantile((1 - level) / 2), self.quantile((1 + level) / 2)


def shares_of(prior: Mixture, z: Array, n: Array) -> Array:
    """Posterior probabilities of the components, [..., K]."""
    return jax.nn.softmax(prior.log_components(z, n) + jnp.log(prior.weights), axis=-1)


def log_marginal(prior: Mixture, z: Array, n: Array) -> Array:
    """Log probability of each client's counts under a mixture, [...]."""
    return logsumexp(prior.log_components(z, n) + jnp.log(prior.weights), axis=-1) + prior.log_constant(z, n)

"""Posteriors of probabilities and of rates, under a Beta or a Gamma prior or a mixture, and questions to them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.scipy.special import betainc, gammainc, gammaincc, logsumexp

from jaxpfl.core.types import Array, Key, Scalar
from jaxpfl.estimators import inputs
from jaxpfl.estimators.frames import Labels, frame
from jaxpfl.estimators.intervals import bisect
from jaxpfl.estimators.normal_means.answer import in_blocks
from jaxpfl.estimators.normal_means.ranks import ranks_of
from jaxpfl.support.errors import JaxpflError


def to_frame(
    self: Rates | RateMixture, level: float | None = None, *, threshold: Any = None, key: Key | None = None
) -> Any:
    """A pandas frame of what is known of each client; with the ends of the intervals where a level is given.

    Args:
      level: of the intervals, and of those of the ranks, which are at .95 without it.
      threshold: of the column ``exceedance``; the population's mean unless given.
      key: of the draws of the columns ``rank``, ``rank_low`` and ``rank_high``, which are left out without it.
    """
    return frame(self, len(self.mean), level, more=_questions(self, level, threshold, key))


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

    to_frame = to_frame

    def quantile(self, p: Scalar) -> Array:
        """Posterior quantile, [m]."""
        inputs.inside("p", p)
        first, rest, scale = self._parameters()

        def below(t: Array) -> Array:
            share = betainc(first, jnp.where(self.bounded, rest, 1), jnp.clip(t, 0, 1))
            return jnp.where(self.bounded, share, gammainc(first, t * scale)) < p

        most = jnp.where(self.bounded, 1, self.mean + 40 * self.sd + 40 / scale)
        found = bisect(below, jnp.zeros_like(self.mean), most)
        return jnp.where(jnp.isinf(self.prior_size), self.prior_mean, found)

    def exceedance(self, threshold: Any = None) -> Array:
        """Posterior probability of more than a threshold, [m]; without spread 0 or 1, and 0 at the mean of all.

        Args:
          threshold: [] or [m], the population's mean unless given.

        Raises:
          JaxpflError: for a threshold that is no finite number of at least zero, or above one for probabilities.
        """
        alike = jnp.isinf(self.prior_size)
        t = _threshold(threshold, self.prior_mean, self.bounded, self.mean, self.labels)
        first, rest, scale = self._parameters()
        # Of the upper tail its own function: one less the lower tail would round a small probability away.
        share = betainc(jnp.where(self.bounded, rest, 1), first, jnp.clip(1 - t, 0, 1))
        above = jnp.where(self.bounded, share, gammaincc(first, t * scale))
        return jnp.where(alike, (self.prior_mean > t).astype(above.dtype), above)

    def sample(self, key: Key) -> Array:
        """One draw of every client's probability or rate from its posterior, [m]."""
        first, rest, scale = self._parameters()
        of_share, of_rate = jax.random.split(key)
        share = jax.random.beta(of_share, first, jnp.where(self.bounded, rest, 1))
        drawn = jnp.where(self.bounded, share, jax.random.gamma(of_rate, first) / scale)
        return jnp.where(jnp.isinf(self.prior_size), self.prior_mean, drawn)

    def _parameters(self) -> tuple[Array, Array, Array]:
        """Both parameters of a Beta posterior, and the size of a Gamma one, whose shape is the first, [m] each."""
        finite = jnp.where(jnp.isinf(self.prior_size), 1, self.prior_size)
        first = finite * self.prior_mean + self.events
        return first, finite * (1 - self.prior_mean) + self.size - self.events, finite + self.size

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

    def exceedance(self, t: Array, z: Array, n: Array, /) -> Array:
        """Posterior probability of more than t [...] under every component, [..., K]."""
        ...

    def draw(self, key: Key, kind: Array, z: Array, n: Array, /) -> Array:
        """Posterior draws under the component of each client, kind [...], [...]."""
        ...

    @property
    def bounded(self) -> bool:
        """True of probabilities, false of rates."""
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

    to_frame = to_frame

    @property
    def prior_mean(self) -> Array:
        """Mean of the prior, []."""
        return (self.prior.weights * self.prior.means).sum()

    def membership(self) -> Array:
        """Posterior probabilities of the components, [m, K]."""
        return shares_of(self.prior, self.events, self.size)

    def quantile(self, p: Scalar) -> Array:
        """Posterior quantile, [m]."""
        inputs.inside("p", p)

        def of(z: Array, n: Array) -> Array:
            return self.prior.quantile(p, shares_of(self.prior, z, n), z, n)

        return in_blocks(of, self.events, self.size)

    def exceedance(self, threshold: Any = None) -> Array:
        """Posterior probability of more than a threshold, [m]; an atom at the threshold is not above it.

        Args:
          threshold: [] or [m], the mean of the prior unless given, which of an NPMLE's atoms may lie beside one.

        Raises:
          JaxpflError: as that of `Rates`.
        """
        t = _threshold(threshold, self.prior_mean, self.prior.bounded, self.mean, self.labels)

        def of(t: Array, z: Array, n: Array) -> Array:
            return (shares_of(self.prior, z, n) * self.prior.exceedance(t, z, n)).sum(axis=-1)

        return in_blocks(of, t, self.events, self.size)

    def sample(self, key: Key) -> Array:
        """One draw of every client's probability or rate from its posterior, [m]."""

        def kind(p: Array, z: Array, n: Array) -> Array:
            reached = jnp.cumsum(shares_of(self.prior, z, n), axis=-1)
            return (reached < p[..., None] * reached[..., -1:]).sum(axis=-1)

        return self.drawn(key, lambda p: in_blocks(kind, p, self.events, self.size))

    def drawn(self, key: Key, kinds: Callable[[Array], Array]) -> Array:
        """The draw of `sample` where each client's component is found otherwise, [m].

        Args:
          key: of the draw.
          kinds: shares p within (0, 1] of every client's cumulated probabilities, [m], to the first components that
            reach them, [m].
        """
        of_kind, of_place = jax.random.split(key)
        # Never 0, at which the first atom would be drawn also where it has no weight.
        p = 1 - jax.random.uniform(of_kind, self.mean.shape, self.mean.dtype)
        return self.prior.draw(of_place, kinds(p), self.events, self.size)

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


def check_threshold(t: Any, *, bounded: bool) -> None:
    """Check known thresholds of probabilities, or of rates where they are not bounded.

    Raises:
      JaxpflError: the first bad one, and what is allowed.
    """
    t = np.ravel(t)
    bad = ~np.isfinite(t) | (t < 0) | (bounded & (t > 1))
    if bad.any():
        allowed = "from 0 to 1 for probabilities" if bounded else "finite and at least 0"
        raise JaxpflError(f"threshold must be {allowed}, got {t[int(np.argmax(bad))]}")


def _threshold(given: Any, mean: Array, bounded: Any, like: Array, labels: Labels | None) -> Array:
    """A threshold of each client, the mean of all unless given, [m].

    Raises:
      JaxpflError: for one that is no such number, where its value is known.
    """
    if given is None:
        return jnp.broadcast_to(mean, like.shape)
    if labels is not None:
        given = inputs.by_names("threshold", given, labels.index, None)
    t = inputs.numbers("threshold", given, "one, or one for each client")
    if t.shape not in ((), like.shape):
        raise JaxpflError(f"threshold must be one number, or one for each of {len(like)} clients, got shape {t.shape}")
    if not isinstance(t, Tracer):
        check_threshold(t, bounded=not isinstance(bounded, Tracer) and bool(bounded))
    return jnp.broadcast_to(jnp.asarray(t, like.dtype), like.shape)


def _questions(answer: Rates | RateMixture, level: float | None, threshold: Any, key: Key | None) -> dict[str, Array]:
    """Columns of a frame beside the fields of an answer."""
    found = {"exceedance": answer.exceedance(threshold)}
    if key is not None:
        placed = ranks_of(answer.sample, key, level=0.95 if level is None else level)
        found |= {"rank": placed.expected, "rank_low": placed.low, "rank_high": placed.high}
    return found

r"""Collaborative estimation with a discrete population: X_ij ~ N(theta_i, sx2 I), P(theta_i = mu_l) = p_l, k centers.

If the probabilities p and the centers mu are known, the optimal estimate is (Theorem 6)

.. math:: \hat\theta_i = \sum_l r_{il} \mu_l, \qquad
   r_{il} \propto p_l \exp\Big(-\frac{\sum_j |X_{ij} - \mu_l|^2}{2 sx^2}\Big)

If p and mu are unknown, they are fitted to the clients' messages. `em` fits them in one round, and `private` does so
under central differential privacy. `alternating` is the paper's algorithm. From its second round on, it clusters the
clients' posterior means. These are weighted means of the previous centers, so the new centers are closer to each other
than the previous centers, and the error may increase with every round.

Reference: Ozkara et al. 2023, appendix D, Theorem 6 and Algorithm 3.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxpfl.core.types import Array, Key, Scalar
from jaxpfl.estimators import clustering
from jaxpfl.estimators.base import Estimator, Samples
from jaxpfl.estimators.clustering import square_distances, within_ball
from jaxpfl.estimators.gaussian import Local
from jaxpfl.estimators.release import EXACT, Release
from jaxpfl.priors import discrete
from jaxpfl.priors.discrete import Discrete


class Mixture(NamedTuple):
    """Mixture with probabilities p [k], centers mu [k, d], and the samples' variance sx2 []."""

    p: Array
    mu: Array
    sx2: Array


class Broadcast(NamedTuple):
    """The server's broadcast: whether the server had any messages, [] bool, and the mixture fitted to them."""

    learned: Array
    mixture: Mixture


class Sent(NamedTuple):
    """A client's message.

    Attributes:
      mean: released mean of the samples, [d].
      size: number of samples n_i, [], which is public.
      scatter: sum of the samples' squared deviations from their mean, [], if sx2 is to be estimated; otherwise zero.
      scores: random numbers for k-means++, [starts, k], which are public and independent of the client's data.
    """

    mean: Array
    size: Array
    scatter: Array
    scores: Array


def posterior_mean(at: Mixture, own: Local) -> Array:
    """A client's estimate by Theorem 6 under the mixture ``at``, [d], from the mean and the number of its samples.

    Implements: Ozkara et al. 2023, equations (37) to (42); Ozkara et al. 2023, Theorem 6.
    """
    losses = own.size * square_distances(own.mean[None], at.mu)[0] / (2 * jnp.maximum(at.sx2, _TINY))
    return discrete.posterior_mean(discrete.responsibilities(at.p, losses), at.mu)


def discrete_posterior(prior: Discrete, sx2: Scalar) -> Estimator:
    """Create the estimator of Theorem 6, with known probabilities and centers; clients send no messages.

    Implements: Ozkara et al. 2023, Theorem 6.
    """
    at = Mixture(prior.p, prior.mu, jnp.asarray(sx2))
    return Estimator(
        lambda key, shared, samples: ((), Local(samples.mean, samples.size)),
        lambda key, shared, messages, sent: None,
        lambda shared, message, sent, own: posterior_mean(at, own),
    )


def em(
    components: int,
    *,
    sx2: Scalar | None = None,
    release: Release = EXACT,
    steps: int = 50,
    starts: int = 4,
    floor: Scalar = 1e-6,
    reach: Scalar = jnp.inf,
) -> Estimator:
    """Create the estimator with one round in which the server fits centers and probabilities to clients' means by EM.

    EM starts from the best of several runs of k-means++ with Lloyd's algorithm. If the release quantizes the means or
    makes them locally private, EM takes the added variance into account, and costs no further privacy.

    Args:
      components: number k of mixture components.
      sx2: variance of the samples. If None, the variance is fitted too; every message then contains a second number,
        which is neither quantized nor private.
      release: mechanism that releases a client's mean.
      steps: number of EM steps, and number of steps of Lloyd's algorithm before EM.
      starts: number of runs of k-means++.
      floor: positive lower bound on sx2.
      reach: data-independent bound on the norm of the centers, useful when messages are noisy. The fitted centers are
        projected onto the ball of this radius.
    """

    def summarize(key: Key, shared: None, samples: Samples) -> tuple[Sent, Local]:
        own = Local(samples.mean, samples.size)
        scatter = samples.scatter.sum() if sx2 is None else jnp.zeros(())
        return Sent(release.send(key, own.mean), own.size, scatter, _scores(key, starts, components)), own

    def combine(key: Key, shared: None, messages: Sent, sent: Array) -> Broadcast:
        begin = clustering.kmeans(messages.scores, messages.mean, sent, steps)
        noise = jnp.asarray(sx2) if sx2 is not None else _pooled(messages, sent, begin.centers)
        start = Mixture(*begin.prior, jnp.maximum(noise, floor))
        end = fit(start, messages, sent, release.variance, floor, steps, noise_known=sx2 is not None)
        return Broadcast(sent.any(), end._replace(mu=within_ball(end.mu, reach)))

    return Estimator(summarize, combine, _personalize)


def fit(
    start: Mixture, messages: Sent, sent: Array, sq2: Scalar, floor: Scalar, steps: int, *, noise_known: bool
) -> Mixture:
    """Run EM steps on the stacked messages, arrays [m, ...]; no step decreases the likelihood.

    A center without clients keeps its position. ``sq2`` is the variance that the release adds; it must be zero if sx2
    is fitted (``noise_known`` is false).
    """
    d = messages.mean.shape[-1]

    def step(_: Array, at: Mixture) -> Mixture:
        belongs = jnp.where(sent[:, None], jax.nn.softmax(_log_joint(at, messages, sq2), axis=1), 0)
        precise = belongs / _variance(at, messages, sq2)[:, None]  # weight messages by their precision
        weights = precise.sum(axis=0)
        total, _ = clustering.sums(messages.mean, sent, precise)
        mu = jnp.where(weights[:, None] > 0, total / jnp.where(weights > 0, weights, 1)[:, None], at.mu)
        numbers = belongs.sum(axis=0)
        p = jnp.where(numbers.sum() > 0, numbers / jnp.maximum(numbers.sum(), _TINY), at.p)
        if noise_known:
            return Mixture(p, mu, at.sx2)
        square = (belongs * square_distances(messages.mean, mu)).sum(axis=1)
        residual = jnp.where(sent, messages.scatter + messages.size * square, 0).sum()
        samples = jnp.where(sent, messages.size, 0).sum()
        return Mixture(p, mu, jnp.maximum(residual / jnp.maximum(d * samples, 1), floor))

    return jax.lax.fori_loop(0, steps, step, start)


def alternating(
    components: int, dim: int, sx2: Scalar, *, release: Release = EXACT, steps: int = 20, starts: int = 4
) -> Estimator:
    """Create the estimator of the paper's Algorithm 3, for several rounds (``base.estimate(..., rounds=T)``).

    In the first round each client sends its sample mean, and in later rounds its posterior mean (Theorem 6). In every
    round, each client releases one message, and the server clusters the messages anew by k-means.

    Implements: Ozkara et al. 2023, Algorithm 3.
    """

    def summarize(key: Key, shared: Broadcast, samples: Samples) -> tuple[Sent, Local]:
        own = Local(samples.mean, samples.size)
        theta = _personalize(shared, None, None, own)
        return Sent(release.send(key, theta), own.size, jnp.zeros(()), _scores(key, starts, components)), own

    def combine(key: Key, shared: Broadcast, messages: Sent, sent: Array) -> Broadcast:
        found = clustering.kmeans(messages.scores, messages.mean, sent, steps).prior
        return Broadcast(sent.any(), Mixture(found.p, found.mu, shared.mixture.sx2))

    nothing = Mixture(jnp.full(components, 1 / components), jnp.zeros((components, dim)), jnp.asarray(sx2, float))
    return Estimator(summarize, combine, _personalize, Broadcast(jnp.zeros((), bool), nothing))


def private(
    components: int,
    sx2: Scalar,
    *,
    radius: Scalar,
    noise: Scalar,
    steps: int = 10,
    reach: Scalar | None = None,
    soft: bool = False,
) -> Estimator:
    """Create the estimator with one round in which a trusted server fits the mixture with central differential privacy.

    The server receives the clients' means, and publishes only centers and probabilities, computed by Lloyd's algorithm
    with noisy sums (`clustering.noisy_lloyd` states the guarantees). The initial centers do not depend on the data.
    Clients compute their estimates locally, and do not publish them.

    Implements: Ozkara et al. 2023, appendix D.3.

    Args:
      components: number k of mixture components.
      sx2: variance of the samples.
      radius: clipping norm of the means, for example from `estimators.release.norm_radius`.
      noise: noise multiplier of one step, for example from `clustering.noise_multiplier`.
      steps: number of steps T.
      reach: data-independent bound on the norm of the centers; by default ``radius``.
      soft: whether a client is divided between the centers, as in EM, instead of belonging to the nearest one. This is
        better if centers are close to each other.
    """

    def summarize(key: Key, shared: None, samples: Samples) -> tuple[Local, Local]:
        own = Local(samples.mean, samples.size)
        return own, own

    def combine(key: Key, shared: None, messages: Local, sent: Array) -> Broadcast:
        of_start, of_noise = jax.random.split(key)
        begin = clustering.spread_out(of_start, radius if reach is None else reach, components, messages.mean.shape[-1])
        # n_i is public, so the variance of a client's mean at the average size is public too.
        typical = sx2 / jnp.maximum(jnp.where(sent, messages.size, 0).sum() / jnp.maximum(sent.sum(), 1), 1)
        found = clustering.noisy_lloyd(
            of_noise, begin, messages.mean, sent, radius=radius, noise=noise, steps=steps, reach=reach,
            variance=typical if soft else None,
        )  # fmt: skip
        return Broadcast(sent.any(), Mixture(*found.prior, jnp.asarray(sx2)))

    return Estimator(summarize, combine, _personalize)


def _personalize(told: Broadcast, message: Any, sent: Any, own: Local) -> Array:
    return jnp.where(told.learned, posterior_mean(told.mixture, own), own.mean)


def _variance(at: Mixture, messages: Sent, sq2: Scalar) -> Array:
    """Variance of an entry of each message about its center in the mixture ``at``, [m]."""
    return jnp.maximum(at.sx2 / jnp.maximum(messages.size, 1) + sq2, _TINY)


def _log_joint(at: Mixture, messages: Sent, sq2: Scalar) -> Array:
    """log p_l plus the exponent of N(message; mu_l, variance I), for every message and component of ``at``, [m, k]."""
    return jnp.log(at.p) - square_distances(messages.mean, at.mu) / (2 * _variance(at, messages, sq2)[:, None])


def _pooled(messages: Sent, sent: Array, centers: Array) -> Array:
    """Estimate of sx2 if every client belongs to its nearest center."""
    square = square_distances(messages.mean, centers).min(axis=1)
    residual = jnp.where(sent, messages.scatter + messages.size * square, 0).sum()
    return residual / jnp.maximum(jnp.where(sent, messages.size, 0).sum() * messages.mean.shape[-1], 1)


def _scores(key: Key, starts: int, components: int) -> Array:
    # The scores are public. Their key must differ from the release's key, because otherwise they would reveal the
    # noise.
    return jax.random.gumbel(jax.random.fold_in(key, 1), (starts, components))


_TINY = 1e-30

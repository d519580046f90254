r"""Collaborative estimation of Bernoulli probabilities: X_ij ~ Bern(p_i), p_i ~ P on [0, 1].

With mu and v the mean and the variance of the population P, the best weight of the client's own share of ones is

.. math:: \hat p_i = a_i \bar X_i + (1 - a_i) \mu, \qquad a_i = \frac{n_i v}{\mu (1 - \mu) + (n_i - 1) v}

for every P (the posterior mean if P is a Beta distribution). The estimators differ in the source of mu and v.
Samples are numbers in {0, 1}, [n].

Reference: Ozkara et al. 2023, section 2.2, Theorem 3 and appendix C.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp

from jaxpfl.core.types import Array, Key, Scalar
from jaxpfl.estimators.base import Estimator, Samples
from jaxpfl.estimators.moments import Moments, moments, without

_ROUNDING = 1e-5
"""Rounding error of the mean of 1/n_j: below the effect of a single client with two samples among fifty thousand with
one.
"""


class Share(NamedTuple):
    """A client's share of ones [] and n_i []: its local state, and without privacy its message."""

    share: Array
    size: Array


class Told(NamedTuple):
    """Broadcast of the server: moments of the shares that were sent, and of the 1/n_i."""

    shares: Moments
    inverse_sizes: Moments


def local() -> Estimator:
    """Each client's own share of ones; nothing is sent."""
    return Estimator(
        lambda key, shared, samples: ((), samples.mean),
        lambda key, shared, messages, sent: None,
        lambda shared, message, sent, share: share,
    )


def known_beta(alpha: Scalar, beta: Scalar) -> Estimator:
    """Posterior mean under a known prior Beta(alpha, beta); nothing is sent.

    Its error is exactly n / (alpha + beta + n) times that of `local`.

    Implements: Ozkara et al. 2023, Remark 5; Ozkara et al. 2023, equation (31).
    """
    total = alpha + beta

    def personalize(shared: None, message: tuple, sent: Array, own: Share) -> Array:
        return (own.size * own.share + alpha) / (own.size + total)

    return Estimator(
        lambda key, shared, samples: ((), Share(samples.mean, samples.size)),
        lambda key, shared, messages, sent: None,
        personalize,
    )


def global_mean() -> Estimator:
    """The mean share of all clients, as the estimate of each."""
    return Estimator(
        lambda key, shared, samples: (samples.mean, ()),
        lambda key, shared, messages, sent: moments(messages, sent).mean,
        lambda mean, message, sent, own: mean,
    )


def personalized(*, printed: bool = False, variance: Scalar | None = None) -> Estimator:
    r"""Shrinkage of the client's own share towards mu; mean and variance of P by moments of the other shares.

    The shares' variance S2 about their mean estimates :math:`v + E\,p(1-p)/n`, and :math:`E\,p(1-p) = \mu(1-\mu) - v`:

    .. math:: v = \frac{S^2 - h \mu (1 - \mu)}{1 - h}, \qquad h = \operatorname{mean}_j \frac{1}{n_j}

    clipped to [0, mu (1 - mu)]; (n S2 - mu (1 - mu)) / (n - 1) for equal sizes. Every client has the same weight in mu
    and S2, whatever its size: it is one draw of P.

    A client without enough others to learn from keeps its own share.

    Implements: Ozkara et al. 2023, equation (6); Ozkara et al. 2023, Theorem 3; Ozkara et al. 2023, equation (32).

    Args:
      printed: take v = S2 as in the paper; the weight is then too large.
      variance: v, if known. It is required if no client has two samples: v cannot be learned from single samples (the
        estimates are then the mean of all).
    """

    def summarize(key: Key, shared: None, samples: Samples) -> tuple[Share, Share]:
        own = Share(samples.mean, samples.size)
        return own, own

    def combine(key: Key, shared: None, messages: Share, sent: Array) -> Told:
        return Told(moments(messages.share, sent), moments(1 / jnp.maximum(messages.size, 1), sent))

    def personalize(told: Told, message: Share, sent: Array, own: Share) -> Array:
        others = without(told.shares, message.share, sent)
        h = without(told.inverse_sizes, 1 / jnp.maximum(message.size, 1), sent).mean
        mu = jnp.clip(others.mean, 0, 1)
        if variance is not None:
            v = jnp.asarray(variance)
        elif printed:
            v = others.variance
        else:
            v = moment_variance(mu, others.variance, h)
        a = printed_weight(mu, v, own.size) if printed else weight(mu, v, own.size)
        learned = others.number >= (2 if variance is None else 1)
        return jnp.where(learned, a * own.share + (1 - a) * mu, own.share)

    return Estimator(summarize, combine, personalize)


def moment_variance(mu: Array, S2: Array, h: Array) -> Array:
    """Moment estimate of v, not clipped, from the shares' variance S2 and the mean h of the 1/n_j; 0 if every n_j is 1.

    The mean over the other clients is a difference in single precision, so a remainder of 1 - h below the rounding
    error counts as zero.
    """
    learned = 1 - h > _ROUNDING
    return jnp.where(learned, (S2 - h * mu * (1 - mu)) / jnp.where(learned, 1 - h, 1), 0)


def weight(mu: Array, v: Array, size: Array) -> Array:
    """Weight a_i of the module's docstring, with v clipped to [0, mu (1 - mu)]; 0 if all probabilities are equal.

    Implements: Ozkara et al. 2023, Remark 3.
    """
    most = mu * (1 - mu)
    v = jnp.clip(v, 0, most)
    total = most + (size - 1) * v
    return jnp.where(total > 0, size * v / jnp.where(total > 0, total, 1), 0)


def printed_weight(mu: Array, S2: Array, size: Array) -> Array:
    """Weight as printed, ``n / (mu (1-mu) / S2 - 1 + n)``; 0 if S2 is 0.

    Implements: Ozkara et al. 2023, equation (6).
    """
    ratio = mu * (1 - mu) / jnp.where(S2 > 0, S2, 1)
    return jnp.where(S2 > 0, size / (ratio - 1 + size), 0)

r"""Collaborative estimation of Bernoulli probabilities: X_ij ~ Bern(p_i), p_i ~ P on [0, 1].

Let mu and v be the mean and variance of the population P. For every P, the best linear estimate gives the client's own
share of ones :math:`\bar X_i` the weight a_i:

.. math:: \hat p_i = a_i \bar X_i + (1 - a_i) \mu, \qquad a_i = \frac{n_i v}{\mu (1 - \mu) + (n_i - 1) v}

If P is a Beta distribution, the estimate is the posterior mean. The estimators in this module differ in how they obtain
mu and v. A client's samples are numbers in {0, 1}, [n].

Under privacy (`split`, and `printed_private` for comparison) a client sends the message of the paper's equation (7),
which is `privacy.local_dp.one_bit_unit`. The message takes one of two values, its mean is the encoded number in [0, 1],
and the message is eps-LDP. The variance of a two-valued message is a function of its mean, so bits that encode the
clients' shares carry no information about the variance of P. In `split`, half of the clients therefore encode an
estimate of p_i^2 instead.

Reference: Ozkara et al. 2023, section 2.2, equation (7), Theorems 3 and 4, and appendix C.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxpfl.core.types import Array, Key, Scalar
from jaxpfl.estimators.base import Estimator, Moments, Samples, moments, truncated_mean, without
from jaxpfl.privacy import local_dp

_ROUNDING = 1e-5
"""Largest value of 1 - h (see `moment_variance`) that is treated as a rounding error. One client with two samples among
fifty thousand clients with one sample gives about this value.
"""


class Share(NamedTuple):
    """A client's share of ones [] and number of samples n_i []: the local state and, without privacy, the message."""

    share: Array
    size: Array


class Broadcast(NamedTuple):
    """The server's broadcast: moments of the uploaded shares, and moments of 1/n_i over the same clients."""

    shares: Moments
    inverse_sizes: Moments


def local() -> Estimator:
    """Create the estimator that returns each client's own share of ones; clients send no messages."""
    return Estimator(
        lambda key, shared, samples: ((), samples.mean),
        lambda key, shared, messages, sent: None,
        lambda shared, message, sent, share: share,
    )


def beta_posterior(alpha: Scalar, beta: Scalar) -> Estimator:
    """Create the estimator that returns posterior means under the known prior Beta(alpha, beta).

    Clients send no messages. For clients with n samples whose probabilities are drawn from this prior, the mean squared
    error is exactly n / (alpha + beta + n) times the error of `local`.

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
    """Create the estimator that returns the mean of all uploaded shares for every client."""
    return Estimator(
        lambda key, shared, samples: (samples.mean, ()),
        lambda key, shared, messages, sent: moments(messages, sent).mean,
        lambda mean, message, sent, own: mean,
    )


def personalized(*, printed: bool = False, variance: Scalar | None = None) -> Estimator:
    r"""Create the estimator that shrinks a client's own share toward mu, with mu and v from the other clients' shares.

    If every client has n samples, the variance S2 of the shares estimates :math:`v + E\,p(1-p)/n`, where
    :math:`E\,p(1-p) = \mu(1-\mu) - v`. For clients of any sizes n_j, 1/n is replaced by the mean h of 1/n_j. Hence

    .. math:: v = \frac{S^2 - h \mu (1 - \mu)}{1 - h}, \qquad h = \operatorname{mean}_j \frac{1}{n_j}

    clipped to [0, mu (1 - mu)]. Clients have equal weights in mu and S2, even if they have different numbers of
    samples, because each p_i is one draw from P. If there are too few other clients to estimate mu and v, a client's
    estimate is its own share.

    Implements: Ozkara et al. 2023, equation (6); Ozkara et al. 2023, Theorem 3; Ozkara et al. 2023, equation (32).

    Args:
      printed: whether to use S2 as v, as in the paper, although this makes the weight too large.
      variance: variance v of the population, if known. If no other client has two samples, v cannot be estimated;
        without ``variance``, a client's estimate is then the mean of the other clients' shares.
    """

    def summarize(key: Key, shared: None, samples: Samples) -> tuple[Share, Share]:
        own = Share(samples.mean, samples.size)
        return own, own

    def combine(key: Key, shared: None, messages: Share, sent: Array) -> Broadcast:
        return Broadcast(moments(messages.share, sent), moments(1 / jnp.maximum(messages.size, 1), sent))

    def personalize(told: Broadcast, message: Share, sent: Array, own: Share) -> Array:
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
    """Unclipped moment estimate of the variance v of the population, whose mean is mu; 0 if every n_j is 1.

    S2 is the variance of the clients' shares, and h the mean of 1/n_j. Values of 1 - h below `_ROUNDING` count as zero,
    because the function `without` computes h as a difference in single precision.
    """
    learned = 1 - h > _ROUNDING
    return jnp.where(learned, (S2 - h * mu * (1 - mu)) / jnp.where(learned, 1 - h, 1), 0)


def weight(mu: Array, v: Array, size: Array) -> Array:
    """Optimal weight of a client's own share if P has mean mu and variance v (clipped to [0, mu (1 - mu)]); 0 for v =
    0.

    Implements: Ozkara et al. 2023, Remark 3.
    """
    most = mu * (1 - mu)
    v = jnp.clip(v, 0, most)
    total = most + (size - 1) * v
    return jnp.where(total > 0, size * v / jnp.where(total > 0, total, 1), 0)


def printed_weight(mu: Array, S2: Array, size: Array) -> Array:
    """The paper's weight of the own share, ``n / (mu (1-mu) / S2 - 1 + n)`` for shares of variance S2; 0 for S2 = 0.

    Implements: Ozkara et al. 2023, equation (6).
    """
    ratio = mu * (1 - mu) / jnp.where(S2 > 0, S2, 1)
    return jnp.where(S2 > 0, size / (ratio - 1 + size), 0)


class Bit(NamedTuple):
    """A client's message: a value [], and a public flag [] that says whether the value encodes p_i^2 (true) or p_i."""

    value: Array
    square: Array


class PrivateBroadcast(NamedTuple):
    """Estimated mean and variance of P, and whether there were enough messages to estimate them; shapes []."""

    mean: Array
    variance: Array
    learned: Array


def split(epsilon: Scalar, *, plus_error: bool = False) -> Estimator:
    r"""Create the private estimator in which a client sends one bit, which encodes its share or an estimate of p_i^2.

    Let a client have Z ones among n samples. A fair coin decides whether its bit encodes the share :math:`Z/n` or
    :math:`Z (Z-1) / (n (n-1))`, an unbiased estimate of p_i^2. The means M1 and M2 of the messages in the two halves
    give :math:`\mu = M_1` and :math:`\hat v = M_2 - \mu^2`, with a standard error e. Clients with a single sample
    always encode their share.

    The error of an estimate is linear in v for any fixed weight. The best weight, given the messages, is therefore the
    optimal weight for v equal to its posterior mean. Under a flat prior this is the mean of N(v-hat, e^2) truncated to
    [0, mu (1 - mu)].

    Formal guarantees: every client sends one message of the form (7) of the paper, and nothing else that depends on its
    samples. This message is eps-LDP with respect to the client's whole data set. n_i is public.

    Args:
      epsilon: privacy parameter, positive; may be traced.
      plus_error: whether to use v-hat + e, clipped to [0, mu (1 - mu)], as v. (Too small a v costs more than too large
        a v.) For small eps, v-hat + e is often far too large, or v is 0 and every client's estimate is mu. With 10,000
        clients of 14 samples, this choice loses about a third of the reduction in error relative to `local` at eps =
        0.5, and nearly all of it at eps = 0.25.
    """

    def summarize(key: Key, shared: None, samples: Samples) -> tuple[Bit, Share]:
        of_coin, of_bit = jax.random.split(key)
        own = Share(samples.mean, samples.size)
        n, ones = own.size, own.share * own.size
        square = jax.random.bernoulli(of_coin) & (n > 1)
        # ``ones`` is an integer up to the rounding of share * size.
        pairs = jnp.round(ones) * (jnp.round(ones) - 1) / jnp.where(n > 1, n * (n - 1), 1)
        return Bit(local_dp.one_bit_unit(of_bit, jnp.where(square, pairs, own.share), epsilon), square), own

    def combine(key: Key, shared: None, messages: Bit, sent: Array) -> PrivateBroadcast:
        first = moments(messages.value, sent & ~messages.square)
        second = moments(messages.value, sent & messages.square)
        mu = jnp.clip(first.mean, 0, 1)
        squared_error = _mean_error(second) + (2 * mu) ** 2 * _mean_error(first)
        error, most = jnp.sqrt(squared_error), mu * (1 - mu)
        seen = second.mean - mu**2
        v = jnp.clip(seen + error, 0, most) if plus_error else truncated_mean(seen, error, most)
        return PrivateBroadcast(mu, v, (first.number > 1) & (second.number > 1))

    def personalize(told: PrivateBroadcast, message: Bit, sent: Array, own: Share) -> Array:
        a = weight(told.mean, told.variance, own.size)
        return jnp.where(told.learned, a * own.share + (1 - a) * told.mean, own.share)

    return Estimator(summarize, combine, personalize)


def printed_private(epsilon: Scalar) -> Estimator:
    """Create the private estimator of Theorem 4, for comparison only.

    A client's own share of ones gets the weight of Theorem 3, with mu and S2 computed from the other clients' private
    messages. The variance of these messages is never below mu (1 - mu). The weight of the own share is therefore never
    below 1, and the estimate is never better than the own share alone.

    Implements: Ozkara et al. 2023, Theorem 4.
    """

    def summarize(key: Key, shared: None, samples: Samples) -> tuple[Array, Share]:
        return local_dp.one_bit_unit(key, samples.mean, epsilon), Share(samples.mean, samples.size)

    def personalize(told: Moments, message: Array, sent: Array, own: Share) -> Array:
        others = without(told, message, sent)
        a = printed_weight(others.mean, others.variance, own.size)
        return jnp.where(others.number > 1, a * own.share + (1 - a) * others.mean, own.share)

    return Estimator(summarize, lambda key, shared, messages, sent: moments(messages, sent), personalize)


def _mean_error(of: Moments) -> Array:
    """Squared standard error of a mean, computed from the averaged values' moments."""
    return of.variance / jnp.maximum(of.number, 1)


class Population(NamedTuple):
    r"""Mean and variance of the population P, with the estimators' mean squared errors under P.

    Every client has n samples. If the estimate is ``a`` times the client's own share plus ``1 - a`` times the mean of K
    other clients' shares, the mean squared error is exactly

    .. math:: MSE(a) = a^2 \frac{\mu (1 - \mu) - v}{n} + (1 - a)^2 \Big[ v + \frac{S^2}{K} \Big], \qquad
       S^2 = v + \frac{\mu (1 - \mu) - v}{n}

    Reference: Ozkara et al. 2023, section 2.2, Theorems 3 and 4.
    """

    mean: Scalar
    variance: Scalar

    def share_variance(self, n: Scalar) -> Scalar:
        """Variance S2 of a client's share of ones in n samples."""
        return self.variance + self.local(n)

    def local(self, n: Scalar) -> Scalar:
        """Mean squared error of the client's own share: ``E p (1 - p) / n``."""
        mu, v = self
        return (mu * (1 - mu) - v) / n

    def weight(self, n: Scalar) -> Scalar:
        """Best weight of the client's own share if mu is known: ``v / S2``."""
        return self.variance / self.share_variance(n)

    def printed_weight(self, n: Scalar) -> Scalar:
        """Weight of the own share in the paper, in the limit of many clients; the paper uses S2 in place of v."""
        mu = self.mean
        return n / (mu * (1 - mu) / self.share_variance(n) - 1 + n)

    def personalized(self, n: Scalar, a: Scalar, others: Scalar = jnp.inf) -> Scalar:
        """Mean squared error MSE(a) with the shares of K = ``others`` other clients; K is infinite if mu is known.

        If the weight is estimated, its variance adds an error of order 1/m, which the result does not include.
        """
        spread = self.variance + self.share_variance(n) / others
        return a**2 * self.local(n) + (1 - a) ** 2 * spread

    def global_mean(self, n: Scalar, clients: Scalar) -> Scalar:
        """Mean squared error of the mean of all m shares, including the client's own: ``v (1 - 1/m) + E p(1-p) / (n
        m)``.
        """
        return self.variance * (1 - 1 / clients) + self.local(n) / clients


def printed_error(clients: Scalar, n: Scalar) -> Array:
    """Bound c^2 = 3 log(4 m^2 n) / (m - 1) on the squared error of the mean mu estimated from m clients' shares.

    Each share is computed from n samples.

    Hoeffding's inequality gives the factor 2 instead of 3. Neither bound includes the error of the estimated variance.

    Implements: Ozkara et al. 2023, Theorem 3.
    """
    return 3 * _log(clients, n) / (clients - 1)


def printed_private_error(clients: Scalar, n: Scalar, epsilon: Scalar) -> Array:
    """Bound c^2 = (e^eps + 1)^2 log(4 m^2 n) / (3 (e^eps - 1)^2 (m - 1)) as in `printed_error`, with private messages.

    Like `printed_error`, this bound does not include the error of the estimated variance.

    Implements: Ozkara et al. 2023, Theorem 4; Ozkara et al. 2023, equations (33) to (36).
    """
    return _log(clients, n) / (3 * jnp.tanh(jnp.asarray(epsilon) / 2) ** 2 * (clients - 1))


def _log(clients: Scalar, n: Scalar) -> Array:
    return jnp.log(4 * jnp.asarray(clients, float) ** 2 * n)

r"""Private estimation of Bernoulli probabilities from one bit per client: a sound design, and the printed one.

Message (7) is `privacy.local_dp.one_bit_unit`: one of two values whose mean is the encoded number in [0, 1]; it is
eps-LDP. The variance of a two-valued message depends on its mean alone, so bits about the clients' shares carry no
information about the variance of P: half of the clients encode another number.

Reference: Ozkara et al. 2023, section 2.2, equation (7) and Theorem 4.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxpfl.core.types import Array, Key, Scalar
from jaxpfl.estimators import bernoulli
from jaxpfl.estimators.base import Estimator, Samples
from jaxpfl.estimators.bernoulli import Share
from jaxpfl.estimators.moments import Moments, moments, without
from jaxpfl.estimators.posterior import truncated_mean
from jaxpfl.privacy import local_dp as local


class Bit(NamedTuple):
    """A client's message: its value [], and whether it encodes p_i^2 (public, []) rather than p_i."""

    value: Array
    square: Array


class Told(NamedTuple):
    """Estimated mean and variance of P, and whether there were enough messages to estimate them, [] each."""

    mean: Array
    variance: Array
    learned: Array


def split(epsilon: Scalar, *, plus_error: bool = False) -> Estimator:
    r"""One bit per client: half of the clients report their share, the other half its unbiased square.

    A fair coin of each client decides whether its bit encodes :math:`Z/n` or :math:`Z (Z-1) / (n (n-1))`, whose mean is
    p_i^2. The means M1 and M2 of the two halves give :math:`\mu = M_1` and :math:`\hat v = M_2 - \mu^2`, with a
    standard error e.

    The error of a weight is linear in v, so the best weight given the messages is that at v's posterior mean: with a
    flat prior, the mean of N(v-hat, e^2) truncated to [0, mu (1 - mu)].

    Clients with a single sample always encode p_i.

    Formal guarantees: every client sends one message (7) and nothing else that depends on its samples: pure eps-LDP of
    all its samples together. n_i is public.

    Args:
      epsilon: positive; may be traced.
      plus_error: take v-hat + e, clipped to [0, mu (1 - mu)], for v instead. (Too small a v costs more than too large a
        one.) It costs a third of the gain at small eps: where v-hat falls below -e, all clients are given mu.
    """

    def summarize(key: Key, shared: None, samples: Samples) -> tuple[Bit, Share]:
        of_coin, of_bit = jax.random.split(key)
        own = Share(samples.mean, samples.size)
        n, ones = own.size, own.share * own.size
        square = jax.random.bernoulli(of_coin) & (n > 1)
        pairs = jnp.round(ones) * (jnp.round(ones) - 1) / jnp.where(n > 1, n * (n - 1), 1)
        return Bit(local.one_bit_unit(of_bit, jnp.where(square, pairs, own.share), epsilon), square), own

    def combine(key: Key, shared: None, messages: Bit, sent: Array) -> Told:
        first = moments(messages.value, sent & ~messages.square)
        second = moments(messages.value, sent & messages.square)
        mu = jnp.clip(first.mean, 0, 1)
        squared_error = _of_mean(second) + (2 * mu) ** 2 * _of_mean(first)
        error, most = jnp.sqrt(squared_error), mu * (1 - mu)
        seen = second.mean - mu**2
        v = jnp.clip(seen + error, 0, most) if plus_error else truncated_mean(seen, error, most)
        return Told(mu, v, (first.number > 1) & (second.number > 1))

    def personalize(told: Told, message: Bit, sent: Array, own: Share) -> Array:
        a = bernoulli.weight(told.mean, told.variance, own.size)
        return jnp.where(told.learned, a * own.share + (1 - a) * told.mean, own.share)

    return Estimator(summarize, combine, personalize)


def printed(epsilon: Scalar) -> Estimator:
    """Theorem 4 as printed, for comparison: moments of the OTHER clients' messages in the weight of Theorem 3.

    The variance of these messages is never below mu (1 - mu), so the weight is never below 1, and the estimate is never
    better than the client's own share.

    Implements: Ozkara et al. 2023, Theorem 4.
    """

    def summarize(key: Key, shared: None, samples: Samples) -> tuple[Array, Share]:
        return local.one_bit_unit(key, samples.mean, epsilon), Share(samples.mean, samples.size)

    def personalize(told: Moments, message: Array, sent: Array, own: Share) -> Array:
        others = without(told, message, sent)
        a = bernoulli.printed_weight(others.mean, others.variance, own.size)
        return jnp.where(others.number > 1, a * own.share + (1 - a) * others.mean, own.share)

    return Estimator(summarize, lambda key, shared, messages, sent: moments(messages, sent), personalize)


def _of_mean(of: Moments) -> Array:
    """Squared standard error of a mean."""
    return of.variance / jnp.maximum(of.number, 1)

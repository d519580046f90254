r"""Collaborative estimation of Gaussian means: X_ij ~ N(theta_i, sx2 I), theta_i ~ N(mu, st2 I), mu unknown.

.. math:: \hat\theta_i = a_i \bar X_i + (1 - a_i) M, \qquad M = \frac{\sum_j w_j q(\bar X_j)}{\sum_j w_j},
   \qquad w_j = \frac{1}{st^2 + sx^2 / n_j + sq^2}

Here client i has the mean :math:`\bar X_i` of n_i samples, q is the release (the identity without quantization or
privacy), and sq2 is the variance that the release adds. M is the maximum-likelihood estimate of mu from the messages
:math:`q(\bar X_j)`; if all clients have equally many samples, M is the plain mean of the messages. The weight a_i
minimizes the mean squared error exactly, given the weights w_j. If all clients upload and have equally many samples,
a_i is the weight in the paper's equation (5). `gaussian_closed_form` computes the errors.

Reference: Ozkara et al. 2023, section 2.1, Theorems 1 and 2, Remark 7.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxpfl.core import trees
from jaxpfl.core.types import Array, Key, Scalar
from jaxpfl.estimators import gaussian_closed_form as closed_form
from jaxpfl.estimators.base import Estimator, Samples, moments, truncated_mean
from jaxpfl.estimators.release import EXACT, Release
from jaxpfl.privacy import local_dp


class Local(NamedTuple):
    """A client's local state: the mean [d] and the number [] of the client's samples."""

    mean: Array
    size: Array


class Sent(NamedTuple):
    """A client's message.

    Attributes:
      mean: released mean, [d].
      size: number of samples n_i, [], which is public.
      scatter: sum of the samples' squared deviations from their mean: one number per coordinate, [d], in
        `gaussian_columns`, and otherwise the mean of these numbers, []; zero if the samples' variance is known.
    """

    mean: Array
    size: Array
    scatter: Array


class Broadcast(NamedTuple):
    """The server's broadcast: M [d], the sum of the weights w_j [], and the variances st2 [] and sx2 []."""

    mean: Array
    weight: Array
    st2: Array
    sx2: Array


def local() -> Estimator:
    """Create the estimator that returns each client's own mean; clients send no messages."""
    return Estimator(
        lambda key, shared, samples: ((), samples.mean),
        lambda key, shared, messages, sent: None,
        lambda shared, message, sent, mean: mean,
    )


def global_mean(release: Release = EXACT) -> Estimator:
    """Create the estimator that returns the mean of all messages for every client."""
    return Estimator(
        lambda key, shared, samples: (release.send(key, samples.mean), ()),
        lambda key, shared, messages, sent: moments(messages, sent).mean,
        lambda mean, message, sent, own: mean,
    )


def personalized(*, st2: Scalar | None = None, sx2: Scalar | None = None, release: Release = EXACT) -> Estimator:
    r"""Create the estimator that combines a client's own mean with the weighted mean M of all messages.

    The weight of the client's own mean minimizes the mean squared error. Without any messages, the estimate is the
    client's own mean.

    Implements: Ozkara et al. 2023, equation (2); Ozkara et al. 2023, equation (3); Ozkara et al. 2023, Theorem 1;
      Ozkara et al. 2023, equation (4); Ozkara et al. 2023, Theorem 2.

    Args:
      st2: variance of the theta_i. If None, it is estimated from the messages by the method of moments: :math:`st^2 =
        \max(0, S^2 - \operatorname{mean}_j(sx^2 / n_j) - sq^2)`, where S^2 is the variance of the messages. Messages
        with Gaussian noise carry almost no information about this variance: give ``st2``, or use `split`.
      sx2: variance of the samples. If None, the variances within the clients are pooled. Pooling requires clients with
        at least two samples. Each message then contains a second number, which is not private.
      release: mechanism that releases a client's mean.
    """

    def summarize(key: Key, shared: None, samples: Samples) -> tuple[Sent, Local]:
        scatter = samples.scatter.mean() if sx2 is None else jnp.zeros(())
        own = Local(samples.mean, samples.size)
        return Sent(release.send(key, own.mean), own.size, scatter), own

    def combine(key: Key, shared: None, messages: Sent, sent: Array) -> Broadcast:
        noise = pooled_variance(messages, sent) if sx2 is None else jnp.asarray(sx2)
        s2 = noise / jnp.maximum(messages.size, 1)
        if st2 is None:
            of_means = moments(messages.mean, sent)
            within = moments(s2, sent).mean + release.variance
            spread = jnp.maximum(of_means.variance.mean() - within, 0)
        else:
            spread = jnp.asarray(st2)
        w = jnp.where(sent, weight(spread + s2 + release.variance), 0)
        total = w.sum()
        mean = trees.sum_products(w, jnp.where(sent[:, None], messages.mean, 0)) / _nonzero(total)
        return Broadcast(mean, total, spread, noise)

    def personalize(told: Broadcast, message: Sent, sent: Array, own: Local) -> Array:
        a = closed_form.best_weight(*error_terms(told, own.size, sent, release.variance))
        return jnp.where(told.weight > 0, a * own.mean + (1 - a) * told.mean, own.mean)

    return Estimator(summarize, combine, personalize)


def error_terms(told: Broadcast, size: Array, sent: Array, sq2: Scalar = 0.0) -> tuple[Array, Array, Array]:
    """Arguments ``s2``, ``c`` and ``V`` [] of `gaussian_closed_form.error` for a client, given the broadcast ``told``.

    Let w_j be the inverse of the variance of client j's message about mu, and W the sum of the weights of all messages.
    M then has the variance 1 / W about mu. Hence c = w_i s2 / W and V = 1 / W + st2 (1 - 2 w_i / W), where w_i is zero
    if the client sent no message.
    """
    s2 = told.sx2 / jnp.maximum(size, 1)
    part = jnp.where(sent, weight(told.st2 + s2 + sq2), 0) / _nonzero(told.weight)
    # If all variances are zero, `weight` is 1 by convention, but Var M must be zero.
    return s2, part * s2, 1 / _nonzero(told.weight) * (told.st2 + s2 + sq2 > 0) + told.st2 * (1 - 2 * part)


def james_stein(sx2: Scalar, *, positive: bool = True) -> Estimator:
    r"""Create the James-Stein estimator for clients with equally many samples. It shrinks their means toward M:

    .. math:: \hat\theta_i = M + \Big(1 - \frac{((m-1) d - 2)\, s^2}{\sum_j |\bar X_j - M|^2}\Big) (\bar X_i - M)

    Here M is the mean of all messages, and s2 the variance of a client's mean. If (m - 1) d is at most 2, estimates are
    not shrunk.

    Args:
      sx2: variance of the samples.
      positive: whether a negative factor is replaced by zero, which can only decrease the error.

    Reference: James and Stein 1961; Efron and Morris 1973.
    """

    def combine(key: Key, shared: None, messages: Sent, sent: Array) -> tuple[Array, Array]:
        of_means = moments(messages.mean, sent)
        free = (of_means.number - 1) * messages.mean.shape[-1] - 2
        s2 = sx2 / jnp.maximum(moments(messages.size, sent).mean, 1)
        square = of_means.scatter.sum()
        keep = 1 - jnp.maximum(free, 0) * s2 / _nonzero(square)
        # If all messages are equal, shrink estimates completely to M, unless the samples have no noise.
        keep = jnp.where(square > 0, keep, jnp.where(s2 > 0, 0.0, 1.0) if positive else 1.0)
        return of_means.mean, jnp.maximum(keep, 0) if positive else keep

    def personalize(told: tuple[Array, Array], message: Sent, sent: Array, own: Array) -> Array:
        mean, keep = told
        return mean + keep * (own - mean)

    def summarize(key: Key, shared: None, samples: Samples) -> tuple[Sent, Array]:
        return Sent(samples.mean, samples.size, jnp.zeros(())), samples.mean

    return Estimator(summarize, combine, personalize)


def pooled_variance(messages: Sent, sent: Array) -> Array:
    """Pooled estimate of sx2: squared deviations divided by degrees of freedom, or zero if there are none."""
    free = jnp.where(sent, jnp.maximum(messages.size - 1, 0), 0).sum()
    return jnp.where(sent, messages.scatter, 0).sum() / jnp.maximum(free, 1)


def weight(variance: Array) -> Array:
    """Inverse of a variance; 1 if the variance is zero."""
    return 1 / jnp.where(variance > 0, variance, 1)


def _nonzero(value: Array) -> Array:
    return jnp.where(value > 0, value, 1)


class Bit(NamedTuple):
    """A client's message: a value [1], a public flag [] (true if the value encodes the squared mean), and n_i []."""

    value: Array
    square: Array
    size: Array


class PrivateBroadcast(NamedTuple):
    """Estimated mean M [1], variance of M about mu [], estimated st2 [], and whether messages sufficed [] bool."""

    mean: Array
    error: Array
    st2: Array
    learned: Array


def split(b: Scalar, epsilon: Scalar, sx2: Scalar) -> Estimator:
    r"""Create the private estimator with one bit per client, which encodes the client's mean or the mean's square.

    This estimator is for one dimension. The variance of a two-valued message is a function of its mean, so bits that
    encode the clients' means carry no information about the variance of these means.

    A fair coin decides for each client whether its bit encodes its mean, clipped to [-b, b], or the square of the
    clipped mean. Let M1 and M2 be the mean messages of the clients that encode the mean and the square, respectively.
    They give

    .. math:: \mu = M_1, \qquad \hat{st^2} = M_2 - M_1^2 - \operatorname{mean}_j(sx^2 / n_j)

    The estimator uses the posterior mean of st2 under a flat prior on [0, b^2], given this estimate and its standard
    error.

    Formal guarantees: only one bit of a client's message depends on its samples. The mechanism
    `privacy.local_dp.one_bit` or `one_bit_unit` makes this bit pure eps-LDP for all samples of the client together.

    Args:
      b: clipping bound, for example from `estimators.release.gaussian_radius`.
      epsilon: privacy parameter, positive; may be traced.
      sx2: variance of the samples, public.
    """

    def summarize(key: Key, shared: None, samples: Samples) -> tuple[Bit, Local]:
        of_coin, of_bit = jax.random.split(key)
        own = Local(samples.mean, samples.size)
        square = jax.random.bernoulli(of_coin)
        about_mean = local_dp.one_bit(of_bit, own.mean, b, epsilon)
        about_square = b**2 * local_dp.one_bit_unit(of_bit, (own.mean / b) ** 2, epsilon)
        return Bit(jnp.where(square, about_square, about_mean), square, own.size), own

    def combine(key: Key, shared: None, messages: Bit, sent: Array) -> PrivateBroadcast:
        first = moments(messages.value, sent & ~messages.square)
        second = moments(messages.value, sent & messages.square)
        mean = jnp.clip(first.mean, -b, b)
        of_first = first.variance / jnp.maximum(first.number, 1)
        within = sx2 * moments(1 / jnp.maximum(messages.size, 1), sent).mean
        seen = second.mean - mean**2 - within
        error = jnp.sqrt(second.variance / jnp.maximum(second.number, 1) + (2 * mean) ** 2 * of_first)
        st2 = truncated_mean(seen, error, jnp.square(jnp.asarray(b, seen.dtype)))[0]
        return PrivateBroadcast(mean, of_first[0], st2, (first.number > 1) & (second.number > 1))

    def personalize(told: PrivateBroadcast, message: Bit, sent: Array, own: Local) -> Array:
        a = closed_form.best_weight(sx2 / jnp.maximum(own.size, 1), 0.0, told.st2 + told.error)
        return jnp.where(told.learned, a * own.mean + (1 - a) * told.mean, own.mean)

    return Estimator(summarize, combine, personalize)

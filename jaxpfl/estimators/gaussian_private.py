r"""Private estimation of one-dimensional Gaussian means from one bit per client, st2 unknown.

The variance of a two-valued message depends on its mean alone, so bits about the clients' means carry no information
about the variance of these means. Half of the clients therefore encode the squares of theirs.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxpfl.core.types import Array, Key, Scalar
from jaxpfl.estimators import gaussian_closed_form as closed_form
from jaxpfl.estimators.base import Estimator, Samples
from jaxpfl.estimators.gaussian import Local
from jaxpfl.estimators.moments import moments
from jaxpfl.estimators.posterior import truncated_mean
from jaxpfl.privacy import local_dp as local


class Bit(NamedTuple):
    """A client's message: its value [1], whether it encodes the mean's square (public, []), and n_i [] (public)."""

    value: Array
    square: Array
    size: Array


class Told(NamedTuple):
    """Estimated mean M [1], its variance about mu [] and st2 []; and whether there were enough messages, []."""

    mean: Array
    error: Array
    st2: Array
    learned: Array


def split(b: Scalar, epsilon: Scalar, sx2: Scalar) -> Estimator:
    r"""One bit per client: half of the clients report their mean, the other half its square.

    A fair coin of each client decides whether its bit encodes its mean clipped to [-b, b] or the square of that. With
    the halves' means M1 and M2

    .. math:: \mu = M_1, \qquad \hat{st^2} = M_2 - M_1^2 - \operatorname{mean}_j(sx^2 / n_j)

    and st2 is the posterior mean of a number in [0, b^2] given that estimate and its standard error.

    Formal guarantees: each client sends one bit that depends on its samples, by `privacy.local_dp.one_bit` or
    `one_bit_unit`: pure eps-LDP of all its samples together.

    Args:
      b: the clipping bound (`estimators.radius.gaussian`).
      epsilon: positive; may be traced.
      sx2: the samples' variance, public.
    """

    def summarize(key: Key, shared: None, samples: Samples) -> tuple[Bit, Local]:
        of_coin, of_bit = jax.random.split(key)
        own = Local(samples.mean, samples.size)
        square = jax.random.bernoulli(of_coin)
        about_mean = local.one_bit(of_bit, own.mean, b, epsilon)
        about_square = b**2 * local.one_bit_unit(of_bit, (own.mean / b) ** 2, epsilon)
        return Bit(jnp.where(square, about_square, about_mean), square, own.size), own

    def combine(key: Key, shared: None, messages: Bit, sent: Array) -> Told:
        first = moments(messages.value, sent & ~messages.square)
        second = moments(messages.value, sent & messages.square)
        mean = jnp.clip(first.mean, -b, b)
        of_first = first.variance / jnp.maximum(first.number, 1)
        within = sx2 * moments(1 / jnp.maximum(messages.size, 1), sent).mean
        seen = second.mean - mean**2 - within
        error = jnp.sqrt(second.variance / jnp.maximum(second.number, 1) + (2 * mean) ** 2 * of_first)
        st2 = truncated_mean(seen, error, jnp.square(jnp.asarray(b, seen.dtype)))[0]
        return Told(mean, of_first[0], st2, (first.number > 1) & (second.number > 1))

    def personalize(told: Told, message: Bit, sent: Array, own: Local) -> Array:
        a = closed_form.best_weight(sx2 / jnp.maximum(own.size, 1), 0.0, told.st2 + told.error)
        return jnp.where(told.learned, a * own.mean + (1 - a) * told.mean, own.mean)

    return Estimator(summarize, combine, personalize)

r"""Means of Gaussian clients whose samples have several columns, each in units of its own.

The model of `gaussian` for each column by itself, with its own mu, st2 and sx2, so that what one column is measured in
changes nothing of the others; and where the clients' variances differ, each client's own, as `client_variances` draws
it to the common one:

.. math:: \hat\theta_i = a_i \bar X_i + (1 - a_i) M, \qquad M = \frac{\sum_j w_j \bar X_j}{\sum_j w_j},
   \qquad w_j = \frac{1}{st^2 + s_j^2}, \qquad s_j^2 = \tilde\sigma_j^2 / n_j

st2 solves :math:`\sum_j w_j (\bar X_j - M)^2 = m - 1`, or is zero where the left side is less at zero. For equal
:math:`s_j^2` that is the difference of moments.

Reference: Paule and Mandel 1982, "Consensus values and weighting factors".
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxpfl.estimators import client_variances
from jaxpfl.estimators import gaussian_closed_form as closed_form
from jaxpfl.estimators.base import Estimator, Samples
from jaxpfl.estimators.client_variances import Variances
from jaxpfl.estimators.gaussian import weight
from jaxpfl.estimators.intervals import bisect
from jaxpfl.types import Array, Key

_DIGITS = 8.0


class Sent(NamedTuple):
    """A client's message: its means [d], summed squared deviations from them [d], and n_i []."""

    mean: Array
    scatter: Array
    size: Array


class Told(NamedTuple):
    """What the server tells of each column, [d] each: M, the sum of the weights w_j, st2, the clients' variances."""

    mean: Array
    weight: Array
    st2: Array
    variances: Variances


def personalized() -> Estimator:
    """The client's own mean and the mean of all, each by what it is worth, column by column; all is learned.

    Where nobody sent, an estimate is the client's own mean.
    """

    def summarize(key: Key, shared: None, samples: Samples) -> tuple[Sent, Sent]:
        sent = Sent(samples.mean, scatter(samples), samples.size)
        return sent, sent

    def of_column(mean: Array, squares: Array, size: Array, sent: Array) -> Told:
        degrees = jnp.where(sent, jnp.maximum(size - 1, 0), 0)
        squares = jnp.where(sent, squares, 0)
        variances = client_variances.learn(squares, degrees)
        s2 = variances.of_client(squares, degrees) / jnp.maximum(size, 1)
        st2 = between_variance(mean, s2, sent)
        w = jnp.where(sent, weight(st2 + s2), 0)
        return Told(w @ jnp.where(sent, mean, 0) / jnp.maximum(w.sum(), _least(w)), w.sum(), st2, variances)

    def combine(key: Key, shared: None, messages: Sent, sent: Array) -> Told:
        return jax.vmap(of_column, in_axes=(1, 1, None, None))(messages.mean, messages.scatter, messages.size, sent)

    def personalize(told: Told, message: Sent, sent: Array, own: Sent) -> Array:
        s2 = told.variances.of_client(own.scatter, own.size - 1) / jnp.maximum(own.size, 1)
        part = jnp.where(sent, weight(told.st2 + s2), 0) / jnp.maximum(told.weight, _least(told.weight))
        V = jnp.where(told.weight > 0, 1 / jnp.maximum(told.weight, _least(told.weight)), 0) * (told.st2 + s2 > 0)
        a = closed_form.best_weight(s2, part * s2, V + told.st2 * (1 - 2 * part))
        return jnp.where(told.weight > 0, a * own.mean + (1 - a) * told.mean, own.mean)

    return Estimator(summarize, combine, personalize)


def scatter(samples: Samples) -> Array:
    """One client's summed squared deviations, [d]: zero of equal samples, whose mean may be rounded."""
    rounding = _DIGITS * jnp.finfo(samples.x.dtype).eps * jnp.abs(samples.mean)
    return jnp.where(samples.scatter > samples.size * rounding**2, samples.scatter, 0)


def between_variance(mean: Array, s2: Array, sent: Array) -> Array:
    """st2 of Paule and Mandel, [], from the clients' means and their variances, [m] each, of those that ``sent``."""
    free = sent.sum() - 1
    center = jnp.where(sent, mean, 0).sum() / jnp.maximum(sent.sum(), 1)
    y = jnp.where(sent, mean - center, 0)

    def above(st2: Array) -> Array:
        w = jnp.where(sent, weight(st2 + s2), 0)
        off = w @ y / jnp.maximum(w.sum(), _least(w))
        return w @ (y - off) ** 2 > free

    most = (y**2).sum() / jnp.maximum(free, 1)
    return jnp.where((most > 0) & above(jnp.zeros_like(most)), bisect(above, jnp.zeros_like(most), most), 0)


def _least(of: Array) -> float:
    return float(jnp.finfo(of.dtype).tiny)

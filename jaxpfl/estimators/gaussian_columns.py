r"""Collaborative estimation of Gaussian means, column by column, each in its own units.

The model of `gaussian` for each column separately, with its own mu, st2 and sx2, so that the units of one column do not
affect the others. If the clients' variances differ, each client has its own, shrunk to the common one by
`client_variances`:

.. math:: \hat\theta_i = a_i \bar X_i + (1 - a_i) M, \qquad M = \frac{\sum_j w_j \bar X_j}{\sum_j w_j},
   \qquad w_j = \frac{1}{st^2 + s_j^2}, \qquad s_j^2 = \tilde\sigma_j^2 / n_j

st2 solves :math:`\sum_j w_j (\bar X_j - M)^2 = m - 1`, or is zero if the left side is smaller at zero. For equal
:math:`s_j^2` that is the moment estimate.

Reference: Paule and Mandel 1982, "Consensus values and weighting factors".
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxpfl.core import trees
from jaxpfl.core.types import Array, Key
from jaxpfl.estimators import client_variances
from jaxpfl.estimators import gaussian_closed_form as closed_form
from jaxpfl.estimators.base import Estimator, Samples
from jaxpfl.estimators.client_variances import Variances
from jaxpfl.estimators.gaussian import weight
from jaxpfl.estimators.intervals import bisect

_DIGITS = 8.0


class Sent(NamedTuple):
    """A client's message: its means [d], sums of squared deviations from them [d], and n_i []."""

    mean: Array
    scatter: Array
    size: Array


class Told(NamedTuple):
    """Broadcast of the server, [d] each: M, the sum of the weights w_j, st2, and the clients' variances."""

    mean: Array
    weight: Array
    st2: Array
    variances: Variances


def personalized() -> Estimator:
    """Best combination of the client's own mean and the mean of all, column by column, with all variances learned.

    Without any messages the estimate is the client's own mean.
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
        total = trees.sum_products(w, jnp.where(sent, mean, 0))
        return Told(total / jnp.maximum(w.sum(), _least(w)), w.sum(), st2, variances)

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
    """A client's sums of squared deviations, [d]; zero for equal samples, whose mean may be rounded."""
    rounding = _DIGITS * jnp.finfo(samples.x.dtype).eps * jnp.abs(samples.mean)
    return jnp.where(samples.scatter > samples.size * rounding**2, samples.scatter, 0)


def between_variance(mean: Array, s2: Array, sent: Array) -> Array:
    """Paule and Mandel's estimate of st2, [], from the means and variances [m] of the clients that ``sent``."""
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

r"""Collaborative estimation of Gaussian means, with a separate population for every column.

Each column follows the model of `gaussian` with its own mu, st2 and sx2, so the units of one column do not affect the
other columns. If the clients' variances differ significantly, every client has its own variance, which is shrunk toward
the common variance by an inverse chi-square prior (see below). The estimate is

.. math:: \hat\theta_i = a_i \bar X_i + (1 - a_i) M, \qquad M = \frac{\sum_j w_j \bar X_j}{\sum_j w_j},
   \qquad w_j = \frac{1}{st^2 + s_j^2}, \qquad s_j^2 = \tilde\sigma_j^2 / n_j

st2 is the solution of :math:`\sum_j w_j (\bar X_j - M)^2 = m - 1`, or zero if the left side at st2 = 0 is below m - 1.
For equal :math:`s_j^2` this is the moment estimate.

**Variances.** Let :math:`\sigma_i^2` be the variance of client i's samples. Its estimate from these samples alone is
:math:`v_i`, with :math:`\nu_i = n_i - 1` degrees of freedom. Under the prior, :math:`\sigma_i^2` is :math:`\nu_0 s_0^2`
divided by a chi-square variable with :math:`\nu_0` degrees of freedom. The posterior estimate

.. math:: \tilde\sigma_i^2 = \frac{\nu_0 s_0^2 + \nu_i v_i}{\nu_0 + \nu_i}

has :math:`\nu_0 + \nu_i` degrees of freedom. The prior is fitted to the mean and the variance over clients of
:math:`\log v_i - \psi(\nu_i/2) + \log(\nu_i/2)`, where psi is the digamma function, as in the R package limma. Unless
Bartlett's test rejects equal variances, :math:`\nu_0` is infinite and all clients have the pooled variance.

References: Paule and Mandel 1982, "Consensus values and weighting factors"; Smyth 2004, "Linear models and empirical
Bayes methods for assessing differential expression in microarray experiments", section 6.2; Bartlett 1937.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.scipy.special import digamma, ndtr

from jaxpfl.core import trees
from jaxpfl.core.search import bisect
from jaxpfl.core.types import Array, Key, Scalar
from jaxpfl.estimators import gaussian_closed_form as closed_form
from jaxpfl.estimators.base import Estimator, Samples
from jaxpfl.estimators.gaussian import Sent, weight

SIGNIFICANT = 0.05
"""Significance level of Bartlett's test."""

_LEAST_DEGREES = 2  # the log of a variance with one degree of freedom varies too much for the fit
_LEAST_CLIENTS = 3  # smallest number of clients from which a prior of variances is fitted
_STEPS = 50  # Newton steps, enough from any start
_FAR = 8  # shift of the argument, by the recurrence, that makes the asymptotic series accurate
_DIGITS = 8.0  # deviations of at most this many rounding errors of the mean count as zero


class Variances(NamedTuple):
    """Fitted distribution of the clients' variances.

    Attributes:
      pooled: the pooled variance, [].
      p_value: p-value of Bartlett's test of equal variances, []; NaN if the test is not possible.
      degrees: degrees of freedom nu_0 of the prior, []; infinite if all clients have the pooled variance.
      scale: scale s_0^2 of the prior, []; the pooled variance if nu_0 is infinite.
    """

    pooled: Array
    p_value: Array
    degrees: Array
    scale: Array

    def client_variance(self, scatter: Array, degrees: Array) -> Array:
        """Clients' shrunken variances, from sums of squared deviations and degrees of freedom.

        The shapes of both arguments are broadcast.
        """
        some = degrees * (scatter > 0)
        prior = jnp.where(jnp.isinf(self.degrees), 1, self.degrees)
        own = (prior * self.scale + scatter) / (prior + some)
        return jnp.where(jnp.isinf(self.degrees), self.pooled, own)

    def client_degrees(self, scatter: Array, degrees: Array) -> Array:
        """Degrees of freedom of `client_variance`; infinite if all clients have the pooled variance."""
        return self.degrees + degrees * (scatter > 0)


class Broadcast(NamedTuple):
    """The server's broadcast, [d] each: M, the sum of the weights w_j, st2, and the distribution of variances."""

    mean: Array
    weight: Array
    st2: Array
    variances: Variances


def personalized() -> Estimator:
    """Create the estimator that combines, in every column, a client's own mean with the weighted mean M of all clients.

    All variances are estimated from the messages, and the weight a_i minimizes the mean squared error for these
    variances. Without any messages, the estimate is the client's own mean.
    """

    def summarize(key: Key, shared: None, samples: Samples) -> tuple[Sent, Sent]:
        sent = Sent(samples.mean, samples.size, scatter(samples))
        return sent, sent

    def learn_column(mean: Array, squares: Array, size: Array, sent: Array) -> Broadcast:
        degrees = jnp.where(sent, jnp.maximum(size - 1, 0), 0)
        squares = jnp.where(sent, squares, 0)
        variances = learn_variances(squares, degrees)
        s2 = variances.client_variance(squares, degrees) / jnp.maximum(size, 1)
        st2 = between_variance(mean, s2, sent)
        w = jnp.where(sent, weight(st2 + s2), 0)
        total = trees.sum_products(w, jnp.where(sent, mean, 0))
        return Broadcast(total / jnp.maximum(w.sum(), _least(w)), w.sum(), st2, variances)

    def combine(key: Key, shared: None, messages: Sent, sent: Array) -> Broadcast:
        return jax.vmap(learn_column, in_axes=(1, 1, None, None))(messages.mean, messages.scatter, messages.size, sent)

    def personalize(told: Broadcast, message: Sent, sent: Array, own: Sent) -> Array:
        s2 = told.variances.client_variance(own.scatter, own.size - 1) / jnp.maximum(own.size, 1)
        part = jnp.where(sent, weight(told.st2 + s2), 0) / jnp.maximum(told.weight, _least(told.weight))
        V = jnp.where(told.weight > 0, 1 / jnp.maximum(told.weight, _least(told.weight)), 0) * (told.st2 + s2 > 0)
        a = closed_form.best_weight(s2, part * s2, V + told.st2 * (1 - 2 * part))
        return jnp.where(told.weight > 0, a * own.mean + (1 - a) * told.mean, own.mean)

    return Estimator(summarize, combine, personalize)


def scatter(samples: Samples) -> Array:
    """Sums of a client's squared deviations, [d]; zero if the sums could come from rounding errors of equal samples."""
    rounding = _DIGITS * jnp.finfo(samples.x.dtype).eps * jnp.abs(samples.mean)
    return jnp.where(samples.scatter > samples.size * rounding**2, samples.scatter, 0)


def between_variance(mean: Array, s2: Array, sent: Array) -> Array:
    """Paule and Mandel's estimate of st2, [], from means [m] and variances [m] of the clients marked in ``sent``."""
    free = sent.sum() - 1
    center = jnp.where(sent, mean, 0).sum() / jnp.maximum(sent.sum(), 1)
    y = jnp.where(sent, mean - center, 0)

    def above(st2: Array) -> Array:
        w = jnp.where(sent, weight(st2 + s2), 0)
        off = w @ y / jnp.maximum(w.sum(), _least(w))
        return w @ (y - off) ** 2 > free

    # At st2 = ``most``, the sum is at most m - 1, because w <= 1 / st2.
    most = (y**2).sum() / jnp.maximum(free, 1)
    return jnp.where((most > 0) & above(jnp.zeros_like(most)), bisect(above, jnp.zeros_like(most), most), 0)


def _least(of: Array) -> float:
    return float(jnp.finfo(of.dtype).tiny)


def learn_variances(scatter: Array, degrees: Array) -> Variances:
    """Fit the prior of the clients' variances.

    The fit omits clients whose samples are all equal (as rounded values may be), because their variance of zero is not
    a draw from the prior. It also omits clients with a single degree of freedom (two samples).

    Args:
      scatter: sums of squared deviations from the clients' means, [m].
      degrees: degrees of freedom nu_i, [m]; zero for clients that sent nothing.
    """
    total = degrees.sum()
    pooled = scatter.sum() / jnp.maximum(total, 1)
    used = (degrees >= _LEAST_DEGREES) & (scatter > 0)
    number = used.sum().astype(pooled.dtype)
    nu = jnp.where(used, degrees, _LEAST_DEGREES).astype(pooled.dtype)
    s2 = jnp.where(used, scatter, 1.0) / nu

    def mean(values: Array) -> Array:
        return jnp.where(used, values, 0).sum() / jnp.maximum(number, 1)

    e = jnp.log(s2) - digamma(nu / 2) + jnp.log(nu / 2)
    center = mean(e)
    excess = mean((e - center) ** 2) * number / jnp.maximum(number - 1, 1) - mean(_trigamma(nu / 2))
    p_value = _bartlett(s2, jnp.where(used, nu, 0), number)
    unequal = (number >= _LEAST_CLIENTS) & (p_value < SIGNIFICANT) & (excess > 0)
    prior = 2 * _trigamma_inverse(jnp.where(unequal, excess, 1))
    scale = jnp.exp(center + digamma(prior / 2) - jnp.log(prior / 2))
    return Variances(pooled, p_value, jnp.where(unequal, prior, jnp.inf), jnp.where(unequal, scale, pooled))


def _bartlett(s2: Array, nu: Array, number: Array) -> Array:
    """p-value of Bartlett's test over the clients with positive ``nu``."""
    total = nu.sum()
    pooled = (nu * s2).sum() / jnp.maximum(total, 1)
    statistic = (nu * jnp.log(jnp.where(pooled > 0, pooled, 1) / s2)).sum()
    inverse = jnp.where(nu > 0, 1 / jnp.maximum(nu, 1), 0).sum() - 1 / jnp.maximum(total, 1)
    free = jnp.maximum(number - 1, 1)
    chi_square = jnp.maximum(statistic / (1 + inverse / (3 * free)), 0)
    off = 2 / (9 * free)  # Wilson and Hilferty's approximation: error below .002, fast to compile
    return jnp.where(number > 1, ndtr(-((chi_square / free) ** (1 / 3) - 1 + off) / jnp.sqrt(off)), jnp.nan)


def _trigamma_inverse(value: Scalar) -> Array:
    """Solve trigamma(y) = value > 0 for y, by Newton steps on 1 / trigamma.

    1 / trigamma is convex, so Newton's steps approach the solution from one side.
    """
    value = jnp.clip(value, 1e-7, 1e7)

    def step(_: Array, y: Array) -> Array:
        at, slope = jax.jvp(_trigamma, (y,), (jnp.ones_like(y),))
        return y + at * (1 - at / value) / slope

    return jax.lax.fori_loop(0, _STEPS, step, 0.5 + 1 / value)


def _trigamma(x: Array) -> Array:
    """Trigamma function by recurrence and asymptotic series, because XLA compiles a zeta function slowly."""
    y = x + _FAR
    far = 1 / y + 1 / (2 * y**2) + 1 / (6 * y**3) - 1 / (30 * y**5) + 1 / (42 * y**7) - 1 / (30 * y**9)
    return sum((1 / (x + k) ** 2 for k in range(_FAR)), far)

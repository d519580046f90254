r"""Empirical Bayes for shares of categories: a Dirichlet prior of multinomial counts, fitted by marginal likelihood.

Client i has counts :math:`c_{ik}` of K categories, :math:`N_i` in total, and a priori its shares are
:math:`\mathrm{Dirichlet}(\alpha)`, of mean :math:`\mu = \alpha / \alpha_0` and size :math:`\alpha_0 = \sum_k \alpha_k`.
The posterior is :math:`\mathrm{Dirichlet}(\alpha + c_i)`, of mean

.. math:: \mu + \frac{N_i}{\alpha_0 + N_i} (c_i / N_i - \mu),

and each share of it is a Beta. The log likelihood and its derivatives are sums over clients of functions of one count
each, so that histograms over clients, of every category's counts and of the totals, are all that the fit needs: a
message of one count in each is summable, and large.

Newton steps use that the Hessian is a diagonal plus a constant (Minka's equations 55 to 60). Where one leaves the
positive numbers or is no better, Minka's fixed point is taken, which maximises a lower bound: no step lowers the
likelihood. Where no spread is likelier than any, alpha_0 is infinite and all clients have the pooled shares.

References: Minka 2000, "Estimating a Dirichlet distribution"; Mosimann 1962, "On the compound multinomial
distribution"; Self and Liang 1987, for the test.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.scipy.special import betainc, gammaln, ndtr, xlogy

from jaxpfl.core import full_precision
from jaxpfl.core.types import Array, Scalar
from jaxpfl.estimators import inputs
from jaxpfl.estimators.frames import Labels, frame, labels_of
from jaxpfl.estimators.intervals import bisect
from jaxpfl.estimators.rising import log_rise
from jaxpfl.support.errors import JaxpflError

_STEPS = 200
_STARTS = (-2.0, 0.0, 2.0, 4.0, 6.0, 9.0)  # logarithms of the size
_MOST = 1e12


class Shares(NamedTuple):
    """Posteriors of m clients' shares of K categories. The prior counts as known.

    Attributes:
      counts: [m, K].
      prior_mean: mu, [K].
      prior_size: alpha_0, []; infinite without spread.
      mean: posterior means, [m, K].
      sd: posterior standard deviations, [m, K].
      shrinkage: alpha_0 / (alpha_0 + N_i), [m].
      log_marginal: log likelihood of all counts, [].
      ratio: twice the log likelihood ratio to equal shares of all clients, [].
      p_value: probability of a ratio at least as large if all are equal, [], for many clients half that of a chi-square
        with one degree of freedom; 1 where no spread is likelier than any.
      labels: of the clients, where they came in a frame.
    """

    counts: Array
    prior_mean: Array
    prior_size: Array
    mean: Array
    sd: Array
    shrinkage: Array
    log_marginal: Array
    ratio: Array
    p_value: Array
    labels: Labels | None = None

    def to_frame(self, level: float | None = None) -> Any:
        """A pandas frame of every client's counts and shares; with the ends of intervals where a level is given."""
        return frame(self, len(self.counts), level)

    def quantile(self, p: Scalar) -> Array:
        """Quantile of each share's posterior, a Beta distribution, [m, K]."""
        inputs.inside("p", p)
        finite = jnp.where(jnp.isinf(self.prior_size), 1, self.prior_size)
        first = finite * self.prior_mean + self.counts
        rest = finite + self.counts.sum(axis=1, keepdims=True) - first
        zero = jnp.zeros_like(first)
        found = bisect(lambda t: betainc(first, rest, t) < p, zero, zero + 1)
        return jnp.where(jnp.isinf(self.prior_size), self.prior_mean, found)

    def interval(self, level: Scalar = 0.95) -> tuple[Array, Array]:
        """Ends of the equal-tailed credible intervals of each share by itself, [m, K] each."""
        inputs.level(level)
        return self.quantile((1 - level) / 2), self.quantile((1 + level) / 2)


def ebmultinomial(counts: Any) -> Shares:
    """Fit a Dirichlet prior to counts of categories, and return every client's posterior.

    Jits, and vmaps over problems. Outside of transformations distinct counts are fitted with their numbers, which is
    fast for many clients.

    Args:
      counts: c_ik, whole numbers, [m, K]: at least two clients and two categories, each of them with a count.

    Raises:
      JaxpflError: for numbers that are no such counts, clients or categories without any (leave them out), and a single
        count of every client. Under a transformation, where values are not known, such values make all results NaN, as
        do counts beyond 8388 in single precision; else the fit is in double precision.
    """
    given = _checked(counts)
    labels = labels_of(counts)
    if not isinstance(given, Tracer):
        return inputs.in_double(_solve, given, *_histograms(given))._replace(labels=labels)
    kind = jnp.result_type(float)
    c = jnp.asarray(given, kind)
    N = c.sum(axis=1)
    good = (jnp.isfinite(c) & (c >= 0) & (c == jnp.round(c))).all() & (c.sum(axis=0) > 0).all() & (N > 0).all()
    good &= (N.max() > 1) & (N.max() <= inputs.most_counted())
    c = jnp.where(good, c, jnp.nan)
    return _solve(c, *(jnp.asarray(of, kind) for of in _histograms(c)))


class _Place(NamedTuple):
    alpha: Array
    value: Array
    moved: Array
    steps: Array


@full_precision.jit
def _solve(c: Array, heights: Array, numbers: Array) -> Shares:
    """Fit alpha; column k of heights [d, K + 1] has distinct counts of category k, the last totals, with numbers."""
    m, kind = len(c), c.dtype
    total = c.sum()
    pooled = c.sum(axis=0) / total
    weights = numbers / m

    def starts_of(alpha: Array) -> Array:
        return jnp.broadcast_to(jnp.append(alpha, alpha.sum()), heights.shape)

    def value(alpha: Array) -> Array:
        each = (weights * log_rise(starts_of(alpha), heights)).sum(axis=0)
        return each[:-1].sum() - each[-1]

    def slopes(alpha: Array) -> tuple[Array, Array]:
        """Sums over clients of psi(a + c) - psi(a), and its derivative, [K + 1] each, over m."""

        def first(a: Array) -> Array:
            return jax.jvp(lambda a: log_rise(a, heights), (a,), (jnp.ones_like(a),))[1]

        at = starts_of(alpha)
        one, two = jax.jvp(first, (at,), (jnp.ones_like(at),))
        return (weights * one).sum(axis=0), (weights * two).sum(axis=0)

    def go_on(place: _Place) -> Array:
        return (place.moved > 4 * jnp.sqrt(jnp.finfo(kind).eps)) & (place.steps < _STEPS)

    def step(place: _Place) -> _Place:
        one, two = slopes(place.alpha)
        bound = place.alpha * one[:-1] / one[-1]
        gradient, q, z = one[:-1] - one[-1], two[:-1], -two[-1]
        newton = place.alpha - (gradient - (gradient / q).sum() / (1 / z + (1 / q).sum())) / q
        newton = jnp.where(jnp.isfinite(newton) & (newton > 0), newton, jnp.nan)
        values = jnp.stack([place.value, value(bound), value(newton)])
        values = jnp.where(jnp.isnan(values), -jnp.inf, values)
        best = jnp.argmax(values)
        new = jnp.stack([place.alpha, bound, newton])[best]
        moved = jnp.abs(jnp.log(new / place.alpha)).max()
        return _Place(new, values[best], moved, place.steps + 1)

    starts = jnp.exp(jnp.array(_STARTS, kind))[:, None] * pooled
    values = jax.lax.map(value, starts)
    first = jnp.argmax(values)
    begin = _Place(starts[first], values[first], jnp.array(jnp.inf, kind), jnp.zeros((), jnp.int32))
    end = jax.lax.while_loop(go_on, step, begin)

    none = xlogy(c.sum(axis=0), pooled).sum() / m
    rounding = 16 * jnp.finfo(kind).eps * (1 + jnp.abs(end.value))
    alike = none >= end.value - rounding
    size = jnp.where(alike, jnp.inf, end.alpha.sum())
    mu = jnp.where(alike, pooled, end.alpha / end.alpha.sum())
    N = c.sum(axis=1, keepdims=True)
    shrinkage = jnp.where(alike, 1, size / (size + N))
    mean = mu + (1 - shrinkage) * (c / N - mu)
    sd = jnp.sqrt(mean * (1 - mean) / (size + N + 1))
    ratio = jnp.where(alike, 0, 2 * m * (end.value - none))
    orders = gammaln(N + 1).sum() - gammaln(c + 1).sum()
    return Shares(
        c, mu, size, mean, sd, shrinkage[:, 0], m * jnp.where(alike, none, end.value) + orders, ratio,
        jnp.where(alike, 1, ndtr(-jnp.sqrt(jnp.maximum(ratio, 0)))),
    )  # fmt: skip


def _histograms(c: Any) -> tuple[Any, Any]:
    """Distinct counts of every category and distinct totals, with their numbers of clients, [d, K + 1] each."""
    if isinstance(c, Tracer):
        heights = jnp.concatenate([c, c.sum(axis=1, keepdims=True)], axis=1)
        return heights, jnp.ones(heights.shape)
    columns = [np.unique(of, return_counts=True) for of in (*c.T, c.sum(axis=1))]
    longest = max(len(values) for values, _ in columns)
    padded = [[np.pad(of, (0, longest - len(of))) for of in column] for column in columns]
    return np.stack([values for values, _ in padded], axis=1), np.stack([numbers for _, numbers in padded], axis=1)


def _checked(counts: Any) -> Any:
    """Counts [m, K], in double precision where their values are known."""
    given = inputs.numbers("counts", counts, "a row for each client")
    if given.ndim != 2:
        raise JaxpflError(f"counts must have a row for each client and a column for each category, got {given.shape}")
    if given.shape[0] < 2 or given.shape[1] < 2:
        raise JaxpflError(f"counts must be of at least 2 clients and 2 categories, got shape {given.shape}")
    if isinstance(given, Tracer):
        return given
    bad = ~(np.isfinite(given) & (given >= 0) & (given <= _MOST) & (given == np.round(given)))
    if bad.any():
        row, column = np.argwhere(bad)[0]
        value = given[row, column]
        raise JaxpflError(
            f"counts must be whole numbers of at least 0, got {value} for client {row} in column {column}"
        )
    for axis, name in ((1, "client"), (0, "category")):
        empty = given.sum(axis=axis) == 0
        if empty.any():
            raise JaxpflError(f"{name} {int(np.argmax(empty))} has no counts: leave it out")
    if given.sum(axis=1).max() == 1:
        raise JaxpflError("counts must be above 1 in all for some client: of one count each no spread can be learned")
    return given

r"""A mixture of K free normals as the prior of normal means: weights, means and spreads, by EM and Newton steps.

Client i is of component k with probability r_ik, and then theta_i has the posterior mean b_ik and variance V_ik. Given
these, with weights w_i of the clients, the likeliest component is

.. math:: \pi_k = \sum_i w_i r_{ik}, \quad c_k = \frac{\sum_i w_i r_{ik} b_{ik}}{\pi_k}, \quad
   t_k^2 = \frac{\sum_i w_i r_{ik} (V_{ik} + (b_{ik} - c_k)^2)}{\pi_k}

so that no step lowers the likelihood. It runs from four starts without random draws, with means at quantiles of x and
spreads small, middling, wide, or small and wide in turn; Newton steps follow from the best end. The likelihood has
several maxima, of which this need not be the greatest; as x has errors of its own, it is bounded.

Reference: Dempster, Laird and Rubin 1977, "Maximum likelihood from incomplete data via the EM algorithm".
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxpfl.core.types import Array
from jaxpfl.estimators.climb import climb
from jaxpfl.estimators.normal_means.bins import MANY, binned
from jaxpfl.estimators.normal_means.normal_mixture import NormalMixture

_STEPS = 100
_SPREADS = ((0.1, 0.1), (0.5, 0.5), (1.0, 1.0), (0.1, 1.0))
"""Spreads of the components in turn, in parts of that of x."""
_LEAST_LOG = -12.0  # of a spread, in units of the errors
_LEAST_LOGIT = -30.0


def em_step(at: NormalMixture, x: Array, s: Array, w: Array) -> NormalMixture:
    """One step; w [m] sums to one."""
    p, centers, deviations = at.posterior(x, s)
    shares = w[:, None] * p
    total = shares.sum(axis=0)
    whole = jnp.where(total > 0, total, 1)
    mean = jnp.where(total > 0, (shares * centers).sum(axis=0) / whole, at.means)
    square = (shares * (deviations**2 + (centers - mean) ** 2)).sum(axis=0) / whole
    return NormalMixture(total, mean, jnp.where(total > 0, jnp.sqrt(square), at.sds))


def fit(x: Array, s: Array, w: Array, components: int) -> NormalMixture:
    """The best end of all starts, by increasing mean; arguments in units in which s is about one."""
    kind, many = x.dtype, len(x) > MANY
    some = binned(x, s, w) if many else (x, s, w)
    order = jnp.argsort(some[0])
    middles = (jnp.arange(components, dtype=kind) + 0.5) / components
    places = jnp.searchsorted(jnp.cumsum(some[2][order]), middles).clip(max=len(order) - 1)
    means = some[0][order][places]
    center = some[2] @ some[0]
    spread = jnp.sqrt(some[2] @ (some[0] - center) ** 2)
    turns = jnp.arange(components) % 2

    def run(parts: Array) -> tuple[NormalMixture, Array]:
        even = NormalMixture(jnp.full(components, 1 / components, kind), means, parts[turns] * spread)
        end = jax.lax.fori_loop(0, _STEPS, lambda _, at: em_step(at, *some), even)
        return end, end.log_marginal(*some[:2]) @ some[2]

    ends, values = jax.lax.map(run, jnp.array(_SPREADS, kind))
    best = jax.tree.map(lambda of: of[jnp.argmax(values)], ends)

    def place(at: Array) -> NormalMixture:
        weight, mean, log = at.reshape(3, components)
        return NormalMixture(jax.nn.softmax(weight), mean, jnp.exp(jnp.maximum(log, _LEAST_LOG)))

    def value_of(x: Array, s: Array, w: Array):
        return lambda at: place(at).log_marginal(x, s) @ w

    weight = jnp.log(best.weights + jnp.finfo(kind).tiny)
    # A share below the rounding errors has no slope: none is lost by keeping it from falling further.
    weight = jnp.maximum(weight - weight.max(), _LEAST_LOGIT)
    log = jnp.log(jnp.maximum(best.sds, jnp.exp(jnp.asarray(_LEAST_LOG, kind))))
    start = jnp.concatenate([weight, best.means, log])[None]
    at, value = climb(value_of(x, s, w), start, value_of(*some) if many else None)
    found = place(at)
    # Spreads far below the errors are none, where that is as likely.
    atoms = found._replace(sds=jnp.where(found.sds < s.min() / 100, 0, found.sds))
    enough = atoms.log_marginal(x, s) @ w >= value - 16 * jnp.finfo(kind).eps * (1 + jnp.abs(value))
    found = found._replace(sds=jnp.where(enough, atoms.sds, found.sds))
    by_mean = jnp.argsort(found.means)
    return jax.tree.map(lambda of: of[by_mean], found)

r"""Mixtures as priors of Poisson rates: Gamma components, or atoms on a grid.

Client i has :math:`Z_i` events in an exposure of :math:`e_i`, and a priori its rate is :math:`\lambda_i \sim \sum_k
\pi_k \mathrm{Gamma}(\mu_k s_k, s_k)`, of mean mu_k and pseudo-exposure s_k. Component k makes the count with
probability in proportion to

.. math:: L_{ik} = \frac{\Gamma(\mu_k s_k + Z_i)}{\Gamma(\mu_k s_k)}
   \frac{s_k^{\mu_k s_k}}{(s_k + e_i)^{\mu_k s_k + Z_i}},

and the posterior is the mixture of :math:`\mathrm{Gamma}(\mu_k s_k + Z_i, s_k + e_i)` with weights in proportion to
:math:`\pi_k L_{ik}`.

**Gamma components** are fitted by EM, of which the rates are the missing data, from four starts without random draws,
and by Newton steps from the best of them; none lowers the likelihood, which has several maxima. **Atoms** (prior
"npmle") lie on a grid between the least and the greatest Z_i / e_i, even in their roots; their weights solve a convex
problem with a certificate (`normal_means.simplex`).

References: Simar 1976, "Maximum likelihood estimation of a compound Poisson process"; Minka 2002, "Estimating a Gamma
distribution"; Kiefer and Wolfowitz 1956.
"""

from __future__ import annotations

from functools import partial
from typing import Literal, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jax.scipy.special import digamma, gammainc, gammaincc, gammaln, polygamma, xlogy

from jaxpfl.core import full_precision
from jaxpfl.core.types import Array, Key, Scalar
from jaxpfl.estimators.climb import climb
from jaxpfl.estimators.intervals import bisect
from jaxpfl.estimators.normal_means import simplex
from jaxpfl.estimators.rate_answers import RateMixture, shares_of
from jaxpfl.estimators.rate_mixtures import EM_STEPS, Atoms, mean_log_likelihood, posterior, weighed
from jaxpfl.estimators.rising import log_rise

PoissonPrior: TypeAlias = Literal["gamma", "gamma-mixture", "npmle"]
COMPONENTS = {"gamma-mixture": 2, "npmle": 300}
"""Components of the mixtures, unless another number is given."""

_STARTS = ((1.0, 1.0), (10.0, 10.0), (100.0, 100.0), (1.0, 100.0))
"""Shapes mu_k s_k of the components in turn."""
_LOG_SHAPE = (-9.0, 20.0)
_NEWTON = 4


class Gammas(NamedTuple):
    """A mixture of K Gamma distributions, by increasing mean.

    Attributes:
      weights: pi_k, [K], which sum to one.
      means: mu_k, [K].
      sizes: s_k, the pseudo-exposures, [K].
    """

    bounded = False

    weights: Array
    means: Array
    sizes: Array

    def log_constant(self, z: Array, e: Array) -> Array:
        """Log of e^z / z!, [...]."""
        return _log_constant(z, e)

    def log_components(self, z: Array, e: Array) -> Array:
        """Log L, [..., K]."""
        z, e = z[..., None], e[..., None]
        shape = self.means * self.sizes
        risen = log_rise(*jnp.broadcast_arrays(shape, z))
        return risen - shape * jnp.log1p(e / self.sizes) - z * jnp.log(self.sizes + e)

    def components(self, z: Array, e: Array) -> tuple[Array, Array]:
        """Posterior means and variances of every component, [..., K] each."""
        size = self.sizes + e[..., None]
        mean = (self.means * self.sizes + z[..., None]) / size
        return mean, mean / size

    def quantile(self, p: Scalar, shares: Array, z: Array, e: Array) -> Array:
        """Posterior quantile from the components' shares [..., K], [...]."""
        shape, size = self.means * self.sizes + z[..., None], self.sizes + e[..., None]
        most = ((shape + 40 * jnp.sqrt(shape) + 40) / size).max(axis=-1)

        def below(t: Array) -> Array:
            return (shares * gammainc(shape, t[..., None] * size)).sum(axis=-1) < p

        return bisect(below, jnp.zeros_like(most), most)

    def exceedance(self, t: Array, z: Array, e: Array) -> Array:
        """Posterior probability of more than t [...] under every component, [..., K]."""
        return gammaincc(self.means * self.sizes + z[..., None], t[..., None] * (self.sizes + e[..., None]))

    def draw(self, key: Key, kind: Array, z: Array, e: Array) -> Array:
        """Posterior draws under the component of each client, kind [...], [...]."""
        mean, size = self.means[kind], self.sizes[kind]
        return jax.random.gamma(key, mean * size + z) / (size + e)


class Places(NamedTuple):
    """A discrete distribution of rates.

    Attributes:
      weights: pi_k, [K], which sum to one.
      means: its places, increasing, [K].
    """

    bounded = False

    weights: Array
    means: Array

    def log_constant(self, z: Array, e: Array) -> Array:
        """Log of e^z / z!, [...]."""
        return _log_constant(z, e)

    def log_components(self, z: Array, e: Array) -> Array:
        """Log L, [..., K]; -inf where a place cannot have made the count."""
        return xlogy(z[..., None], self.means) - e[..., None] * self.means

    def components(self, z: Array, e: Array) -> tuple[Array, Array]:
        """Means and variances of every component, [..., K] each."""
        return Atoms(*self).components(z, e)

    def quantile(self, p: Scalar, shares: Array, z: Array, e: Array) -> Array:
        """Posterior quantile from the components' shares [..., K], [...]."""
        return Atoms(*self).quantile(p, shares, z, e)

    def exceedance(self, t: Array, z: Array, e: Array) -> Array:
        """Posterior probability of more than t [...] under every component, one or zero, [..., K]."""
        return Atoms(*self).exceedance(t, z, e)

    def draw(self, key: Key, kind: Array, z: Array, e: Array) -> Array:
        """The atom of each client, of its place kind [...], [...]."""
        return self.means[kind]


def fit_mixture(z: Array, e: Array, *, prior: PoissonPrior, components: int) -> RateMixture:
    """Fit a mixture to counts and exposures [m] that have been checked, and return the posteriors."""
    pairs = weighed(z, e)
    if prior == "npmle":
        fitted, slack = fit_places(*pairs, components=components)
        return posterior(fitted, z, e, slack)
    return posterior(fit_gammas(*pairs, components=components), z, e, jnp.zeros((), z.dtype))


@partial(full_precision.jit, static_argnames="components")
def fit_places(z: Array, e: Array, w: Array, *, components: int) -> tuple[Places, Array]:
    """The likeliest weights on the grid, with their slack; w [m] of the clients sums to one."""
    root = jnp.sqrt(z / e)
    low, high = root.min(), root.max()
    places = (low + (high - low) * jnp.arange(components, dtype=z.dtype) / (components - 1)) ** 2
    even = Places(jnp.full(components, 1 / components, z.dtype), places)
    weights, slack = simplex.weights(even.log_components(z, e), w)
    return Places(weights, places), slack


@partial(full_precision.jit, static_argnames="components")
def fit_gammas(z: Array, e: Array, w: Array, *, components: int) -> Gammas:
    """Gamma components by EM and Newton steps; w [m] of the clients sums to one."""
    kind = z.dtype
    rate = (z + 0.5) / (e + 0.5 / ((w @ z) / (w @ e)))  # half an event at the pooled rate: none is zero
    order = jnp.argsort(rate)
    middles = (jnp.arange(components, dtype=kind) + 0.5) / components
    means = rate[order][jnp.searchsorted(jnp.cumsum(w[order]), middles).clip(max=len(z) - 1)]
    shapes = jnp.array(_STARTS, kind)[:, jnp.arange(components) % 2]

    def run(shapes: Array) -> tuple[Gammas, Array]:
        even = Gammas(jnp.full(components, 1 / components, kind), means, shapes / means)
        end = jax.lax.fori_loop(0, EM_STEPS, lambda _, at: em_step(at, z, e, w), even)
        return end, mean_log_likelihood(end, z, e, w)

    ends, values = jax.lax.map(run, shapes)
    best = jax.tree.map(lambda of: of[jnp.argmax(values)], ends)

    def place(at: Array) -> Gammas:
        weight, mean, shape = at.reshape(3, components)
        mean = jnp.exp(mean)
        return Gammas(jax.nn.softmax(weight), mean, jnp.exp(jnp.clip(shape, *_LOG_SHAPE)) / mean)

    tiny = jnp.finfo(kind).tiny
    weight = jnp.log(best.weights + tiny)
    # A share below the rounding errors has no slope: none is lost by keeping it from falling further.
    weight = jnp.maximum(weight - weight.max(), -30.0)
    start = jnp.concatenate([weight, jnp.log(best.means), jnp.log(best.means * best.sizes)])
    at, _ = climb(lambda at: mean_log_likelihood(place(at), z, e, w), start[None])
    found = place(at)
    by_mean = jnp.argsort(found.means)
    return jax.tree.map(lambda of: of[by_mean], found)


def em_step(at: Gammas, z: Array, e: Array, w: Array) -> Gammas:
    """Responsibilities and the rates' expectations, then each component's likeliest weight, mean and shape."""
    shares = w[:, None] * shares_of(at, z, e)
    shape, size = at.means * at.sizes + z[:, None], at.sizes + e[:, None]
    total = shares.sum(axis=0)
    whole = jnp.where(total > 0, total, 1)
    mean = jnp.where(total > 0, (shares * shape / size).sum(axis=0) / whole, at.means)
    log = (shares * (digamma(shape) - jnp.log(size))).sum(axis=0) / whole
    least, most = (jnp.exp(jnp.asarray(of, z.dtype)) for of in _LOG_SHAPE)
    found = jnp.clip(_shape_of(jnp.maximum(jnp.log(mean) - log, 1 / (2 * most))), least, most)
    found = jnp.where(total > 0, found, at.means * at.sizes)
    return Gammas(total, mean, found / mean)


def _shape_of(gap: Array) -> Array:
    """Shape a of a Gamma distribution with ``log E x - E log x = gap``: log a - psi(a) = gap, by Minka's steps."""
    a = (3 - gap + jnp.sqrt((gap - 3) ** 2 + 24 * gap)) / (12 * gap)
    for _ in range(_NEWTON):
        a = 1 / (1 / a + (jnp.log(a) - digamma(a) - gap) / (a**2 * (1 / a - polygamma(1, a))))
    return a


def _log_constant(z: Array, e: Array) -> Array:
    return z * jnp.log(e) - gammaln(z + 1)

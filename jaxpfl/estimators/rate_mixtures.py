r"""Mixtures as priors of probabilities: Beta components, or atoms on a grid.

Client i has :math:`Z_i` successes in :math:`n_i` trials, and a priori :math:`p_i \sim \sum_k \pi_k \mathrm{Beta}(
\alpha_k, \beta_k)`. Component k makes the counts with probability in proportion to

.. math:: L_{ik} = \frac{B(\alpha_k + Z_i, \beta_k + n_i - Z_i)}{B(\alpha_k, \beta_k)},

and the posterior is the mixture of :math:`\mathrm{Beta}(\alpha_k + Z_i, \beta_k + n_i - Z_i)` with weights in
proportion to :math:`\pi_k L_{ik}`.

**Beta components** are fitted by EM from four starts without random draws: means at quantiles of the clients' shares,
with 3, 30 or 300 pseudo-trials each, or 3 and 300 in turn. Given the responsibilities, alpha and beta take a step of
Minka's fixed point, which maximises a lower bound, so that no step lowers the likelihood; nor do the Newton steps that
follow from the best of the four. The likelihood has several maxima, of which this need not be the greatest.

**Atoms** (prior "npmle") lie on a grid between the least and the greatest share, even on the arcsine scale; their
weights solve a convex problem with a certificate (`normal_means.simplex`).

References: Minka 2000, "Estimating a Dirichlet distribution"; Kiefer and Wolfowitz 1956; Koenker and Mizera 2014.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any, Literal, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.scipy.special import betainc, gammaln, logsumexp, xlog1py, xlogy

from jaxpfl.core import full_precision
from jaxpfl.core.types import Array, Key, Scalar
from jaxpfl.estimators.climb import climb
from jaxpfl.estimators.intervals import bisect
from jaxpfl.estimators.normal_means import simplex
from jaxpfl.estimators.normal_means.answer import in_blocks
from jaxpfl.estimators.rate_answers import Mixture, RateMixture, log_marginal, shares_of
from jaxpfl.estimators.rising import log_rise

RatePrior: TypeAlias = Literal["beta", "beta-mixture", "npmle"]
COMPONENTS = {"beta-mixture": 2, "npmle": 300}
"""Components of the mixtures, unless another number is given."""

EM_STEPS = 30
_STARTS = ((3.0, 3.0), (30.0, 30.0), (300.0, 300.0), (3.0, 300.0))
_ROUNDING = 64  # unit rounding errors within which an atom is a threshold
_LOGIT, _LOG_SIZE = 30.0, (-9.0, 20.0)  # between which parameters stay


class Betas(NamedTuple):
    """A mixture of K Beta distributions, by increasing mean.

    Attributes:
      weights: pi_k, [K], which sum to one.
      means: alpha / (alpha + beta), [K].
      sizes: alpha + beta, the pseudo-trials, [K].
    """

    bounded = True

    weights: Array
    means: Array
    sizes: Array

    def log_constant(self, z: Array, n: Array) -> Array:
        """Log of the number of orders of z successes in n trials, [...]."""
        return log_orders(z, n)

    def log_components(self, z: Array, n: Array) -> Array:
        """Log L, [..., K]."""
        return log_beta_binomial(z[..., None], n[..., None], self.means * self.sizes, (1 - self.means) * self.sizes)

    def components(self, z: Array, n: Array) -> tuple[Array, Array]:
        """Posterior means and variances of every component, [..., K] each."""
        size = self.sizes + n[..., None]
        mean = (self.means * self.sizes + z[..., None]) / size
        return mean, mean * (1 - mean) / (size + 1)

    def quantile(self, p: Scalar, shares: Array, z: Array, n: Array) -> Array:
        """Posterior quantile from the components' shares [..., K], [...]."""
        first = self.means * self.sizes + z[..., None]
        rest = (1 - self.means) * self.sizes + (n - z)[..., None]
        zero = jnp.zeros_like(z)
        return bisect(lambda t: (shares * betainc(first, rest, t[..., None])).sum(axis=-1) < p, zero, zero + 1)

    def exceedance(self, t: Array, z: Array, n: Array) -> Array:
        """Posterior probability of more than t [...] under every component, [..., K]."""
        first = self.means * self.sizes + z[..., None]
        rest = (1 - self.means) * self.sizes + (n - z)[..., None]
        return betainc(rest, first, 1 - t[..., None])

    def draw(self, key: Key, kind: Array, z: Array, n: Array) -> Array:
        """Posterior draws under the component of each client, kind [...], [...]."""
        mean, size = self.means[kind], self.sizes[kind]
        return jax.random.beta(key, mean * size + z, (1 - mean) * size + n - z)


class Atoms(NamedTuple):
    """A discrete distribution.

    Attributes:
      weights: pi_k, [K], which sum to one.
      means: its places, increasing, [K].
    """

    bounded = True

    weights: Array
    means: Array

    def log_constant(self, z: Array, n: Array) -> Array:
        """Log of the number of orders of z successes in n trials, [...]."""
        return log_orders(z, n)

    def log_components(self, z: Array, n: Array) -> Array:
        """Log L, [..., K]; -inf where a place cannot have made the counts."""
        return xlogy(z[..., None], self.means) + xlog1py((n - z)[..., None], -self.means)

    def components(self, z: Array, n: Array) -> tuple[Array, Array]:
        """Means and variances of every component, [..., K] each."""
        mean = jnp.broadcast_to(self.means, (*z.shape, len(self.means)))
        return mean, jnp.zeros_like(mean)

    def quantile(self, p: Scalar, shares: Array, z: Array, n: Array) -> Array:
        """Posterior quantile from the components' shares [..., K], [...]."""
        return self.means[(jnp.cumsum(shares, axis=-1) < p).sum(axis=-1).clip(max=len(self.means) - 1)]

    def exceedance(self, t: Array, z: Array, n: Array) -> Array:
        """Posterior probability of more than t [...] under every component, one or zero, [..., K]."""
        # An atom that is the threshold but for rounding, as a mean of a single one may be, is not above it.
        above = self.means > (t * (1 + _ROUNDING * jnp.finfo(t.dtype).eps))[..., None]
        return jnp.broadcast_to(above, (*z.shape, len(self.means))).astype(self.means.dtype)

    def draw(self, key: Key, kind: Array, z: Array, n: Array) -> Array:
        """The atom of each client, of its place kind [...], [...]."""
        return self.means[kind]


def log_beta_binomial(z: Array, n: Array, alpha: Array, beta: Array) -> Array:
    """Log probability of one order of z successes in n trials under Beta(alpha, beta)."""
    first, second, both = log_rise(*_rises(z, n, alpha, beta))  # at once, which compiles in a third of the time
    return first + second - both


def _rises(z: Array, n: Array, alpha: Array, beta: Array) -> tuple[Array, Array]:
    """Starts and heights of the three rising factorials, [3, ...] each."""
    shape = jnp.broadcast_shapes(z.shape, n.shape, alpha.shape, beta.shape)
    starts, heights = (alpha, beta, alpha + beta), (z, n - z, n)
    return jnp.stack([jnp.broadcast_to(of, shape) for of in starts]), jnp.stack(
        [jnp.broadcast_to(of, shape) for of in heights]
    )


def fit_mixture(z: Array, n: Array, *, prior: RatePrior, components: int) -> RateMixture:
    """Fit a mixture to counts [m] that have been checked, and return the posteriors."""
    pairs = weighed(z, n)
    if prior == "npmle":
        fitted, slack = fit_atoms(*pairs, components=components)
    else:
        fitted, slack = fit_betas(*pairs, components=components), jnp.zeros((), z.dtype)
    return posterior(fitted, z, n, slack)


@partial(full_precision.jit, static_argnames="components")
def fit_atoms(z: Array, n: Array, w: Array, *, components: int) -> tuple[Atoms, Array]:
    """The likeliest weights on the grid, with their slack; w [m] of the clients sums to one."""
    angle = jnp.arcsin(jnp.sqrt(z / n))
    low, high = angle.min(), angle.max()
    places = jnp.sin(low + (high - low) * jnp.arange(components, dtype=z.dtype) / (components - 1)) ** 2
    even = Atoms(jnp.full(components, 1 / components, z.dtype), places)
    weights, slack = simplex.weights(even.log_components(z, n), w)
    return Atoms(weights, places), slack


@partial(full_precision.jit, static_argnames="components")
def fit_betas(z: Array, n: Array, w: Array, *, components: int) -> Betas:
    """Beta components by EM and Newton steps; w [m] of the clients sums to one."""
    kind = z.dtype
    share = (z + 0.5) / (n + 1)
    order = jnp.argsort(share)
    reached = jnp.cumsum(w[order])
    middles = (jnp.arange(components, dtype=kind) + 0.5) / components
    means = share[order][jnp.searchsorted(reached, middles).clip(max=len(z) - 1)]
    turns = jnp.arange(components) % 2
    sizes = jnp.array(_STARTS, kind)[:, turns]

    def run(sizes: Array) -> tuple[Betas, Array]:
        even = Betas(jnp.full(components, 1 / components, kind), means, sizes)
        end = jax.lax.fori_loop(0, EM_STEPS, lambda _, at: em_step(at, z, n, w), even)
        return end, mean_log_likelihood(end, z, n, w)

    ends, values = jax.lax.map(run, sizes)
    best = jax.tree.map(lambda of: of[jnp.argmax(values)], ends)

    limit = _most_logit(kind)

    def place(at: Array) -> Betas:
        weight, mean, size = at.reshape(3, components)
        size = jnp.exp(jnp.clip(size, *_LOG_SIZE))
        return Betas(jax.nn.softmax(weight), jax.nn.sigmoid(jnp.clip(mean, -limit, limit)), size)

    tiny = jnp.finfo(kind).tiny
    start = [jnp.log(best.weights + tiny), jnp.log(best.means) - jnp.log1p(-best.means), jnp.log(best.sizes)]
    # A share below the rounding errors has no slope: none is lost by keeping it from falling further.
    start[0] = jnp.maximum(start[0] - start[0].max(), -_LOGIT)
    at, _ = climb(lambda at: mean_log_likelihood(place(at), z, n, w), jnp.concatenate(start)[None])
    found = place(at)
    by_mean = jnp.argsort(found.means)
    return jax.tree.map(lambda of: of[by_mean], found)


def em_step(at: Betas, z: Array, n: Array, w: Array) -> Betas:
    """Responsibilities, then shares, and a step of Minka's fixed point; it does not lower the likelihood."""
    shares = w[:, None] * shares_of(at, z, n)
    alpha, beta = at.means * at.sizes, (1 - at.means) * at.sizes

    starts, heights = _rises(z[:, None], n[:, None], alpha, beta)
    # psi(start + height) - psi(start) without cancellation.
    slopes = jax.jvp(lambda of: log_rise(of, heights), (starts,), (jnp.ones_like(starts),))[1]
    first, second, below = (shares * slopes).sum(axis=1)
    below = jnp.where(below > 0, below, 1)
    least, most = (jnp.exp(jnp.asarray(of, z.dtype)) for of in _LOG_SIZE)
    alpha, beta = alpha * first / below, beta * second / below
    edge = math.exp(-_most_logit(z.dtype))
    alpha, beta = jnp.maximum(alpha, edge), jnp.maximum(beta, edge)
    mean = jnp.clip(alpha / (alpha + beta), edge, 1 - edge)
    return Betas(shares.sum(axis=0), mean, jnp.clip(alpha + beta, least, most))


def _most_logit(kind: Any) -> float:
    """The greatest logit of a component's mean, at which one minus the mean still has digits."""
    return min(_LOGIT, -math.log(8 * float(jnp.finfo(kind).eps)))


def mean_log_likelihood(prior: Mixture, z: Array, n: Array, w: Array) -> Array:
    """Mean log probability of the clients' counts but for its constant, [], weighted by w [m], which sums to one."""
    return logsumexp(prior.log_components(z, n) + jnp.log(prior.weights), axis=-1) @ w


@full_precision.jit
def posterior(prior: Any, z: Array, n: Array, slack: Array) -> RateMixture:
    """Posteriors of clients of counts z and n, [m] each, under a `Mixture`, with the slack of its fit."""

    def of(z: Array, n: Array) -> tuple[Array, Array, Array]:
        shares = shares_of(prior, z, n)
        means, variances = prior.components(z, n)
        mean = (shares * means).sum(axis=-1)
        variance = (shares * (variances + (means - mean[..., None]) ** 2)).sum(axis=-1)
        return mean, jnp.sqrt(variance), log_marginal(prior, z, n)

    mean, sd, value = in_blocks(of, z, n)
    return RateMixture(z, n, prior, mean, sd, value.sum(), slack)


def log_orders(z: Array, n: Array) -> Array:
    """Log of the number of orders of z successes in n trials."""
    return gammaln(n + 1) - gammaln(z + 1) - gammaln(n - z + 1)


def weighed(z: Array, n: Array) -> tuple[Array, Array, Array]:
    """Distinct pairs of counts with their shares of the clients, where values are known: often few, of many clients."""
    if isinstance(z, Tracer) or isinstance(n, Tracer):
        return z, n, jnp.full(z.shape, 1 / len(z), z.dtype)
    pairs, _, counts = distinct(np.asarray(z), np.asarray(n))
    return jnp.asarray(pairs[0], z.dtype), jnp.asarray(pairs[1], z.dtype), jnp.asarray(counts / len(z), z.dtype)


def distinct(z: np.ndarray, n: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Distinct pairs [2, d] of counts, each client's place among them [m], and the numbers of clients [d]."""
    found: Any = np.unique(np.stack([z, n]), axis=1, return_inverse=True, return_counts=True)
    return found[0], found[1].reshape(-1), found[2]

r"""Empirical Bayes for normal means with known, unequal standard errors.

Client i has an estimate :math:`x_i \sim N(\theta_i, s_i^2)` of its own parameter, with the prior :math:`\theta_i \sim
G`. G is fitted, within a family of priors, by maximizing the marginal likelihood of all clients. The personalized
estimate is the posterior mean under G.

=============== ========================================================= ====================
prior           G                                                         center by default
=============== ========================================================= ====================
normal          N(c, t^2)                                                 learned
point-normal    pi_0 at c, else N(c, t^2)                                 0
scale-mixture   sum_k pi_k N(c, t_k^2), t_k on a grid (ash)               0
npmle           any distribution on a grid: weight pi_k at the point c_k  none
=============== ========================================================= ====================

A fit is iterative. Each step needs new sums over clients: the likelihood's derivatives with respect to two or three
parameters, or K first and K^2 second derivatives for weights on a grid. For unequal s, no fixed set of sums is enough
for the whole fit of any family. (For equal s, the sums of x and of x^2 are enough for the normal family.) One client
can change these sums by any amount, because its log likelihood is unbounded in x. They therefore cannot be made private
by adding noise.

Every prior is a mixture of normal distributions, possibly with atoms. Component k is N(c_k, t_k^2) with the weight
pi_k. Under component k, x has the marginal distribution N(c_k, t_k^2 + s^2), and theta has the posterior

.. math:: N\Big(c_k + \frac{t_k^2}{t_k^2 + s^2} (x - c_k),\; \frac{t_k^2 s^2}{t_k^2 + s^2}\Big)

The component's posterior weight is proportional to pi_k times its marginal density of x. A component with t_k = 0 is an
atom.

References: Efron and Morris 1973; Johnstone and Silverman 2004; Kiefer and Wolfowitz 1956; Koenker and Mizera 2014;
Stephens 2017, "False discovery rates: a new deal"; Willwerscheid, Carbonetto and Stephens 2025, "ebnm: an R package for
solving the empirical Bayes normal means problem using a variety of prior families".
"""

from __future__ import annotations

from functools import partial
from typing import Any, Literal, NamedTuple, TypeAlias, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.scipy.special import erfc, gammaincc, logsumexp, ndtr, ndtri

from jaxpfl.core import full_precision
from jaxpfl.core.search import bisect, climb
from jaxpfl.core.types import Array, Key, Scalar
from jaxpfl.estimators.empirical_bayes import grid, inputs
from jaxpfl.support.errors import JaxpflError, shown, unknown_name, warn

Family: TypeAlias = Literal["normal", "point-normal", "scale-mixture", "npmle"]
FAMILIES: tuple[Family, ...] = get_args(Family)
COMPONENTS = {"scale-mixture": 41, "npmle": 300}
"""Default number of components of the families on a grid."""

_LEAST_COMPONENTS = 3
_LEAST_SIDED, _SIDED = 8, 0.95
"""Smallest number of clients, and smallest fraction of estimates on one side of zero, for a warning about the center
zero.
"""
_SCALES = 16  # starting values of the normal prior's spread; several, because the likelihood may have several maxima
_SLABS = 6  # starting values of a slab's spread, each combined with every start of the spike's log odds
_LOGITS = (-3.0, 0.0, 2.0, 4.0)
_FINEST = 10.0  # smallest standard error divided by a scale mixture's smallest spread, as in ashr
AT_ONCE = 4096
"""Number of clients whose posteriors are computed together, which limits memory."""
_FARTHEST = 9.0
"""Standard deviations beyond which a normal has no mass in double precision."""


class NormalMixture(NamedTuple):
    """A mixture of K normal distributions: a prior for theta, given an estimate x with standard error s.

    Attributes:
      weights: weights pi_k, [K], with sum one.
      means: means c_k, [K].
      sds: standard deviations t_k, [K]; zero for an atom.
    """

    weights: Array
    means: Array
    sds: Array

    @property
    @full_precision.products
    def mean(self) -> Array:
        """Mean of the prior, []."""
        return self.weights @ self.means

    @property
    @full_precision.products
    def sd(self) -> Array:
        """Standard deviation of the prior, []."""
        return jnp.sqrt(self.weights @ (self.sds**2 + (self.means - self.mean) ** 2))

    def log_components(self, x: Array, s: Array) -> Array:
        """Logarithm of the marginal density of x under each component, [..., K]."""
        spread = jnp.hypot(s[..., None], self.sds)
        return -(((x[..., None] - self.means) / spread) ** 2 + jnp.log(2 * jnp.pi)) / 2 - jnp.log(spread)

    def log_marginal(self, x: Array, s: Array) -> Array:
        """Log marginal density of x, [...]."""
        return logsumexp(self.log_components(x, s) + self._log_weights, axis=-1)

    @full_precision.products
    def marginal_below(self, t: Array, s: Array) -> Array:
        """Marginal probability that an estimate with standard error s is at most t, [...]."""
        spread = jnp.hypot(s[..., None], self.sds)
        return ndtr((t[..., None] - self.means) / spread) @ self.weights

    def posterior(self, x: Array, s: Array) -> tuple[Array, Array, Array]:
        """Weights, means and standard deviations, [..., K] each, of the posterior's components."""
        p = jax.nn.softmax(self.log_components(x, s) + self._log_weights, axis=-1)
        spread = jnp.hypot(s[..., None], self.sds)
        centers = self.means + (self.sds / spread) ** 2 * (x[..., None] - self.means)
        return p, centers, self.sds * (s[..., None] / spread)

    def moments(self, x: Array, s: Array) -> tuple[Array, Array]:
        """Posterior mean and standard deviation, [...] each."""
        p, centers, deviations = self.posterior(x, s)
        mean = (p * centers).sum(axis=-1)
        return mean, jnp.sqrt((p * (deviations**2 + (centers - mean[..., None]) ** 2)).sum(axis=-1))

    def below(self, t: Array, x: Array, s: Array, *, strictly: bool = False) -> Array:
        """Posterior probability that theta is at most t (below t if ``strictly``), [...]."""
        p, centers, deviations = self.posterior(x, s)
        off = t[..., None] - centers
        smooth = deviations > 0
        share = erfc(-(0.5**0.5) * off / jnp.where(smooth, deviations, 1)) / 2  # four times as fast as ndtr
        return (p * jnp.where(smooth, share, off > 0 if strictly else off >= 0)).sum(axis=-1)

    def quantile(self, p: Scalar, x: Array, s: Array) -> Array:
        """Posterior quantile: the smallest t with P(theta <= t) >= p, [...]."""
        shares, centers, deviations = self.posterior(x, s)
        low, high = centers - _FARTHEST * deviations, centers + _FARTHEST * deviations
        margin = jnp.finfo(x.dtype).eps * (1 + _FARTHEST) * jnp.maximum(jnp.abs(low), jnp.abs(high))
        least = jnp.where(shares > 0, low - margin, jnp.inf).min(-1)
        most = jnp.where(shares > 0, high + margin, -jnp.inf).max(-1)
        near = bisect(lambda t: self.below(t, x, s) < p, least, most)
        # A quantile at an atom is set to the atom exactly; with a rounding error, an interval could exclude the atom.
        atoms = jnp.where((self.sds == 0) & (self.weights > 0), self.means, jnp.inf)
        atom = atoms[jnp.abs(near[..., None] - atoms).argmin(axis=-1)]
        there = (self.below(atom, x, s, strictly=True) < p) & (self.below(atom, x, s) >= p)
        return jnp.where(there, atom, near)

    def sample(self, key: Key, x: Array, s: Array) -> Array:
        """Draw every theta from its posterior, [...]."""
        kind_key, place_key = jax.random.split(key)
        p, centers, deviations = self.posterior(x, s)
        kind = jax.random.categorical(kind_key, jnp.log(p))[..., None]
        center, deviation = (jnp.take_along_axis(each, kind, axis=-1)[..., 0] for each in (centers, deviations))
        return center + deviation * jax.random.normal(place_key, x.shape, x.dtype)

    def mirrored(self) -> NormalMixture:
        """The prior distribution of -theta."""
        return self._replace(means=-self.means)

    @property
    def _log_weights(self) -> Array:
        return jnp.where(self.weights > 0, jnp.log(jnp.where(self.weights > 0, self.weights, 1)), -jnp.inf)


class NormalMeans(NamedTuple):
    """Empirical Bayes posteriors of m clients' means, with the fitted prior treated as known.

    Attributes:
      x, s: estimates and their standard errors, [m] each.
      prior: the fitted prior.
      mean: posterior means, the personalized estimates, [m].
      sd: posterior standard deviations, [m].
      lfsr: local false sign rates, min(P(theta <= 0), P(theta >= 0)), [m].
      shrinkage: 1 - sd^2 / s^2, [m]: one minus the derivative of the posterior mean with respect to x. Under a normal
        prior, the shrinkage is s^2 / (s^2 + t^2). The shrinkage is negative where the posterior mean changes faster
        than x, as between two atoms.
      log_marginal: log likelihood of all estimates, [].
      slack: upper bound on the difference between the largest mean log likelihood of any weights on the grid and the
        mean log likelihood of the fitted weights, []; zero for priors without a grid.
      labels: the clients' labels, if the data came in a data frame.
    """

    x: Array
    s: Array
    prior: NormalMixture
    mean: Array
    sd: Array
    lfsr: Array
    shrinkage: Array
    log_marginal: Array
    slack: Array
    labels: inputs.Labels | None = None

    def to_frame(self, level: float | None = None) -> Any:
        """Return a pandas frame with a row per client; with ``level``, also interval endpoints ``low`` and ``high``."""
        return inputs.frame(self, len(self.x), level)

    def quantile(self, p: Scalar) -> Array:
        """Posterior quantile: the smallest t with P(theta <= t) >= p, [m]."""
        inputs.inside("p", p)
        return blockwise(lambda x, s: self.prior.quantile(p, x, s), self.x, self.s)

    def interval(self, level: Scalar = 0.95) -> tuple[Array, Array]:
        """Lower and upper endpoints [m] of the equal-tailed credible intervals.

        The coverage is correct, on average over clients, if the true prior is in the fitted family and there are many
        clients. For other priors use `robust_intervals`; for few clients use the intervals of `learned_gaussian`.

        Raises:
          JaxpflError: if the level is out of range.
        """
        inputs.level_within(level)
        return self.quantile((1 - level) / 2), self.quantile((1 + level) / 2)

    def sample(self, key: Key) -> Array:
        """Draw every client's mean from its posterior, [m]."""
        return self.prior.sample(key, self.x, self.s)

    @property
    def risk(self) -> Array:
        """Stein's unbiased risk estimate for `mean`, [], which treats the prior as known."""
        return self.risks.mean()

    @property
    def risks(self) -> Array:
        """Terms of `risk`, [m]: (mean - x)^2 + 2 sd^2 - s^2, because the derivative of ``mean`` is sd^2 / s^2."""
        return (self.mean - self.x) ** 2 + 2 * self.sd**2 - self.s**2

    @property
    def scores(self) -> Array:
        """Normal scores of the estimates under their fitted marginals, [m]; N(0, 1) if the prior is correct."""
        below = blockwise(self.prior.marginal_below, self.x, self.s)
        above = blockwise(self.prior.mirrored().marginal_below, -self.x, self.s)
        tail = jnp.maximum(jnp.minimum(below, above), jnp.finfo(below.dtype).tiny)  # both may underflow
        return jnp.where(below < above, 1, -1) * ndtri(tail)


def posterior(prior: NormalMixture, x: Array, s: Array, slack: Scalar = 0.0) -> NormalMeans:
    """Return posteriors of clients under a known prior, which need not have been fitted to these clients.

    ``slack``, the bound on the prior's distance from the maximum likelihood, is stored in the result as given.
    """

    def block(x: Array, s: Array) -> tuple[Array, ...]:
        zero = jnp.zeros_like(x)
        # Each tail is computed separately, because 1 - P loses the digits of a small probability.
        sign = jnp.minimum(prior.below(zero, x, s), prior.mirrored().below(zero, -x, s))
        return *prior.moments(x, s), sign, prior.log_marginal(x, s)

    mean, sd, lfsr, fit = blockwise(block, x, s)
    return NormalMeans(x, s, prior, mean, sd, lfsr, 1 - (sd / s) ** 2, fit.sum(), jnp.asarray(slack, x.dtype))


def blockwise(function: Any, *arrays: Array) -> Any:
    """Apply ``function`` to arrays of all m clients, `AT_ONCE` clients at a time."""
    m = len(arrays[0])
    if m <= AT_ONCE:
        return function(*arrays)
    blocks = tuple(jnp.pad(each, (0, -m % AT_ONCE), mode="edge").reshape(-1, AT_ONCE) for each in arrays)
    found = jax.lax.map(lambda block: function(*block), blocks)
    return jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:])[:m], found)


def ebnm(
    x: Any,
    s: Any,
    prior: Family = "normal",
    *,
    center: Scalar | Literal["learned"] | None = None,
    components: int | None = None,
    weights: Any = None,
) -> NormalMeans:
    """Fit the prior to all estimates, and return every client's posterior under the fitted prior.

    This function works under ``jax.jit``, and under ``jax.vmap`` over problems. The following are static: the family,
    the number of components, and whether the center is learned. Results have JAX's floating-point type. The likelihood
    is maximized to 1e-9 in double precision (``jax.enable_x64(True)``), and to about 1e-4 in single precision. For more
    than 16384 clients, weights on a grid are fitted to 4096 bins, each of which stands for similar clients.

    Args:
      x: the clients' estimates, [m]: an array, a list, or a column of a data frame.
      s: positive standard errors, [m], or one for all clients.
      prior: family of the prior, from the table at the top of this module.
      center: the number c, or "learned" to fit c too. scale-mixture accepts only a number, and npmle has no center.
      components: number of components of a scale mixture (by default 41) or an NPMLE (by default 300). The distance
        between the NPMLE's atoms should be smaller than the smallest s.
      weights: weights of the clients in the fit of the prior, [m], nonnegative and in any unit; by default equal. If
        clients are regions weighted by their populations, the prior describes the region of a person drawn at random. A
        client with weight zero does not affect the fit. Weights are scaled to a mean of one in ``log_marginal``, and
        not used in ``risk``.

    Raises:
      JaxpflError: if x or s are not finite numbers, s is not positive, or lengths differ; if data-frame indexes name
        different clients; if the prior is unknown, or does not accept ``center`` or ``components``; if weights are
        negative or not numbers; or if too few clients have a positive weight. At least two clients are needed, or one
        for a prior with a fixed center. Within a JAX transformation, values are not checked.

    Examples:
      >>> rng = np.random.default_rng(0)
      >>> theta = np.where(rng.random(1000) < 0.05, 5.0, 0.0)
      >>> found = ebnm(theta + rng.normal(size=1000), 1.0, prior="point-normal")
      >>> bool(((found.mean - theta) ** 2).mean() < 0.2)  # 1 for each client alone
      True
    """
    if prior not in FAMILIES:
        raise unknown_name("prior", prior, FAMILIES)
    learned = center == "learned" if isinstance(center, str) else center is None and prior == "normal"
    _check_center(prior, center)
    count = _components(prior, components)
    x, s, weights = inputs.aligned(x=x, s=s, weights=weights)
    alone = prior != "npmle" and not learned
    own, errors = checked(x, s, one=alone)
    if prior == "npmle" and not isinstance(own, Tracer) and not isinstance(errors, Tracer):
        step = float(own.max() - own.min()) / (count - 1)
        if step > float(errors.min()):
            warn(f"npmle atoms are {step:.3g} apart, but the smallest s is {float(errors.min()):.3g}: add components")
    if center is None and alone:
        _warn_of_center(prior, own)
    at = jnp.asarray(0.0 if learned or center is None else center, own.dtype)
    w = inputs.shares(weights, len(own), 1 if alone else 2)
    found = _solve(own, errors, w, at, prior=prior, learned=learned, components=count, weighted=weights is not None)
    return found._replace(labels=inputs.labels_of(x, s, weights))


@partial(full_precision.jit, static_argnames=("prior", "learned", "components", "weighted"))
def _solve(
    x: Array, s: Array, w: Array, center: Array, *, prior: Family, learned: bool, components: int, weighted: bool
) -> NormalMeans:
    """Fit the prior in units in which s is near one, and return the posteriors; the weights w [m] must sum to one."""
    # Scaling by a power of two causes no rounding errors.
    unit = jnp.exp2(jnp.round(jnp.log2(s).mean()))
    # The origin affects only rounding errors, so with many clients the median of a subset suffices.
    origin = jnp.median(x[:: 1 + len(x) // grid.MANY]) if learned or prior == "npmle" else center
    y, e = (x - origin) / unit, s / unit
    zero = jnp.zeros((), x.dtype)
    slack = zero
    if prior == "normal":
        fitted = _normal(y, e, w, None if learned else zero)[0]
    elif prior == "point-normal":
        fitted = _point_normal(y, e, w, None if learned else zero)
    else:
        fitted, slack = (_npmle if prior == "npmle" else _scale_mixture)(y, e, w, components)
    fitted = fitted._replace(means=fitted.means * unit + origin, sds=fitted.sds * unit)
    found = posterior(fitted, x, s, slack)
    if weighted:
        found = found._replace(log_marginal=len(x) * (w @ blockwise(fitted.log_marginal, x, s)))
    return found


def _normal(x: Array, s: Array, w: Array, center: Array | None) -> tuple[NormalMixture, Array]:
    """Fitted N(c, t^2) and its mean log likelihood; the center is fitted too, unless given."""

    def prior(sd: Array) -> NormalMixture:
        precision = w / (s**2 + sd**2)
        c = (precision / precision.sum()) @ x if center is None else center
        return NormalMixture(jnp.ones(1, x.dtype), jnp.reshape(c, 1), jnp.reshape(sd, 1))

    def value(sd: Array) -> Array:
        return prior(sd).log_marginal(x, s) @ w

    best, some = climb(lambda at: value(jnp.exp(at[0])), _scales(x, s, center, _SCALES)[:, None])
    zero = jnp.zeros((), x.dtype)
    none = value(zero)
    return _simplest([(prior(zero), none), (prior(jnp.exp(best[0])), some)]), jnp.maximum(none, some)


def _point_normal(x: Array, s: Array, w: Array, center: Array | None) -> NormalMixture:
    """Fitted mixture of an atom at c (spike) and a normal distribution about c (slab)."""
    precision = w / s**2
    middle = (precision / precision.sum()) @ x if center is None else center
    one, one_value = _normal(x, s, w, center)

    def prior(at: Array) -> NormalMixture:
        c = at[2] if center is None else center
        return mixed(jax.nn.sigmoid(at[0]), c, jnp.exp(at[1]))

    def mixed(null: Array, c: Array, sd: Array) -> NormalMixture:
        weights = jnp.stack([null, 1 - null])
        return NormalMixture(weights, jnp.stack([c, c]), jnp.stack([jnp.zeros_like(sd), sd]))

    def value(prior: NormalMixture) -> Array:
        return prior.log_marginal(x, s) @ w

    scales, logits = _scales(x, s, center, _SLABS), jnp.asarray(_LOGITS, x.dtype)
    starts = jnp.stack([each.ravel() for each in jnp.meshgrid(logits, scales)], axis=1)
    if center is None:
        starts = jnp.concatenate([starts, jnp.zeros((len(starts), 1), x.dtype)], axis=1)
    best, both = climb(lambda at: value(prior(at)), starts)
    zero = jnp.zeros((), x.dtype)
    none = mixed(zero + 1, middle, zero)
    slab = mixed(zero, one.means[0], one.sds[0])
    return _simplest([(none, value(none)), (slab, one_value), (prior(best), both)])


def _scale_mixture(x: Array, s: Array, w: Array, components: int) -> tuple[NormalMixture, Array]:
    """Fitted mixture of normals about zero (ash); the grid of spreads is geometric, from zero to beyond the data."""
    low = s.min() / _FINEST
    widest = 2 * jnp.sqrt(jnp.maximum((x**2 - s**2).max(), (8 * low) ** 2))
    share = jnp.arange(components - 1, dtype=x.dtype) / (components - 2)
    sds = jnp.concatenate([jnp.zeros(1, x.dtype), low * (widest / low) ** share])
    return _weighted(x, s, w, jnp.zeros(components, x.dtype), sds)


def _npmle(x: Array, s: Array, w: Array, components: int) -> tuple[NormalMixture, Array]:
    """Fitted nonparametric distribution: atoms on an evenly spaced grid over the range of x.

    Atoms outside this range would not increase the likelihood.
    """
    share = jnp.arange(components, dtype=x.dtype) / (components - 1)
    return _weighted(x, s, w, x.min() + (x.max() - x.min()) * share, jnp.zeros(components, x.dtype))


def _weighted(x: Array, s: Array, w: Array, means: Array, sds: Array) -> tuple[NormalMixture, Array]:
    """Fit the weights of a mixture of given components by maximum likelihood.

    Args:
      x, s: estimates and their standard errors, [m] each.
      w: weights of the clients, [m].
      means, sds: means and standard deviations of the components, [K] each.

    Returns:
      mixture: mixture of these components with the fitted weights.
      slack: upper bound on how far the mean log likelihood is below its maximum, as in `NormalMeans`.
    """
    even = NormalMixture(jnp.full(len(means), 1 / len(means), x.dtype), means, sds)
    if len(x) > grid.MANY:
        x, s, w = grid.binned(x, s, w)
    weights, slack = grid.weights(even.log_components(x, s), w)
    return even._replace(weights=weights), slack


def _scales(x: Array, s: Array, center: Array | None, number: int) -> Array:
    """Logarithms of scales, [number], from well below the standard errors to the range of the data."""
    low, high = s.min() / 4, jnp.abs(x - (0 if center is None else center)).max() + s.max()
    return jnp.log(low) + (jnp.log(high) - jnp.log(low)) * jnp.linspace(0, 1, number, dtype=x.dtype)


def _simplest(found: list[tuple[NormalMixture, Array]]) -> NormalMixture:
    """Simplest fit whose likelihood is the largest up to rounding errors; ``found`` begins with the simplest fit."""
    values = jnp.stack([value for _, value in found])
    best = values.max()
    enough = values >= best - 16 * jnp.finfo(values.dtype).eps * (1 + jnp.abs(best))
    return jax.tree.map(lambda *each: jnp.stack(each)[jnp.argmax(enough)], *(prior for prior, _ in found))


def _check_center(prior: Family, center: Any) -> None:
    if center is None or isinstance(center, Tracer):
        return
    if isinstance(center, str):
        if center != "learned":
            raise JaxpflError(f"center must be a number or 'learned', got {shown(center)}")
        if prior in COMPONENTS:
            raise JaxpflError(f"center must be a number for prior {prior!r}, got 'learned': subtract a center from x")
    elif prior == "npmle":
        raise JaxpflError(f"center must be left out for prior {prior!r}, got {center}")
    elif np.ndim(center) > 0 or not np.isfinite(center):
        raise JaxpflError(f"center must be a finite number, got {shown(center)}")


def _warn_of_center(prior: Family, x: Array) -> None:
    """Warn if nearly all estimates are on one side of zero, the default center of symmetric priors."""
    if isinstance(x, Tracer) or len(x) < _LEAST_SIDED:
        return
    above, below = int((x > 0).sum()), int((x < 0).sum())
    most = max(above, below)
    if most >= _SIDED * len(x):
        other = "" if prior in COMPONENTS else " or 'learned'"
        warn(
            f"prior {prior} is symmetric about 0 unless center is given, but {most} of {len(x)} estimates lie "
            f"{'above' if above == most else 'below'} 0: set center to a number{other}"
        )


def _components(prior: Family, components: int | None) -> int:
    if prior not in COMPONENTS:
        if components is not None:
            raise JaxpflError(f"components must be left out for prior {prior!r}, got {components}")
        return 0
    count = COMPONENTS[prior] if components is None else components
    if count != int(count) or count < _LEAST_COMPONENTS:
        raise JaxpflError(f"components must be a whole number of at least {_LEAST_COMPONENTS}, got {components}")
    return int(count)


def checked(x: Any, s: Any, *, one: bool) -> tuple[Array, Array]:
    """Check estimates and standard errors, and return them with equal length in JAX's floating-point type.

    Args:
      x, s: estimates and standard errors, as in `ebnm`. Traced values are not checked.
      one: whether a single client is allowed.

    Raises:
      JaxpflError: as in `ebnm`.
    """
    own, errors = checked_arrays(x, s, one=one)
    kind = jnp.result_type(float)
    if isinstance(own, np.ndarray) and isinstance(errors, np.ndarray):
        for name, each in (("x", own), ("s", errors)):
            if np.abs(each).max() > jnp.finfo(kind).max / 4 or (name == "s" and each.min() < 4 * jnp.finfo(kind).tiny):
                raise JaxpflError(f"{name} must be within the range of {kind}: use another unit, or double precision")
        full_precision.check_digits(float(np.abs(own).max()), float(errors.min()))
    return jnp.asarray(own, kind), jnp.broadcast_to(jnp.asarray(errors, kind), own.shape)


def checked_arrays(x: Any, s: Any, *, one: bool) -> tuple[Any, Any]:
    """Check inputs as `checked` does, but return known values as NumPy arrays in double precision."""
    own, errors = (inputs.numbers(name, each) for name, each in zip("xs", inputs.aligned(x=x, s=s), strict=True))
    if own.ndim != 1 or errors.ndim > 1:
        raise JaxpflError(f"x and s must have one number for each client, got shapes {own.shape} and {errors.shape}")
    if errors.ndim and errors.shape != own.shape:
        raise JaxpflError(f"x and s must have the same length, got lengths {len(own)} and {len(errors)}")
    least = 1 if one else 2
    if len(own) < least:
        what = "1 client is required" if one else "2 clients are required to estimate a prior (1 if center is given)"
        raise JaxpflError(f"at least {what}, got {len(own)}")
    if isinstance(own, np.ndarray) and not np.isfinite(own).all():
        at = int(np.argmin(np.isfinite(own)))
        raise JaxpflError(f"x must be finite, got {own[at]} for client {at}")
    if isinstance(errors, np.ndarray):
        bad = ~(np.isfinite(errors) & (errors > 0)).ravel()
        if bad.any():
            at = int(np.argmax(bad))
            raise JaxpflError(f"s must be finite and > 0, got {errors.ravel()[at]} for client {at}")
    return own, errors


class Homogeneity(NamedTuple):
    """Result of Cochran's test of the hypothesis that all theta_i are equal. All arrays are scalars.

    Attributes:
      mean, stderr: pooled mean of all clients, and its standard error if all theta_i are equal.
      statistic: test statistic Q.
      degrees: degrees of freedom, m - 1.
      p_value: probability of a Q at least as large if all theta_i are equal.
      excess: I^2 = max(0, 1 - (m - 1) / Q): the fraction of the estimates' variance that is not due to their standard
        errors.
    """

    mean: Array
    stderr: Array
    statistic: Array
    degrees: int
    p_value: Array
    excess: Array


@full_precision.products
def homogeneity(x: Any, s: Any) -> Homogeneity:
    r"""Cochran's test of whether all theta_i are equal; arguments and exceptions are as in `ebnm`.

    With :math:`w_i = 1 / s_i^2` the pooled mean is :math:`M = \sum_i w_i x_i / \sum_i w_i`, and its standard error is
    :math:`(\sum_i w_i)^{-1/2}`. :math:`Q = \sum_i w_i (x_i - M)^2` is chi-square with m - 1 degrees of freedom if all
    theta_i are equal. The test works under ``jax.jit`` and ``jax.vmap``.

    References: Cochran 1954, "The combination of estimates from different experiments"; Higgins and Thompson 2002,
    "Quantifying heterogeneity in a meta-analysis", for I^2.
    """
    own, errors = checked(x, s, one=False)
    unit = errors.min()  # so that squares of tiny errors do not underflow
    w = (unit / errors) ** 2
    mean = (w / w.sum()) @ own
    Q = (((own - mean) / errors) ** 2).sum()
    degrees = len(own) - 1
    excess = jnp.maximum(0, 1 - degrees / jnp.where(Q > 0, Q, 1)) * (Q > 0)
    return Homogeneity(mean, unit / jnp.sqrt(w.sum()), Q, degrees, gammaincc(degrees / 2, Q / 2), excess)


class Shrunken(NamedTuple):
    """Shrunken estimates [m], the weight c of each client's own estimate x_i [], and the mean of all x_i []."""

    mean: Array
    weight: Array
    center: Array


def james_stein(x: Any, s: Any) -> Shrunken:
    r"""James-Stein estimator for clients with equal standard errors; estimates shrink toward their mean.

    .. math:: \hat\theta_i = \bar x + c\, (x_i - \bar x), \qquad c = \max\Big(0, 1 - \frac{(m - 3) s^2}{\sum_j (x_j -
       \bar x)^2}\Big)

    For m > 3 clients and any theta_i, the expected sum of squared errors is smaller than without shrinkage.

    Args:
      x: the clients' estimates, [m].
      s: standard error of every estimate, one number.

    Raises:
      JaxpflError: as in `ebnm`; or if there are fewer than four clients, or more than one standard error.

    Reference: Efron and Morris 1975, "Data analysis using Stein's estimator and its generalizations", equation (1.3)
    and section 2.
    """
    own, errors = checked(x, s, one=False)
    m = len(own)
    if m <= 3:
        raise JaxpflError(f"the James-Stein estimator requires at least 4 clients, got {m}")
    if np.ndim(s) != 0:
        raise JaxpflError(f"s must be one number for the James-Stein estimator, got shape {np.shape(s)}: use ebnm")
    center = own.mean()
    spread = (((own - center) / errors) ** 2).sum()
    weight = jnp.maximum(0, 1 - (m - 3) / jnp.where(spread > 0, spread, 1)) * (spread > 0)
    return Shrunken(center + weight * (own - center), weight, center)

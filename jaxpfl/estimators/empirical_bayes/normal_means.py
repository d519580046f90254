r"""Empirical Bayes for normal means with known, unequal standard errors.

Client i has an estimate :math:`x_i \sim N(\theta_i, s_i^2)` of its own parameter, and a priori
:math:`\theta_i \sim G`. G is fitted within a family by the marginal likelihood of all clients, and the personalised
estimate is the posterior mean under it.

=============== ========================================================= ==================== =========
prior           G                                                         center unless given  summable
=============== ========================================================= ==================== =========
normal          N(c, t^2)                                                 learned              each step
point-normal    pi_0 at c, else N(c, t^2)                                 0                    each step
scale-mixture   sum_k pi_k N(c, t_k^2), t_k on a grid (ash)               0                    each step
npmle           any: sum_k pi_k at c_k, on a grid over the range of x     none                 each step
=============== ========================================================= ==================== =========

No family has a single message of fixed size that suffices for unequal s (for equal s the normal one has: the sum of x
and of x^2). What a step of any fit needs is a sum over clients: of the likelihood's derivatives by two or three
parameters, or of K gradients and K^2 curvatures of weights on a grid. A client's log likelihood is unbounded in its x,
so that these sums have no private form.

Every prior is a mixture of normals, atoms among them. Component k, N(c_k, t_k^2) with the weight pi_k, has the marginal
N(c_k, t_k^2 + s^2) and the posterior

.. math:: N\Big(c_k + \frac{t_k^2}{t_k^2 + s^2} (x - c_k),\; \frac{t_k^2 s^2}{t_k^2 + s^2}\Big)

with a weight in proportion to pi_k times its marginal density. t_k = 0 is an atom.

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
"""Components of the families on a grid, unless another number is given."""

_LEAST_COMPONENTS = 3
_LEAST_SIDED, _SIDED = 8, 0.95
"""Number of clients, and share of them on one side of zero, above which a warning doubts zero as the center."""
_SCALES = 16  # starts of the normal prior's spread, as its likelihood may have several maxima
_SLABS = 6  # starts of a slab's spread, each with every start of the spike's log odds
_LOGITS = (-3.0, 0.0, 2.0, 4.0)
_FINEST = 10.0  # the least slab of a scale mixture, in parts of the smallest error, as in ashr
AT_ONCE = 4096
"""Number of clients whose posteriors, with as many components as the prior, are in memory at once."""
_FARTHEST = 9.0
"""Standard deviations beyond which a normal has no mass in double precision."""


class NormalMixture(NamedTuple):
    """A mixture of K normals.

    Attributes:
      weights: pi_k, [K], which sum to one.
      means: c_k, [K].
      sds: t_k, [K]; zero for an atom.
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
        """Log marginal density of x under every component, [..., K]."""
        spread = jnp.hypot(s[..., None], self.sds)
        return -(((x[..., None] - self.means) / spread) ** 2 + jnp.log(2 * jnp.pi)) / 2 - jnp.log(spread)

    def log_marginal(self, x: Array, s: Array) -> Array:
        """Log marginal density of x, [...]."""
        return logsumexp(self.log_components(x, s) + self._log_weights, axis=-1)

    @full_precision.products
    def marginal_below(self, t: Array, s: Array) -> Array:
        """Marginal probability that an estimate of standard error s is at most t, [...]."""
        spread = jnp.hypot(s[..., None], self.sds)
        return ndtr((t[..., None] - self.means) / spread) @ self.weights

    def posterior(self, x: Array, s: Array) -> tuple[Array, Array, Array]:
        """Weights, means and standard deviations of the posterior's components, [..., K] each."""
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
        """Posterior probability that theta is at most t, or below it, [...]."""
        p, centers, deviations = self.posterior(x, s)
        off = t[..., None] - centers
        smooth = deviations > 0
        share = erfc(-(0.5**0.5) * off / jnp.where(smooth, deviations, 1)) / 2  # four times as fast as ndtr
        return (p * jnp.where(smooth, share, off > 0 if strictly else off >= 0)).sum(axis=-1)

    def quantile(self, p: Scalar, x: Array, s: Array) -> Array:
        """Posterior quantile, the least t with P(theta <= t) >= p, [...]."""
        shares, centers, deviations = self.posterior(x, s)
        low, high = centers - _FARTHEST * deviations, centers + _FARTHEST * deviations
        margin = jnp.finfo(x.dtype).eps * (1 + _FARTHEST) * jnp.maximum(jnp.abs(low), jnp.abs(high))
        least = jnp.where(shares > 0, low - margin, jnp.inf).min(-1)
        most = jnp.where(shares > 0, high + margin, -jnp.inf).max(-1)
        near = bisect(lambda t: self.below(t, x, s) < p, least, most)
        # Of an atom the place itself: beside it by a rounding error, an interval would miss it.
        atoms = jnp.where((self.sds == 0) & (self.weights > 0), self.means, jnp.inf)
        atom = atoms[jnp.abs(near[..., None] - atoms).argmin(axis=-1)]
        there = (self.below(atom, x, s, strictly=True) < p) & (self.below(atom, x, s) >= p)
        return jnp.where(there, atom, near)

    def sample(self, key: Key, x: Array, s: Array) -> Array:
        """One posterior draw of every theta, [...]."""
        kind_key, place_key = jax.random.split(key)
        p, centers, deviations = self.posterior(x, s)
        kind = jax.random.categorical(kind_key, jnp.log(p))[..., None]
        center, deviation = (jnp.take_along_axis(each, kind, axis=-1)[..., 0] for each in (centers, deviations))
        return center + deviation * jax.random.normal(place_key, x.shape, x.dtype)

    def mirrored(self) -> NormalMixture:
        """The prior of -theta."""
        return self._replace(means=-self.means)

    @property
    def _log_weights(self) -> Array:
        return jnp.where(self.weights > 0, jnp.log(jnp.where(self.weights > 0, self.weights, 1)), -jnp.inf)


class NormalMeans(NamedTuple):
    """Empirical Bayes posteriors of m clients' means. The prior counts as known: its own uncertainty is left out.

    Attributes:
      x, s: the estimates and their standard errors, [m] each.
      prior: the fitted one.
      mean: posterior means, the personalised estimates, [m].
      sd: posterior standard deviations, [m].
      lfsr: local false sign rates, min(P(theta <= 0), P(theta >= 0)), [m].
      shrinkage: 1 - sd^2 / s^2, [m]: the share of a small change of x that the posterior mean does not follow, and
        s^2 / (s^2 + t^2) under a normal prior. Below zero where the mean moves by more than x, as between two atoms.
      log_marginal: log likelihood of all estimates, [].
      slack: upper bound on how far the mean log likelihood per client is below its maximum over the weights on a
        grid, []; zero for priors without a grid.
      labels: labels of the clients, where they came in a frame.
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
        """Return a pandas frame with a row per client; ``level`` adds the intervals' ends as ``low`` and ``high``."""
        return inputs.frame(self, len(self.x), level)

    def quantile(self, p: Scalar) -> Array:
        """Posterior quantile, the least t with P(theta <= t) >= p, [m]."""
        inputs.inside("p", p)
        return blockwise(lambda x, s: self.prior.quantile(p, x, s), self.x, self.s)

    def interval(self, level: Scalar = 0.95) -> tuple[Array, Array]:
        """Ends of the equal-tailed credible intervals, [m] each.

        They are right on average over clients if the prior belongs to the fitted family and the clients are many;
        `robust_intervals` does not need the first condition, `learned_gaussian` does not need the second.
        """
        inputs.level_within(level)
        return self.quantile((1 - level) / 2), self.quantile((1 + level) / 2)

    def sample(self, key: Key) -> Array:
        """One draw of every client's mean from its posterior, [m]."""
        return self.prior.sample(key, self.x, self.s)

    @property
    def risk(self) -> Array:
        """Stein's unbiased risk estimate for `mean`, [], which takes the prior as known."""
        return self.risks.mean()

    @property
    def risks(self) -> Array:
        """Terms of `risk`, (mean - x)^2 + 2 sd^2 - s^2, as sd^2 / s^2 is the derivative of the posterior mean, [m]."""
        return (self.mean - self.x) ** 2 + 2 * self.sd**2 - self.s**2

    @property
    def scores(self) -> Array:
        """Normal scores of the estimates under their fitted marginal distributions: N(0, 1) if the prior holds, [m]."""
        below = blockwise(self.prior.marginal_below, self.x, self.s)
        above = blockwise(self.prior.mirrored().marginal_below, -self.x, self.s)
        tail = jnp.maximum(jnp.minimum(below, above), jnp.finfo(below.dtype).tiny)  # far out both round to zero
        return jnp.where(below < above, 1, -1) * ndtri(tail)


def posterior(prior: NormalMixture, x: Array, s: Array, slack: Scalar = 0.0) -> NormalMeans:
    """Posteriors under a known prior, for clients new to it as well."""

    def block(x: Array, s: Array) -> tuple[Array, ...]:
        zero = jnp.zeros_like(x)
        # Complementary sides each by itself: 1 - P would round a small probability away.
        sign = jnp.minimum(prior.below(zero, x, s), prior.mirrored().below(zero, -x, s))
        return *prior.moments(x, s), sign, prior.log_marginal(x, s)

    mean, sd, lfsr, fit = blockwise(block, x, s)
    return NormalMeans(x, s, prior, mean, sd, lfsr, 1 - (sd / s) ** 2, fit.sum(), jnp.asarray(slack, x.dtype))


def blockwise(function: Any, *arrays: Array) -> Any:
    """A function of [n] arrays over all m clients, `AT_ONCE` of them at a time."""
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
    """Fit the prior to all estimates, and return every client's posterior under it.

    Jits, and vmaps over problems; the family, whether the center is learned, and the number of components are static.
    Results have JAX's floating-point type; in double precision (``jax.enable_x64(True)``) the likelihood is maximised
    to 1e-9, in single precision to about 1e-4. With more than 16384 clients, weights on a grid are fitted to 4096 bins.

    Args:
      x: the clients' estimates, [m]: an array, a list, or a column of a frame.
      s: their standard errors, [m], or one for all; above zero.
      prior: the family, as in the table above.
      center: c, a number; "learned" fits it with the rest (not for scale-mixture and npmle).
      components: components of a scale mixture or NPMLE; 41 and 300 unless given. Atoms of the NPMLE are to lie closer
        than the least s.
      weights: weights of the clients in the fit of the prior, [m], at least 0 and in any unit; equal unless given. With
        populations as weights the prior describes a random person's client; a client of weight zero has no part in the
        fit. ``log_marginal`` then has weights of mean one; ``risk`` has none.

    Raises:
      JaxpflError: for x and s that are not numbers, not finite, s <= 0, of different lengths, or too few clients (two,
        one where the center is given), an unknown prior, a center or components that it does not take, and weights that
        are not such numbers or leave too few clients. Under a transformation values are not checked.

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
            warn(
                f"prior npmle: atoms {step:.3g} apart, above the least s {float(errors.min()):.3g}: use more components"
            )
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
    """The likeliest prior in units in which s is about one, and the posteriors under it; w [m] sums to one."""
    # Powers of two: scaling by them makes no rounding errors.
    unit = jnp.exp2(jnp.round(jnp.log2(s).mean()))
    # The place of zero affects rounding errors alone: with many clients the median of some is good enough.
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
    """N(c, t^2), its center profiled out unless given, and its mean log likelihood."""

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
    """A spike at c, and a normal about it."""
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
    """Normals about zero, of spreads on a geometric grid from zero to beyond all data (ash, Stephens 2017)."""
    low = s.min() / _FINEST
    widest = 2 * jnp.sqrt(jnp.maximum((x**2 - s**2).max(), (8 * low) ** 2))
    share = jnp.arange(components - 1, dtype=x.dtype) / (components - 2)
    sds = jnp.concatenate([jnp.zeros(1, x.dtype), low * (widest / low) ** share])
    return _weighted(x, s, w, jnp.zeros(components, x.dtype), sds)


def _npmle(x: Array, s: Array, w: Array, components: int) -> tuple[NormalMixture, Array]:
    """Any distribution: atoms on an even grid over the range of x, outside of which the likeliest one has none."""
    share = jnp.arange(components, dtype=x.dtype) / (components - 1)
    return _weighted(x, s, w, x.min() + (x.max() - x.min()) * share, jnp.zeros(components, x.dtype))


def _weighted(x: Array, s: Array, w: Array, means: Array, sds: Array) -> tuple[NormalMixture, Array]:
    """The likeliest weights of given components, means and sds [K] each, and their slack."""
    even = NormalMixture(jnp.full(len(means), 1 / len(means), x.dtype), means, sds)
    if len(x) > grid.MANY:
        x, s, w = grid.binned(x, s, w)
    weights, slack = grid.weights(even.log_components(x, s), w)
    return even._replace(weights=weights), slack


def _scales(x: Array, s: Array, center: Array | None, number: int) -> Array:
    """Log scales from well below the errors to the range of the data, [number]."""
    low, high = s.min() / 4, jnp.abs(x - (0 if center is None else center)).max() + s.max()
    return jnp.log(low) + (jnp.log(high) - jnp.log(low)) * jnp.linspace(0, 1, number, dtype=x.dtype)


def _simplest(found: list[tuple[NormalMixture, Array]]) -> NormalMixture:
    """The first of the fits, simplest first, that is as likely as any but for rounding errors."""
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
            raise JaxpflError(f"prior {prior} does not learn its center: give a number, or subtract it from x")
    elif prior == "npmle":
        raise JaxpflError(f"prior {prior} has no center, got {center}")
    elif np.ndim(center) > 0 or not np.isfinite(center):
        raise JaxpflError(f"center must be a finite number, got {shown(center)}")


def _warn_of_center(prior: Family, x: Array) -> None:
    """Warn if nearly all estimates lie on one side of zero, a prior's center of symmetry by default."""
    if isinstance(x, Tracer) or len(x) < _LEAST_SIDED:
        return
    above, below = int((x > 0).sum()), int((x < 0).sum())
    most = max(above, below)
    if most >= _SIDED * len(x):
        other = "" if prior in COMPONENTS else ", or 'learned'"
        warn(
            f"prior {prior} is symmetric about 0 unless center is given, and {most} of {len(x)} estimates lie "
            f"{'above' if above == most else 'below'} it: give center, a number{other}"
        )


def _components(prior: Family, components: int | None) -> int:
    if prior not in COMPONENTS:
        if components is not None:
            raise JaxpflError(f"prior {prior} has no components, got components {components}")
        return 0
    count = COMPONENTS[prior] if components is None else components
    if count != int(count) or count < _LEAST_COMPONENTS:
        raise JaxpflError(f"components must be a whole number of at least {_LEAST_COMPONENTS}, got {components}")
    return int(count)


def checked(x: Any, s: Any, *, one: bool) -> tuple[Array, Array]:
    """Estimates and errors of one length in JAX's floating-point type, checked as far as their values are known.

    Args:
      x, s: estimates and errors, as in `ebnm`.
      one: whether a single client will do.

    Raises:
      JaxpflError: as `ebnm`.
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
    """Estimates and errors as NumPy arrays in double precision, where they are known; arguments as `checked`."""
    own, errors = (inputs.numbers(name, each) for name, each in zip("xs", inputs.aligned(x=x, s=s), strict=True))
    if own.ndim != 1 or errors.ndim > 1:
        raise JaxpflError(f"x and s must be one number for each client, got shapes {own.shape} and {errors.shape}")
    if errors.ndim and errors.shape != own.shape:
        raise JaxpflError(f"x and s must have the same length, got {len(own)} estimates and {len(errors)} errors")
    least = 1 if one else 2
    if len(own) < least:
        what = "" if one else ": a single client does not determine a prior (or give center)"
        raise JaxpflError(f"needs at least {least} client{'s' * (least > 1)}, got {len(own)}{what}")
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
    """Pooled mean and its standard error, Q with its degrees of freedom and p-value, and I^2, [] each.

    Attributes:
      mean, stderr: mean of all clients together, if they are alike, and its standard error.
      statistic: Q.
      degrees: m - 1.
      p_value: probability of a Q at least as large if all theta_i are equal.
      excess: I^2 = max(0, 1 - (m - 1) / Q), the share of the estimates' spread that errors do not explain.
    """

    mean: Array
    stderr: Array
    statistic: Array
    degrees: int
    p_value: Array
    excess: Array


@full_precision.products
def homogeneity(x: Any, s: Any) -> Homogeneity:
    r"""Cochran's test that all theta_i are equal; arguments and errors as in `ebnm`. Jits and vmaps.

    With :math:`w_i = 1 / s_i^2` the pooled mean is :math:`M = \sum_i w_i x_i / \sum_i w_i`, of standard error
    :math:`(\sum_i w_i)^{-1/2}`, and :math:`Q = \sum_i w_i (x_i - M)^2` is chi-square with m - 1 degrees of freedom if
    all theta_i are equal.

    References: Cochran 1954, "The combination of estimates from different experiments"; Higgins and Thompson 2002,
    "Quantifying heterogeneity in a meta-analysis", for I^2.
    """
    own, errors = checked(x, s, one=False)
    unit = errors.min()  # squares of tiny errors would leave the range of floats
    w = (unit / errors) ** 2
    mean = (w / w.sum()) @ own
    Q = (((own - mean) / errors) ** 2).sum()
    degrees = len(own) - 1
    excess = jnp.maximum(0, 1 - degrees / jnp.where(Q > 0, Q, 1)) * (Q > 0)
    return Homogeneity(mean, unit / jnp.sqrt(w.sum()), Q, degrees, gammaincc(degrees / 2, Q / 2), excess)


class Shrunken(NamedTuple):
    """Estimates [m], the weight c of a client's own estimate [], and the mean of all []."""

    mean: Array
    weight: Array
    center: Array


def james_stein(x: Any, s: Any) -> Shrunken:
    r"""James and Stein's estimator, shrinking towards the mean of all, for clients of equal standard errors.

    .. math:: \hat\theta_i = \bar x + c\, (x_i - \bar x), \qquad c = \max\Big(0, 1 - \frac{(m - 3) s^2}{\sum_j (x_j -
       \bar x)^2}\Big)

    On average its total squared error is below the total squared error of x, whatever the theta_i, for m > 3 clients.

    Args:
      x: the clients' estimates, [m].
      s: their common standard error.

    Raises:
      JaxpflError: as `ebnm`; and for fewer than four clients, or standard errors that differ.

    Reference: Efron and Morris 1975, "Data analysis using Stein's estimator and its generalizations", (1.3), section 2.
    """
    own, errors = checked(x, s, one=False)
    m = len(own)
    if m <= 3:
        raise JaxpflError(f"James and Stein's estimator needs at least 4 clients, got {m}")
    if np.ndim(s) != 0:
        raise JaxpflError(f"James and Stein's estimator needs one s for all clients, got {np.shape(s)}: use ebnm")
    center = own.mean()
    spread = (((own - center) / errors) ** 2).sum()
    weight = jnp.maximum(0, 1 - (m - 3) / jnp.where(spread > 0, spread, 1)) * (spread > 0)
    return Shrunken(center + weight * (own - center), weight, center)

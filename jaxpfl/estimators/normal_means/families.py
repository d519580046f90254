"""Families of priors for normal means, each fitted by the likelihood of all estimates together.

Every fit is a pure function of x, s and the clients' weights w, [m] each, in units in which the errors s are about one,
and with the middle of x at zero where the center is learned. The weights sum to one; a client without weight tells
nothing of the prior.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp

from jaxpfl.core.types import Array
from jaxpfl.estimators.climb import climb
from jaxpfl.estimators.normal_means import simplex
from jaxpfl.estimators.normal_means.answer import AT_ONCE
from jaxpfl.estimators.normal_means.bins import MANY, binned
from jaxpfl.estimators.normal_means.normal_mixture import NormalMixture
from jaxpfl.estimators.normal_means.point_laplace import PointLaplace

Family: TypeAlias = Literal["normal", "point-normal", "point-laplace", "scale-mixture", "npmle", "normal-mixture"]
FAMILIES: tuple[Family, ...] = ("normal", "point-normal", "point-laplace", "scale-mixture", "npmle")
"""Families that are compared unless others are asked for: all but normal-mixture, whose maximum may be a local one."""
COMPONENTS = {"scale-mixture": 41, "npmle": 300, "normal-mixture": 2}
"""Components of the families that have some, unless another number is given."""
UNCENTERED: tuple[Family, ...] = ("npmle", "normal-mixture")
"""Families without a center."""

_SCALES = 16
_SLABS = 6
_LOGITS = (-3.0, 0.0, 2.0, 4.0)
_FINEST = 10.0  # the least slab of a scale mixture, in parts of the smallest error, as in ashr
_MOST_LOGIT = 16.0


class Fit(NamedTuple):
    """A fitted prior, and for the weights of a grid their slack (see `simplex`), else zero."""

    prior: NormalMixture | PointLaplace
    slack: Array


def normal(x: Array, s: Array, w: Array, center: Array | None) -> Fit:
    """N(c, t^2): its center profiled out unless given, and the spread climbed to."""
    return Fit(_normal(x, s, w, center)[0], jnp.zeros((), x.dtype))


def point_normal(x: Array, s: Array, w: Array, center: Array | None) -> Fit:
    """A spike at c, and a normal about it."""
    (one, value_one), (none, value_none) = _normal(x, s, w, center), _null(x, s, w, center)

    def prior(at: Array, *_: Array) -> NormalMixture:
        c = at[2] if center is None else center
        null = jax.nn.sigmoid(at[0])
        sds = jnp.stack([jnp.zeros_like(at[1]), jnp.exp(at[1])])
        return NormalMixture(jnp.stack([null, 1 - null]), jnp.stack([c, c]), sds)

    best, value = _likeliest(prior, x, s, w, _starts(x, s, center))
    both = prior(best)

    def padded(weight: float, of: NormalMixture) -> NormalMixture:
        null = jnp.full_like(value, weight)
        zero = jnp.zeros_like(value)
        return NormalMixture(jnp.stack([null, 1 - null]), of.means[0] + jnp.zeros(2), jnp.stack([zero, of.sds[0]]))

    found = [(padded(1.0, none), value_none), (padded(0.0, one), value_one), (both, value)]
    return Fit(_simplest(found), jnp.zeros((), x.dtype))


def point_laplace(x: Array, s: Array, w: Array, center: Array | None) -> Fit:
    """A spike at c, and a Laplace slab about it."""
    none, value_none = _null(x, s, w, center)

    def prior(at: Array, *_: Array) -> PointLaplace:
        return PointLaplace(jax.nn.sigmoid(at[0]), at[2] if center is None else center, jnp.exp(at[1]))

    best, value = _likeliest(prior, x, s, w, _starts(x, s, center))
    both = prior(best)
    spike = PointLaplace(jnp.ones_like(value), none.means[0], both.scale)
    # A share of spikes below the rounding error of the likelihood is none.
    slab = both._replace(null=jnp.zeros_like(value))
    return Fit(_simplest([(spike, value_none), (slab, _fit_of(slab, x, s, w)), (both, value)]), jnp.zeros((), x.dtype))


def scale_mixture(x: Array, s: Array, w: Array, center: Array, components: int) -> Fit:
    """Normals about c, of spreads on a geometric grid from zero to beyond all data (ash, Stephens 2017)."""
    low = s.min() / _FINEST
    widest = 2 * jnp.sqrt(jnp.maximum(((x - center) ** 2 - s**2).max(), (8 * low) ** 2))
    share = jnp.arange(components - 1, dtype=x.dtype) / (components - 2)
    sds = jnp.concatenate([jnp.zeros(1, x.dtype), low * (widest / low) ** share])
    return weighted(x, s, w, jnp.full(components, 1.0, x.dtype) * center, sds)


def npmle(x: Array, s: Array, w: Array, components: int) -> Fit:
    """Any distribution: atoms on an even grid over the range of x, outside of which the likeliest one has none."""
    share = jnp.arange(components, dtype=x.dtype) / (components - 1)
    return weighted(x, s, w, x.min() + (x.max() - x.min()) * share, jnp.zeros(components, x.dtype))


def weighted(x: Array, s: Array, w: Array, means: Array, sds: Array) -> Fit:
    """The likeliest weights of given components, means and sds [K] each."""
    grid = NormalMixture(jnp.full(len(means), 1 / len(means), x.dtype), means, sds)
    if len(x) <= MANY:
        weights, slack = simplex.weights(grid.log_components(x, s), w)
        return Fit(grid._replace(weights=weights), slack)

    blocks = tuple(jnp.pad(of, (0, -len(x) % AT_ONCE), mode="edge").reshape(-1, AT_ONCE) for of in (x, s))
    shares = jnp.pad(w, (0, -len(x) % AT_ONCE)).reshape(-1, AT_ONCE)

    def ratios(pi: Array) -> Array:
        def of_block(total: Array, block: tuple[Array, ...]) -> tuple[Array, None]:
            own, errors, share = block
            logs = grid.log_components(own, errors)
            L = jnp.exp(logs - logs.max(axis=1, keepdims=True))
            return total + (share / (L @ pi)) @ L, None

        return jax.lax.scan(of_block, jnp.zeros_like(pi), (*blocks, shares))[0]

    some, errors, share = binned(x, s, w)
    weights, slack = simplex.weights(grid.log_components(some, errors), share, ratios)
    return Fit(grid._replace(weights=weights), slack)


def _likeliest(
    prior: Callable[..., NormalMixture | PointLaplace], x: Array, s: Array, w: Array, starts: Array
) -> tuple[Array, Array]:
    """Parameters at which ``prior(parameters, x, s, w)`` is likeliest, and the mean log likelihood there."""

    def of(*clients: Array) -> Callable[[Array], Array]:
        return lambda at: _fit_of(prior(at, *clients), *clients)

    return climb(of(x, s, w), starts, of(*binned(x, s, w)) if len(x) > MANY else None)


def _normal(x: Array, s: Array, w: Array, center: Array | None) -> tuple[NormalMixture, Array]:
    """The likeliest normal, and its mean log likelihood."""

    def of(sd: Array, x: Array, s: Array, w: Array) -> NormalMixture:
        precision = w / (s**2 + sd**2)
        c = (precision / precision.sum()) @ x if center is None else center
        return NormalMixture(jnp.ones(1, x.dtype), jnp.reshape(c, 1), jnp.reshape(sd, 1))

    def prior(at: Array, *clients: Array) -> NormalMixture:
        return of(jnp.exp(at[0]), *clients)

    best, value = _likeliest(prior, x, s, w, _scales(x, s, center, _SCALES)[:, None])
    none = of(jnp.zeros((), x.dtype), x, s, w)
    some = prior(best, x, s, w)
    value_none = _fit_of(none, x, s, w)
    return _simplest([(none, value_none), (some, value)]), jnp.maximum(value_none, value)


def _null(x: Array, s: Array, w: Array, center: Array | None) -> tuple[NormalMixture, Array]:
    """All clients alike: an atom, and its mean log likelihood."""
    precision = w / s**2
    c = (precision / precision.sum()) @ x if center is None else center
    found = NormalMixture(jnp.ones(1, x.dtype), jnp.reshape(c, 1), jnp.zeros(1, x.dtype))
    return found, _fit_of(found, x, s, w)


def _starts(x: Array, s: Array, center: Array | None) -> Array:
    """Logits of the spike, log scales and, where it is learned, the center: [starts, 2 or 3]."""
    scales, logits = _scales(x, s, center, _SLABS), jnp.asarray(_LOGITS, x.dtype)
    pairs = jnp.stack([of.ravel() for of in jnp.meshgrid(logits, scales)], axis=1)
    if center is not None:
        return pairs
    return jnp.concatenate([pairs, jnp.zeros((len(pairs), 1), x.dtype)], axis=1)


def _scales(x: Array, s: Array, center: Array | None, number: int) -> Array:
    """Log scales from well below the errors to the range of the data, [number]."""
    low, high = s.min() / 4, jnp.abs(x - (0 if center is None else center)).max() + s.max()
    return jnp.log(low) + (jnp.log(high) - jnp.log(low)) * jnp.linspace(0, 1, number, dtype=x.dtype)


def _fit_of(prior: NormalMixture | PointLaplace, x: Array, s: Array, w: Array) -> Array:
    """Mean log likelihood of a client."""
    return prior.log_marginal(x, s) @ w


def _simplest(found: list[tuple[NormalMixture, Array]] | list[tuple[PointLaplace, Array]]):
    """The first of the fits, simplest first, that is as likely as any but for rounding errors."""
    values = jnp.stack([value for _, value in found])
    best = values.max()
    enough = values >= best - 16 * jnp.finfo(values.dtype).eps * (1 + jnp.abs(best))
    return jax.tree.map(lambda *each: jnp.stack(each)[jnp.argmax(enough)], *(prior for prior, _ in found))

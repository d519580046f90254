r"""Empirical Bayes for normal means with known, unequal standard errors.

Client i has an estimate :math:`x_i \sim N(\theta_i, s_i^2)` of its own parameter, and a priori
:math:`\theta_i \sim G`. G is fitted within a family by the marginal likelihood of all clients, and the personalised
estimate is the posterior mean under it.

=============== ========================================================= ==================== =========
prior           G                                                         center unless given  summable
=============== ========================================================= ==================== =========
normal          N(c, t^2)                                                 learned              each step
point-normal    pi_0 at c, else N(c, t^2)                                 0                    each step
point-laplace   pi_0 at c, else Laplace about c                           0                    each step
scale-mixture   sum_k pi_k N(c, t_k^2), t_k on a grid (ash)               0                    each step
npmle           any: sum_k pi_k at c_k, on a grid over the range of x     none                 each step
normal-mixture  sum_k pi_k N(c_k, t_k^2), all K free (`free_mixture`)     none                 each step
=============== ========================================================= ==================== =========

No family has a single message of fixed size that suffices for unequal s (for equal s the normal one has: the sum of x
and of x^2). What a step of any fit needs is a sum over clients: of the likelihood's derivatives by two or three
parameters, or of K gradients and K^2 curvatures of weights on a grid. A client's log likelihood is unbounded in its x,
so that these sums have no private form; counts of cells of a public grid have (`private`).

References: Efron and Morris 1973; Johnstone and Silverman 2004; Kiefer and Wolfowitz 1956; Koenker and Mizera 2014;
Stephens 2017, "False discovery rates: a new deal"; Willwerscheid, Carbonetto and Stephens 2025, "ebnm: an R package for
solving the empirical Bayes normal means problem using a variety of prior families".
"""

from __future__ import annotations

from functools import partial
from typing import Any, Literal, get_args

import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from jaxpfl.core import full_precision
from jaxpfl.core.types import Array, Scalar
from jaxpfl.estimators import inputs
from jaxpfl.estimators.base import check_digits
from jaxpfl.estimators.frames import labels_of
from jaxpfl.estimators.normal_means import families, free_mixture
from jaxpfl.estimators.normal_means.answer import NormalMeans, in_blocks, posterior
from jaxpfl.estimators.normal_means.bins import MANY
from jaxpfl.estimators.normal_means.families import COMPONENTS, UNCENTERED, Family, Fit
from jaxpfl.estimators.normal_means.point_laplace import PointLaplace
from jaxpfl.support.errors import JaxpflError, shown, unknown_name, warn

_LEAST_COMPONENTS = 3
_LEAST_SIDED, _SIDED = 8, 0.95
"""Clients, and the share of them on one side of zero, from which zero is doubted as a center."""


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
    to 1e-9, in single precision to about 1e-4.

    Args:
      x: the clients' estimates, [m]: an array, a list, or a column of a frame.
      s: their standard errors, [m], or one for all; above zero.
      prior: the family, as in the table above.
      center: c, a number; "learned" fits it with the rest (not for scale-mixture and npmle).
      components: of a scale mixture, NPMLE or normal mixture; 41, 300 and 2 unless given. Atoms of the NPMLE are to lie
        closer than the least s.
      weights: of the clients in the fit of the prior, [m], at least 0 and in any unit; equal unless given. With
        populations for weights the prior is that of a random person's client, and with zeros it is fitted to the others
        alone. ``log_marginal`` then has weights of mean one; ``risk`` has none.

    Raises:
      JaxpflError: for x and s that are no numbers, not finite, s <= 0, of different lengths, or too few clients (two,
        one where the center is given), an unknown prior, a center or components that it does not take, and weights that
        are no such numbers or leave too few clients. Under a transformation, where values are not known, estimates that
        are not finite, s <= 0, and weights below zero make all results NaN.

    Examples:
      >>> rng = np.random.default_rng(0)
      >>> theta = np.where(rng.random(1000) < 0.05, 5.0, 0.0)
      >>> found = ebnm(theta + rng.normal(size=1000), 1.0, prior="point-normal")
      >>> bool(((found.mean - theta) ** 2).mean() < 0.2)  # 1 for each client alone
      True
    """
    if prior not in get_args(Family):
        raise unknown_name("prior", prior, get_args(Family))
    learned = center == "learned" if isinstance(center, str) else center is None and prior == "normal"
    _check_center(prior, center)
    count = _components(prior, components)
    x, s, weights = inputs.aligned(x=x, s=s, weights=weights)
    centered = prior not in UNCENTERED
    own, errors = checked(x, s, one=centered and not learned)
    if prior == "npmle" and not isinstance(own, Tracer) and not isinstance(errors, Tracer):
        step = float(own.max() - own.min()) / (count - 1)
        if step > float(errors.min()):
            warn(f"prior npmle: atoms {step:.3g} apart, the least s is {float(errors.min()):.3g}: give more components")
    at = 0.0 if learned or center is None else center
    if not learned and center is None and centered:
        _warn_of_center(prior, own)
    parts = inputs.shares(weights, len(own), 1 if centered and not learned else 2)
    of_center = jnp.asarray(at, own.dtype)
    given = weights is not None
    found = _solve(own, errors, parts, of_center, prior=prior, learned=learned, components=count, weighted=given)
    return found._replace(labels=labels_of(x, s, weights))


@partial(full_precision.jit, static_argnames=("prior", "learned", "components", "weighted"))
def _solve(
    x: Array, s: Array, w: Array, center: Array, *, prior: Family, learned: bool, components: int, weighted: bool
) -> NormalMeans:
    good = jnp.isfinite(x).all() & (jnp.isfinite(s) & (s > 0)).all() & (jnp.isfinite(w) & (w >= 0)).all()
    x = jnp.where(good, x, jnp.nan)
    fit = fitted(x, s, w, center, prior=prior, learned=learned, components=components)
    found = posterior(fit.prior, x, s, fit.slack)
    if weighted:
        each = in_blocks(fit.prior.log_marginal, x, s)
        found = found._replace(log_marginal=len(x) * (w @ each))
    return found


def fitted(x: Array, s: Array, w: Array, center: Array, *, prior: Family, learned: bool, components: int) -> Fit:
    """The likeliest prior of a family; w [m] sums to one, the rest as in `ebnm`, with all choices made."""
    # Powers of two: scaling by them makes no rounding errors.
    unit = jnp.exp2(jnp.round(jnp.log2(s).mean()))
    # Where zero lies changes rounding errors alone: of many clients the median of some is good enough.
    origin = jnp.median(x[:: 1 + len(x) // MANY]) if learned or prior in UNCENTERED else center
    y, e = (x - origin) / unit, s / unit
    about = None if learned else jnp.zeros((), x.dtype)
    if prior == "normal":
        fit = families.normal(y, e, w, about)
    elif prior == "point-normal":
        fit = families.point_normal(y, e, w, about)
    elif prior == "point-laplace":
        fit = families.point_laplace(y, e, w, about)
    elif prior == "scale-mixture":
        fit = families.scale_mixture(y, e, w, jnp.zeros((), x.dtype), components)
    elif prior == "normal-mixture":
        fit = Fit(free_mixture.fit(y, e, w, components), jnp.zeros((), x.dtype))
    else:
        fit = families.npmle(y, e, w, components)
    return Fit(_in_units(fit, origin, unit), fit.slack)


def _in_units(fit: Fit, origin: Array, unit: Array):
    prior = fit.prior
    if isinstance(prior, PointLaplace):
        return PointLaplace(prior.null, prior.center * unit + origin, prior.scale * unit)
    return prior._replace(means=prior.means * unit + origin, sds=prior.sds * unit)


def _check_center(prior: Family, center: Any) -> None:
    if center is None or isinstance(center, Tracer):
        return
    if isinstance(center, str):
        if center != "learned":
            raise JaxpflError(f"center must be a number or 'learned', got {shown(center)}")
        if prior in COMPONENTS:
            raise JaxpflError(f"prior {prior} does not learn its center: give a number, or take it off x")
    elif prior in UNCENTERED:
        raise JaxpflError(f"prior {prior} has no center, got {center}")
    elif np.ndim(center) > 0 or not np.isfinite(center):
        raise JaxpflError(f"center must be a finite number, got {shown(center)}")


def _warn_of_center(prior: Family, x: Array) -> None:
    """Warn if nearly all estimates lie on one side of zero, about which a prior is symmetric unless told otherwise."""
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
    least = 1 if prior == "normal-mixture" else _LEAST_COMPONENTS
    if count != int(count) or count < least:
        raise JaxpflError(f"components must be a whole number of at least {least}, got {components}")
    return int(count)


def checked(x: Any, s: Any, *, one: bool) -> tuple[Array, Array]:
    """Estimates and errors of one length in JAX's floating-point type, checked as far as their values are known.

    Args:
      x, s: as those of `ebnm`.
      one: whether a single client will do.

    Raises:
      JaxpflError: as `ebnm`.
    """
    own, errors = values(x, s, one=one)
    kind = jnp.result_type(float)
    if isinstance(own, np.ndarray) and isinstance(errors, np.ndarray):
        for name, of in (("x", own), ("s", errors)):
            if np.abs(of).max() > jnp.finfo(kind).max / 4 or (name == "s" and of.min() < 4 * jnp.finfo(kind).tiny):
                raise JaxpflError(f"{name} must be within the range of {kind}: take another unit, or double precision")
        check_digits(float(np.abs(own).max()), float(errors.min()))
    return jnp.asarray(own, kind), jnp.broadcast_to(jnp.asarray(errors, kind), own.shape)


def values(x: Any, s: Any, *, one: bool) -> tuple[Any, Any]:
    """Estimates and errors as NumPy arrays in double precision, where they are known; arguments as `checked`."""
    own, errors = (inputs.numbers(name, of) for name, of in zip("xs", inputs.aligned(x=x, s=s), strict=True))
    if own.ndim != 1 or errors.ndim > 1:
        raise JaxpflError(f"x and s must be one number for each client, got shapes {own.shape} and {errors.shape}")
    if errors.ndim and errors.shape != own.shape:
        raise JaxpflError(f"x and s must be of the same clients, got {len(own)} estimates and {len(errors)} errors")
    least = 1 if one else 2
    if len(own) < least:
        what = "" if one else ": of a single one, nothing can be learned of the others (or give center)"
        raise JaxpflError(f"needs at least {least} client{'s' * (least > 1)}, got {len(own)}{what}")
    known = [isinstance(of, np.ndarray) for of in (own, errors)]
    if known[0] and not np.isfinite(own).all():
        at = int(np.argmin(np.isfinite(own)))
        raise JaxpflError(f"x must be finite, got {own[at]} for client {at}")
    if known[1]:
        bad = ~(np.isfinite(errors) & (errors > 0))
        if bad.any():
            at = int(np.argmax(bad.ravel()))
            raise JaxpflError(f"s must be finite and > 0, got {errors.ravel()[at]} for client {at}")
    return own, errors

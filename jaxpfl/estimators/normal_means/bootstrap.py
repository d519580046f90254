r"""Intervals of normal means that count the error of the fitted prior, by refitting it to drawn clients.

Each refit G_b is to m clients drawn anew, and every client's posterior given its own, undrawn estimate is the mean
over the refits, :math:`\frac1B \sum_b p(\theta_i \mid x_i, G_b)`, of which intervals are the quantiles.

- "parametric": :math:`\theta_i^b \sim \hat G`, :math:`x_i^b \sim N(\theta_i^b, s_i^2)`, with the errors of the clients
  as they are (type III of Laird and Louis). For an NPMLE, whose atoms are too few to stand for a smooth population,
  :math:`\hat G` is the smoothest one that the clients allow (`smooth`); what is refitted are NPMLEs.
- "clients": clients (x_i, s_i) drawn with replacement, which trusts no family, but knows of no distribution beyond the
  estimates at hand.

Atoms lie on one grid for all refits, and a scale mixture's spreads on the grid of the first fit, so that only the
weights differ. With the fitted prior at an atom, as where clients differ less than their errors, drawn clients differ
by their errors alone: about half of the refits then have a spread, and intervals have a length.

Reference: Laird and Louis 1987, "Empirical Bayes confidence intervals based on bootstrap samples".
"""

from __future__ import annotations

from functools import partial
from typing import Any, Literal, TypeAlias, get_args

import jax
import jax.numpy as jnp

from jaxpfl.core import checks, full_precision
from jaxpfl.core.types import Array, Key, Scalar
from jaxpfl.estimators.normal_means import families
from jaxpfl.estimators.normal_means.answer import NormalMeans, posterior
from jaxpfl.estimators.normal_means.families import COMPONENTS, Family
from jaxpfl.estimators.normal_means.fit import ebnm, fitted
from jaxpfl.estimators.normal_means.normal_mixture import NormalMixture
from jaxpfl.estimators.normal_means.refits import GridRefits, Refits
from jaxpfl.estimators.normal_means.smooth import smoothest
from jaxpfl.support.errors import unknown_name

Resampling: TypeAlias = Literal["parametric", "clients"]
REFITS = 100
ATOMS = 100
"""Atoms of an NPMLE, unless another number is given: refits of 300 take ten times as long."""
_AT_ONCE = 2**15
"""Refits times clients, or entries of all refits' matrices over eight, that are worked on together."""


def bootstrap(
    key: Key,
    x: Any,
    s: Any,
    prior: Family = "normal",
    *,
    center: Scalar | Literal["learned"] | None = None,
    components: int | None = None,
    refits: int = REFITS,
    resampling: Resampling = "parametric",
) -> NormalMeans:
    """Posteriors of every client's mean that are mixed over refits of the prior.

    Jits, and vmaps over problems and keys; ``refits`` and ``resampling`` are static beside what is in `ebnm`.

    Args:
      key: of the draws.
      x, s, prior, center, components: as those of `ebnm`, but for the 100 atoms of an NPMLE.
      refits: B. The end of an interval at probability p is wrong by the scatter of B draws.
      resampling: "parametric" or "clients".

    Returns:
      As `ebnm`, with the mixture in place of the fitted prior's posterior: ``mean`` and ``sd`` are its moments,
      ``prior`` the refits, ``log_marginal`` of their mean density, ``slack`` zero.

    Raises:
      JaxpflError: as `ebnm`; for refits below one, or another resampling.

    Examples:
      >>> import numpy as np
      >>> x = np.array([28.0, 8.0, -3.0, 7.0, -1.0, 1.0, 18.0, 12.0])
      >>> s = np.array([15.0, 10.0, 16.0, 11.0, 9.0, 11.0, 10.0, 18.0])
      >>> low, high = bootstrap(jax.random.key(0), x, s, "point-normal", center="learned").interval()
      >>> bool((high - low > 10).all())  # zero under the likeliest prior, an atom
      True
    """
    checks.count("refits", refits)
    if resampling not in get_args(Resampling):
        raise unknown_name("resampling", resampling, get_args(Resampling))
    found = ebnm(x, s, prior, center=center, components=components_of(prior, components))
    at, learned = center_of(center, prior, found.x.dtype)
    return _mixed(key, found, at, prior=prior, learned=learned, refits=int(refits), resampling=resampling)


def components_of(prior: Family, components: int | None) -> int | None:
    """Components that are given, or else 100 atoms of an NPMLE."""
    return ATOMS if prior == "npmle" and components is None else components


def center_of(center: Scalar | Literal["learned"] | None, prior: Family, dtype: Any) -> tuple[Array, bool]:
    """The given center, 0 without one, and whether it is learned instead, as `ebnm` takes it."""
    if center is None or isinstance(center, str):
        return jnp.zeros((), dtype), center == "learned" or (center is None and prior == "normal")
    return jnp.asarray(center, dtype), False


def number_at_once(refits: int, clients: int, components: int) -> int:
    """Refits that are worked on together, so that their arrays stay small."""
    size = clients if not components else components * max(clients, components) // 8
    return max(1, min(refits, _AT_ONCE // max(size, 1)))


@partial(full_precision.jit, static_argnames=("prior", "learned", "refits", "resampling"))
def _mixed(
    key: Key, found: NormalMeans, center: Array, *, prior: Family, learned: bool, refits: int, resampling: Resampling
) -> NormalMeans:
    x, s, likeliest = found.x, found.s, found.prior
    if isinstance(likeliest, Refits):
        raise TypeError("a prior that was refitted is no family to draw from")
    m = len(x)
    even = jnp.full(m, 1 / m, x.dtype)
    population = likeliest
    if prior == "npmle" and resampling == "parametric":
        assert isinstance(likeliest, NormalMixture)
        population = smoothest(x, s, even, likeliest)

    def drawn(key: Key) -> tuple[Array, Array]:
        """Estimates and weights of clients, [m] each."""
        of_theta, of_x = jax.random.split(key)
        if resampling == "clients":
            chosen = jax.random.randint(of_theta, (m,), 0, m)
            return x, jnp.zeros_like(x).at[chosen].add(1 / m)
        theta = population.draw(of_theta, x.shape)
        return theta + s * jax.random.normal(of_x, x.shape, x.dtype), even

    keys = jax.random.split(key, refits)
    if prior not in COMPONENTS:

        def refit(key: Key) -> Any:
            own, w = drawn(key)
            return fitted(own, s, w, center, prior=prior, learned=learned, components=0).prior

        return posterior(Refits(jax.lax.map(refit, keys, batch_size=number_at_once(refits, m, 0))), x, s)

    assert isinstance(likeliest, NormalMixture)
    means, sds = likeliest.means, likeliest.sds
    if prior == "npmle" and resampling == "parametric":
        ends = jax.lax.map(lambda key: jnp.stack([of(drawn(key)[0]) for of in (jnp.min, jnp.max)]), keys)
        low, high = jnp.minimum(x.min(), ends[:, 0].min()), jnp.maximum(x.max(), ends[:, 1].max())
        means = low + (high - low) * jnp.arange(len(means), dtype=x.dtype) / (len(means) - 1)

    unit, origin = jnp.exp2(jnp.round(jnp.log2(s).mean())), means[0]

    def weights(key: Key) -> Array:
        own, w = drawn(key)
        made = families.weighted((own - origin) / unit, s / unit, w, (means - origin) / unit, sds / unit).prior
        assert isinstance(made, NormalMixture)
        return made.weights

    together = number_at_once(refits, m, len(means))
    return posterior(GridRefits(jax.lax.map(weights, keys, batch_size=together), means, sds), x, s)

r"""The smoothest population that an NPMLE's clients allow, to draw other clients from.

An NPMLE is a few atoms even where the population is smooth, so that clients drawn from it scatter less about what is
fitted to them than those of the population do. Among mixtures of normals of one spread h on the NPMLE's grid, each with
its likeliest weights (the smooth estimate of Magder and Zeger), the mean log likelihood falls with h, as a mixture of
wider normals is one of narrower ones. Drawn from is the widest h whose log likelihood is below the NPMLE's by no more
than

.. math:: \tfrac12 \chi^2_{1, .95} = 1.92,

the end of a 95 % likelihood interval for h.

References: Magder and Zeger 1996, "A smooth nonparametric estimate of a mixing distribution using mixtures of
Gaussians"; Silverman and Young 1987, "The bootstrap: to smooth or not to smooth?".
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxpfl.core.types import Array
from jaxpfl.estimators.normal_means import families
from jaxpfl.estimators.normal_means.answer import in_blocks
from jaxpfl.estimators.normal_means.normal_mixture import NormalMixture

DROP = 1.9207294103470617
"""Half the 95 % quantile of a chi-square with one degree of freedom."""
_FINEST = 16.0  # the least h, in parts of the smallest error: clients do not show whether it is zero
_HALVINGS = 8


def smoothest(x: Array, s: Array, w: Array, likeliest: NormalMixture) -> NormalMixture:
    """Mixture of the widest normals about the NPMLE's atoms that the clients do not refuse.

    Args:
      x, s: the estimates and their standard errors, [m] each.
      w: of the clients, [m], of sum one.
      likeliest: the NPMLE, atoms on a grid that spans all x.

    Returns:
      The same places with one spread h > 0 and the likeliest weights for it. h is found to 1/256 of the logarithm of
      its range, from the narrower side: from a 16th of the least error to the distance between the outermost atoms.
    """

    def fitted(log_h: Array) -> tuple[NormalMixture, Array]:
        prior = families.weighted(x, s, w, likeliest.means, jnp.full_like(likeliest.means, jnp.exp(log_h))).prior
        assert isinstance(prior, NormalMixture)
        return prior, in_blocks(prior.log_marginal, x, s) @ w

    least = in_blocks(likeliest.log_marginal, x, s) @ w - DROP / len(x)
    low = jnp.log(s.min() / _FINEST)
    high = jnp.maximum(jnp.log(likeliest.means[-1] - likeliest.means[0]), low)

    def halve(_: int, ends: tuple[Array, Array]) -> tuple[Array, Array]:
        middle = (ends[0] + ends[1]) / 2
        allowed = fitted(middle)[1] >= least
        return jnp.where(allowed, middle, ends[0]), jnp.where(allowed, ends[1], middle)

    low, _ = jax.lax.fori_loop(0, _HALVINGS, halve, (low, high))
    return fitted(low)[0]

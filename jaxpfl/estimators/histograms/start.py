r"""Algorithm 1: initial centers, users' own histograms that lie far from each other.

The first is a random user's; each further one is user u's with a probability proportional to

.. math:: \exp\big(t \, \min_k KL(P_k \| \hat Q_u)\big)

as printed; the objective that is then minimised has the divergence the other way round,
:math:`KL(\hat Q_u \| P_k)`, which is the other choice. Either needs positive histograms: both sides are floored.

Never private, as the centers are users' raw histograms. `histograms.private` has another start.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

import jax
import jax.numpy as jnp

from jaxpfl.core import full_precision
from jaxpfl.core.types import Array, Key, Scalar
from jaxpfl.estimators.histograms.base import Users, as_counted, floored, histograms

Direction: TypeAlias = Literal["printed", "objective"]
"""Direction of the divergence between centers and users: KL(P_k || Qhat_u), or KL(Qhat_u || P_k) as in the objective.
"""


@full_precision.products
def far_apart(
    key: Key, users: Users, clusters: int, *, temperature: Scalar, floor: Scalar, direction: Direction = "printed"
) -> Array:
    """Initial centers of Algorithm 1, [k, d], floored.

    Implements: Setlur et al. 2023, Algorithm 1.

    Args:
      key: of the draws; a user's scores depend on it and on the user's id alone.
      users: their histograms become centers.
      clusters: k.
      temperature: t >= 0; 0 draws users uniformly, infinity takes the one with the worst fit.
      floor: s.
      direction: of the divergence.
    """

    temperature = as_counted(temperature, users)

    def pick(i: Array | int, gap: Array) -> Array:
        """Histogram of the user with the largest ``t gap + Gumbel``, which is a draw with that probability."""

        def step(best: tuple[Array, Array], xs: tuple[Users, Array]) -> tuple[tuple[Array, Array], None]:
            block, gaps = xs
            keys = jax.vmap(lambda user: jax.random.fold_in(jax.random.fold_in(key, i), user))(block.ids)
            scores = jax.vmap(lambda k: jax.random.gumbel(k, dtype=gap.dtype))(keys) + temperature * gaps
            scores = jnp.where(block.valid, scores, -jnp.inf)
            at = jnp.argmax(scores)
            better = scores[at] > best[0]
            return (jnp.maximum(scores[at], best[0]), jnp.where(better, histograms(block)[at], best[1])), None

        nobody = jnp.asarray(-jnp.inf, gap.dtype), jnp.zeros(users.tokens, users.count.dtype)
        return floored(jax.lax.scan(step, nobody, (users, gap))[0][1], floor)

    def gaps(center: Array) -> Array:
        def of_block(block: Users) -> Array:
            q = floored(histograms(block), floor)
            if direction == "printed":
                return center @ jnp.log(center) - jnp.log(q) @ center
            return (q * jnp.log(q)).sum(axis=1) - q @ jnp.log(center)

        return jax.lax.map(of_block, users)

    first = pick(0, jnp.zeros(users.size.shape, users.count.dtype))

    def another(carry: tuple[Array, Array], i: Array) -> tuple[tuple[Array, Array], Array]:
        gap, latest = carry
        gap = jnp.minimum(gap, gaps(latest))
        center = pick(i, gap)
        return (gap, center), center

    infinite = jnp.full(users.size.shape, jnp.inf, users.count.dtype)
    rest = jax.lax.scan(another, (infinite, first), jnp.arange(1, clusters))[1]
    return jnp.concatenate([first[None], rest])

r"""Fine-tuning: a user's estimate between its center and its own histogram, and how far, chosen on other users.

.. math:: \lambda P_{c(u)} + (1 - \lambda) \hat Q_u

For users whose distribution is Dirichlet(alpha P) this is the Bayes estimate at lambda = alpha / (alpha + m_u)
(Lemma 2.2), so that one alpha serves users of any number of tokens; one lambda does not.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from jaxpfl.estimators.histogram import Truth, Users, entropy_term, floored, histograms, nearest
from jaxpfl.types import Array, Scalar

Personal = Callable[[Users, Array], Array]
"""Estimates of one block's users, [c, d], of the block and its histograms [c, d]. An unseen user's needs no more."""
Weight = Callable[[Array], Array]
"""lambda, [c], of the users' numbers of tokens [c]."""


def fixed(weight: Scalar) -> Weight:
    """The same lambda for all."""
    return lambda size: jnp.broadcast_to(jnp.asarray(weight, size.dtype), size.shape)


def by_size(alpha: Scalar) -> Weight:
    """``alpha / (alpha + m_u)``."""
    return lambda size: jnp.asarray(alpha, size.dtype) / (alpha + size)


def local(floor: Scalar) -> Personal:
    """Every user's own histogram."""
    return lambda block, q: floored(q, floor)


def finetuned(centers: Array, weight: Weight, floor: Scalar) -> Personal:
    """Between the nearest of the centers [k, d] and the user's own histogram; ``fixed(1)`` is the center itself."""

    def personal(block: Users, q: Array) -> Array:
        share = weight(block.size)[:, None]
        return floored(share * centers[nearest(q, centers)] + (1 - share) * q, floor)

    return personal


def losses(users: Users, truth: Truth, personal: Personal) -> Array:
    """``KL(Q_u || estimate)`` of every user, [b, c]; zero where there is no user.

    Args:
      users: what is known of the users.
      truth: Q_u.
      personal: the estimates.
    """

    def of_block(xs: tuple[Users, Truth]) -> Array:
        block, of = xs
        q = histograms(of)
        estimate = personal(block, histograms(block))
        score = entropy_term(q) - jnp.where(q > 0, q * jnp.log(estimate), 0).sum(axis=-1)
        return jnp.where(block.valid, score, 0)

    return jax.lax.map(of_block, (users, truth))


def loss(users: Users, truth: Truth, personal: Personal) -> Array:
    """The mean of `losses` over users, []."""
    return losses(users, truth, personal).sum() / jnp.maximum(users.number, 1)


def tuned(
    users: Users, truth: Truth, centers: Array, candidates: Array, kind: Callable[[Scalar], Weight], floor: Scalar
) -> tuple[Array, Array]:
    """The best of several lambdas (``kind=fixed``) or alphas (``kind=by_size``) on users set apart.

    Not private: what is learned of these users is released without noise. A privacy claim does not cover them.

    Args:
      users, truth: validation users and their held-out tokens.
      centers: [k, d].
      candidates: [g].

    Returns:
      The best candidate [], and the mean loss of each [g].
    """
    found = jax.lax.map(lambda value: loss(users, truth, finetuned(centers, kind(value), floor)), candidates)
    return candidates[jnp.argmin(found)], found


def estimates(users: Users, personal: Personal) -> Array:
    """Every user's estimate, [b, c, d]: dense, for export and for few users."""
    return jax.lax.map(lambda block: personal(block, histograms(block)), users)

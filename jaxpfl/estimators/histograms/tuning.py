r"""Fine-tuning: interpolation between a user's center and its own histogram, with a weight chosen on other users.

.. math:: \lambda P_{c(u)} + (1 - \lambda) \hat Q_u

For users whose distribution is Dirichlet(alpha P) this is the Bayes estimate at lambda = alpha / (alpha + m_u)
(Lemma 2.2), so that one alpha suits users with any number of tokens; one lambda does not.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from jaxpfl.core import full_precision
from jaxpfl.core.types import Array, Scalar
from jaxpfl.estimators.histograms.base import Truth, Users, entropy_term, floored, histograms, nearest

Personal = Callable[[Users, Array], Array]
"""Function of a block and its histograms [c, d] that returns the users' estimates [c, d], also for unseen users."""
Weight = Callable[[Array], Array]
"""Function of the users' numbers of tokens [c] that returns lambda [c]."""


def fixed(weight: Scalar) -> Weight:
    """The same lambda for all users."""
    return lambda size: jnp.broadcast_to(jnp.asarray(weight, size.dtype), size.shape)


def size_weight(alpha: Scalar) -> Weight:
    """lambda = ``alpha / (alpha + m_u)``.

    Implements: Setlur et al. 2023, Lemma 2.2.
    """
    return lambda size: jnp.asarray(alpha, size.dtype) / (alpha + size)


def local(floor: Scalar) -> Personal:
    """Each user's own histogram."""
    return lambda block, q: floored(q, floor)


def nearest_center(centers: Array) -> Personal:
    """The nearest of the centers [k, d], without fine-tuning."""
    return lambda _, q: centers[nearest(q, centers)]


def between(centers: Array, steps: int = 30) -> Personal:
    r"""A convex combination of the centers [k, d], fitted by each user to its own counts.

    The user's weights of the centers maximise the likelihood of its tokens; EM from equal weights iterates

    .. math:: w_k \leftarrow w_k \sum_x \hat Q_u(x) \frac{P_k(x)}{\sum_j w_j P_j(x)}

    It suits overlapping populations, such as text, where users belong to no single cluster. It runs on the user's
    device and costs no privacy.
    """

    def point(block: Users, q: Array) -> Array:
        def step(_: Array, shares: Array) -> Array:
            return shares * ((q / (shares @ centers)) @ centers.T)

        k = len(centers)
        even = jnp.full((q.shape[0], k), 1 / k, q.dtype)
        shares = jax.lax.fori_loop(0, steps if k > 1 else 0, step, even)
        return jnp.where(block.valid[:, None], shares, even) @ centers

    return point


def toward(point: Personal, weight: Weight, floor: Scalar) -> Personal:
    """Fine-tuning: interpolation between a user's point and its own histogram."""

    def personal(block: Users, q: Array) -> Array:
        share = weight(block.size)[:, None]
        return floored(share * point(block, q) + (1 - share) * q, floor)

    return personal


def finetuned(centers: Array, weight: Weight, floor: Scalar) -> Personal:
    """Interpolation between the nearest of the centers [k, d] (at weight 1) and the user's own histogram."""
    return toward(nearest_center(centers), weight, floor)


def blended(centers: Array, weight: Weight, floor: Scalar, steps: int = 30) -> Personal:
    """Fine-tuning from a convex combination of the centers [k, d] (`between`)."""
    return toward(between(centers, steps), weight, floor)


def _divergence(q: Array, estimate: Array) -> Array:
    return entropy_term(q) - jnp.where(q > 0, q * jnp.log(estimate), 0).sum(axis=-1)


@full_precision.products
def losses(users: Users, truth: Truth, personal: Personal) -> Array:
    """Loss ``KL(Q_u || estimate)`` of every user, [b, c]; zero where there is no user.

    Args:
      users: the observed counts.
      truth: Q_u.
      personal: the estimates.
    """

    def block_losses(xs: tuple[Users, Truth]) -> Array:
        block, of = xs
        return jnp.where(block.valid, _divergence(histograms(of), personal(block, histograms(block))), 0)

    return jax.lax.map(block_losses, (users, truth))


@full_precision.products
def loss(users: Users, truth: Truth, personal: Personal) -> Array:
    """Mean of `losses` over users, []."""
    return losses(users, truth, personal).sum() / jnp.maximum(users.number, 1)


@full_precision.products
def tuned(
    users: Users, truth: Truth, candidates: Array, point: Personal, weight: Callable[[Scalar], Weight], floor: Scalar
) -> tuple[Array, Array]:
    """The best of several lambdas or alphas, by the loss of users set apart for validation.

    Not private: the result depends on these users without noise. A privacy claim does not cover them.

    Args:
      users, truth: validation users and their held-out tokens.
      candidates: [g].
      point: point to be fine-tuned (`toward`), computed once for all candidates.
      weight: `fixed` or `size_weight`.
      floor: s.

    Returns:
      The best candidate [] and the mean loss of each [g].
    """

    def block_losses(xs: tuple[Users, Truth]) -> Array:
        block, of = xs
        q, own = histograms(of), histograms(block)
        at = point(block, own)

        def candidate_loss(candidate: Scalar) -> Array:
            made = toward(lambda *_: at, weight(candidate), floor)(block, own)
            return jnp.where(block.valid, _divergence(q, made), 0).sum()

        return jax.lax.map(candidate_loss, candidates)

    found = jax.lax.map(block_losses, (users, truth)).sum(axis=0) / jnp.maximum(users.number, 1)
    return candidates[jnp.argmin(found)], found


@full_precision.products
def estimates(users: Users, personal: Personal) -> Array:
    """Every user's estimate, [b, c, d]: dense, for export and for few users."""
    return jax.lax.map(lambda block: personal(block, histograms(block)), users)

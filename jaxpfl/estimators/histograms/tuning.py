r"""Fine-tuning: interpolation between a user's center and the user's own histogram, with a weight tuned on other users.

.. math:: \lambda P_{c(u)} + (1 - \lambda) \hat Q_u

Here P_c(u) is the nearest center of user u, and Qhat_u the user's own histogram. If a user's distribution is drawn from
Dirichlet(alpha P), the Bayes estimate has lambda = alpha / (alpha + m_u), where m_u is the user's number of tokens
(Setlur et al. 2023, Lemma 2.2). One alpha is therefore optimal for users with any number of tokens, while one lambda is
not.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from jaxpfl.core import full_precision
from jaxpfl.core.types import Array, Scalar
from jaxpfl.estimators.histograms.base import Truth, Users, entropy_term, floored, histograms, nearest

Personal = Callable[[Users, Array], Array]
"""Function ``(block, histograms [c, d]) -> estimates [c, d]`` for users who may or may not have been clustered."""
Weight = Callable[[Array], Array]
"""Function ``sizes [c] -> lambda [c]``, from the users' numbers of tokens."""


def fixed(weight: Scalar) -> Weight:
    """Make the function that returns the same lambda for all users."""
    return lambda size: jnp.broadcast_to(jnp.asarray(weight, size.dtype), size.shape)


def size_weight(alpha: Scalar) -> Weight:
    """Make the function that returns lambda = ``alpha / (alpha + m_u)`` for a user with m_u tokens.

    Implements: Setlur et al. 2023, Lemma 2.2.
    """
    return lambda size: jnp.asarray(alpha, size.dtype) / (alpha + size)


def local(floor: Scalar) -> Personal:
    """Make the function that returns users' own histograms, floored."""
    return lambda block, q: floored(q, floor)


def nearest_center(centers: Array) -> Personal:
    """Make the function that returns the nearest of the centers [k, d] for each user, without fine-tuning."""
    return lambda _, q: centers[nearest(q, centers)]


def between(centers: Array, steps: int = 30) -> Personal:
    r"""Make the function that returns a convex combination of the centers [k, d] for each user.

    Each user fits the weights to its own counts by maximizing the likelihood of its tokens. EM starts from equal
    weights and iterates, with the user's histogram :math:`\hat Q_u`,

    .. math:: w_k \leftarrow w_k \sum_x \hat Q_u(x) \frac{P_k(x)}{\sum_j w_j P_j(x)}

    Convex combinations suit overlapping populations, such as users of text, who do not belong to a single cluster. The
    fit runs on the user's device and costs no privacy.
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
    """Make the function that interpolates between the estimates of ``point`` and the users' own histograms."""

    def personal(block: Users, q: Array) -> Array:
        share = weight(block.size)[:, None]
        return floored(share * point(block, q) + (1 - share) * q, floor)

    return personal


def finetuned(centers: Array, weight: Weight, floor: Scalar) -> Personal:
    """Make the function that averages a user's own histogram and the nearest of the centers [k, d].

    ``weight`` is the center's weight: 1 gives the center, and 0 the user's own histogram.
    """
    return toward(nearest_center(centers), weight, floor)


def blended(centers: Array, weight: Weight, floor: Scalar, steps: int = 30) -> Personal:
    """Make the function that fine-tunes a convex combination of the centers [k, d] (`between`)."""
    return toward(between(centers, steps), weight, floor)


def _divergence(q: Array, estimate: Array) -> Array:
    return entropy_term(q) - jnp.where(q > 0, q * jnp.log(estimate), 0).sum(axis=-1)


@full_precision.products
def losses(users: Users, truth: Truth, personal: Personal) -> Array:
    """Loss ``KL(Q_u || estimate)`` of every user, [b blocks, c rows]; zero in rows without a user.

    Args:
      users: observed counts, from which the estimates are made.
      truth: the users' distributions Q_u, as held-out counts or true histograms.
      personal: function that computes the estimates.
    """

    def block_losses(xs: tuple[Users, Truth]) -> Array:
        block, of = xs
        return jnp.where(block.valid, _divergence(histograms(of), personal(block, histograms(block))), 0)

    return jax.lax.map(block_losses, (users, truth))


@full_precision.products
def loss(users: Users, truth: Truth, personal: Personal) -> Array:
    """Mean of `losses` over the users, []."""
    return losses(users, truth, personal).sum() / jnp.maximum(users.number, 1)


@full_precision.products
def tuned(
    users: Users, truth: Truth, candidates: Array, point: Personal, weight: Callable[[Scalar], Weight], floor: Scalar
) -> tuple[Array, Array]:
    """Choose the lambda or alpha with the smallest mean loss over validation users.

    The choice is not private: it depends on the validation users without noise, so a privacy claim does not cover these
    users.

    Args:
      users, truth: validation users and their held-out tokens.
      candidates: the g values to choose from, [g].
      point: estimates to fine-tune (see `toward`), computed once for all candidates.
      weight: `fixed` or `size_weight`.
      floor: lower bound s on a token's probability, before normalization; see `floored`.

    Returns:
      Two arrays: the best candidate, [], and the mean loss of every candidate, [g].
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
    """Compute every user's estimate, [b blocks, c rows, d tokens].

    The array is dense, so use this function for export or for few users only.
    """
    return jax.lax.map(lambda block: personal(block, histograms(block)), users)

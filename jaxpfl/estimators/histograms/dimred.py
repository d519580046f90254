r"""DimRed: selection of the tokens that separate clusters, by singular vectors of the users' standardised deviations.

.. math:: V_u = Diag(\bar q)^{-1/2} (\hat Q_u - \bar q), \qquad M = \frac1n \sum_u V_u V_u^\top

A token x is kept if |v_x| exceeds a threshold in any of M's leading eigenvectors v. This is our reading: literally, the
paper drops x if |v_x| is small in any v, which keeps almost nothing; ``every=True`` selects that.

The deviations are from the mean, so that k clusters span k - 1 directions; the paper takes k. (Its expectation of M
also omits I / (alpha + 1) and -sqrt(q) sqrt(q)^T; the first does not rotate the eigenvectors, the second removes one
direction.)

Clustering then uses the kept tokens; the others' estimates are those of the mean, whose release is accounted for.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxpfl.core import full_precision
from jaxpfl.core.types import Array, Key, Scalar
from jaxpfl.estimators.clustering import within_ball
from jaxpfl.estimators.histograms.base import Users, total
from jaxpfl.privacy.noise import add_gaussian


class Directions(NamedTuple):
    """Leading eigenvectors [r, p] and eigenvalues [r], in descending order, over candidate tokens [p]."""

    vectors: Array
    values: Array
    candidates: Array


@full_precision.products
def second_moment(users: Users, mean: Array, candidates: Array, radius: Scalar | None = None) -> Array:
    """Second moment ``sum_u V_u V_u^T`` over the candidate tokens, [p, p].

    Implements: Setlur et al. 2023, appendix C.

    Args:
      users: to be summed over.
      mean: positive, [d].
      candidates: tokens, [p] int.
      radius: B, the clipping norm of each V_u, so that a user changes the sum by at most B^2 in Frobenius norm; None
        for no clipping.
    """
    of = mean[candidates]

    def of_block(block: Users, q: Array) -> Array:
        v = (q[:, candidates] - of) / jnp.sqrt(of)
        v = jnp.where(block.valid[:, None], v if radius is None else within_ball(v, radius), 0)
        return v.T @ v

    return total(users, of_block)


def directions(moment: Array, candidates: Array, number: int) -> Directions:
    """Leading eigenvectors of a second moment (or of a noisy one).

    Implements: Setlur et al. 2023, appendix C.
    """
    values, vectors = jnp.linalg.eigh(moment)
    return Directions(vectors.T[::-1][:number], values[::-1][:number], candidates)


def noisy_moment(key: Key, moment: Array, radius: Scalar, noise: Scalar) -> Array:
    """Second moment with symmetric noise, ``N(0, (z B^2)^2)`` on and above the diagonal.

    Formal guarantees: a Gaussian mechanism of noise multiplier z under add-or-remove-one of a user whose V_u is clipped
    to B, if the mean and the candidates are private or public: |V V^T|_F = |V|^2 <= B^2, and the norm of the entries on
    and above the diagonal is no larger.
    """
    upper = jnp.triu(add_gaussian(key, moment, noise * radius**2))
    return upper + jnp.triu(upper, 1).T


def candidate_tokens(mean: Array, number: int) -> Array:
    """The tokens of largest mean, [number]; private if the mean is."""
    return jax.lax.top_k(mean, number)[1]


def kept(found: Directions, tokens: int, threshold: Scalar, *, every: bool = False) -> Array:
    """Mask of the kept tokens, |v_x| above the threshold in any of the vectors (or in every one), [d] bool.

    Implements: Setlur et al. 2023, appendix C.
    """
    size = jnp.abs(found.vectors)
    size = size.min(axis=0) if every else size.max(axis=0)
    return jnp.zeros(tokens, bool).at[found.candidates].set(size > threshold)


def threshold_of(found: Directions, number: int) -> Array:
    """Threshold that keeps ``number`` candidates, those largest in any vector."""
    size = jnp.sort(jnp.abs(found.vectors).max(axis=0))[::-1]
    return size[number] if number < len(size) else jnp.asarray(-1.0, size.dtype)

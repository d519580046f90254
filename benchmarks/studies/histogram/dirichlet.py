r"""Maximum-likelihood Dirichlet mixtures of counts. Their posterior means serve as a reference for other estimates.

In cluster k with parameters :math:`a_k = \alpha_k P_k`, counts c_u of m_u tokens have the likelihood

.. math:: \frac{\Gamma(A_k)}{\Gamma(A_k + m_u)} \prod_x \frac{\Gamma(a_{kx} + c_{ux})}{\Gamma(a_{kx})},
   \qquad A_k = \sum_x a_{kx}

and the posterior mean of Q_u, given the cluster and the counts, is :math:`(c_u + a_k) / (m_u + A_k)` (Setlur et al.
2023, Lemma 2.2). EM alternates between computing the responsibilities r_uk, the posterior probabilities of the
clusters, and Minka's fixed-point step:

.. math:: a_{kx} \leftarrow a_{kx} \frac{\sum_u r_{uk} [\psi(c_{ux} + a_{kx}) - \psi(a_{kx})]}
   {\sum_u r_{uk} [\psi(m_u + A_k) - \psi(A_k)]}

Here psi is the digamma function. The step maximizes a lower bound on the likelihood, so the likelihood never decreases.
Only nonzero counts contribute, so all computations use the sparse counts.

Reference: Minka 2000, "Estimating a Dirichlet distribution", eq. 55.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.scipy.special import digamma, gammaln

from jaxpfl.core import full_precision
from jaxpfl.core.full_precision import RunningSum
from jaxpfl.core.types import Array, Scalar
from jaxpfl.estimators.histograms.base import Users, counts_dtype, floored, histograms, nearest
from jaxpfl.estimators.histograms.tuning import Personal

LEAST = 1e-8
"""Lower bound on a_kx: an entry of zero could never become positive again."""


class Mixture(NamedTuple):
    """Probabilities w [k] and Dirichlet parameters a [k, d]; alpha is ``a.sum(axis=1)``, centers are ``a / alpha``."""

    shares: Array
    a: Array


class Fit(NamedTuple):
    """A mixture, and users' mean log-likelihoods before the T steps, [T], without the multinomial coefficient."""

    mixture: Mixture
    likelihood: Array


@full_precision.products
def log_likelihood(block: Users, a: Array) -> Array:
    """Log-likelihood of each of the c users in a block under each cluster, [c, k]."""
    rows, k = block.size.shape[0], len(a)
    row, token = jnp.divmod(block.place, block.tokens)
    own = a.T[token % block.tokens]  # [e, k]; padding has a count of zero and contributes nothing
    gain = gammaln(own + block.count[:, None]) - gammaln(own)
    per_user = jnp.zeros((rows, k), gain.dtype).at[row].add(gain, mode="drop")
    whole = a.sum(axis=1)
    return per_user + gammaln(whole) - gammaln(whole + block.size[:, None])


@full_precision.products
def responsibilities(block: Users, mixture: Mixture) -> tuple[Array, Array]:
    """Responsibilities P(cluster | counts), [c, k], and log-likelihoods, [c], of the c users in a block."""
    joint = jnp.log(mixture.shares) + log_likelihood(block, mixture.a)
    return jax.nn.softmax(joint, axis=1), jax.nn.logsumexp(joint, axis=1)


@full_precision.products
def em(users: Users, start: Mixture, steps: int, *, hard: Array | None = None) -> Fit:
    """Fit a mixture by EM.

    Args:
      users: users whose counts are fitted.
      start: initial mixture.
      steps: number of steps T.
      hard: centers [k, d], such as those from `clusters.cluster`. If given, every user belongs to the cluster of the
        nearest center, and EM fits only the Dirichlet distribution of each cluster.
    """

    start = counts_dtype(start, users)

    def step(mixture: Mixture, _: None) -> tuple[Mixture, Array]:
        def add_block(sums: RunningSum, block: Users) -> tuple[RunningSum, None]:
            r, likelihood = responsibilities(block, mixture)
            if hard is not None:
                joint = log_likelihood(block, mixture.a)
                r = jax.nn.one_hot(nearest(histograms(block), hard), len(hard), dtype=joint.dtype)
                likelihood = (r * joint).sum(axis=1)
            r = jnp.where(block.valid[:, None], r, 0)
            row, token = jnp.divmod(block.place, block.tokens)
            at = token % block.tokens
            own = mixture.a.T[at]
            # The padding's row is out of range, so its weight is zero.
            weight = r.at[row].get(mode="fill", fill_value=0)
            seen = weight * (digamma(own + block.count[:, None]) - digamma(own))
            whole = mixture.a.sum(axis=1)
            sizes = r * (digamma(block.size[:, None] + whole) - digamma(whole))
            new = (
                jnp.zeros_like(mixture.a.T).at[at].add(seen),
                sizes.sum(axis=0),
                r.sum(axis=0),
                jnp.where(block.valid, likelihood, 0).sum(),
            )
            return sums.plus(new), None

        k = len(mixture.a)
        zero = jnp.zeros_like(mixture.a.T), jnp.zeros(k), jnp.zeros(k), jnp.zeros(())
        zero = jax.tree.map(lambda z: z.astype(mixture.a.dtype), zero)
        seen, sizes, members, likelihood = jax.lax.scan(add_block, RunningSum.zero(zero), users)[0].total
        lonely = members <= 0
        ratio = seen.T / jnp.where(lonely, 1, sizes)[:, None]
        a = jnp.where(lonely[:, None], mixture.a, jnp.maximum(mixture.a * ratio, LEAST))
        shares = floored(members / jnp.maximum(members.sum(), 1), LEAST)
        return Mixture(shares, a), likelihood / jnp.maximum(users.number, 1)

    return Fit(*jax.lax.scan(step, start, None, length=steps))


def around(centers: Array, alpha: Scalar) -> Mixture:
    """Initial mixture with equal probabilities, and the concentration ``alpha`` about each of the centers [k, d]."""
    return Mixture(jnp.full(len(centers), 1 / len(centers), centers.dtype), alpha * centers)


def posterior(mixture: Mixture, floor: Scalar) -> Personal:
    """Make the function that returns users' posterior means: the Bayes estimates if users are drawn from the mixture.

    Implements: Setlur et al. 2023, Lemma 2.2.
    """

    def personal(block: Users, q: Array) -> Array:
        r = responsibilities(block, mixture)[0]
        whole = mixture.a.sum(axis=1)
        over = r / (block.size[:, None] + whole)
        return floored(over @ mixture.a + over.sum(axis=1, keepdims=True) * q * block.size[:, None], floor)

    return personal


def empirical_bayes(mixture: Mixture, centers: Array, floor: Scalar) -> Personal:
    """Make the function that returns users' posterior means, given that a user belongs to the nearest center."""

    def personal(block: Users, q: Array) -> Array:
        a = mixture.a[nearest(q, centers)]
        return floored(a + q * block.size[:, None], floor)

    return personal

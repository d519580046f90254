r"""Linear regression for clients whose coefficients lie in one unknown subspace.

.. math:: y_i = X_i B w_i + e_i, \quad e_i \sim N(0, \sigma^2 I), \quad B \in R^{d \times k}, \quad w_i \in R^k

B is the common representation, and w_i is the head of client i. The rank k <= d is given. A client sends a `Message`
with :math:`A_i = X_i^T X_i` and :math:`b_i = X_i^T y_i`. `em` assumes :math:`w_i \sim N(0, I)` and maximizes the
marginal likelihood. With :math:`M_i = I + B^T A_i B / \sigma^2`, :math:`\hat w_i = M_i^{-1} B^T b_i / \sigma^2` and
:math:`S_i = M_i^{-1} + \hat w_i \hat w_i^T`, the new B solves

.. math:: \sum_i A_i B S_i = \sum_i b_i \hat w_i^T

and is then multiplied by the Cholesky factor of the mean of S_i, which accelerates EM (parameter expansion: Liu, Rubin
and Wu 1998).

`alternating` minimizes the squared errors alternately over the heads and over B, as the papers below do. The heads are
then least-squares solutions, :math:`S_i = \hat w_i \hat w_i^T`, and the columns of B are made orthonormal. If a client
has fewer than k examples, its least-squares head is not unique; if it has few examples, the head is inaccurate. In
`em`, heads are shrunk toward zero, which avoids both problems.

References: Collins et al. 2021, "Exploiting shared representations for personalized federated learning",
https://arxiv.org/abs/2102.07078; Tripuraneni, Jin and Jordan 2021, "Provable meta-learning of linear representations",
https://arxiv.org/abs/2002.11684; Ozkara et al. 2023, appendix J.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxpfl.core import full_precision
from jaxpfl.core.types import Array, Scalar
from jaxpfl.estimators.empirical_bayes.random_coefficients import Message, Posterior
from jaxpfl.support.errors import JaxpflError


class Representation(NamedTuple):
    """Common representation.

    Attributes:
      basis: common representation B, [d, k].
      noise: noise variance sigma^2, [].
    """

    basis: Array
    noise: Array


@full_precision.products
def start(messages: Message, rank: int) -> Representation:
    """Initial basis, scaled so that the model explains half of the mean square of the labels y, and noise the rest.

    The columns of the basis are multiples of the k leading eigenvectors of sum_i b_i b_i', where b_i = X_i' y_i.

    Args:
      messages: messages of all m clients, stacked: arrays [m, ...].
      rank: dimension k of the subspace.

    Raises:
      JaxpflError: if the rank is not in 1 ... d.
    """
    d = messages.cross.shape[-1]
    if not 1 <= rank <= d:
        raise JaxpflError(f"rank must be from 1 to {d} (the number of coefficients), got {rank}")
    _, vectors = jnp.linalg.eigh(messages.cross.T @ messages.cross)
    basis = vectors[:, ::-1][:, :rank]
    half = messages.square.sum() / messages.size.sum() / 2
    energy = jnp.trace(basis.T @ messages.gram.sum(axis=0) @ basis) / messages.size.sum()
    return Representation(basis * jnp.sqrt(half / energy), half)


@full_precision.products
def head(at: Representation, sent: Message) -> Posterior:
    """Posterior of one client's head w under the representation ``at``, in whose fit the client need not have taken
    part.

    The client's coefficients are ``basis @ mean``, and ``log_evidence`` is ``log N(y; 0, X B B' X' + sigma^2 I)``.
    """
    seen = at.basis.T @ sent.cross / at.noise
    factor = jnp.linalg.cholesky(jnp.eye(at.basis.shape[1]) + at.basis.T @ sent.gram @ at.basis / at.noise)
    covariance = jax.scipy.linalg.cho_solve((factor, True), jnp.eye(len(seen), dtype=seen.dtype))
    mean = covariance @ seen
    deviance = sent.size * jnp.log(2 * jnp.pi * at.noise) + 2 * jnp.log(jnp.diag(factor)).sum()
    return Posterior(mean, covariance, -(deviance + sent.square / at.noise - seen @ mean) / 2)


@full_precision.products
def em(at: Representation, messages: Message, floor: Scalar, steps: int) -> Representation:
    """Fit the representation by EM; no step decreases the summed ``log_evidence``.

    Args:
      at: initial representation; its sigma^2 must be above ``floor``.
      messages: messages of all m clients, stacked: arrays [m, ...].
      floor: positive lower bound on sigma^2.
      steps: number of steps; static.
    """

    def step(_: Array, at: Representation) -> Representation:
        of = jax.vmap(lambda sent: head(at, sent))(messages)
        second = of.covariance + of.mean[:, :, None] * of.mean[:, None, :]
        basis = _basis(messages, of.mean, second)
        crossed = jnp.einsum("id,dk,ik->", messages.cross, basis, of.mean)
        fitted = jnp.einsum("dk,ide,el,ikl->", basis, messages.gram, basis, second)
        noise = (messages.square.sum() - 2 * crossed + fitted) / messages.size.sum()
        return Representation(basis @ jnp.linalg.cholesky(second.mean(axis=0)), jnp.maximum(noise, floor))

    return jax.lax.fori_loop(0, steps, step, at)


@full_precision.products
def least_squares_head(basis: Array, sent: Message) -> Array:
    """Minimum-norm least-squares head of a client, [k]."""
    return jnp.linalg.pinv(basis.T @ sent.gram @ basis, hermitian=True) @ (basis.T @ sent.cross)


@full_precision.products
def alternating(basis: Array, messages: Message, steps: int) -> Array:
    """Fit the heads and the basis in turn, by least squares; return a basis with orthonormal columns, [d, k].

    Implements: Ozkara et al. 2023, appendix J.
    """

    def step(_: Array, basis: Array) -> Array:
        heads = jax.vmap(lambda sent: least_squares_head(basis, sent))(messages)
        return jnp.linalg.qr(_basis(messages, heads, heads[:, :, None] * heads[:, None, :]))[0]

    return jax.lax.fori_loop(0, steps, step, jnp.linalg.qr(basis)[0])


def _basis(messages: Message, heads: Array, second: Array) -> Array:
    """Solution B [d, k] of ``sum_i A_i B S_i = sum_i b_i w_i'``, with the smallest norm if there are several solutions.

    Here w_i are the ``heads``, S_i are the matrices ``second``, and A_i and b_i are parts of the messages.
    """
    (k, d), right = (heads.shape[1], messages.cross.shape[1]), messages.cross.T @ heads
    whole = jnp.einsum("ikl,ide->dkel", second, messages.gram).reshape(d * k, d * k)
    return (jnp.linalg.pinv(whole, hermitian=True) @ right.reshape(-1)).reshape(d, k)

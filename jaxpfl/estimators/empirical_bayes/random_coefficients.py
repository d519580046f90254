r"""Linear regression in which the clients' coefficients have a joint Gaussian distribution with a full covariance.

.. math:: y_i = X_i \theta_i + w_i, \quad w_i \sim N(0, \sigma^2 I), \quad \theta_i \sim N(\mu, \Sigma)

A client sends a `Message` with :math:`A_i = X_i^T X_i`, :math:`b_i = X_i^T y_i`, :math:`y_i^T y_i` and its number of
examples, n_i, which may be smaller than the number of coefficients. With :math:`\Sigma = L L^T`, :math:`M_i = I + L^T
A_i L / \sigma^2` and :math:`g_i = b_i - A_i \mu`, the posterior of the client's coefficients has mean and covariance

.. math:: E\,\theta_i = \mu + L M_i^{-1} L^T g_i / \sigma^2, \qquad C_i = L M_i^{-1} L^T

`em` fits mu, Sigma and sigma^2 by maximizing the clients' marginal likelihood. A step first updates mu by generalized
least squares, given the current Sigma and sigma^2. It then updates

.. math:: \Sigma \leftarrow \operatorname{mean}_i [C_i + (E\,\theta_i - \mu)(E\,\theta_i - \mu)^T], \qquad
   \sigma^2 \leftarrow \frac{\sum_i E |y_i - X_i \theta_i|^2}{\sum_i n_i}

A lower bound is enforced on sigma^2 and on the eigenvalues of Sigma. Neither part of a step decreases the likelihood.
EM converges slowly if the maximum-likelihood Sigma is singular.

References: Laird and Ware 1982, "Random-effects models for longitudinal data"; Ozkara et al. 2023, appendix J, for a
joint Gaussian of known covariance in multi-task learning.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxpfl.core import full_precision
from jaxpfl.core.types import Array, Scalar


class Message(NamedTuple):
    """Sums over a client's examples, which suffice for the fit.

    Attributes:
      gram: matrix X'X, [d, d].
      cross: vector X'y, [d].
      square: sum of squares y'y, [].
      size: number n of examples, [].
    """

    gram: Array
    cross: Array
    square: Array
    size: Array


class Coefficients(NamedTuple):
    """Distribution of the coefficients over clients.

    Attributes:
      mean: mean mu, [d].
      covariance: covariance Sigma, [d, d].
      noise: noise variance sigma^2, [].
    """

    mean: Array
    covariance: Array
    noise: Array


class Posterior(NamedTuple):
    """Posterior of a client's coefficients.

    Attributes:
      mean: posterior mean, [d].
      covariance: posterior covariance, [d, d]. Its trace is the mean squared error of ``mean`` if the distribution of
        the coefficients is known.
      log_evidence: ``log N(y; X mu, X Sigma X' + sigma^2 I)``, [].
    """

    mean: Array
    covariance: Array
    log_evidence: Array


@full_precision.products
def message(x: Array, y: Array, size: Scalar | None = None) -> Message:
    """Compute the sufficient statistics X'X, X'y, y'y and n of a client's examples.

    Args:
      x, y: examples, [n, d] and [n]; rows of padding are zero.
      size: number of examples; by default the number of rows.
    """
    return Message(x.T @ x, x.T @ y, y @ y, jnp.asarray(len(y) if size is None else size, x.dtype))


@full_precision.products
def pooled(messages: Message) -> Array:
    """Minimum-norm least-squares coefficients [d] of all clients' examples, from stacked messages (arrays [m, ...])."""
    return jnp.linalg.pinv(messages.gram.sum(axis=0), hermitian=True) @ messages.cross.sum(axis=0)


@full_precision.products
def start(messages: Message) -> Coefficients:
    """Initial distribution for `em`, with the pooled coefficients as mean.

    Half of the variance of the residuals about the pooled fit is attributed to the noise, and half to the spread of the
    clients' coefficients.

    Args:
      messages: messages of all m clients, stacked: arrays [m, ...].
    """
    mu = pooled(messages)
    half = _residual(messages, mu[None]).sum() / messages.size.sum() / 2
    energy = jnp.trace(messages.gram.sum(axis=0)) / messages.size.sum()
    return Coefficients(mu, half / energy * jnp.eye(len(mu), dtype=mu.dtype), half)


@full_precision.products
def posterior(population: Coefficients, sent: Message) -> Posterior:
    """Posterior of one client's coefficients."""
    return _posterior(population, _root(population.covariance), sent)


@full_precision.products
def em(population: Coefficients, messages: Message, floor: Scalar, steps: int) -> Coefficients:
    """Fit the distribution of the coefficients by EM.

    If all variances stay above ``floor``, no step decreases the summed ``log_evidence``.

    Args:
      population: initial distribution; its variances must be above ``floor``.
      messages: messages of all m clients, stacked: arrays [m, ...].
      floor: positive lower bound on the eigenvalues of Sigma and on sigma^2.
      steps: number of steps; static.
    """

    def step(_: Array, at: Coefficients) -> Coefficients:
        root = _root(at.covariance)
        at = at._replace(mean=_generalised(at, root, messages))
        of = jax.vmap(lambda sent: _posterior(at, root, sent))(messages)
        apart = of.mean - at.mean
        covariance = of.covariance.mean(axis=0) + apart.T @ apart / len(apart)
        fitted = jnp.einsum("ijk,ikj->i", messages.gram, of.covariance)
        noise = (_residual(messages, of.mean) + fitted).sum() / messages.size.sum()
        return Coefficients(at.mean, _above(covariance, floor), jnp.maximum(noise, floor))

    return jax.lax.fori_loop(0, steps, step, population)


def _posterior(population: Coefficients, root: Array, sent: Message) -> Posterior:
    mu, noise = population.mean, population.noise
    factor = jnp.linalg.cholesky(jnp.eye(root.shape[1], dtype=mu.dtype) + root.T @ sent.gram @ root / noise)
    apart = sent.cross - sent.gram @ mu
    half = jax.scipy.linalg.solve_triangular(factor, root.T, lower=True)  # F^-1 L'
    moved = half.T @ (half @ apart) / noise
    square = sent.square - 2 * mu @ sent.cross + mu @ sent.gram @ mu
    deviance = sent.size * jnp.log(2 * jnp.pi * noise) + 2 * jnp.log(jnp.diag(factor)).sum()
    return Posterior(mu + moved, half.T @ half, -(deviance + (square - apart @ moved) / noise) / 2)


def _generalised(population: Coefficients, root: Array, messages: Message) -> Array:
    """Mean by generalized least squares, ``(sum X' V^-1 X)^+ sum X' V^-1 y``, where V = X Sigma X' + sigma^2 I."""

    def weighed(sent: Message) -> tuple[Array, Array]:
        shrunk = sent.gram @ _posterior(population, root, sent).covariance / population.noise
        return sent.gram - shrunk @ sent.gram, sent.cross - shrunk @ sent.cross

    gram, cross = (part.sum(axis=0) for part in jax.vmap(weighed)(messages))
    return jnp.linalg.pinv((gram + gram.T) / 2, hermitian=True) @ cross


def _residual(messages: Message, theta: Array) -> Array:
    """Sum of each client's squared residuals, [m], for coefficients [m, d], or for common coefficients [1, d]."""
    theta = jnp.broadcast_to(theta, messages.cross.shape)
    fitted = jnp.einsum("ij,ijk,ik->i", theta, messages.gram, theta)
    return jnp.maximum(messages.square - 2 * (theta * messages.cross).sum(axis=-1) + fitted, 0)


def _root(covariance: Array) -> Array:
    """Root L with Sigma = L L', which exists even for a singular Sigma."""
    values, vectors = jnp.linalg.eigh(covariance)
    return vectors * jnp.sqrt(jnp.maximum(values, 0))


def _above(covariance: Array, floor: Scalar) -> Array:
    """Covariance with eigenvalues of at least ``floor`` that maximizes the likelihood, given a second moment."""
    values, vectors = jnp.linalg.eigh((covariance + covariance.T) / 2)
    return (vectors * jnp.maximum(values, floor)) @ vectors.T

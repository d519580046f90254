r"""Linear regression with a joint Gaussian of the clients' coefficients, of full covariance.

.. math:: y_i = X_i \theta_i + w_i, \quad w_i \sim N(0, \sigma^2 I), \quad \theta_i \sim N(\mu, \Sigma)

A client sends :math:`A_i = X_i^T X_i`, :math:`b_i = X_i^T y_i`, :math:`y_i^T y_i` and n_i (`Message`); fewer examples
than coefficients are no obstacle. With :math:`\Sigma = L L^T`, :math:`M_i = I + L^T A_i L / \sigma^2` and
:math:`g_i = b_i - A_i \mu` its posterior is

.. math:: E\,\theta_i = \mu + L M_i^{-1} L^T g_i / \sigma^2, \qquad C_i = L M_i^{-1} L^T

`em` fits the population by the clients' marginal likelihood: mu by generalised least squares at the Sigma and sigma^2
at hand, then

.. math:: \Sigma \leftarrow \operatorname{mean}_i [C_i + (E\,\theta_i - \mu)(E\,\theta_i - \mu)^T], \qquad
   \sigma^2 \leftarrow \frac{\sum_i E |y_i - X_i \theta_i|^2}{\sum_i n_i}

with the eigenvalues of Sigma and sigma^2 held above a floor; neither part lowers the likelihood. EM creeps where the
likeliest Sigma is singular; `maximum_likelihood` climbs to the same maximum by a quasi-Newton method in L, in which a
zero spread is an interior stationary point, and can restrict L to few columns (a subspace).

References: Laird and Ware 1982, "Random-effects models for longitudinal data"; Ozkara et al. 2023, appendix J, for a
joint Gaussian of known covariance in multi-task learning.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxpfl.core import full_precision
from jaxpfl.core.types import Array, Scalar


class Message(NamedTuple):
    """Sums over a client's examples, all that the fit needs of them.

    Attributes:
      gram: X'X, [d, d].
      cross: X'y, [d].
      square: y'y, [].
      size: n, [].
    """

    gram: Array
    cross: Array
    square: Array
    size: Array


class Coefficients(NamedTuple):
    """Population of the coefficients.

    Attributes:
      mean: mu, [d].
      covariance: Sigma, [d, d].
      noise: sigma^2, [].
    """

    mean: Array
    covariance: Array
    noise: Array


class Posterior(NamedTuple):
    """Posterior of a client's coefficients.

    Attributes:
      mean: [d].
      covariance: [d, d]; its trace is the mean squared error of ``mean`` for a known population.
      log_evidence: ``log N(y; X mu, X Sigma X' + sigma^2 I)``, [].
    """

    mean: Array
    covariance: Array
    log_evidence: Array


@full_precision.products
def message(x: Array, y: Array, size: Scalar | None = None) -> Message:
    """Sums of a client's examples.

    Args:
      x, y: [n, d] and [n]; rows of padding are zeros.
      size: number of examples; all rows unless given.
    """
    return Message(x.T @ x, x.T @ y, y @ y, jnp.asarray(len(y) if size is None else size, x.dtype))


@full_precision.products
def pooled(messages: Message) -> Array:
    """Least-squares coefficients of all clients' examples together, of least norm, [d]; leaves of messages [m, ...]."""
    return jnp.linalg.pinv(messages.gram.sum(axis=0), hermitian=True) @ messages.cross.sum(axis=0)


@full_precision.products
def about(center: Array, messages: Message) -> Message:
    """Messages of the residuals ``y - X center``, leaves [m, ...]; center [d]."""
    fitted = messages.gram @ center
    square = messages.square - 2 * messages.cross @ center + fitted @ center
    return messages._replace(cross=messages.cross - fitted, square=jnp.maximum(square, 0))


@full_precision.products
def start(messages: Message) -> Coefficients:
    """Start of `em`: the pooled coefficients, and their residuals' variance halved between noise and coefficients.

    Args:
      messages: of all clients, leaves [m, ...].
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
def squared_errors(population: Coefficients, messages: Message) -> Array:
    r"""Covariance of every client's error, for known variances and a mean learned from all clients, [m, d, d].

    .. math:: C_i + D_i V D_i^T, \qquad D_i = I - C_i A_i / \sigma^2, \qquad
       V = \Big( \sum_i X_i^T (X_i \Sigma X_i^T + \sigma^2 I)^{-1} X_i \Big)^+

    The second term is for the mean (the first two of Prasad and Rao's 1990 three); none is for the variances.

    Args:
      population: whose mean is that of generalised least squares, as `em` leaves it.
      messages: of all clients, leaves [m, ...].

    Reference: Henderson 1975, "Best linear unbiased estimation and prediction under a selection model".
    """
    root = _root(population.covariance)
    of = jax.vmap(lambda sent: _posterior(population, root, sent))(messages)
    kept = jnp.eye(len(population.mean)) - of.covariance @ messages.gram / population.noise
    seen = (messages.gram @ kept).sum(axis=0) / population.noise
    spread = jnp.linalg.pinv((seen + seen.T) / 2, hermitian=True)
    return of.covariance + kept @ spread @ kept.swapaxes(1, 2)


@full_precision.products
def em(population: Coefficients, messages: Message, floor: Scalar, steps: int) -> Coefficients:
    """Fit the population by steps of EM, which never lower the summed ``log_evidence`` once the floor is met.

    Args:
      population: to start from, of variances above the floor.
      messages: of all clients, leaves [m, ...].
      floor: the least eigenvalue of Sigma, and the least sigma^2; positive.
      steps: static.
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


class Maximum(NamedTuple):
    """Maximum of the likelihood.

    Attributes:
      population: its covariance may be singular.
      root: L of the covariance, [d, k].
      log_likelihood: summed ``log_evidence``, [].
      converged: whether neither L, sigma^2, nor a direction that L lacks can raise the likelihood.
    """

    population: Coefficients
    root: Array
    log_likelihood: float
    converged: bool


_SLOPE = 1e-5
"""Slope of the log likelihood per example at which it has converged."""
_NO_SPREAD = 1e-8
"""Eigenvalue of Sigma, relative to the labels' mean square, below which it is zero: a standard deviation of 1e-4."""
_RESTARTS = 5


def maximum_likelihood(messages: Message, floor: float, start: Array, mean: Array | None = None) -> Maximum:
    """Fit the population by L-BFGS in L and log sigma^2; mu is that of generalised least squares at each step.

    Runs on the host, in double precision; the likelihood and its gradient are one compiled program.

    Args:
      messages: messages of all clients, leaves [m, ...].
      floor: least sigma^2, positive.
      start: L to start from, [d, k], without zero columns; k < d restricts the coefficients to a subspace about mu.
      mean: mu, [d], where it is known; learned unless given.
    """
    from scipy import optimize

    shape, count = start.shape, float(messages.size.sum())
    scale = float(messages.square.sum()) / count
    half = float(_residual(messages, pooled(messages)[None] if mean is None else mean[None]).sum()) / count / 2

    def minus(flat: np.ndarray) -> tuple[float, np.ndarray]:
        value, slope = _minus_log_likelihood(jnp.asarray(flat), messages, mean, shape=shape)
        return float(value) / count, np.asarray(slope) / count

    bounds = [(None, None)] * start.size + [(np.log(floor), None)]
    at = np.append(np.asarray(start), np.log(max(half, floor)))
    slope, rises = np.array(np.inf), True
    for _ in range(_RESTARTS):
        options = {"maxiter": 2000, "maxfun": 4000, "ftol": 1e-15, "gtol": _SLOPE / 100, "maxcor": 30}
        found = optimize.minimize(minus, at, jac=True, method="L-BFGS-B", bounds=bounds, options=options)
        at, slope = found.x, np.array(found.jac)
        if at[-1] == np.log(floor):  # where only a smaller sigma^2 could raise the likelihood
            slope[-1] = min(slope[-1], 0)
        values, vectors = np.linalg.eigh(_slope_of_covariance(jnp.asarray(at), messages, mean, shape=shape) / count)
        rises = shape[0] == shape[1] and values[-1] * scale > _SLOPE
        if not rises:
            break
        # A saddle: L lacks a direction in which a spread would raise the likelihood. Replace its least column.
        root = at[:-1].reshape(shape)
        left, sizes, _ = np.linalg.svd(root)
        root = left * sizes
        root[:, -1] += 0.1 * scale**0.5 * vectors[:, -1]
        at = np.append(root, at[-1])
    left, sizes, _ = np.linalg.svd(at[:-1].reshape(shape), full_matrices=False)
    root = jnp.asarray(left * np.where(sizes**2 > _NO_SPREAD * scale, sizes, 0))
    noise = jnp.exp(at[-1])
    value, mu = _profile(root, noise, messages, mean)
    converged = bool(np.abs(slope).max() < _SLOPE * max(1, scale**-0.5)) and not rises
    return Maximum(Coefficients(mu, root @ root.T, noise), root, float(value), converged)


@full_precision.products
def _profile(root: Array, noise: Array, messages: Message, mean: Array | None) -> tuple[Array, Array]:
    """Log likelihood at the likeliest mu, or at one that is known, and mu."""
    at = Coefficients(jnp.zeros(len(root), root.dtype) if mean is None else mean, root @ root.T, noise)
    if mean is None:
        # At the likeliest mu the likelihood does not change with it, nor does its gradient need mu's.
        still = jax.lax.stop_gradient((root, noise))
        at = at._replace(mean=_generalised(at._replace(noise=still[1]), still[0], messages))
    return jax.vmap(lambda sent: _posterior(at, root, sent).log_evidence)(messages).sum(), at.mean


@partial(full_precision.jit, static_argnames="shape")
@partial(jax.value_and_grad, argnums=0)
def _minus_log_likelihood(flat: Array, messages: Message, mean: Array | None, *, shape: tuple[int, int]) -> Array:
    return -_profile(flat[:-1].reshape(shape), jnp.exp(flat[-1]), messages, mean)[0]


@partial(full_precision.jit, static_argnames="shape")
def _slope_of_covariance(flat: Array, messages: Message, mean: Array | None, *, shape: tuple[int, int]) -> Array:
    """Derivative of the log likelihood by Sigma, [d, d]: ``sum (X'V^-1 r r'V^-1 X - X'V^-1 X) / 2``."""
    root, noise = flat[:-1].reshape(shape), jnp.exp(flat[-1])
    at = Coefficients(_profile(root, noise, messages, mean)[1], root @ root.T, noise)

    def own(sent: Message) -> Array:
        shrunk = sent.gram @ _posterior(at, root, sent).covariance / noise
        apart = sent.cross - sent.gram @ at.mean
        score = (apart - shrunk @ apart) / noise
        return (jnp.outer(score, score) - (sent.gram - shrunk @ sent.gram) / noise) / 2

    return jax.vmap(own)(messages).sum(axis=0)


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
    """Mean by generalised least squares: ``(sum X' V^-1 X)^+ sum X' V^-1 y``, V of the covariance and noise at hand."""

    def weighed(sent: Message) -> tuple[Array, Array]:
        shrunk = sent.gram @ _posterior(population, root, sent).covariance / population.noise
        return sent.gram - shrunk @ sent.gram, sent.cross - shrunk @ sent.cross

    gram, cross = (part.sum(axis=0) for part in jax.vmap(weighed)(messages))
    return jnp.linalg.pinv((gram + gram.T) / 2, hermitian=True) @ cross


def _residual(messages: Message, theta: Array) -> Array:
    """Squared residuals of every client at its own coefficients, [m, d] or [1, d], summed over its examples, [m]."""
    theta = jnp.broadcast_to(theta, messages.cross.shape)
    fitted = jnp.einsum("ij,ijk,ik->i", theta, messages.gram, theta)
    return jnp.maximum(messages.square - 2 * (theta * messages.cross).sum(axis=-1) + fitted, 0)


def _root(covariance: Array) -> Array:
    """L of Sigma = L L', for singular ones too."""
    values, vectors = jnp.linalg.eigh(covariance)
    return vectors * jnp.sqrt(jnp.maximum(values, 0))


def _above(covariance: Array, floor: Scalar) -> Array:
    """The covariance with eigenvalues of at least the floor: the likeliest of those for these moments."""
    values, vectors = jnp.linalg.eigh((covariance + covariance.T) / 2)
    return (vectors * jnp.maximum(values, floor)) @ vectors.T

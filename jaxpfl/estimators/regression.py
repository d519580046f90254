r"""Linear and logistic regression with a Gaussian population of coefficients.

.. math:: y_i = X_i \theta_i + w_i, \quad w_i \sim N(0, s_x^2 I), \quad \theta_i \sim N(\mu, s^2 I)

Given (mu, s2, sx2), each client's posterior has a closed form; its mean squared error is the trace of the posterior
covariance. Unknown population parameters are initialised by moments and fitted by EM. Data are stacked: X [m, n, d],
y [m, n]; most functions take them after `rotate`, so that a client's data are decomposed once.

Reference: Ozkara et al. 2023, appendices E and F, Algorithms 4 and 5.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxpfl.core import full_precision
from jaxpfl.core.types import Array, Scalar


class Population(NamedTuple):
    """Mean of the coefficients mu [d], their variance s2 [], and the noise variance sx2 []."""

    mu: Array
    s2: Array
    sx2: Array


class Posterior(NamedTuple):
    """Posterior of a client's coefficients.

    Attributes:
      mean: [d].
      variance: the trace of the covariance C, []: the mean squared error of ``mean`` for a known population.
      fitted: the trace of ``X C X'``, [].
      log_evidence: ``log N(y; X mu, s2 X X' + sx2 I)``, [].
    """

    mean: Array
    variance: Array
    fitted: Array
    log_evidence: Array


class Rotated(NamedTuple):
    """A client's data in an orthogonal basis of its examples in which X X' is diagonal; white noise stays white.

    Attributes:
      x: [n, d].
      y: [n].
      squares: the diagonal, [n].
    """

    x: Array
    y: Array
    squares: Array


@full_precision.products
def rotate(x: Array, y: Array) -> Rotated:
    """Rotate a client's data ``x`` [n, d], ``y`` [n] into that basis, once for all populations.

    Besides saving time, this avoids a deadlock: over many clients the decomposition is one batched LAPACK call, and two
    such calls at the same time can wait for each other on XLA's CPU threads for ever (seen with jaxlib 0.10.2 on two
    cores).
    """
    _, basis = jnp.linalg.eigh(x @ x.T)
    x, y = basis.T @ x, basis.T @ y
    return Rotated(x, y, (x**2).sum(axis=-1))


@full_precision.products
def posterior(population: Population, data: Rotated) -> Posterior:
    r"""Posterior of a client's coefficients:

    .. math:: E\,\theta = \mu + s^2 X^T S^{-1} (y - X \mu), \qquad S = s^2 X X^T + s_x^2 I

    S is diagonal here. With ``t = tr(s2 X X' S^-1)``, tr C = s2 (d - t) and tr X C X' = sx2 t.

    Implements: Ozkara et al. 2023, Theorem 7; Ozkara et al. 2023, equations (47) to (51).
    """
    mu, s2, sx2 = population
    d = data.x.shape[1]
    diagonal = s2 * data.squares + sx2
    residual = data.y - data.x @ mu
    explained = (s2 * data.squares / diagonal).sum()
    log_evidence = -((residual**2 / diagonal).sum() + jnp.log(2 * jnp.pi * diagonal).sum()) / 2
    mean = mu + s2 * data.x.T @ (residual / diagonal)
    return Posterior(mean, s2 * (d - explained), sx2 * explained, log_evidence)


@full_precision.products
def least_squares(data: Rotated) -> Array:
    """A client's own least-squares coefficients of least norm, ``X' (X X')^+ y``, [d].

    Implements: Ozkara et al. 2023, equations (52) and (53).
    """
    seen = data.squares > 10 * max(data.x.shape) * jnp.finfo(data.x.dtype).eps * data.squares.max()
    return data.x.T @ jnp.where(seen, data.y / jnp.where(seen, data.squares, 1), 0)


@full_precision.products
def pooled(data: Rotated) -> Array:
    """Least-squares coefficients of all clients pooled, leaves [m, ...]: FedAvg's solution for a linear model, [d].

    It decomposes the output of the clients' own decompositions, so that it runs after them (see `rotate`).
    """
    d = data.x.shape[-1]
    return jnp.linalg.pinv(data.x.reshape(-1, d)) @ data.y.reshape(-1)


@full_precision.products
def moments(mu: Array, x: Array, y: Array, floor: Scalar) -> Population:
    r"""Moment estimates of the variances, the start of EM.

    From the residuals e of the pooled coefficients, with :math:`E\,e_j e_k = s^2 \langle x_j, x_k \rangle` for two
    examples of one client,

    .. math:: s^2 = \frac{\sum_{j \ne k} e_j e_k \langle x_j, x_k \rangle}{\sum_{j \ne k} \langle x_j, x_k \rangle^2},
       \qquad s_x^2 = \operatorname{mean}(e_j^2 - s^2 |x_j|^2)

    Args:
      mu: [d], from `pooled`.
      x, y: all clients' data, [m, n, d] and [m, n], not rotated: rotation removes the products of two examples.
      floor: the least variance, positive.
    """
    e = y - x @ mu
    gram = jnp.einsum("ijd,ikd->ijk", x, x)
    cross = jnp.where(jnp.eye(x.shape[1], dtype=bool), 0, gram)
    squares = (cross**2).sum()
    s2 = jnp.einsum("ij,ik,ijk->i", e, e, cross).sum() / jnp.where(squares > 0, squares, 1)
    s2 = jnp.maximum(s2, floor)
    return Population(mu, s2, jnp.maximum((e**2 - s2 * (x**2).sum(-1)).mean(), floor))


@full_precision.products
def em(population: Population, data: Rotated, floor: Scalar, steps: int) -> Population:
    """EM steps on all clients' data, leaves [m, ...]; they never lower the summed ``log_evidence``."""
    _, n, d = data.x.shape

    def step(_: Array, population: Population) -> Population:
        of = jax.vmap(lambda data: posterior(population, data))(data)
        mu = of.mean.mean(axis=0)
        s2 = (((of.mean - mu) ** 2).sum(axis=-1) + of.variance).mean() / d
        residual = data.y - jnp.einsum("ijd,id->ij", data.x, of.mean)
        sx2 = ((residual**2).sum(axis=-1) + of.fitted).mean() / n
        return Population(mu, jnp.maximum(s2, floor), jnp.maximum(sx2, floor))

    return jax.lax.fori_loop(0, steps, step, population)


@full_precision.products
def gradient_descent(
    population: Population,
    thetas: Array,
    x: Array,
    y: Array,
    rate: Scalar,
    steps: int,
    *,
    accelerated: bool = False,
) -> tuple[Population, Array]:
    r"""Algorithm 4 with given variances: joint steps of each client's theta_i and copy of mu, with the copies averaged.

    .. math:: \theta_i^+ = \theta_i + \eta [ X_i^T (y_i - X_i \theta_i) / s_x^2 + (\mu - \theta_i) / s^2 ], \qquad
       \mu^+ = \mu - \eta \operatorname{mean}_i (\mu - \theta_i) / s^2

    The paper also steps on the variances. That diverges (the gradient grows as 1 / s2^2 while s2 shrinks to zero, where
    the joint likelihood is unbounded), so they are fixed here: estimate them by `moments` and `em`.

    As printed mu is slow: in directions without examples, the thetas follow mu and mu follows them. Accelerated steps
    start from points ahead, by k / (k + 3) of the last step (Nesterov 1983), with k set to zero where the step before
    went against the gradient (O'Donoghue and Candes 2015), which clients see from one number each.

    Implements: Ozkara et al. 2023, equation (54); Ozkara et al. 2023, Algorithm 4.

    Returns:
      The population with the last mu, and the coefficients [m, d].
    """
    s2, sx2 = population.s2, population.sx2

    def descend(mu: Array, thetas: Array) -> tuple[Array, Array]:
        fit = jnp.einsum("ijd,ij->id", x, y - jnp.einsum("ijd,id->ij", x, thetas)) / sx2
        pull = (mu - thetas) / s2
        return mu - rate * pull.mean(axis=0), thetas + rate * (fit + pull)

    def ahead(_: Array, at: tuple[tuple[Array, Array], tuple[Array, Array], Array]):
        last, from_here, k = at
        new = descend(*from_here)
        # mu steps along a mean over clients; the objective sums over them, so that its step is m times as long.
        weights = (thetas.shape[0], 1)
        against = sum(w * jnp.vdot(a - b, b - c) for w, a, b, c in zip(weights, from_here, new, last, strict=True))
        k = jnp.where(against > 0, 0, k + 1)
        onward = tuple(b + k / (k + 3) * (b - c) for b, c in zip(new, last, strict=True))
        return new, onward, k

    begin = population.mu, thetas
    if accelerated:
        (mu, thetas), _, _ = jax.lax.fori_loop(0, steps, ahead, (begin, begin, jnp.zeros((), x.dtype)))
    else:
        mu, thetas = jax.lax.fori_loop(0, steps, lambda _, at: descend(*at), begin)
    return population._replace(mu=mu), thetas


@full_precision.products
def logistic_objective(theta: Array, mu: Array, s2: Scalar, x: Array, y: Array) -> Array:
    """A client's loss ``sum_j CE + |theta - mu|^2 / (2 s2)``: theta, mu [d], x [n, d], y [n] of zeros and ones.

    Implements: Ozkara et al. 2023, equation (55).
    """
    logits = x @ theta
    return (jnp.logaddexp(0, logits) - y * logits).sum() + ((theta - mu) ** 2).sum() / (2 * s2)


@full_precision.products
def logistic_fit(mu: Array, s2: Scalar, x: Array, y: Array, rate: Scalar, steps: int) -> Array:
    """A client's coefficients after gradient steps on its `logistic_objective` from mu, with mu fixed, [d].

    With s2 = infinity nothing is regularised; on separable data the steps then do not converge.
    """

    def step(_: Array, theta: Array) -> Array:
        return theta - rate * (x.T @ (jax.nn.sigmoid(x @ theta) - y) + (theta - mu) / s2)

    return jax.lax.fori_loop(0, steps, step, mu)


@full_precision.products
def logistic_descent(
    mu: Array, s2: Scalar, thetas: Array, x: Array, y: Array, rate: Scalar, steps: int, *, printed: bool = False
) -> tuple[Array, Array]:
    r"""Algorithm 5: gradient descent of all clients, with their copies of mu averaged after each step.

    .. math:: \theta_i^+ = \theta_i - \eta \Big[ \sum_j \nabla CE(\theta_i; x_{ij}, y_{ij})
       + \frac{\theta_i - \mu}{s^2} \Big], \qquad
       \mu^+ = \mu - \eta \operatorname{mean}_i \frac{\mu - \theta_i}{s^2}

    The paper has mu - theta_i in theta's step, which pushes theta away from mu; ``printed`` does the same. As in linear
    regression, the variance is fixed: the paper's step on it diverges.

    Implements: Ozkara et al. 2023, Algorithm 5.

    Args:
      mu: [d].
      s2: variance of the coefficients.
      thetas: the clients' coefficients, [m, d].
      x, y: all clients' data, [m, n, d] and [m, n].
      printed: whether the prior's term in theta's step has the paper's sign.

    Returns:
      mu [d] and the coefficients [m, d].
    """
    sign = -1 if printed else 1

    def step(_: Array, at: tuple[Array, Array]) -> tuple[Array, Array]:
        mu, thetas = at
        errors = jax.nn.sigmoid(jnp.einsum("ijd,id->ij", x, thetas)) - y
        pull = (thetas - mu) / s2
        gradient = jnp.einsum("ijd,ij->id", x, errors) + sign * pull
        return mu + rate * pull.mean(axis=0), thetas - rate * gradient

    return jax.lax.fori_loop(0, steps, step, (mu, thetas))

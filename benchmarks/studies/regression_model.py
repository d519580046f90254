r"""Linear and logistic regression with a Gaussian population of coefficients.

.. math:: y_i = X_i \theta_i + w_i, \quad w_i \sim N(0, s_x^2 I), \quad \theta_i \sim N(\mu, s^2 I)

For known mu, s2 and sx2, each client's posterior has a closed form, and the mean squared error of the posterior mean is
the trace of the posterior covariance. Unknown population parameters are initialized by moment estimates, and fitted by
EM. Data are stacked: X [m, n, d], y [m, n]. Most functions take the result of `rotate`, so that each client's data are
decomposed only once.

Reference: Ozkara et al. 2023, appendices E and F, Algorithms 4 and 5.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxpfl.core import full_precision
from jaxpfl.core.types import Array, Scalar


class Population(NamedTuple):
    """Population: mean mu [d] and variance s2 [] of the coefficients, and noise variance sx2 []."""

    mu: Array
    s2: Array
    sx2: Array


class Posterior(NamedTuple):
    """Posterior of a client's coefficients.

    Attributes:
      mean: posterior mean, [d].
      variance: trace of the posterior covariance C, []; this is the mean squared error of ``mean`` if the population
        is known.
      fitted: trace of ``X C X'``, [].
      log_evidence: ``log N(y; X mu, s2 X X' + sx2 I)``, [].
    """

    mean: Array
    variance: Array
    fitted: Array
    log_evidence: Array


class Rotated(NamedTuple):
    """A client's data after a rotation of the examples that makes X X' diagonal; white noise remains white.

    Attributes:
      x: rotated inputs, [n, d].
      y: rotated targets, [n].
      squares: diagonal of X X', [n].
    """

    x: Array
    y: Array
    squares: Array


@full_precision.products
def rotate(x: Array, y: Array) -> Rotated:
    """Rotate a client's data ``x`` [n, d], ``y`` [n] so that X X' is diagonal, whatever the population.

    Decomposing the data only once saves time and avoids a deadlock. Over many clients the decomposition is one batched
    LAPACK call, and two concurrent calls can block each other on XLA's CPU threads (seen with jaxlib 0.10.2 on two
    cores).
    """
    _, basis = jnp.linalg.eigh(x @ x.T)
    x, y = basis.T @ x, basis.T @ y
    return Rotated(x, y, (x**2).sum(axis=-1))


@full_precision.products
def posterior(population: Population, data: Rotated) -> Posterior:
    r"""Posterior of a client's coefficients:

    .. math:: E\,\theta = \mu + s^2 X^T S^{-1} (y - X \mu), \qquad S = s^2 X X^T + s_x^2 I

    S is diagonal after `rotate`. The posterior covariance C has tr C = s2 (d - t) and tr X C X' = sx2 t, where ``t =
    tr(s2 X X' S^-1)``.

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
    """Minimum-norm least-squares coefficients of a client's own data, ``X' (X X')^+ y``, [d].

    Implements: Ozkara et al. 2023, equations (52) and (53).
    """
    # Squares below the largest square's rounding error count as zero: the data do not span these directions.
    seen = data.squares > 10 * max(data.x.shape) * jnp.finfo(data.x.dtype).eps * data.squares.max()
    return data.x.T @ jnp.where(seen, data.y / jnp.where(seen, data.squares, 1), 0)


@full_precision.products
def pooled(data: Rotated) -> Array:
    """Least-squares coefficients [d] for all clients' data, leaves [m, ...]: FedAvg's solution for a linear model.

    The input is rotated data, so that the decomposition of the pooled data runs after the clients' decompositions,
    because two concurrent decompositions could block each other (see `rotate`).
    """
    d = data.x.shape[-1]
    return jnp.linalg.pinv(data.x.reshape(-1, d)) @ data.y.reshape(-1)


@full_precision.products
def moments(mu: Array, x: Array, y: Array, floor: Scalar) -> Population:
    r"""Moment estimates of the variances, from which EM starts.

    Let e be the residuals of the pooled coefficients. For two examples j and k of the same client, :math:`E\,e_j e_k =
    s^2 \langle x_j, x_k \rangle`. Hence

    .. math:: s^2 = \frac{\sum_{j \ne k} e_j e_k \langle x_j, x_k \rangle}{\sum_{j \ne k} \langle x_j, x_k \rangle^2},
       \qquad s_x^2 = \operatorname{mean}(e_j^2 - s^2 |x_j|^2)

    Args:
      mu: pooled coefficients [d] (`pooled`).
      x, y: all clients' data, [m, n, d] and [m, n], not rotated: after rotation :math:`\langle x_j, x_k \rangle` is
        zero.
      floor: positive lower bound on the variances.
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
    """Run EM steps on all clients' data, leaves [m, ...]; no step decreases the summed ``log_evidence``."""
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
    r"""Algorithm 4 with fixed variances: each client updates theta_i and a copy of mu, and the copies are averaged.

    .. math:: \theta_i^+ = \theta_i + \eta [ X_i^T (y_i - X_i \theta_i) / s_x^2 + (\mu - \theta_i) / s^2 ], \qquad
       \mu^+ = \mu - \eta \operatorname{mean}_i (\mu - \theta_i) / s^2

    The paper also takes steps on the variances. These steps diverge: the gradient grows as 1 / s2^2 while s2 shrinks to
    zero, where the joint likelihood is unbounded. This function therefore keeps the variances fixed; estimate them by
    `moments` and `em`.

    With the printed steps, mu converges slowly, because in directions without examples the thetas follow mu, and mu
    follows the thetas. An accelerated step starts from a point extrapolated by k / (k + 3) of the last step (Nesterov
    1983), where k counts the steps since the last restart. Acceleration restarts if the last step has a negative inner
    product with the new gradient step (O'Donoghue and Candes 2015), which the server computes from one number per
    client.

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
        # The factor m is needed because mu's step uses a mean over clients, while the objective is a sum over clients.
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
    """A client's objective ``sum_j CE_j + |theta - mu|^2 / (2 s2)``, where CE_j is the cross-entropy of example j.

    x is [n, d], and labels y [n] are in {0, 1}.

    Implements: Ozkara et al. 2023, equation (55).
    """
    logits = x @ theta
    return (jnp.logaddexp(0, logits) - y * logits).sum() + ((theta - mu) ** 2).sum() / (2 * s2)


@full_precision.products
def logistic_fit(mu: Array, s2: Scalar, x: Array, y: Array, rate: Scalar, steps: int) -> Array:
    """A client's coefficients [d] after gradient steps on `logistic_objective` from the initial value mu; mu is fixed.

    An infinite s2 means no regularization; the steps then do not converge on separable data.
    """

    def step(_: Array, theta: Array) -> Array:
        return theta - rate * (x.T @ (jax.nn.sigmoid(x @ theta) - y) + (theta - mu) / s2)

    return jax.lax.fori_loop(0, steps, step, mu)


@full_precision.products
def logistic_descent(
    mu: Array, s2: Scalar, thetas: Array, x: Array, y: Array, rate: Scalar, steps: int, *, printed: bool = False
) -> tuple[Array, Array]:
    r"""Algorithm 5: each client takes gradient steps on theta_i and a copy of mu, and the copies are averaged.

    .. math:: \theta_i^+ = \theta_i - \eta \Big[ \sum_j \nabla CE(\theta_i; x_{ij}, y_{ij})
       + \frac{\theta_i - \mu}{s^2} \Big], \qquad
       \mu^+ = \mu - \eta \operatorname{mean}_i \frac{\mu - \theta_i}{s^2}

    Here CE is the cross-entropy of an example. The paper's step on theta has mu - theta_i instead of theta_i - mu,
    which moves theta away from mu; ``printed`` selects the paper's step. As in `gradient_descent`, the variance is
    fixed, because the paper's step on the variance diverges.

    Implements: Ozkara et al. 2023, Algorithm 5.

    Args:
      mu: center of the coefficients, [d].
      s2: variance of the coefficients.
      thetas: the clients' coefficients, [m, d].
      x, y: all clients' data, [m, n, d] and [m, n].
      rate: learning rate eta.
      steps: number of steps.
      printed: whether the prior's term in theta's step has the paper's sign.

    Returns:
      The center mu [d], and the coefficients [m, d].
    """
    sign = -1 if printed else 1

    def step(_: Array, at: tuple[Array, Array]) -> tuple[Array, Array]:
        mu, thetas = at
        errors = jax.nn.sigmoid(jnp.einsum("ijd,id->ij", x, thetas)) - y
        pull = (thetas - mu) / s2
        gradient = jnp.einsum("ijd,ij->id", x, errors) + sign * pull
        return mu + rate * pull.mean(axis=0), thetas - rate * gradient

    return jax.lax.fori_loop(0, steps, step, (mu, thetas))

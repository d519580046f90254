r"""Linear regression whose coefficients are drawn from a mixture of k Gaussians, or from k points.

In EM on the data, client i has the responsibilities :math:`r_{il} \propto p_l N(y_i; X_i \mu_l, S_{il})` with
:math:`S_{il} = s_l^2 X_i X_i^T + s_x^2 I`. The client's estimate is the posterior mean :math:`\sum_l r_{il} m_{il}`,
where :math:`m_{il}` is the posterior mean under component l. In this EM, only the clients' components are missing data:
given the responsibilities, a step maximizes the marginal likelihood over the centers and variances. If the coefficients
were missing data too, a step would hardly change the variances when clients have fewer examples than coefficients. With
only two or three examples per client, the centers would not separate.

The paper's alternating algorithms are included for comparison. Algorithm 1 (AdaMix) takes a step on each client's
coefficients, and then fits the mixture to the coefficients. This algorithm needs many steps, and the variances decrease
to their lower bound. Algorithm 6, for a mixture of k points, clusters estimates that are already in the convex hull of
the centers, so its centers change little.

Reference: Ozkara et al. 2023, sections 3.1 and G, Algorithms 1 and 6.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxpfl.core import full_precision, trees
from jaxpfl.core.search import climb
from jaxpfl.core.types import Array, Scalar
from jaxpfl.priors import discrete, gaussian_mixture
from jaxpfl.priors.gaussian_mixture import Mixture

from . import regression_model
from .regression_model import Population, Posterior, Rotated


class MixturePopulation(NamedTuple):
    """Probabilities p [k], centers mu [k, d] and variances s2 [k] of the components, and the noise variance sx2 []."""

    p: Array
    mu: Array
    s2: Array
    sx2: Array


@full_precision.products
def start(data: Rotated, components: int, sx2: Scalar, floor: Scalar) -> MixturePopulation:
    """Initial mixture, fitted to the clients' minimum-norm least-squares estimates.

    Args:
      data: all clients' data, leaves [m, ...].
      components: number k of components.
      sx2: initial noise variance.
      floor: positive lower bound on the variances.
    """
    alone = jax.vmap(regression_model.least_squares)(data)
    valid = jnp.ones(alone.shape[0], bool)
    begin = gaussian_mixture.start(components, alone, valid, floor)
    fitted = gaussian_mixture.em(begin, alone, valid, floor, 10)
    return MixturePopulation(fitted.p, fitted.mu, fitted.s2, jnp.maximum(jnp.asarray(sx2, alone.dtype), floor))


@full_precision.products
def posteriors(population: MixturePopulation, data: Rotated) -> tuple[Array, Posterior]:
    """A client's responsibilities [k], and its posterior under each component, leaves [k, ...]."""

    def under(mu: Array, s2: Array) -> Posterior:
        return regression_model.posterior(Population(mu, s2, population.sx2), data)

    of = jax.vmap(under)(population.mu, population.s2)
    return discrete.responsibilities(population.p, -of.log_evidence), of


@full_precision.products
def personalize(population: MixturePopulation, data: Rotated) -> Array:
    """A client's estimate, [d]: the posterior mean."""
    belongs, of = posteriors(population, data)
    return belongs @ of.mean


@full_precision.products
def em(population: MixturePopulation, data: Rotated, floor: Scalar, steps: int) -> MixturePopulation:
    r"""Run EM steps on all clients' data, leaves [m, ...]; no step decreases the likelihood.

    .. math:: \mu_l \leftarrow \Big( \sum_i r_{il} X_i^T S_{il}^{-1} X_i \Big)^{-1} \sum_i r_{il} X_i^T S_{il}^{-1} y_i

    Centers are updated with the current variances. All variances are then updated by Newton steps on
    :math:`\sum_{il} r_{il} \log N(y_i; X_i \mu_l, S_{il})`. A component without clients keeps its center and variance.

    Reference: Liu and Rubin 1994, "The ECME algorithm".
    """

    def step(_: Array, old: MixturePopulation) -> MixturePopulation:
        belongs = jax.vmap(lambda data: posteriors(old, data)[0])(data)  # [m, k]
        mu = jax.vmap(lambda r, mu, s2: _center(Population(mu, s2, old.sx2), data, r), in_axes=(1, 0, 0))(
            belongs, old.mu, old.s2
        )
        s2, sx2 = _variances(old, belongs, data, mu, floor)
        return MixturePopulation(discrete.shares(belongs), mu, s2, sx2)

    return jax.lax.fori_loop(0, steps, step, population)


def _center(population: Population, data: Rotated, belongs: Array) -> Array:
    """New center of a component by generalized least squares, weighted by the clients' responsibilities [m]."""
    weights = belongs[:, None] / (population.s2 * data.squares + population.sx2)
    apart = data.y - data.x @ population.mu
    gram = jnp.einsum("ij,ijd,ije->de", weights, data.x, data.x)
    return population.mu + jnp.linalg.pinv(gram, hermitian=True) @ jnp.einsum("ij,ijd->d", weights * apart, data.x)


def _variances(old: MixturePopulation, belongs: Array, data: Rotated, mu: Array, floor: Scalar) -> tuple[Array, Array]:
    """New variances of the components [k] and of the noise, given the new centers [k, d]."""
    squares = (data.y[:, None] - jnp.einsum("ijd,kd->ikj", data.x, mu)) ** 2

    def variances(at: Array) -> tuple[Array, Array]:
        found = jnp.maximum(jnp.exp(at), floor)
        return found[:-1], found[-1]

    def likelihood(at: Array) -> Array:
        s2, sx2 = variances(at)
        diagonal = s2[:, None] * data.squares[:, None] + sx2
        each = (squares / diagonal + jnp.log(diagonal)).sum(axis=-1)
        return -(belongs * each).mean() / 2

    begin = jnp.log(jnp.append(old.s2, old.sx2))
    s2, sx2 = variances(climb(likelihood, begin[None])[0])
    return jnp.where(belongs.sum(axis=0) > 0, s2, old.s2), sx2


@full_precision.products
def adamix(
    begin: Mixture, thetas: Array, x: Array, y: Array, sx2: Scalar, rate: Scalar, floor: Scalar, steps: int
) -> tuple[Mixture, Array]:
    r"""Algorithm 1 (AdaMix): alternate between a step on each client's objective and an EM step on the mixture.

    .. math:: \theta_i \leftarrow \operatorname{prox}\big( \theta_i + \eta X_i^T (y_i - X_i \theta_i) / s_x^2 \big),
       \qquad (p, \mu, s^2) \leftarrow \operatorname{EM}(\theta_1, \dots, \theta_m)

    A proximal step for the mixture replaces the paper's gradient step. A gradient step would need ``rate / floor < 2``,
    because the variances decrease to the floor. (The proximal step moves the thetas toward the centers, so they vary
    less than the population, and the variances of the next fit are smaller still.)

    Implements: Ozkara et al. 2023, Algorithm 1.

    Args:
      begin: initial mixture.
      thetas: the clients' initial coefficients, [m, d].
      x, y: all clients' data, [m, n, d] and [m, n].
      sx2: noise variance.
      rate: learning rate eta, at most sx2 divided by the largest eigenvalue of any ``X_i^T X_i``.
      floor: lower bound on a component's variance.
      steps: number of iterations.

    Returns:
      The mixture, and the coefficients [m, d].
    """
    everyone = jnp.ones(x.shape[0], bool)

    def step(_: Array, at: tuple[Mixture, Array]) -> tuple[Mixture, Array]:
        mixture, thetas = at
        fit = jnp.einsum("ijd,ij->id", x, y - jnp.einsum("ijd,id->ij", x, thetas)) / sx2
        thetas = jax.vmap(lambda theta: gaussian_mixture.prox(rate, mixture, theta))(thetas + rate * fit)
        return gaussian_mixture.em(mixture, thetas, everyone, floor, 1), thetas

    return jax.lax.fori_loop(0, steps, step, (begin, thetas))


@full_precision.products
def alternating(
    begin: discrete.Discrete, x: Array, y: Array, sx2: Scalar, steps: int
) -> tuple[discrete.Discrete, Array]:
    """Algorithm 6 as printed: alternate between the clients' estimates and a step of Lloyd's algorithm.

    A client's estimate is the mean of the centers, weighted by their responsibilities for the client's data. The server
    then updates the centers by one step of Lloyd's algorithm on the estimates.

    Implements: Ozkara et al. 2023, Algorithm 6.

    Returns:
      The centers, and the estimates [m, d].
    """
    components = begin.p.shape[0]

    def estimates(gamma: discrete.Discrete) -> Array:
        def one(x: Array, y: Array) -> Array:
            losses = ((x @ gamma.mu.T - y[:, None]) ** 2).sum(axis=0) / (2 * sx2)
            return discrete.posterior_mean(discrete.responsibilities(gamma.p, losses), gamma.mu)

        return jax.vmap(one)(x, y)

    def step(_: Array, gamma: discrete.Discrete) -> discrete.Discrete:
        thetas = estimates(gamma)
        nearest = ((thetas[:, None] - gamma.mu) ** 2).sum(axis=-1).argmin(axis=1)
        member = jax.nn.one_hot(nearest, components, dtype=thetas.dtype)
        counts = member.sum(axis=0)[:, None]
        mu = jnp.where(counts > 0, trees.sum_products(member, thetas) / jnp.maximum(counts, 1), gamma.mu)
        return discrete.Discrete(discrete.shares(member), mu)

    end = jax.lax.fori_loop(0, steps, step, begin)
    return end, estimates(end)

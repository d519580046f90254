r"""Mean squared errors of the Bernoulli estimators, from the mean mu and variance v of the population P, and bounds.

For a fixed weight a and the mean of K other clients' shares, the error is exactly

.. math:: MSE(a) = a^2 \frac{\mu (1 - \mu) - v}{n} + (1 - a)^2 \Big[ v + \frac{S^2}{K} \Big], \qquad
   S^2 = v + \frac{\mu (1 - \mu) - v}{n}

Reference: Ozkara et al. 2023, section 2.2, Theorems 3 and 4.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp

from jaxpfl.core.types import Array, Scalar


class Population(NamedTuple):
    """Mean and variance of the population P."""

    mean: Scalar
    variance: Scalar

    def of_shares(self, n: Scalar) -> Scalar:
        """S2, the variance of a client's share of ones among n samples."""
        return self.variance + local(self, n)


def local(population: Population, n: Scalar) -> Scalar:
    """Error of the client's own share: ``E p (1 - p) / n``."""
    mu, v = population
    return (mu * (1 - mu) - v) / n


def weight(population: Population, n: Scalar) -> Scalar:
    """Best weight of the client's own share for known mu: ``v / S2``."""
    return population.variance / population.of_shares(n)


def printed_weight(population: Population, n: Scalar) -> Scalar:
    """Limit of the printed weight for many clients, which takes S2 for v."""
    mu = population.mean
    return n / (mu * (1 - mu) / population.of_shares(n) - 1 + n)


def personalized(population: Population, n: Scalar, a: Scalar, others: Scalar = jnp.inf) -> Scalar:
    """MSE(a) with a mean over ``others`` other clients (infinitely many: mu is known).

    With weights estimated from them it is exact up to the spread of the estimated weight, O(1/m).
    """
    spread = population.variance + population.of_shares(n) / others
    return a**2 * local(population, n) + (1 - a) ** 2 * spread


def global_mean(population: Population, n: Scalar, clients: Scalar) -> Scalar:
    """Error of the mean of all m shares, including the client's own: ``v (1 - 1/m) + E p(1-p) / (n m)``."""
    return population.variance * (1 - 1 / clients) + local(population, n) / clients


def printed_error(clients: Scalar, n: Scalar) -> Array:
    """Theorem 3's bound c^2 = 3 log(4 m^2 n) / (m - 1) on the squared error of the estimated mean.

    Hoeffding's inequality for that range gives 2 instead of 3; neither covers the error of the estimated variance.

    Implements: Ozkara et al. 2023, Theorem 3.
    """
    return 3 * _log(clients, n) / (clients - 1)


def printed_private_error(clients: Scalar, n: Scalar, epsilon: Scalar) -> Array:
    """Theorem 4's bound c^2 = (e^eps + 1)^2 log(4 m^2 n) / (3 (e^eps - 1)^2 (m - 1)), with the same reservations.

    Implements: Ozkara et al. 2023, Theorem 4; Ozkara et al. 2023, equations (33) to (36).
    """
    return _log(clients, n) / (3 * jnp.tanh(jnp.asarray(epsilon) / 2) ** 2 * (clients - 1))


def _log(clients: Scalar, n: Scalar) -> Array:
    return jnp.log(4 * jnp.asarray(clients, float) ** 2 * n)

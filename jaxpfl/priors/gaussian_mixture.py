r"""Gaussian-mixture prior of AdaMix, with k centers.

.. math:: -\log p(\theta) = -\log \sum_{l=1}^k p_l (2 \pi s_l^2)^{-d/2} \exp(-|\theta-\mu_l|^2 / (2 s_l^2))

with probabilities p_l, centers mu_l and variances s2_l = s_l^2; theta has d entries. The parameters are estimated by EM
on all models. An EM step never lowers the likelihood, even with a lower bound (floor) on the variances. The reason is
that the expected log likelihood has a single maximum in s2_l, so that the floor is its best allowed value if this
maximum is below the floor. Without a floor the likelihood is unbounded, because a center can coincide with a model
while its variance goes to zero.

Reference: Ozkara et al. 2023, equation (10) and Algorithm 1, https://openreview.net/forum?id=FUiDMCr_W4o. The 2022
version (https://arxiv.org/abs/2207.01771) has the exponent m/2 instead of d/2.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxpfl.core import trees
from jaxpfl.core.types import Array, Key, Metrics, PyTree, Scalar
from jaxpfl.priors import gaussian
from jaxpfl.priors.base import Examples, Prior, float_array, weighted_mean
from jaxpfl.support.errors import JaxpflError


class Mixture(NamedTuple):
    """Parameters of the prior: probabilities p [k], which sum to one, centers mu [k, ...], and variances s2 [k]."""

    p: Array
    mu: PyTree
    s2: Array


def prior(components: int, *, s2_init: Scalar = 0.1, floor: Scalar = 1e-4, em_steps: int = 20) -> Prior:
    """Make the Gaussian-mixture prior with k components.

    Initially all components are equal, so the prior is Gaussian. `Prior.fit` runs EM twice, from the current estimate
    and from a new initialization (`start`). The second result is returned only if its log likelihood is higher by more
    than one. The centers can thus separate in the first fit, and a later fit can leave a bad optimum. (With a threshold
    of zero, the choice between equal results would depend on rounding errors.)

    Args:
      components: number k of components.
      s2_init: initial variance of every component.
      floor: positive lower bound on the variances.
      em_steps: number of EM steps in each run.

    Raises:
      JaxpflError: if ``components`` is below one.
    """
    if components < 1:
        raise JaxpflError(f"components must be at least 1, got {components}")

    def init(theta: PyTree) -> Mixture:
        mu = jax.tree.map(lambda a: jnp.broadcast_to(a, (components, *a.shape)), theta)
        s2 = jnp.maximum(float_array(s2_init), floor)
        return Mixture(float_array(jnp.full(components, 1 / components)), mu, jnp.broadcast_to(s2, components))

    def center(gamma: Mixture) -> PyTree:
        most = jnp.argmax(gamma.p)
        return jax.tree.map(lambda a: a[most], gamma.mu)

    def fit(gamma: Mixture, thetas: PyTree, valid: Array) -> Mixture:
        ends = [em(begin, thetas, valid, floor, em_steps) for begin in (gamma, start(components, thetas, valid, floor))]
        old, new = (log_likelihood(end, thetas, valid) for end in ends)
        return trees.where(valid.any(), trees.where(new > old + 1, ends[1], ends[0]), gamma)

    def report(gamma: Mixture) -> Metrics:
        # effective number of components, exp of the entropy of p: k if all are equally likely, 1 if one has probability
        # 1
        return {"s2": gamma.p @ gamma.s2, "components": jnp.exp(jax.scipy.special.entr(gamma.p).sum())}

    return Prior(init, center, penalty, report, fit=fit, sample=sample, prox=prox)


def log_joint(gamma: Mixture, theta: PyTree) -> Array:
    """Log joint density ``log p_l + log N(theta; mu_l, s2_l I)`` of each component, [k]."""

    def log_density(mu: PyTree, s2: Array) -> Array:
        return -gaussian.penalty(gaussian.Gaussian(mu, s2), theta)

    return jnp.log(gamma.p) + jax.vmap(log_density)(gamma.mu, gamma.s2)


def penalty(gamma: Mixture, theta: PyTree, on: Examples | None = None) -> Array:
    """Minus the log density of theta, []."""
    return -jax.nn.logsumexp(log_joint(gamma, theta))


def sample(key: Key, gamma: Mixture) -> PyTree:
    """Draw a random model."""
    of_component, of_model = jax.random.split(key)
    chosen = jax.random.categorical(of_component, jnp.log(gamma.p))
    mu, s2 = jax.tree.map(lambda a: a[chosen], (gamma.mu, gamma.s2))
    return gaussian.sample(of_model, gaussian.Gaussian(mu, s2))


def prox(step: Scalar, gamma: Mixture, theta: PyTree) -> PyTree:
    r"""Proximal step on EM's quadratic upper bound of the penalty, which touches the penalty at theta.

    As a function of the model t, and up to a constant, the bound is

    .. math:: \sum_l r_l |t - \mu_l|^2 / (2 s_l^2), \qquad r_l \propto p_l N(\theta; \mu_l, s_l^2 I)

    The step is the Gaussian prior's proximal step with variance ``1 / sum_l (r_l / s2_l)``, toward the mean of the
    centers with weights ``r_l / s2_l``.
    """
    precisions = jax.nn.softmax(log_joint(gamma, theta)) / gamma.s2
    mean = weighted_mean(precisions, gamma.mu)
    return gaussian.prox(step, gaussian.Gaussian(mean, 1 / precisions.sum()), theta)


def log_likelihood(gamma: Mixture, thetas: PyTree, valid: Array) -> Array:
    """Log likelihood, []; of C stacked models, those marked in ``valid`` count. EM maximizes it."""
    return -trees.valid_sum(valid, jax.vmap(lambda theta: penalty(gamma, theta))(thetas))


def em(gamma: Mixture, thetas: PyTree, valid: Array, floor: Scalar, steps: int) -> Mixture:
    """Run ``steps`` EM steps on the valid models.

    ``thetas`` are C stacked models, a pytree of arrays [C, ...]; the mask ``valid`` [C] marks the valid ones. A
    component without models keeps its center and variance, and its probability becomes zero.
    """
    d = optax.tree.size(thetas) / valid.shape[0]

    def step(_: Array, gamma: Mixture) -> Mixture:
        joint = jax.vmap(lambda theta: log_joint(gamma, theta))(thetas)
        belongs = jnp.where(valid[:, None], jax.nn.softmax(joint, axis=1), 0)  # [C, k]
        counts = belongs.sum(axis=0)
        shares = belongs / jnp.where(counts > 0, counts, 1)

        def center(leaf: Array, old: Array) -> Array:
            used = (counts > 0).reshape(-1, *[1] * (leaf.ndim - 1))
            return jnp.where(used, jnp.tensordot(shares.astype(leaf.dtype), leaf, axes=(0, 0)), old)

        mu = jax.tree.map(center, thetas, gamma.mu)
        squares = jax.vmap(lambda theta: jax.vmap(lambda m: _square(theta, m))(mu))(thetas)
        s2 = jnp.where(counts > 0, jnp.maximum((shares * squares).sum(axis=0) / d, floor), gamma.s2)
        return Mixture(counts / jnp.maximum(counts.sum(), 1), mu, s2)

    return jax.lax.fori_loop(0, steps, step, gamma)


def start(components: int, thetas: PyTree, valid: Array, floor: Scalar) -> Mixture:
    """Make the initial mixture by a greedy choice of centers, with equal probabilities and one common variance.

    The centers are chosen from the models one by one. Each center is the model that most reduces the sum of all models'
    squared distances to the nearest center, whereas k-means++ would draw a model at random. The greedy choice needs C^2
    distances, but no random draws, which would depend on the order of the clients.
    """
    distances = jax.lax.map(lambda theta: jax.vmap(lambda other: _square(theta, other))(thetas), thetas)  # [C, C]
    distances = jnp.where(valid[None, :], distances, 0)
    d, count = optax.tree.size(thetas) / valid.shape[0], trees.valid_count(valid)
    nearest, chosen = jnp.full(valid.shape, jnp.inf, distances.dtype), []
    for _ in range(components):
        after = jnp.minimum(distances, jnp.where(valid, nearest, 0))
        chosen.append(jnp.argmin(jnp.where(valid, after.sum(axis=1), jnp.inf)))
        nearest = after[chosen[-1]]
    mu = jax.tree.map(lambda a: a[jnp.stack(chosen)], thetas)
    s2 = jnp.maximum(nearest.sum() / (count * d), floor)
    return Mixture(jnp.full(components, 1 / components, s2.dtype), mu, jnp.broadcast_to(s2, components))


def _square(a: PyTree, b: PyTree) -> Array:
    return optax.tree.norm(optax.tree.sub(a, b), squared=True)

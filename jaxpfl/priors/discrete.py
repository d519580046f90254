r"""The discrete prior: a personal model is one of k centers. FedEM and IFCA are its relatives.

.. math:: P(\theta = \mu_l) = p_l, \qquad
   r_{il} = P(\theta_i = \mu_l \mid \text{data}_i) \propto p_l \exp(-f_i(\mu_l))

A density of theta does not exist, so that this is no `Prior`: what a client needs are the losses of the centers on its
data, and theta is an index, or its posterior mean.

Reference: Ozkara et al. 2023, Algorithms 3 and 6.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxpfl.types import Array, Key, PyTree


class Discrete(NamedTuple):
    """Gamma: shares p [k] that sum to one, and centers mu with leaves [k, ...]."""

    p: Array
    mu: PyTree


def penalty(gamma: Discrete, index: Array) -> Array:
    """``-log p_l`` of the center with that index, []."""
    return -jnp.log(gamma.p[index])


def sample(key: Key, gamma: Discrete) -> PyTree:
    """A center, drawn with its share."""
    index = jax.random.categorical(key, jnp.log(gamma.p))
    return jax.tree.map(lambda a: a[index], gamma.mu)


def responsibilities(p: Array, losses: Array) -> Array:
    """``r_l`` [k] of one client from the shares [k] and ``losses[l] = f_i(mu_l)``, the SUM of its examples' losses.

    Softmax of ``log p - losses``: sums of hundreds of losses would all underflow in exp.
    """
    return jax.nn.softmax(jnp.log(p) - losses)


def negative_log_likelihood(p: Array, losses: Array) -> Array:
    """``-log sum_l p_l exp(-f_i(mu_l))`` of one client's data, []: what EM lowers."""
    return -jax.nn.logsumexp(jnp.log(p) - losses)


def posterior_mean(belongs: Array, mu: PyTree) -> PyTree:
    """``sum_l r_l mu_l``, responsibilities [k] and centers with leaves [k, ...]: the personal model of Algorithm 6.

    Implements: Ozkara et al. 2023, Algorithm 6.
    """
    return jax.tree.map(lambda a: jnp.tensordot(belongs.astype(a.dtype), a, axes=1), mu)


def shares(belongs: Array) -> Array:
    """EM's ``p_l = mean_i r_il``: responsibilities [m, k] -> [k]."""
    return belongs.mean(axis=0)

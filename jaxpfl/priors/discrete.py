r"""Discrete prior: a personal model is one of k centers; related to FedEM and IFCA.

.. math:: P(\theta = \mu_l) = p_l, \qquad
   r_{il} = P(\theta_i = \mu_l \mid \text{data}_i) \propto p_l \exp(-f_i(\mu_l))

with probabilities p_l, centers mu_l, losses f_i and responsibilities r_il. theta has no density, so this is not a
`Prior`. A client needs the losses of all centers on its data, and theta is a center's index, or the posterior mean.

Reference: Ozkara et al. 2023, Algorithms 3 and 6, https://openreview.net/forum?id=FUiDMCr_W4o.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxpfl.core.types import Array, PyTree


class Discrete(NamedTuple):
    """Parameters Gamma: probabilities p [k], which sum to one, and centers mu with leaves [k, ...]."""

    p: Array
    mu: PyTree


def responsibilities(p: Array, losses: Array) -> Array:
    """Responsibilities ``r_l`` [k] of one client, from p [k] and ``losses[l] = f_i(mu_l)``, SUMS over examples.

    They are the softmax of ``log p - losses``, because exp of minus a sum of hundreds of losses underflows.
    """
    return jax.nn.softmax(jnp.log(p) - losses)


def posterior_mean(belongs: Array, mu: PyTree) -> PyTree:
    """Posterior mean ``sum_l r_l mu_l``, a personal model, from responsibilities [k] and centers [k, ...].

    Implements: Ozkara et al. 2023, Algorithm 6.
    """
    return jax.tree.map(lambda a: jnp.tensordot(belongs.astype(a.dtype), a, axes=1), mu)


def shares(belongs: Array) -> Array:
    """EM update ``p_l = mean_i r_il`` of the probabilities: responsibilities [m, k] -> [k]."""
    return belongs.mean(axis=0)

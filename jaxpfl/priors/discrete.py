r"""Discrete prior: each personal model is one of k centers, much as in FedEM and IFCA.

.. math:: P(\theta = \mu_l) = p_l, \qquad
   r_{il} = P(\theta_i = \mu_l \mid \text{data}_i) \propto p_l \exp(-f_i(\mu_l))

with probabilities p_l, centers mu_l, losses f_i and responsibilities r_il. theta has no density, so the discrete prior
is not a `Prior`. A client needs the losses of all centers on its data. A method's estimate of the personal model is one
of the centers, or the posterior mean.

Reference: Ozkara et al. 2023, Algorithms 3 and 6, https://openreview.net/forum?id=FUiDMCr_W4o.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxpfl.core.types import Array, PyTree


class Discrete(NamedTuple):
    """Parameters of the prior: probabilities p [k], which sum to one, and centers mu, a pytree of arrays [k, ...]."""

    p: Array
    mu: PyTree


def responsibilities(p: Array, losses: Array) -> Array:
    """Responsibilities ``r_l`` [k] of the centers for one client.

    They are computed as the softmax of ``log p - losses``, because ``exp(-f)`` underflows for a sum f of many losses.

    Args:
      p: probabilities of the centers, [k].
      losses: ``f_i(mu_l)`` for each center, [k], the SUM of the losses over the client's examples.
    """
    return jax.nn.softmax(jnp.log(p) - losses)


def posterior_mean(belongs: Array, mu: PyTree) -> PyTree:
    """Personal model ``sum_l r_l mu_l``, the posterior mean, from responsibilities [k] and centers [k, ...].

    Implements: Ozkara et al. 2023, Algorithm 6.
    """
    return jax.tree.map(lambda a: jnp.tensordot(belongs.astype(a.dtype), a, axes=1), mu)


def shares(belongs: Array) -> Array:
    """EM update ``p_l = mean_i r_il`` of the probabilities, [k], from all clients' responsibilities, [m, k]."""
    return belongs.mean(axis=0)

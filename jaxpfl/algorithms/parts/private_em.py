r"""EM for a Gaussian mixture from noisy sums: AdaMix's server under user-level differential privacy.

Let x_i be the model update of client i, clipped to norm C, and let r_i be the vector of its responsibilities under the
current mixture. An EM step needs the sums of :math:`r_i`, :math:`r_i x_i` and :math:`r_i |x_i|^2` over clients for each
component. These sums are scaled to comparable size and released together, with noise multiplier z:

.. math:: \sum_i v_i + N(0, z^2 \tfrac32 C^2 I), \qquad
   v_i = (\tfrac12 C r_i, \; r_i \otimes x_i, \; r_i |x_i|^2 / (2 C))

Privacy guarantee: :math:`|v_i|^2 \le |r_i|^2 (C^2/4 + C^2 + C^2/4) \le \tfrac32 C^2` for any upload, and the current
mixture is public, because the previous step released it. Each EM step is therefore a Gaussian mechanism with noise
multiplier z, and a round has one release per EM step. In the first round, EM starts from the current centers, moved by
C / 2 in random directions that do not depend on the data.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import optax

from jaxpfl.core import trees
from jaxpfl.core.types import Array, Key, PyTree, Scalar
from jaxpfl.priors import gaussian_mixture
from jaxpfl.priors.gaussian_mixture import Mixture
from jaxpfl.privacy.noise import add_gaussian, clip, gaussian

SENSITIVITY = math.sqrt(1.5)
"""L2 sensitivity of an EM step's sums (the largest change by one client), divided by C."""


def em(
    key: Key,
    gamma: Mixture,
    changes: PyTree,
    valid: Array,
    *,
    clipping_norm: Scalar,
    noise_multiplier: Scalar,
    floor: Scalar,
    steps: int,
) -> Mixture:
    """Run EM steps, each releasing noisy sums over clients.

    The count of a component is the sum of the clients' responsibilities for it. A component keeps its center and
    variance if its noisy count is below one, or below two standard deviations of the count's noise. A component's
    probability is proportional to its noisy count, or to one if the count is below one, so that the component can
    recover.

    Args:
      key: key of the noise.
      gamma: the current mixture, with centers relative to the same origin as ``changes``.
      changes: the uploaded model updates, leaves [S, ...] for the S clients of a round.
      valid: mask of the clients with an upload, [S].
      clipping_norm: norm C to which the updates are clipped.
      noise_multiplier: noise multiplier z of each EM step.
      floor: lower bound on the variances.
      steps: number of EM steps, each with one release.
    """
    clipped, _ = jax.vmap(lambda change: clip(change, clipping_norm))(changes)
    d = optax.tree.size(clipped) / valid.shape[0]
    stddev = noise_multiplier * SENSITIVITY * clipping_norm
    uncertain = stddev / (clipping_norm / 2)  # standard deviation of a count: the sums contain C / 2 times counts

    def step(t: Array, gamma: Mixture) -> Mixture:
        sums = jax.vmap(lambda x: contribution(gamma, x, clipping_norm))(clipped)
        sums = jax.tree.map(lambda a: trees.where_rows(valid, a).sum(axis=0), sums)
        counts, totals, squares = add_gaussian(jax.random.fold_in(key, t), sums, stddev, "sums of a step of EM")
        counts, squares = counts / (clipping_norm / 2), squares * (2 * clipping_norm)
        # Dividing by a count that is only noise could give an arbitrarily large center.
        used = counts > jnp.maximum(1.0, 2 * uncertain)
        n = jnp.where(used, counts, 1.0)
        mu = jax.tree.map(
            lambda new, old: jnp.where(_along(used, new), new / _along(n, new), old).astype(old.dtype), totals, gamma.mu
        )
        # Subtract d stddev^2, which the noise adds to the expectation of |sum|^2.
        lengths = jax.vmap(lambda total: optax.tree.norm(total, squared=True))(totals) - d * stddev**2
        s2 = jnp.maximum((squares - lengths / n) / (n * d), floor)
        shares = jnp.maximum(counts, 1.0)
        return Mixture(shares / shares.sum(), mu, jnp.where(used, s2, gamma.s2))

    return jax.lax.fori_loop(0, steps, step, gamma)


def contribution(gamma: Mixture, change: PyTree, clipping_norm: Scalar) -> tuple[Array, PyTree, Array]:
    """Contribution v_i of a client to an EM step's sums, [k], [k, ...] and [k], of norm at most ``SENSITIVITY`` C.

    Args:
      gamma: the current mixture.
      change: the client's clipped model update.
      clipping_norm: norm C to which the update was clipped.
    """
    belongs = jax.nn.softmax(gaussian_mixture.log_joint(gamma, change))
    spread = jax.tree.map(lambda a: jnp.multiply.outer(belongs, a), change)
    square = optax.tree.norm(change, squared=True)
    return belongs * clipping_norm / 2, spread, belongs * square / (2 * clipping_norm)


def start(key: Key, gamma: Mixture, clipping_norm: Scalar) -> Mixture:
    """Return the mixture ``gamma`` with each center moved in a random direction, by half the clipping norm."""
    noise = gaussian(key, gamma.mu, 1.0, "nothing: directions of the start")
    # The factor makes every direction so long that clipping sets its norm to C / 2.
    away = jax.vmap(lambda one: clip(jax.tree.map(lambda a: a * 1e6, one), clipping_norm / 2)[0])(noise)
    return gamma._replace(mu=jax.tree.map(lambda mu, by: mu + by.astype(mu.dtype), gamma.mu, away))


def translate(gamma: Mixture, by: PyTree) -> Mixture:
    """Return the mixture ``gamma`` with all centers translated by ``by``."""
    return gamma._replace(mu=jax.tree.map(jnp.add, gamma.mu, by))


def server_step(
    key: Key,
    gamma: Mixture,
    origin: PyTree,
    changes: PyTree,
    valid: Array,
    first: Array,
    *,
    clipping_norm: Scalar,
    noise_multiplier: Scalar,
    floor: Scalar,
    steps: int,
) -> Mixture:
    """Update the mixture in a round by `em`; the first round begins with `start`.

    EM runs in coordinates relative to ``origin``. Arguments that are not described here are as in `em`.

    Args:
      origin: the model to which the clients' updates are relative.
      first: whether this is the first round, [] bool.
    """
    start_key, noise_key = jax.random.split(key)
    relative = translate(gamma, optax.tree.scale(-1.0, origin))
    relative = trees.where(first, start(start_key, relative, clipping_norm), relative)
    noise = {"clipping_norm": clipping_norm, "noise_multiplier": noise_multiplier}
    return translate(em(noise_key, relative, changes, valid, **noise, floor=floor, steps=steps), origin)


def _along(vector: Array, leaf: Array) -> Array:
    return vector.reshape(-1, *[1] * (leaf.ndim - 1))

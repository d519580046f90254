r"""The paper's Algorithm 3 (private centering), with the paper's guarantee and its gaps.

Let :math:`\sigma = \sqrt{2 \log(1.25/\delta)} / \epsilon`, let s be the floor, c the clipping constant, and d the
number of tokens. One call computes for each cluster

.. math::
   a &= \max(\text{count} + Lap(1/\epsilon), 1) \\
   b_1 &= \max(\text{sum} / a + N(0, \sigma^2), s) \\
   b_2 &= \sum_u Clip_{\pm c/\sqrt d}\big(Diag(b_1)^{-1/2} (\hat Q_u - b_1)\big) + N(0, c^2 \sigma^2) \\
   P &= b_1 + Diag(b_1)^{1/2} \, b_2 / a

By Theorem 3.1, one call is (3 eps, 2 delta)-DP for eps < 1. T rounds are (eps', delta')-DP, where (with natural
logarithms)

.. math::
   \epsilon' = \Big(\sqrt{2 T \log(1/\delta)} + T \frac{e^{3\epsilon} - 1}{e^{3\epsilon} + 1}\Big) 3 \epsilon,
   \qquad \delta' = (2 T + 1) \delta

The theorem covers only the rounds, although the paper calls the whole algorithm private. Three results are not private:
the initial centers of Algorithm 1, which are users' own histograms; DimRed's mean, eigenvectors and selected tokens;
and all values tuned on the data.

The paper adds the noise to the mean, in which one user has the weight 1/a. Noise on the mean is equivalent to noise on
the sum with a standard deviation larger by the factor a. A user changes the sum by ||Qhat_u|| <= 1, whereas the paper
states "exactly 1".
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp

from jaxpfl.core import checks, full_precision
from jaxpfl.core.types import Array, Key, Scalar
from jaxpfl.estimators.histograms.base import Users, counts_dtype, floored, nearest, total
from jaxpfl.estimators.histograms.clusters import sums
from jaxpfl.privacy.noise import add_gaussian, add_laplace
from jaxpfl.support.errors import JaxpflError


def gaussian_stddev(epsilon: float, delta: float) -> float:
    """Standard deviation ``sqrt(2 log(1.25/delta)) / eps`` of a Gaussian mechanism; valid only for eps < 1.

    Raises:
      JaxpflError: if eps or delta is outside (0, 1).
    """
    checks.probability("delta", delta)
    if not 0 < epsilon < 1:
        raise JaxpflError(f"the paper's calibration requires an epsilon > 0 and < 1 for each call, got {epsilon:g}")
    return math.sqrt(2 * math.log(1.25 / delta)) / epsilon


def theorem_3_1(epsilon: float, delta: float, rounds: int) -> tuple[float, float]:
    """Privacy (eps', delta') after T rounds by Theorem 3.1, from eps and delta for each part of a call.

    Implements: Setlur et al. 2023, Theorem 3.1.
    """
    checks.count("rounds", rounds)
    composed = math.sqrt(2 * rounds * math.log(1 / delta)) + rounds * math.tanh(1.5 * epsilon)
    return 3 * epsilon * composed, (2 * rounds + 1) * delta


def call_budget(epsilon: float, delta: float, rounds: int) -> tuple[float, float]:
    """Inverse of `theorem_3_1`: eps and delta for each part of a call, from the run's eps' and delta'.

    Raises:
      JaxpflError: if the eps of a part would be 1 or more, for which the calibration is not valid; or if the run's eps
        or delta is out of range.
    """
    from scipy.optimize import root_scalar

    checks.positive("epsilon", epsilon)
    checks.probability("delta", delta)
    part = delta / (2 * rounds + 1)
    if theorem_3_1(1.0, part, rounds)[0] <= epsilon:
        raise JaxpflError(
            f"epsilon {epsilon:g} is too large for the paper's calibration: each of {rounds} rounds must be below 1"
        )
    return root_scalar(lambda e: theorem_3_1(e, part, rounds)[0] - epsilon, bracket=(1e-12, 1.0)).root, part


@full_precision.products
def centering(
    key: Key,
    users: Users,
    centers: Array,
    *,
    epsilon: Scalar,
    stddev: Scalar,
    clip: Scalar,
    floor: Scalar,
) -> Array:
    """Run one call of Algorithm 3; return floored centers [k, d], each from the users nearest to the old center.

    Implements: Setlur et al. 2023, Algorithm 3.

    Args:
      key: random key of the noise.
      users, centers: users, each assigned to the nearest of the centers [k, d].
      epsilon: epsilon of each part of a call, for the Laplace noise on the counts.
      stddev: standard deviation sigma, from `gaussian_stddev`.
      clip: clipping constant c.
      floor: lower bound s on a token's probability, before normalization; see `floored`.
    """
    k, d = centers.shape
    of_count, of_mean, of_rest = jax.random.split(key, 3)
    exact = sums(users, centers)
    a = jnp.maximum(add_laplace(of_count, exact.sizes, 1 / epsilon, "counts of a call"), 1)[:, None]
    b1 = jnp.maximum(add_gaussian(of_mean, exact.histograms / a, stddev, "mean of a call"), floor)
    reach = clip / math.sqrt(d)

    def clipped(block: Users, q: Array) -> Array:
        at = jnp.where(block.valid, nearest(q, centers), k)

        def cluster_sum(i: Array, b: Array) -> Array:
            parts = jnp.clip((q - b) / jnp.sqrt(b), -reach, reach)
            return jnp.where((at == i)[:, None], parts, 0).sum(axis=0)

        return jax.lax.map(lambda xs: cluster_sum(*xs), (jnp.arange(k), b1))

    b2 = add_gaussian(of_rest, total(users, clipped), clip * stddev, "correction of a call")
    return floored(b1 + jnp.sqrt(b1) * b2 / a, floor)


@full_precision.products
def cluster(
    key: Key,
    users: Users,
    start: Array,
    rounds: int,
    *,
    epsilon: Scalar,
    stddev: Scalar,
    clip: Scalar,
    floor: Scalar,
) -> Array:
    """Run Algorithm 2 from the initial centers ``start`` [k, d], with ``rounds`` calls of Algorithm 3.

    The theorem does not cover the initial centers.
    """

    start, epsilon, stddev, clip, floor = counts_dtype((start, epsilon, stddev, clip, floor), users)

    def step(t: Array, centers: Array) -> Array:
        own = jax.random.fold_in(key, t)
        return centering(own, users, centers, epsilon=epsilon, stddev=stddev, clip=clip, floor=floor)

    return jax.lax.fori_loop(0, rounds, step, floored(start, floor))

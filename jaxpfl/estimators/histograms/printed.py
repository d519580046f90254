r"""Algorithm 3 as printed, private centering, beside what its theorem says and what it does not cover.

For each cluster, with :math:`\sigma = \sqrt{2 \log(1.25/\delta)} / \epsilon`:

.. math::
   a &= \max(\text{count} + Lap(1/\epsilon), 1) \\
   b_1 &= \max(\text{sum} / a + N(0, \sigma^2), s) \\
   b_2 &= \sum_u Clip_{\pm c/\sqrt d}\big(Diag(b_1)^{-1/2} (\hat Q_u - b_1)\big) + N(0, c^2 \sigma^2) \\
   P &= b_1 + Diag(b_1)^{1/2} \, b_2 / a

Theorem 3.1: one call is (3 eps, 2 delta)-DP for eps < 1, and T rounds are, with all logarithms natural,

.. math::
   \epsilon' = \Big(\sqrt{2 T \log(1/\delta)} + T \frac{e^{3\epsilon} - 1}{e^{3\epsilon} + 1}\Big) 3 \epsilon,
   \qquad \delta' = (2 T + 1) \delta

It covers the rounds alone. Not private, though the text calls the whole private: Algorithm 1's start, whose centers are
users' own histograms; DimRed's mean, vectors and set of tokens; what is tuned on the data. The print's noise stands
on the mean, of which one user is a share 1/a: it is a times more than needed. With ``on_sum`` it stands on the sum,
which a user moves by at most ||Qhat_u|| <= 1 (the text has "exactly 1"), and the theorem holds as well.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp

from jaxpfl import checks
from jaxpfl.errors import JaxpflError
from jaxpfl.estimators.histograms.base import Users, as_counted, floored, nearest, total
from jaxpfl.estimators.histograms.clusters import sums
from jaxpfl.privacy.noise import add_gaussian, add_laplace
from jaxpfl.types import Array, Key, Scalar


def gaussian_stddev(epsilon: float, delta: float) -> float:
    """``sqrt(2 log(1.25/delta)) / eps``, which is a Gaussian mechanism's for eps < 1 only.

    Raises:
      JaxpflError: an eps outside (0, 1), a delta outside (0, 1).
    """
    checks.probability("delta", delta)
    if not 0 < epsilon < 1:
        raise JaxpflError(f"epsilon of a call must be > 0 and < 1 for the printed calibration, got {epsilon:g}")
    return math.sqrt(2 * math.log(1.25 / delta)) / epsilon


def theorem_3_1(epsilon: float, delta: float, rounds: int) -> tuple[float, float]:
    """(eps', delta') of T rounds from the eps and delta of a call's parts."""
    checks.count("rounds", rounds)
    composed = math.sqrt(2 * rounds * math.log(1 / delta)) + rounds * math.tanh(1.5 * epsilon)
    return 3 * epsilon * composed, (2 * rounds + 1) * delta


def of_a_call(epsilon: float, delta: float, rounds: int) -> tuple[float, float]:
    """The eps and delta of a call's parts at which `theorem_3_1` gives the run's eps' and delta'.

    Raises:
      JaxpflError: where an eps of 1 or more would be allowed, for which the calibration does not hold; a run's eps or
        delta out of range.
    """
    from scipy.optimize import root_scalar

    checks.positive("epsilon", epsilon)
    checks.probability("delta", delta)
    part = delta / (2 * rounds + 1)
    if theorem_3_1(1.0, part, rounds)[0] <= epsilon:
        raise JaxpflError(
            f"epsilon {epsilon:g} is too large for the printed calibration of {rounds} rounds: below 1 each"
        )
    return root_scalar(lambda e: theorem_3_1(e, part, rounds)[0] - epsilon, bracket=(1e-12, 1.0)).root, part


def centering(
    key: Key,
    users: Users,
    centers: Array,
    *,
    epsilon: Scalar,
    stddev: Scalar,
    clip: Scalar,
    floor: Scalar,
    on_sum: bool = False,
) -> Array:
    """One call of Algorithm 3 for the users nearest to each center, [k, d], floored.

    Args:
      key: of the noise.
      users, centers: who is assigned to what.
      epsilon: of a call's parts; the counts' Laplace noise.
      stddev: sigma, `gaussian_stddev`.
      clip: c.
      floor: s.
      on_sum: noise on the sum instead of the mean.
    """
    k, d = centers.shape
    of_count, of_mean, of_rest = jax.random.split(key, 3)
    exact = sums(users, centers)
    a = jnp.maximum(add_laplace(of_count, exact.sizes, 1 / epsilon), 1)[:, None]
    if on_sum:
        b1 = add_gaussian(of_mean, exact.histograms, stddev) / a
    else:
        b1 = add_gaussian(of_mean, exact.histograms / a, stddev)
    b1 = jnp.maximum(b1, floor)
    reach = clip / math.sqrt(d)

    def clipped(block: Users, q: Array) -> Array:
        at = jnp.where(block.valid, nearest(q, centers), k)

        def of_cluster(i: Array, b: Array) -> Array:
            parts = jnp.clip((q - b) / jnp.sqrt(b), -reach, reach)
            return jnp.where((at == i)[:, None], parts, 0).sum(axis=0)

        return jax.lax.map(lambda xs: of_cluster(*xs), (jnp.arange(k), b1))

    b2 = add_gaussian(of_rest, total(users, clipped), clip * stddev)
    return floored(b1 + jnp.sqrt(b1) * b2 / a, floor)


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
    on_sum: bool = False,
) -> Array:
    """Algorithm 2 with Algorithm 3 for its centers, [k, d]: T calls from a start that the theorem does not cover."""

    start, epsilon, stddev, clip, floor = as_counted((start, epsilon, stddev, clip, floor), users)

    def step(t: Array, centers: Array) -> Array:
        own = jax.random.fold_in(key, t)
        return centering(own, users, centers, epsilon=epsilon, stddev=stddev, clip=clip, floor=floor, on_sum=on_sum)

    return jax.lax.fori_loop(0, rounds, step, floored(start, floor))

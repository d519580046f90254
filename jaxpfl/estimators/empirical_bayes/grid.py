r"""Maximum-likelihood weights of a mixture's known components: a convex problem, solved by an interior-point method.

Let :math:`L_{ik}` be the density of client i's data under component k. The weights maximize :math:`\sum_i \log (L
\pi)_i` over the simplex. The weights also minimize :math:`-\frac1m \sum_i \log (L \pi)_i + \sum_k \pi_k` over all
:math:`\pi \ge 0`. The minimum is found by primal-dual Newton steps with a line search.

The slack :math:`\max_k \frac1m \sum_i L_{ik} / (L \pi)_i - 1` is the largest derivative of the mean log likelihood
toward a single component. The mean log likelihood of the weights is below its maximum by at most the slack, so a small
slack proves that the weights are nearly optimal. They are optimal if the slack is zero (the condition of Kiefer and
Wolfowitz).

References: Kim, Carbonetto, Stephens and Anitescu 2020, "A fast algorithm for maximum likelihood estimation of mixture
proportions using sequential quadratic programming", for the problem without the simplex constraint; Koenker and Mizera
2014, "Convex optimization, shape constraints, compound decisions, and empirical Bayes rules", for interior points;
Lindsay 1983, for the slack.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxpfl.core.types import Array

MANY = 2**14
"""Number of clients above which the weights are fitted to bins of clients."""
_ESTIMATES, _ERRORS = 256, 16  # bins of estimates and of errors
_STEPS = 80  # largest number of Newton steps
_KEEP = 0.995  # a step may cover this fraction of the distance to the boundary, so that iterates stay inside
_HALVINGS = 12  # number of step sizes that the line search tries
_CENTER = 0.1  # each step aims to reduce the duality gap to this fraction


class _Point(NamedTuple):
    pi: Array
    dual: Array
    ratios: Array
    best: Array
    slack: Array
    steps: Array


def weights(log_density: Array, w: Array | None = None) -> tuple[Array, Array]:
    """Maximum-likelihood weights of the components.

    Args:
      log_density: log density of each client's data under each of K components, [m, K]; -inf if the data are impossible
        under the component.
      w: weights of the clients, [m], with sum one; by default equal.

    Returns:
      Two arrays: the components' weights [K], with sum one; and the slack []. The mean log likelihood of the weights is
      below its maximum by at most the slack.
    """
    m, count = log_density.shape
    w = jnp.full(m, 1 / m, log_density.dtype) if w is None else w
    # Each client's densities are divided by the client's largest density, which does not change the weights.
    L = jnp.exp(log_density - log_density.max(axis=1, keepdims=True))
    kind = L.dtype
    tolerance = float(jnp.finfo(kind).eps) ** 0.6

    def point(pi: Array, dual: Array, steps: Array, before: _Point | None = None) -> _Point:
        ratios = w @ (L / (L @ pi)[:, None])
        # ``ratios`` is inversely proportional to the scale of pi, hence the factor pi.sum().
        whole, slack = pi / pi.sum(), (ratios * pi.sum()).max() - 1
        if before is not None:
            better = slack < before.slack
            whole, slack = jnp.where(better, whole, before.best), jnp.where(better, slack, before.slack)
        return _Point(pi, dual, ratios, whole, slack, steps)

    def step(at: _Point) -> _Point:
        pi, dual = at.pi, at.dual
        fitted = L @ pi
        scaled = L / fitted[:, None]
        gradient = 1 - at.ratios
        mu = _CENTER * (pi @ dual) / count
        root = jnp.sqrt(pi)
        half = jnp.sqrt(w)[:, None] * scaled * root
        curve = half.T @ half
        # Rounding makes the matrix singular if components are nearly equal.
        ridge = 4 * jnp.finfo(kind).eps * count
        factor = jax.scipy.linalg.cho_factor(curve + jnp.diag(dual + ridge))
        move = root * jax.scipy.linalg.cho_solve(factor, root * (mu / pi - gradient))
        dual_move = mu / pi - dual - dual / pi * move
        sizes = _boundary_step(pi, move) * 0.5 ** jnp.arange(_HALVINGS)
        along = L @ move

        def merit(size: Array) -> Array:
            new = pi + size * move
            return -(w @ jnp.log(fitted + size * along)) + new.sum() - mu * jnp.log(new).sum()

        size = sizes[jnp.argmin(jnp.nan_to_num(jax.lax.map(merit, sizes), nan=jnp.inf))]
        usable = jnp.isfinite(move).all()
        new = jnp.where(usable, pi + size * move, pi)
        new_dual = jnp.where(usable, dual + _boundary_step(dual, dual_move) * dual_move, dual)
        new_dual = jnp.maximum(new_dual, jnp.finfo(kind).tiny)
        return point(new, new_dual, jnp.where(usable, at.steps + 1, _STEPS), at)

    even = jnp.full(count, 1 / count, kind)
    begin = point(even, jnp.ones(count, kind), jnp.zeros((), jnp.int32))
    end = jax.lax.while_loop(lambda at: (at.slack > tolerance) & (at.steps < _STEPS), step, begin)
    return end.best, end.slack


def _boundary_step(at: Array, move: Array) -> Array:
    """Size of the step from ``at`` along ``move``: at most 1, and small enough to keep all entries positive."""
    return jnp.minimum(1, _KEEP * jnp.where(move < 0, at / jnp.where(move < 0, -move, 1), jnp.inf).min())


def binned(x: Array, s: Array, w: Array, estimates: int = _ESTIMATES, errors: int = _ERRORS) -> tuple[Array, ...]:
    """Group many clients into bins; return each bin's mean estimate, mean standard error and total weight.

    Each result has shape [estimates * errors].

    Bins are equally spaced in asinh(x) and in log(s). Bins far from x = 0 are therefore wide. The clients in a bin are
    replaced by one client with their mean x and mean s. If the likelihood is smooth, the error is of the order of its
    second derivatives times the variances of x and s within bins.

    Args:
      x, s, w: estimates, positive standard errors and weights of the clients, [m] each; s should be of the order of
        one.
      estimates, errors: numbers of bins along x and along s.
    """
    place = _place(jnp.arcsinh(x), estimates) * errors + _place(jnp.log(s), errors)
    empty = jnp.zeros(estimates * errors, x.dtype)
    weight, x_sum, s_sum = (empty.at[place].add(w * each) for each in (jnp.ones_like(x), x, s))
    full = weight > 0
    total = jnp.where(full, weight, 1)
    return jnp.where(full, x_sum / total, 0), jnp.where(full, s_sum / total, 1), weight


def _place(at: Array, number: int) -> Array:
    low, high = at.min(), at.max()
    share = (at - low) / jnp.where(high > low, high - low, 1)
    return jnp.minimum((number * jnp.nan_to_num(share)).astype(jnp.int32), number - 1)

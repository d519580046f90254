r"""Weights of a mixture with known components, of the greatest likelihood: a convex problem, by interior points.

With :math:`L_{ik}` the density of client i's data under component k, the weights maximise
:math:`\sum_i \log (L \pi)_i` over the simplex. Minus its mean plus :math:`\sum_k \pi_k` has the same solution over all
:math:`\pi \ge 0`, and is solved by primal-dual Newton steps with a line search.

The slack :math:`\max_k \frac1m \sum_i L_{ik} / (L \pi)_i - 1`, the greatest directional derivative, certifies what was
found: the mean log likelihood is at most this far below the best one, and zero is Kiefer and Wolfowitz's condition.

References: Kim, Carbonetto, Stephens and Anitescu 2020, "A fast algorithm for maximum likelihood estimation of mixture
proportions using sequential quadratic programming", for the problem without the simplex; Koenker and Mizera 2014,
"Convex optimization, shape constraints, compound decisions, and empirical Bayes rules", for interior points; Lindsay
1983, for the certificate.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxpfl.types import Array

_STEPS = 80
_KEEP = 0.995
_HALVINGS = 12
_CENTER = 0.1


class _Point(NamedTuple):
    pi: Array
    dual: Array
    best: Array
    slack: Array
    steps: Array


def weights(log_density: Array, w: Array | None = None) -> tuple[Array, Array]:
    """The likeliest weights.

    Args:
      log_density: log L, [m, K]; -inf where a component cannot have made a client's data.
      w: of the clients, [m], which sum to one; equal unless given.

    Returns:
      The weights [K], which sum to one, and their slack [].
    """
    m, count = log_density.shape
    w = jnp.full(m, 1 / m, log_density.dtype) if w is None else w
    # In units of a client's likeliest component; a client's own factor does not matter.
    L = jnp.exp(log_density - log_density.max(axis=1, keepdims=True))
    kind = L.dtype
    tolerance = float(jnp.finfo(kind).eps) ** 0.6

    def slack_of(pi: Array) -> tuple[Array, Array]:
        pi = pi / pi.sum()
        return pi, (w @ (L / (L @ pi)[:, None])).max() - 1

    def go_on(point: _Point) -> Array:
        return (point.slack > tolerance) & (point.steps < _STEPS)

    def step(point: _Point) -> _Point:
        pi, dual = point.pi, point.dual
        fitted = L @ pi
        scaled = L / fitted[:, None]
        gradient = 1 - w @ scaled
        mu = _CENTER * (pi @ dual) / count
        root = jnp.sqrt(pi)
        half = jnp.sqrt(w)[:, None] * scaled * root
        curve = half.T @ half
        ridge = 4 * jnp.finfo(kind).eps * count
        system = curve + jnp.diag(dual + ridge)
        factor = jax.scipy.linalg.cho_factor(system)
        move = root * jax.scipy.linalg.cho_solve(factor, root * (mu / pi - gradient))
        dual_move = mu / pi - dual - dual / pi * move
        longest = _to_boundary(pi, move)
        steps = longest * 0.5 ** jnp.arange(_HALVINGS)
        along = L @ move

        def merit(size: Array) -> Array:
            new = pi + size * move
            return -(w @ jnp.log(fitted + size * along)) + new.sum() - mu * jnp.log(new).sum()

        size = steps[jnp.argmin(jnp.nan_to_num(jax.lax.map(merit, steps), nan=jnp.inf))]
        usable = jnp.isfinite(move).all()
        new = jnp.where(usable, pi + size * move, pi)
        new_dual = jnp.where(usable, dual + _to_boundary(dual, dual_move) * dual_move, dual)
        whole, slack = slack_of(new)
        better = slack < point.slack
        return _Point(
            new,
            jnp.maximum(new_dual, jnp.finfo(kind).tiny),
            jnp.where(better, whole, point.best),
            jnp.where(better, slack, point.slack),
            jnp.where(usable, point.steps + 1, _STEPS),
        )

    even = jnp.full(count, 1 / count, kind)
    begin = _Point(even, jnp.ones(count, kind), *slack_of(even), jnp.zeros((), jnp.int32))
    end = jax.lax.while_loop(go_on, step, begin)
    return end.best, end.slack


def _to_boundary(at: Array, move: Array) -> Array:
    """Longest step, at most 1, that keeps all entries above zero."""
    return jnp.minimum(1, _KEEP * jnp.where(move < 0, at / jnp.where(move < 0, -move, 1), jnp.inf).min())

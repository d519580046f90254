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

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxpfl.core.types import Array

_STEPS = 80
_KEEP = 0.995
_HALVINGS = 12
_CENTER = 0.1
_NEAR = 1e-4  # slack among similar clients, with which all are turned to


class _Point(NamedTuple):
    pi: Array
    dual: Array
    ratios: Array
    best: Array
    slack: Array
    steps: Array


def weights(
    log_density: Array, w: Array | None = None, ratios: Callable[[Array], Array] | None = None
) -> tuple[Array, Array]:
    """The likeliest weights.

    Args:
      log_density: log L, [m, K]; -inf where a component cannot have made a client's data.
      w: of the clients, [m], which sum to one; equal unless given.
      ratios: weights [K] to the mean of L_ik / (L pi)_i over clients, [K], of other clients than those of
        ``log_density``, to which these are similar. The weights and their slack are then theirs: the similar ones serve
        as a start, for the curvature, and in the line search, to which the difference of slopes is added.

    Returns:
      The weights [K], which sum to one, and their slack [].
    """
    m, count = log_density.shape
    w = jnp.full(m, 1 / m, log_density.dtype) if w is None else w
    # In units of a client's likeliest component; a client's own factor does not matter.
    L = jnp.exp(log_density - log_density.max(axis=1, keepdims=True))
    kind = L.dtype
    tolerance = float(jnp.finfo(kind).eps) ** 0.6

    def similar(pi: Array) -> Array:
        return w @ (L / (L @ pi)[:, None])

    def point(pi: Array, dual: Array, ratios: Array, steps: Array, before: _Point | None = None) -> _Point:
        # Ratios are inverse to the length of pi.
        whole, slack = pi / pi.sum(), (ratios * pi.sum()).max() - 1
        if before is not None:
            better = slack < before.slack
            whole, slack = jnp.where(better, whole, before.best), jnp.where(better, slack, before.slack)
        return _Point(pi, dual, ratios, whole, slack, steps)

    def step(of: Callable[[Array], Array] | None, at: _Point) -> _Point:
        pi, dual = at.pi, at.dual
        fitted = L @ pi
        scaled = L / fitted[:, None]
        tilt = jnp.zeros(count, kind) if of is None else w @ scaled - at.ratios
        gradient = 1 - at.ratios
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
        sizes = longest * 0.5 ** jnp.arange(_HALVINGS)
        along = L @ move

        def merit(size: Array) -> Array:
            new = pi + size * move
            return -(w @ jnp.log(fitted + size * along)) + size * (tilt @ move) + new.sum() - mu * jnp.log(new).sum()

        size = sizes[jnp.argmin(jnp.nan_to_num(jax.lax.map(merit, sizes), nan=jnp.inf))]
        usable = jnp.isfinite(move).all()
        new = jnp.where(usable, pi + size * move, pi)
        new_dual = jnp.where(usable, dual + _to_boundary(dual, dual_move) * dual_move, dual)
        new_dual = jnp.maximum(new_dual, jnp.finfo(kind).tiny)
        ratios_there = similar(new) if of is None else of(new)
        return point(new, new_dual, ratios_there, jnp.where(usable, at.steps + 1, _STEPS), at)

    def solved(of: Callable[[Array], Array] | None, begin: _Point, enough: float) -> _Point:
        def go_on(at: _Point) -> Array:
            return (at.slack > enough) & (at.steps < _STEPS)

        return jax.lax.while_loop(go_on, functools.partial(step, of), begin)

    even = jnp.full(count, 1 / count, kind)
    begin = point(even, jnp.ones(count, kind), similar(even), jnp.zeros((), jnp.int32))
    end = solved(None, begin, tolerance if ratios is None else _NEAR)
    if ratios is not None:
        end = solved(ratios, point(end.pi, end.dual, ratios(end.pi), jnp.zeros((), jnp.int32)), tolerance)
    return end.best, end.slack


def _to_boundary(at: Array, move: Array) -> Array:
    """Longest step, at most 1, that keeps all entries above zero."""
    return jnp.minimum(1, _KEEP * jnp.where(move < 0, at / jnp.where(move < 0, -move, 1), jnp.inf).min())

r"""The network lasso's step: clients' vectors y_i, those of neighbours drawn together, by ADMM.

.. math:: \min_Z \tfrac12 \sum_i \|z_i - y_i\|^2 + s \sum_{(i,j)} \|z_i - z_j\|_p

With s = eta lam and y_i = z_i - eta g_i / N it is the Z step of Zhao et al. (section IV-B): their minimand times eta.
With W = ZQ, multipliers Omega (theirs times eta) and rho (theirs times eta), repeated:

.. math:: Z^+ &= (Y + \Omega Q^T + \rho W Q^T)(I + \rho Q Q^T)^{-1}, \\
   W^+ &= \operatorname{prox}_{(s / \rho) \|\cdot\|_p} (Z^+ Q - \Omega / \rho), \\
   \Omega^+ &= \Omega + \rho (W^+ - Z^+ Q)

until :math:`\|W - ZQ\|` and :math:`\rho \|(W^+ - W) Q^T\|` are small. The matrix is factored once, or the system solved
by conjugate gradients from the last Z where N is large. s = 0 gives Y; a large s the mean of each connected component.

Where many such steps are to be taken on one graph, rounds of training or settings side by side, each with a rho of its
own, the Laplacian's spectrum (`graphs.spectrum`) serves all of them: it is found once on the host, and gives the
inverse for any rho by one product.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.scipy import linalg
from jax.scipy.sparse.linalg import cg

from jaxpfl.similarity import graphs, proximal
from jaxpfl.similarity.graphs import Graph, Spectrum
from jaxpfl.types import Array, Scalar

MOST_DENSE = 1000
"""Nodes beyond which the system is solved by conjugate gradients unless told. With a few edges a node they take half
the time of the two triangular solves at N = 2000, and no memory of N^2."""


class Warm(NamedTuple):
    """What the next step may begin with: w [M, d], the differences, and their multipliers omega [M, d]."""

    w: Array
    omega: Array


class Fused(NamedTuple):
    """The minimiser z [N, d], and how it was found.

    Attributes:
      z: [N, d]. Edges whose row of ``warm.w`` is exactly zero join clients with the same z, up to the tolerance.
      warm: for the next step.
      primal: ``|W - ZQ|`` over the size of Y less its mean, [].
      dual: ``rho |(W+ - W) Q^T|`` over the same, [].
      steps: taken, [] int32.
    """

    z: Array
    warm: Warm
    primal: Array
    dual: Array
    steps: Array


def cold(graph: Graph, y: Array) -> Warm:
    """A start without a history: exact for s = 0."""
    w = graphs.differences(graph, y)
    return Warm(w, jnp.zeros_like(w))


def fuse(
    graph: Graph,
    y: Array,
    strength: Scalar,
    p: float,
    *,
    rho: Scalar = 1.0,
    warm: Warm | None = None,
    tolerance: Scalar = 1e-5,
    most: int = 1000,
    dense: bool | None = None,
    spectrum: Spectrum | None = None,
) -> Fused:
    """The minimiser for y [N, d].

    Args:
      graph: its edges are the neighbours; with none, or for N = 1, z = y.
      y: what the clients' vectors would be without neighbours; finite (one that is not makes all of z NaN).
      strength: s, not negative; infinity gives the components' means.
      p: 1, 2 or infinity.
      rho: positive; changes the number of steps alone.
      warm: the last step's, or None for `cold`.
      tolerance: of the primal and of the dual residual.
      most: steps at most.
      dense: factor the matrix; None for N up to `MOST_DENSE`.
      spectrum: the graph's, of which the inverse is then made instead.

    Raises:
      JaxpflError: for other p.
    """
    proximal.check_norm(p)
    warm = cold(graph, y) if warm is None else warm
    middle = y.mean(axis=0)
    # A common shift moves z by as much. Without it the residuals are over what there is to draw together.
    apart = y - middle
    size = jnp.linalg.norm(apart)
    scale = jnp.where(size > 0, size, 1)
    if spectrum is not None:
        solve = _inverse(spectrum, rho, y.dtype)
    else:
        solve = _solver(graph, rho, tolerance, graph.nodes <= MOST_DENSE if dense is None else dense, y.dtype)

    def relative(residual: Array) -> Array:
        return jnp.linalg.norm(residual) / scale

    def step(at: Fused) -> Fused:
        w, omega = at.warm
        z = solve(apart + graphs.gathered(graph, omega + rho * w), at.z)
        here = graphs.differences(graph, z)
        new = proximal.prox(here - omega / rho, strength / rho, p)
        primal, dual = new - here, rho * graphs.gathered(graph, new - w)
        return Fused(z, Warm(new, omega + rho * primal), relative(primal), relative(dual), at.steps + 1)

    def unfinished(at: Fused) -> Array:
        return (at.steps < most) & (jnp.maximum(at.primal, at.dual) > tolerance)

    far = jnp.full((), jnp.inf, y.dtype)
    end = jax.lax.while_loop(unfinished, step, Fused(apart, warm, far, far, jnp.int32(0)))
    return end._replace(z=end.z + middle)


def _inverse(spectrum: Spectrum, rho: Scalar, dtype: jnp.dtype) -> Callable:
    """What `_solver` gives, by the inverse itself."""
    values, vectors = jnp.asarray(spectrum.values, dtype), jnp.asarray(spectrum.vectors, dtype)
    inverse = jnp.matmul(vectors / (1 + rho * values), vectors.T, precision="highest")
    return lambda right, start: jnp.matmul(inverse, right, precision="highest")


def _solver(graph: Graph, rho: Scalar, tolerance: Scalar, dense: bool, dtype: jnp.dtype) -> Callable:
    """``(right-hand side, start) -> (I + rho L)^-1 right-hand side``."""
    if dense:
        factor = linalg.cho_factor(jnp.eye(graph.nodes, dtype=dtype) + rho * graphs.laplacian(graph, dtype))
        return lambda right, start: linalg.cho_solve(factor, right)
    diagonal = 1 + rho * graphs.degrees(graph).astype(dtype)[:, None]

    def matrix(z: Array) -> Array:
        return z + rho * graphs.gathered(graph, graphs.differences(graph, z))

    # Errors of the system must stay below the residuals that are waited for.
    small = tolerance / 10

    def solve(right: Array, start: Array) -> Array:
        return cg(matrix, right, x0=start, tol=small, maxiter=200, M=lambda z: z / diagonal)[0]

    return solve

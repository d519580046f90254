r"""Network lasso by ADMM: the clients' vectors y_i are pulled together along the edges of a graph.

.. math:: \min_Z \tfrac12 \sum_i \|z_i - y_i\|^2 + s \sum_{(i,j)} \|z_i - z_j\|_p

This is the Z step of Zhao et al. (section IV-B), with its objective multiplied by the learning rate eta: s = eta lam,
and y_i = z_i - eta g_i / N for the previous z_i. Here lam is the weight of the penalty, N the number of clients, and
g_i the gradient of client i. The differences along the edges are W = ZQ, where Q is the incidence matrix (`graphs`).
Let Omega be the multipliers and rho the penalty parameter of ADMM, both scaled by eta. The iteration is

.. math:: Z^+ &= (Y + \Omega Q^T + \rho W Q^T)(I + \rho Q Q^T)^{-1}, \\
   W^+ &= \operatorname{prox}_{(s / \rho) \|\cdot\|_p} (Z^+ Q - \Omega / \rho), \\
   \Omega^+ &= \Omega + \rho (W^+ - Z^+ Q)

which is repeated until :math:`\|W - ZQ\|` and :math:`\rho \|(W^+ - W) Q^T\|` are small. For s = 0 the solution is Y.
If s is large enough, every client's solution is the mean of y over its connected component.

The eigendecomposition of the graph's Laplacian is computed once, on the host. Given the decomposition, the linear
system is solved for any rho by two matrix products. The decomposition is therefore reused in all rounds, for all
settings of a sweep and whenever rho changes. For large N, conjugate gradients solve the linear system instead, starting
from the last Z. During the first half of the steps, rho is doubled or halved if one of the two norms above is more than
ten times the other (Boyd et al. 2011, section 3.4.1).

If p = 2 and the dimension d exceeds N, the iteration runs in an orthonormal basis of the centered rows of Y. The basis
preserves norms, and its span contains the minimizer. A step then costs N / d times as much as in the original
coordinates.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.scipy.sparse.linalg import cg

from jaxpfl.core.types import Array, Scalar
from jaxpfl.similarity import graphs
from jaxpfl.similarity.graphs import Graph, Spectrum
from jaxpfl.support.errors import JaxpflError

MOST_DENSE = 1400
"""Number of nodes above which conjugate gradients are the default instead of the spectrum. For graphs with a few edges
per node, a warm-started round with conjugate gradients takes 1.39 times as much processor time as with the spectrum at
N = 500, 1.32 times as much at N = 1000 and 0.71 times as much at N = 2000 (measured on an idle machine)."""
MOST_DENSE_CROWDED = 2000
"""`MOST_DENSE` for graphs in which a node has more than `graphs.MOST_UNROLLED` edges. With 40 edges per node, the two
matrix products of the spectrum are still twice as fast as conjugate gradients at N = 2000.
"""

NORMS = (1.0, 2.0, math.inf)

RANGE = (1e-4, 1e4)
"""Smallest and largest value of the adaptive rho."""


class Warm(NamedTuple):
    """Warm start for the next minimization: differences w along the M edges [M, d], their multipliers omega [M, d], and
    rho [].
    """

    w: Array
    omega: Array
    rho: Array


class Fused(NamedTuple):
    """Minimizer of the network lasso, with the state of the solver.

    Attributes:
      z: minimizer, [N, d]. If an edge's row of ``warm.w`` is exactly zero, the edge's two clients have the same z, up
        to the tolerance.
      warm: warm start for the next minimization.
      primal: primal residual ``|W - ZQ|``, relative to the norm of the centered Y, [].
      dual: dual residual ``rho |(W+ - W) Q^T|``, relative to the norm of the centered Y, [].
      steps: number of steps taken, [] int32.
    """

    z: Array
    warm: Warm
    primal: Array
    dual: Array
    steps: Array


def prefers_spectrum(graph: Graph) -> bool:
    """True if the spectral solver is faster than conjugate gradients for a graph; the graph must be on the host."""
    crowded = graph.edges > 0 and graphs.host_degrees(graph).max() > graphs.MOST_UNROLLED
    return graph.nodes <= (MOST_DENSE_CROWDED if crowded else MOST_DENSE)


def cold(graph: Graph, y: Array, rho: Scalar = 1.0) -> Warm:
    """Make the initial state for a first minimization; this state is the exact solution for s = 0."""
    w = graphs.differences(graph, y)
    return Warm(w, jnp.zeros_like(w), jnp.asarray(rho, y.dtype))


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
    """Minimize the network lasso for y [N, d].

    Implements: Zhao et al., equation (6); Zhao et al., section IV-B; Zhao et al., Algorithm 4.

    Args:
      graph: graph on the host whose edges join neighbors; without edges, z = y.
      y: the clients' vectors, [N, d]. If an entry is not finite, all of z is NaN.
      strength: weight s of the penalty, not negative; infinity gives the means of the connected components.
      p: order of the norm, 1, 2 or infinity.
      rho: positive initial rho, used if ``warm`` is None; it affects only the number of steps.
      warm: ``Fused.warm`` of the previous solution; None for `cold`.
      tolerance: largest primal and dual residual at which the iteration stops.
      most: maximum number of steps.
      dense: whether to use the spectrum of the graph; None for the faster solver; see `prefers_spectrum`.
      spectrum: spectrum of the graph, if it has been computed already.

    Raises:
      JaxpflError: if p is not 1, 2 or infinity.
    """
    check_norm(p)
    warm = cold(graph, y, rho) if warm is None else warm
    middle = y.mean(axis=0)
    # Adding a constant vector to every y_i adds it to every z_i. The mean is subtracted here so that the residuals are
    # relative to the differences between clients.
    apart = y - middle
    size = jnp.linalg.norm(apart)
    scale = jnp.where(size > 0, size, 1)
    basis = orthonormal(apart) if p == 2 and y.shape[1] > graph.nodes else None
    if basis is not None:
        apart, w, omega = (_times(rows, basis.T) for rows in (apart, warm.w, warm.omega))
        warm = Warm(w, omega, warm.rho)
    if prefers_spectrum(graph) if dense is None else dense:
        solve = _spectral_solver(graphs.spectrum(graph) if spectrum is None else spectrum, y.dtype)
    else:
        solve = _cg_solver(graph, tolerance, y.dtype)

    def relative(residual: Array) -> Array:
        return jnp.linalg.norm(residual) / scale

    def step(at: Fused) -> Fused:
        w, omega, rho = at.warm
        z = solve(rho, apart + graphs.gathered(graph, omega + rho * w), at.z)
        here = graphs.differences(graph, z)
        new = prox(here - omega / rho, strength / rho, p)
        gap = new - here
        primal, dual = relative(gap), relative(rho * graphs.gathered(graph, new - w))
        factor = jnp.where(primal > 10 * dual, 2.0, jnp.where(dual > 10 * primal, 0.5, 1.0))
        # RANGE bounds rho because at strength zero the primal residual vanishes, and rho would be halved in every step.
        next_rho = jnp.clip(jnp.where(2 * at.steps < most, factor, 1.0) * rho, *RANGE).astype(rho.dtype)
        return Fused(z, Warm(new, omega + rho * gap, next_rho), primal, dual, at.steps + 1)

    def unfinished(at: Fused) -> Array:
        return (at.steps < most) & (jnp.maximum(at.primal, at.dual) > tolerance)

    far = jnp.full((), jnp.inf, y.dtype)
    end = jax.lax.while_loop(unfinished, step, Fused(apart, warm, far, far, jnp.int32(0)))
    if basis is not None:
        w, omega, rho = end.warm
        end = end._replace(z=_times(end.z, basis), warm=Warm(_times(w, basis), _times(omega, basis), rho))
    return end._replace(z=end.z + middle)


def orthonormal(rows: Array) -> Array:
    """Orthonormal basis of the span of the given rows [N, d], as rows [N, d].

    If a row depends linearly on earlier rows, up to rounding error, the basis has a row of zeros instead. For example,
    the last of N rows that sum to zero depends on the other rows.

    The method is Gram-Schmidt, applied twice to each row. LAPACK is avoided, because its calls in concurrent runs can
    deadlock on a CPU with two cores.
    """
    least = 100 * jnp.finfo(rows.dtype).eps * jnp.linalg.norm(rows, axis=1).max()

    def add(i: Array, basis: Array) -> Array:
        rest = rows[i]
        for _ in range(2):
            rest = rest - _times(_times(basis, rest), basis)
        length = jnp.linalg.norm(rest)
        new = length > least
        return basis.at[i].set(jnp.where(new, rest / jnp.where(new, length, 1), 0))

    return jax.lax.fori_loop(0, rows.shape[0], add, jnp.zeros_like(rows))


_Solve = Callable[[Scalar, Array, Array], Array]
"""Linear solver ``(rho, right-hand side, start) -> (I + rho L)^-1 right-hand side``, where L is the Laplacian."""


def _spectral_solver(spectrum: Spectrum, dtype: jnp.dtype) -> _Solve:
    values, vectors = jnp.asarray(spectrum.values, dtype), jnp.asarray(spectrum.vectors, dtype)
    return lambda rho, right, start: _times(vectors / (1 + rho * values), _times(vectors.T, right))


def _cg_solver(graph: Graph, tolerance: Scalar, dtype: jnp.dtype) -> _Solve:
    degrees = graphs.degrees(graph).astype(dtype)[:, None]
    # The error of the linear solver must stay below the tolerance for the residuals.
    small = tolerance / 10

    def solve(rho: Scalar, right: Array, start: Array) -> Array:
        def matrix(z: Array) -> Array:
            return z + rho * graphs.gathered(graph, graphs.differences(graph, z))

        return cg(matrix, right, x0=start, tol=small, maxiter=200, M=lambda z: z / (1 + rho * degrees))[0]

    return solve


def _times(a: Array, b: Array) -> Array:
    return jnp.matmul(a, b, precision="highest")


def check_norm(p: float) -> float:
    """Return p as a float if `prox` supports this norm.

    Raises:
      JaxpflError: if p is not 1, 2 or infinity.
    """
    if p not in NORMS:
        raise JaxpflError(f"p must be 1, 2 or inf, got {p}")
    return float(p)


def prox(v: Array, kappa: Scalar, p: float) -> Array:
    r"""Proximal operator of ``kappa |.|_p`` on each vector [..., d]; kappa is non-negative and may be infinite.

    The result is ``argmin_w kappa |w|_p + |w - v|_2^2 / 2``:

    - p = 1: every entry of v is shrunk toward zero by kappa;
    - p = 2: :math:`(1 - \kappa / \|v\|_2)_+ v`;
    - p = inf: :math:`v - \operatorname{Proj}(v)`, where Proj projects onto the l1 ball of radius kappa.

    For each p, v - w is the projection of v onto the ball of radius kappa in the dual norm (Moreau). Zhao et al. give a
    single formula for all p, which is correct only for p = 2.

    Implements: Zhao et al., section IV-B.

    Raises:
      JaxpflError: if p is not 1, 2 or infinity.
    """
    if check_norm(p) == 1:
        return jnp.sign(v) * jnp.maximum(jnp.abs(v) - kappa, 0)
    if p == 2:
        length = norm(v, 2)[..., None]
        keep = jnp.where(length > kappa, 1 - kappa / jnp.where(length > 0, length, 1), 0)
        return jnp.where(length > kappa, keep * v, jnp.zeros_like(v))
    # The result is v clipped to [-level, level], where the level is such that clipping removes kappa in total.
    level = jnp.where(norm(v, 1) > kappa, _level(jnp.abs(v), kappa), 0)[..., None]
    return jnp.clip(v, -level, level)


def norm(v: Array, p: float) -> Array:
    """Norm ``|v|_p`` of each vector of v [..., d]."""
    return jnp.linalg.norm(v, ord=int(p) if p in (1, 2) else p, axis=-1)


def _level(size: Array, kappa: Scalar) -> Array:
    """Find t >= 0 with ``sum_i (size_i - t)_+ = kappa``, for sizes [..., d] that sum to more than kappa."""
    ordered = jnp.flip(jnp.sort(size, axis=-1), axis=-1)
    count = jnp.arange(1, size.shape[-1] + 1, dtype=size.dtype)
    # If exactly the c largest sizes exceed t, then t = (sum of these sizes - kappa) / c. The solution is the maximum of
    # these candidates over c.
    levels = (jnp.cumsum(ordered, axis=-1) - kappa) / count
    return jnp.maximum(levels.max(axis=-1), 0)

"""The total-variation update once more, in plain NumPy, and how far a pair of it is from optimal."""

from collections import deque

import jax.numpy as jnp
import numpy as np

from jaxpfl.core.types import Array, Scalar
from jaxpfl.uploads.compression.total_variation import Update


def kkt_residual(g: Array, gamma: Scalar, found: Update) -> Array:
    """Distance of a pair from optimality, []: the largest relative violation of its optimality conditions.

    These are ``u_i = g_i - w_i + w_{i-1}`` and ``w_i = clip(w_i + u_i - u_{i+1}, -gamma, gamma)``, over the largest of
    |g_i| and |w_i|, to which any number of a pair is rounded. It is zero at the optimum and nowhere else.
    """
    u, w = found
    balance = u - g + jnp.diff(w, prepend=0)
    side = w - jnp.clip(w - jnp.diff(u, append=0), -gamma, gamma)
    scale = jnp.maximum(jnp.abs(g).max(), jnp.abs(w).max())
    return jnp.maximum(jnp.abs(balance).max(), jnp.abs(side).max()) / jnp.where(scale > 0, scale, 1)


def dynamic_programme(g: np.ndarray, gamma: float) -> np.ndarray:
    """Johnson 2013 with u_{d+1} = 0, float64: the derivative of the best prefix's cost as a function of its last entry
    is piecewise linear; its knots are kept in a deque, clipped to +-gamma, and u is read off backwards."""
    low, high = np.empty(len(g)), np.empty(len(g))
    knots, left, right = deque(), (0.0, 0.0), (0.0, 0.0)  # a knot: where, and the changes of slope and intercept

    def crossing(piece: tuple, level: float, from_left: bool) -> tuple:
        while True:
            x = (level - piece[1]) / piece[0]
            if not knots or (x <= knots[0][0] if from_left else x >= knots[-1][0]):
                return x, piece
            _, slope, intercept = knots.popleft() if from_left else knots.pop()
            sign = 1 if from_left else -1
            piece = piece[0] + sign * slope, piece[1] + sign * intercept

    for i, value in enumerate(g):
        left, right = (left[0] + 1, left[1] - value), (right[0] + 1, right[1] - value)
        low[i], (slope_l, base_l) = crossing(left, -gamma, True)
        high[i], (slope_r, base_r) = crossing(right, gamma, False)
        knots.appendleft((low[i], slope_l, base_l + gamma))
        knots.append((high[i], -slope_r, gamma - base_r))
        left, right = (0.0, -gamma), (0.0, gamma)
    # gamma |u_d| is one more neighbour, which is fixed at zero.
    u, after = np.empty(len(g)), 0.0
    for i in range(len(g) - 1, -1, -1):
        u[i] = after = min(max(after, low[i]), high[i])
    return u

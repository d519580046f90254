r"""The example of Zhao et al. (section III-A), computed exactly: x* = (1, -1, 1, -1), from x_0 = 0.

The text shows steps that the total-variation update "may" take to the optimum: (-1, -1, 1, 1), (1, -1, 1, 1), x*. No
gamma and no rate gives the first of them: every update u of a gradient g has :math:`u^T g = |u|^2 + \gamma\,TV(u)`, and
the printed one is orthogonal to the gradient; it doubles the squared distance from the optimum. What descent on
:math:`|x - x_*|^2 / 2` does is computed here: with a constant gamma it stalls where no cumulative sum of the gradient
exceeds gamma; a gamma that decays, and error feedback, arrive.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxpfl.core import full_precision
from jaxpfl.core.types import Array
from jaxpfl.uploads.compression import error_feedback, total_variation

OPTIMUM = (1.0, -1.0, 1.0, -1.0)
PRINTED = ((-1.0, -1.0, 1.0, 1.0), (1.0, -1.0, 1.0, 1.0), OPTIMUM)
"""The text's x_1, x_2, x_3."""
GAMMA, RATE = 0.6, 1.0
SHOWN = (1, 2, 3, 10, 100)
"""Steps that are reported."""
WAYS = {"constant": (False, False), "decaying": (True, False), "error feedback": (False, True)}
"""Two switches of each way: gamma decays, and there is error feedback."""


def descent(gamma: float, rate: float, steps: int, *, decay: bool, feedback: bool) -> Array:
    """Points x_1 ... of descent with total-variation updates, [steps, 4]."""
    optimum = jnp.array(OPTIMUM)

    def step(at: tuple[Array, Array], t: Array) -> tuple[tuple[Array, Array], Array]:
        x, memory = at
        today = total_variation.decayed(gamma, t) if decay else gamma
        sent, left = error_feedback.compress(partial(total_variation.compress, gamma=today), memory, x - optimum)
        x = x - rate * sent.value
        return (x, left if feedback else memory), x

    start = jnp.zeros_like(optimum)
    return jax.lax.scan(step, (start, start), jnp.arange(steps))[1]


def run() -> dict[str, Any]:
    """Points of each of `WAYS` at steps `SHOWN`; for the printed path, its first update relative to the gradient, and
    distances.

    Implements: Zhao et al., section III-A.
    """
    found = {}
    for name, (decay, feedback) in WAYS.items():
        go = full_precision.jit(partial(descent, GAMMA, RATE, max(SHOWN), decay=decay, feedback=feedback))
        points = np.asarray(go())
        found[name] = {str(t): points[t - 1].tolist() for t in SHOWN}
    optimum, first = np.array(OPTIMUM), np.array(PRINTED[0])
    printed = {
        "update_times_gradient": float(-first @ -optimum),
        "square_distances": [float(((x - optimum) ** 2).sum()) for x in (np.zeros(4), *np.array(PRINTED))],
    }
    return {"gamma": GAMMA, "rate": RATE, "points": found, "printed": printed}


def said(demo: dict[str, Any]) -> list[str]:
    """Text lines on the demo."""
    last = str(max(SHOWN))
    lines = [
        f"demo x* = {_point(OPTIMUM)} from 0 with gamma {demo['gamma']:g}, rate {demo['rate']:g}, after {last} steps:"
    ]
    lines += [f"  {name}: {_point(points[last])}" for name, points in demo["points"].items()]
    from_zero, after_one = demo["printed"]["square_distances"][:2]
    return [
        *lines,
        f"  the text's first step, to {_point(PRINTED[0])}, is at a right angle to the gradient (squared distance from "
        f"the optimum {from_zero:g} -> {after_one:g}): no gamma gives it",
    ]


def _point(x: Sequence[float]) -> str:
    return f"({', '.join(f'{value + 0.0:.3g}' for value in x)})"

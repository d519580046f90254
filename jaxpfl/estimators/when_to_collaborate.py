r"""Gain of collaboration: the fraction of the local estimate's error that the best personalised estimate avoids.

A client's own mean has the variance s2 about its parameter, the parameters have the variance st2 about their mean, and
sending adds sq2 (quantisation, or privacy). With the best weight, m clients of equal size gain

.. math:: G = 1 - \frac{MSE}{s^2} = \frac{m - 1}{m} \cdot \frac{s^2}{s^2 + st^2 + sq^2 / (m - 1)}

The gain is never negative and at most s2 / (s2 + st2) for any number of clients, and the noise is divided by the number
of other clients. Only second moments enter: for Bernoulli clients take s2 = E p(1-p) / n and st2 = Var p. All functions
broadcast. The errors are those of `gaussian_closed_form`.
"""

from __future__ import annotations

import jax.numpy as jnp

from jaxpfl.core.types import Array, Scalar
from jaxpfl.estimators import gaussian_closed_form as closed_form


def gain(clients: Scalar, s2: Scalar, st2: Scalar, sq2: Scalar = 0.0) -> Array:
    r"""Fraction of the local estimate's error that the best weight avoids, in [0, 1):

    .. math:: G = \frac{m - 1}{m} \cdot \frac{s^2}{s^2 + st^2 + sq^2 / (m - 1)}

    Args:
      clients: m, of equal size, all of whom send.
      s2, st2, sq2: variances of a client's mean about its parameter (positive), of the parameters, and of the release.
    """
    return 1 - closed_form.personalized(clients, s2, st2, sq2) / s2


def careless_gain(clients: Scalar, s2: Scalar, st2: Scalar, sq2: Scalar) -> Array:
    """Gain with the weight for noiseless messages, st2 / (st2 + s2).

    It is negative if the noise makes the mean of all worse than the local estimate that it replaces.
    """
    a = closed_form.weight(clients, s2, st2)
    return 1 - closed_form.personalized(clients, s2, st2, sq2, a) / s2


def global_gain(clients: Scalar, s2: Scalar, st2: Scalar, sq2: Scalar = 0.0) -> Array:
    """Gain of one estimate for all clients, the mean of the messages.

    It is negative if clients differ by more than they err, st2 + sq2/(m-1) > s2.
    """
    return 1 - closed_form.global_mean(clients, s2, st2, sq2) / s2


def most_gain(s2: Scalar, st2: Scalar) -> Array:
    """Gain of infinitely many clients, ``s2 / (s2 + st2)``."""
    return s2 / jnp.asarray(s2 + st2)


def clients_needed(target: Scalar, s2: Scalar, st2: Scalar, sq2: Scalar = 0.0) -> Array:
    r"""Least integer m with a gain of at least ``target`` in (0, 1); infinity if no number of clients suffices.

    With k = m - 1 and T = s2 + st2 it solves :math:`k^2 (s^2 - G T) - k\, G (T + sq^2) - G\, sq^2 \ge 0`.
    """
    total = s2 + st2
    square, linear, constant = s2 - target * total, target * (total + sq2), target * sq2
    reachable = square > 0
    root = (linear + jnp.sqrt(linear**2 + 4 * square * constant)) / (2 * jnp.where(reachable, square, 1))
    # Rounding must not ask for one client more where k is whole.
    return jnp.where(reachable, 1 + jnp.maximum(jnp.ceil(root * (1 - 1e-6)), 1), jnp.inf)


def most_noise(target: Scalar, clients: Scalar, s2: Scalar, st2: Scalar) -> Array:
    """Largest sq2 at which m clients still gain ``target``; NaN if they do not even without noise."""
    others = clients - 1
    room = others * (s2 * others / (clients * target) - s2 - st2)
    return jnp.where(room >= 0, room, jnp.nan)

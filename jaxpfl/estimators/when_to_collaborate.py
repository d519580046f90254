r"""When collaboration helps: the share of local's error that the best personalised estimate avoids.

A client's own mean has the variance s2 about its parameter, the parameters the variance st2 about theirs, and sending
adds sq2 (quantisation, or privacy). With the best weight, m clients of equal size gain

.. math:: G = 1 - \frac{MSE}{s^2} = \frac{m - 1}{m} \cdot \frac{s^2}{s^2 + st^2 + sq^2 / (m - 1)}

So it never hurts, is at most s2 / (s2 + st2) with any number of clients, and noise counts by the number of clients that
share it. Only second moments enter: for Bernoulli clients take s2 = E p(1-p) / n and st2 = Var p. All functions
broadcast. From `gaussian_closed_form`, which has the errors.
"""

from __future__ import annotations

import jax.numpy as jnp

from jaxpfl.estimators import gaussian_closed_form as closed_form
from jaxpfl.types import Array, Scalar


def gain(clients: Scalar, s2: Scalar, st2: Scalar, sq2: Scalar = 0.0) -> Array:
    r"""The share of local's error that the best weight avoids, in [0, 1):

    .. math:: G = \frac{m - 1}{m} \cdot \frac{s^2}{s^2 + st^2 + sq^2 / (m - 1)}

    Args:
      clients: m, of equal size, all of whom send.
      s2, st2, sq2: variances of a client's mean about its parameter (positive), of the parameters, and of what sending
        adds.
    """
    return 1 - closed_form.personalized(clients, s2, st2, sq2) / s2


def careless_gain(clients: Scalar, s2: Scalar, st2: Scalar, sq2: Scalar) -> Array:
    """The gain with the weight for messages without noise, st2 / (st2 + s2): below zero where that noise makes the mean
    worse than what it replaces."""
    a = closed_form.weight(clients, s2, st2)
    return 1 - closed_form.personalized(clients, s2, st2, sq2, a) / s2


def global_gain(clients: Scalar, s2: Scalar, st2: Scalar, sq2: Scalar = 0.0) -> Array:
    """The gain of one estimate for all, the mean of the messages: below zero where clients differ by more than they
    err, st2 + sq2/(m-1) > s2."""
    return 1 - closed_form.global_mean(clients, s2, st2, sq2) / s2


def most_gain(s2: Scalar, st2: Scalar) -> Array:
    """What infinitely many clients gain, ``s2 / (s2 + st2)``."""
    return s2 / jnp.asarray(s2 + st2)


def clients_needed(target: Scalar, s2: Scalar, st2: Scalar, sq2: Scalar = 0.0) -> Array:
    r"""The least whole m with a gain of at least ``target`` in (0, 1); infinity where no number of clients has it.

    With k = m - 1 and T = s2 + st2 it solves :math:`k^2 (s^2 - G T) - k\, G (T + sq^2) - G\, sq^2 \ge 0`.
    """
    total = s2 + st2
    square, linear, constant = s2 - target * total, target * (total + sq2), target * sq2
    reachable = square > 0
    root = (linear + jnp.sqrt(linear**2 + 4 * square * constant)) / (2 * jnp.where(reachable, square, 1))
    # Rounding must not ask for one client more where k is whole.
    return jnp.where(reachable, 1 + jnp.maximum(jnp.ceil(root * (1 - 1e-6)), 1), jnp.inf)


def most_noise(target: Scalar, clients: Scalar, s2: Scalar, st2: Scalar) -> Array:
    """The largest sq2 with which m clients still gain ``target``; NaN where they do not without noise either."""
    others = clients - 1
    room = others * (s2 * others / (clients * target) - s2 - st2)
    return jnp.where(room >= 0, room, jnp.nan)

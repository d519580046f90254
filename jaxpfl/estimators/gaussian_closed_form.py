r"""Exact mean squared errors of the Gaussian estimators, lower bounds, and the gain of collaboration.

The model is X_ij ~ N(theta_i, sx2 I_d), theta_i ~ N(mu, st2 I_d), and s2 = sx2 / n. The release of a mean adds the
variance sq2 to each entry. All functions take scalars or arrays that broadcast, and return the error of ONE entry;
multiply the error by d for a vector.

Let M be the mean of the messages that K of m clients sent (by default K = m). The estimate :math:`a \bar X_i + (1 - a)
M` has the error

.. math:: MSE(a) = a^2 s^2 + 2 a (1 - a) c + (1 - a)^2 V, \qquad c = Cov(\bar X_i - \theta_i, M - \theta_i),
   \quad V = Var(M - \theta_i)

The gain of collaboration is the fraction of the local estimate's error that the best personalized estimate avoids. With
m clients of equal size,

.. math:: G = 1 - \frac{MSE}{s^2} = \frac{m - 1}{m} \cdot \frac{s^2}{s^2 + st^2 + sq^2 / (m - 1)}

The gain is never negative, and at most s2 / (s2 + st2) for any number of clients. The formulas use only second moments,
and are therefore valid for Bernoulli clients too, with s2 = E p(1-p) / n and st2 = Var p.

The errors are exact, not only upper bounds.

Reference: Ozkara et al. 2023, Theorems 1 and 2 and appendix B.
"""

from __future__ import annotations

import jax.numpy as jnp

from jaxpfl.core.types import Array, Scalar


def error(a: Scalar, s2: Scalar, c: Scalar, V: Scalar) -> Array:
    r"""Mean squared error of one entry of :math:`a \bar X_i + (1 - a) M`:

    .. math:: MSE(a) = a^2 s^2 + 2 a (1 - a) c + (1 - a)^2 V

    Implements: Ozkara et al. 2023, equations (14) to (19).

    Args:
      a: weight of the client's own mean.
      s2: variance of the client's mean about theta_i.
      c: covariance of the errors of the client's mean and of M, as estimates of theta_i.
      V: mean squared error of M as an estimate of theta_i.
    """
    return a**2 * s2 + 2 * a * (1 - a) * c + (1 - a) ** 2 * V


def best_weight(s2: Scalar, c: Scalar, V: Scalar) -> Array:
    """Weight a that minimizes `error`; 1 if the error is the same for every a."""
    curvature = s2 - 2 * c + V
    return jnp.where(curvature > 0, (V - c) / jnp.where(curvature > 0, curvature, 1), 1)


def mean_terms(clients: Scalar, s2: Scalar, st2: Scalar, sq2: Scalar = 0.0, *, sent: bool = True) -> tuple:
    """Arguments ``c`` and ``V`` of `error`, if M is the plain mean of the messages and all clients have equally many
    samples.

    Implements: Ozkara et al. 2023, Claim 1.

    Args:
      clients: number K of clients that sent a message (m if all clients did).
      s2, st2, sq2: variance of a client's mean about theta_i, variance of the theta_i, and variance that the release
        adds.
      sent: whether this client sent its mean.
    """
    c = s2 / clients if sent else 0.0 * s2
    return c, (s2 + st2 + sq2) / clients + st2 * (1 - 2 * sent / clients)


def weight(clients: Scalar, s2: Scalar, st2: Scalar, sq2: Scalar = 0.0, *, sent: bool = True) -> Array:
    r"""Best weight of the client's own mean. For a client that sent a message, it is

    .. math:: a = \frac{st^2 + sq^2/(K-1)}{st^2 + sq^2/(K-1) + s^2}

    Implements: Ozkara et al. 2023, Remark 1; Ozkara et al. 2023, equation (5).
    """
    return best_weight(s2, *mean_terms(clients, s2, st2, sq2, sent=sent))


def personalized(
    clients: Scalar, s2: Scalar, st2: Scalar, sq2: Scalar = 0.0, a: Scalar | None = None, *, sent: bool = True
) -> Array:
    """Mean squared error of ``a mean_i + (1 - a) M``; by default, a is the best weight.

    At the best weight, the error is ``s2 (a + (1 - a)/K)`` for a client that sent a message. K is the number of
    messages.

    Implements: Ozkara et al. 2023, Theorem 1; Ozkara et al. 2023, equation (5).
    """
    c, V = mean_terms(clients, s2, st2, sq2, sent=sent)
    return error(best_weight(s2, c, V) if a is None else a, s2, c, V)


def global_mean(clients: Scalar, s2: Scalar, st2: Scalar, sq2: Scalar = 0.0) -> Array:
    r"""Mean squared error if every client's estimate is M. For a client that sent a message, it is

    .. math:: V = \frac{s^2 + st^2 + sq^2}{K} + st^2 \Big(1 - \frac2K\Big)

    Args:
      clients: number K of clients, all of which sent a message.
      s2, st2, sq2: variances as in `mean_terms`.
    """
    return personalized(clients, s2, st2, sq2, a=0.0)


def bound_known_mean(s2: Scalar, st2: Scalar) -> Array:
    """Lower bound on the error of estimators that know mu: the posterior variance ``st2 s2 / (st2 + s2)``.

    Implements: Ozkara et al. 2023, equation (29).
    """
    return _ratio(st2 * s2, st2 + s2)


def bound_unknown_mean(clients: Scalar, s2: Scalar, st2: Scalar) -> Array:
    """Lower bound on the error of equivariant estimators that learn mu: ``s2 (st2 + s2/m) / (st2 + s2)``.

    With m clients, this is equation (30) of the paper, and equals `personalized` without release noise. The paper's
    derivation only proves the smaller `van_trees_bound`.

    Implements: Ozkara et al. 2023, Remark 2; Ozkara et al. 2023, Fact 1; Ozkara et al. 2023, equation (30).
    """
    return _ratio(s2 * (st2 + s2 / clients), st2 + s2)


def van_trees_bound(clients: Scalar, s2: Scalar, st2: Scalar) -> Array:
    r"""Van Trees lower bound on the error, if theta_i has the prior N(mu, V), as in the paper's appendix B.3:

    .. math:: (1/s^2 + 1/V)^{-1}, \qquad V = st^2 (1 + 1/m) + s^2/m

    with m the number of clients. This bound is below `bound_unknown_mean`, although the paper states that the two
    bounds are equal.

    Implements: Ozkara et al. 2023, equation (28); Ozkara et al. 2023, equation (30).
    """
    V = st2 * (1 + 1 / clients) + s2 / clients
    return _ratio(V * s2, V + s2)


def gain(clients: Scalar, s2: Scalar, st2: Scalar, sq2: Scalar = 0.0) -> Array:
    r"""Gain: the fraction of the local estimate's error that the best weight avoids, in [0, 1):

    .. math:: G = \frac{m - 1}{m} \cdot \frac{s^2}{s^2 + st^2 + sq^2 / (m - 1)}

    Args:
      clients: number m of clients, which have equally many samples and all send a message.
      s2, st2, sq2: variances as in `mean_terms`; s2 is positive.
    """
    return 1 - personalized(clients, s2, st2, sq2) / s2


def careless_gain(clients: Scalar, s2: Scalar, st2: Scalar, sq2: Scalar) -> Array:
    """Gain if the weight is st2 / (st2 + s2), which ignores the noise of the messages.

    Under large noise the gain is negative: the local estimate is then better than the combined estimate.
    """
    a = weight(clients, s2, st2)
    return 1 - personalized(clients, s2, st2, sq2, a) / s2


def global_gain(clients: Scalar, s2: Scalar, st2: Scalar, sq2: Scalar = 0.0) -> Array:
    """Gain if every client's estimate is the mean of the messages.

    With m clients, the gain is negative if st2 + sq2/(m-1) > s2.
    """
    return 1 - global_mean(clients, s2, st2, sq2) / s2


def most_gain(s2: Scalar, st2: Scalar) -> Array:
    """Gain with infinitely many clients: ``s2 / (s2 + st2)``."""
    return s2 / jnp.asarray(s2 + st2)


def clients_needed(target: Scalar, s2: Scalar, st2: Scalar, sq2: Scalar = 0.0) -> Array:
    r"""Smallest number m of clients at which the gain is at least ``target`` in (0, 1); infinity if there is none.

    With k = m - 1, T = s2 + st2 and G = ``target``, the gain is at least G if :math:`k^2 (s^2 - G T) - k\, G (T + sq^2)
    - G\, sq^2 \ge 0`.
    """
    total = s2 + st2
    square, linear, constant = s2 - target * total, target * (total + sq2), target * sq2
    reachable = square > 0
    root = (linear + jnp.sqrt(linear**2 + 4 * square * constant)) / (2 * jnp.where(reachable, square, 1))
    # The factor prevents a rounding error from increasing an integer k by one.
    return jnp.where(reachable, 1 + jnp.maximum(jnp.ceil(root * (1 - 1e-6)), 1), jnp.inf)


def most_noise(target: Scalar, clients: Scalar, s2: Scalar, st2: Scalar) -> Array:
    """Largest sq2 at which the gain of m clients is at least ``target``; NaN if the gain without noise is smaller."""
    others = clients - 1
    room = others * (s2 * others / (clients * target) - s2 - st2)
    return jnp.where(room >= 0, room, jnp.nan)


def _ratio(a: Scalar, b: Scalar) -> Array:
    """a / b; zero if b is zero."""
    positive = jnp.asarray(b) > 0
    return jnp.where(positive, a / jnp.where(positive, b, 1), 0)

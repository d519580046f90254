r"""Mean squared errors of the Gaussian estimators, exactly, and the bounds below which none can go.

X_ij ~ N(theta_i, sx2 I_d), theta_i ~ N(mu, st2 I_d), s2 = sx2 / n; sending the mean adds the variance sq2 to an entry.
All functions take scalars or arrays that broadcast, and give the error of ONE entry: times d for a vector's.

For any weight a, with the mean M of the messages that K of m clients sent (K = m unless said),

.. math:: MSE(a) = a^2 s^2 + 2 a (1 - a) c + (1 - a)^2 V, \qquad c = Cov(\bar X_i - \theta_i, M - \theta_i),
   \quad V = Var(M - \theta_i)

Reference: Ozkara et al. 2023, Theorems 1 and 2 and appendix B; the errors hold with equality.
"""

from __future__ import annotations

import jax.numpy as jnp

from jaxpfl.types import Array, Scalar


def error(a: Scalar, s2: Scalar, c: Scalar, V: Scalar) -> Array:
    r"""The error of one entry of :math:`a \bar X_i + (1 - a) M`, as the arguments broadcast:

    .. math:: MSE(a) = a^2 s^2 + 2 a (1 - a) c + (1 - a)^2 V

    Args:
      a: the weight of the client's own mean.
      s2: the variance of that mean about theta_i.
      c: the covariance of the errors of that mean and of M about theta_i.
      V: the variance of M about theta_i.
    """
    return a**2 * s2 + 2 * a * (1 - a) * c + (1 - a) ** 2 * V


def best_weight(s2: Scalar, c: Scalar, V: Scalar) -> Array:
    """The a that minimises `error`; 1 where every a does."""
    curvature = s2 - 2 * c + V
    return jnp.where(curvature > 0, (V - c) / jnp.where(curvature > 0, curvature, 1), 1)


def of_the_mean(clients: Scalar, s2: Scalar, st2: Scalar, sq2: Scalar = 0.0, *, sent: bool = True) -> tuple:
    """``c`` and ``V`` where the clients hold equally many samples.

    Args:
      clients: K, how many sent (m where all did).
      s2, st2, sq2: variances of a client's mean about theta_i, of the theta_i, and of what sending adds.
      sent: whether the client whose error is meant was one of them.
    """
    c = s2 / clients if sent else 0.0 * s2
    return c, (s2 + st2 + sq2) / clients + st2 * (1 - 2 * sent / clients)


def weight(clients: Scalar, s2: Scalar, st2: Scalar, sq2: Scalar = 0.0, *, sent: bool = True) -> Array:
    r"""The best weight of the client's own mean: for one that sent

    .. math:: a = \frac{st^2 + sq^2/(K-1)}{st^2 + sq^2/(K-1) + s^2}
    """
    return best_weight(s2, *of_the_mean(clients, s2, st2, sq2, sent=sent))


def local(s2: Scalar) -> Array:
    """Of the client's own mean."""
    return jnp.asarray(s2)


def personalized(
    clients: Scalar, s2: Scalar, st2: Scalar, sq2: Scalar = 0.0, a: Scalar | None = None, *, sent: bool = True
) -> Array:
    """Of ``a mean_i + (1 - a) M``; at the best weight unless one is given, where it is ``s2 (a + (1 - a)/K)`` for a
    client that sent."""
    c, V = of_the_mean(clients, s2, st2, sq2, sent=sent)
    return error(best_weight(s2, c, V) if a is None else a, s2, c, V)


def global_mean(clients: Scalar, s2: Scalar, st2: Scalar, sq2: Scalar = 0.0) -> Array:
    r"""Of M itself, as every client's estimate: MSE(0), for a client that sent

    .. math:: V = \frac{s^2 + st^2 + sq^2}{K} + st^2 \Big(1 - \frac2K\Big)

    Args:
      clients: K, all of whom sent.
      s2, st2, sq2: as in `of_the_mean`.
    """
    return personalized(clients, s2, st2, sq2, a=0.0)


def james_stein(clients: Scalar, s2: Scalar, st2: Scalar, dim: int = 1) -> Array:
    r"""Of the estimator of James and Stein towards the mean of all, where it may shrink by more than all:

    .. math:: s^2 - \frac{(m-1) d - 2}{m d} \frac{s^4}{s^2 + st^2}

    averaged over the population (Efron and Morris 1973). Cutting the shrinkage off at zero can only lower it.
    """
    free = (clients - 1) * dim
    total = jnp.asarray(s2 + st2)
    return s2 - (free - 2) / (clients * dim) * s2**2 / jnp.where(total > 0, total, 1)


def bound_known_mean(s2: Scalar, st2: Scalar) -> Array:
    """No estimator that knows mu does better: ``st2 s2 / (st2 + s2)``, the posterior variance."""
    return _ratio(st2 * s2, st2 + s2)


def bound_unknown_mean(clients: Scalar, s2: Scalar, st2: Scalar) -> Array:
    """No equivariant estimator that learns mu from the clients does better: ``s2 (st2 + s2/m) / (st2 + s2)``, the
    print's (30). It equals `personalized` without noise; the print's route gives `van_trees_bound`, which is less.
    """
    return _ratio(s2 * (st2 + s2 / clients), st2 + s2)


def van_trees_bound(clients: Scalar, s2: Scalar, st2: Scalar) -> Array:
    r"""What van Trees' inequality gives for the prior N(mu, V) of appendix B.3, :math:`V = st^2 (1 + 1/m) + s^2/m`:

    .. math:: (1/s^2 + 1/V)^{-1}
    """
    V = st2 * (1 + 1 / clients) + s2 / clients
    return _ratio(V * s2, V + s2)


def _ratio(a: Scalar, b: Scalar) -> Array:
    """a / b, zero where both are."""
    positive = jnp.asarray(b) > 0
    return jnp.where(positive, a / jnp.where(positive, b, 1), 0)

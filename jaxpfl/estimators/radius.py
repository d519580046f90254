r"""Clipping radii: high-probability bounds on the clients' means, to which they are clipped before release.

Only accuracy depends on these, never privacy: every mechanism clips, and clipping adds bias.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxpfl.core.types import Array, Scalar


def gaussian(r: Scalar, variance: Scalar, clients: Scalar, samples: Scalar) -> Array:
    r"""Radius in one dimension, for means N(mu, variance) with |mu| <= r:

    .. math:: b = r + \sqrt{variance}\; \Phi^{-1}\Big(1 - \frac{1}{m^2 n}\Big)

    All m lie in [-b, b] with probability at least 1 - 2/(mn). The paper (Theorem 2) has
    :math:`r + (st + s) \sqrt{\log(m^2 n)}`, `printed`, whose tail bound lacks the factor 2 in the exponent.

    Args:
      variance: st2 + s2.
    """
    return r - jnp.sqrt(variance) * jax.scipy.special.ndtri(_tail(clients, samples))


def printed(r: Scalar, st: Scalar, s: Scalar, clients: Scalar, samples: Scalar) -> Array:
    """Theorem 2's radius b, from the standard deviations st and s = sx / sqrt(n).

    Implements: Ozkara et al. 2023, Theorem 2.
    """
    return r + (st + s) * jnp.sqrt(-jnp.log(_tail(clients, samples)))


def norm(r: Scalar, variance: Scalar, dim: int, clients: Scalar, samples: Scalar) -> Array:
    r"""Radius in L2 norm in d dimensions, for N(0, variance I) about points of norm at most r:

    .. math:: R = r + \sqrt{variance} \big( \sqrt{d} + \sqrt{2 \log(m^2 n)} \big)

    All m are within R with probability at least 1 - 1/(mn), as a chi variable exceeds sqrt(d) + t with probability at
    most exp(-t^2/2). Lemma 3 of the paper is looser, `lemma_3`.
    """
    return r + jnp.sqrt(variance) * (jnp.sqrt(float(dim)) + jnp.sqrt(-2 * jnp.log(_tail(clients, samples))))


def lemma_3(r: Scalar, variance: Scalar, dim: int, clients: Scalar, samples: Scalar) -> Array:
    """Lemma 3's radius, ``r + sqrt(variance) (4 sqrt(d) + 2 sqrt(log(m^2 n)))``: valid, and looser than `norm`.

    Implements: Ozkara et al. 2023, Lemma 3; Ozkara et al. 2023, equations (43) to (45).
    """
    return r + jnp.sqrt(variance) * (4 * jnp.sqrt(float(dim)) + 2 * jnp.sqrt(-jnp.log(_tail(clients, samples))))


def _tail(clients: Scalar, samples: Scalar) -> Array:
    """1 / (m^2 n), kept below 1/2 for m = n = 1."""
    return jnp.minimum(1.0 / (jnp.asarray(clients, float) ** 2 * samples), 0.25)

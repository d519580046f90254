r"""James and Stein's estimator, shrinking towards the mean of all, for clients of equal standard errors.

.. math:: \hat\theta_i = \bar x + c\, (x_i - \bar x), \qquad c = \max\Big(0, 1 - \frac{(m - 3) s^2}{\sum_j (x_j - \bar
   x)^2}\Big)

Its total squared error is below that of x on average, whatever the theta_i, for m > 3 clients.

Reference: Efron and Morris 1975, "Data analysis using Stein's estimator and its generalizations", (1.3) and section 2.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from jaxpfl.core.types import Array
from jaxpfl.estimators.normal_means.fit import checked
from jaxpfl.support.errors import JaxpflError

LEAST_CLIENTS = 4


class Shrunken(NamedTuple):
    """Estimates [m], the weight c of a client's own estimate [], and the mean of all []."""

    mean: Array
    weight: Array
    center: Array


def james_stein(x: Any, s: Any) -> Shrunken:
    """Shrink towards the mean of all.

    Args:
      x: the clients' estimates, [m].
      s: their common standard error.

    Raises:
      JaxpflError: as `ebnm`; and for fewer than four clients, or standard errors that differ.
    """
    own, errors = checked(x, s, one=False)
    m = len(own)
    if m < LEAST_CLIENTS:
        raise JaxpflError(f"James and Stein's estimator needs at least {LEAST_CLIENTS} clients, got {m}")
    if not np.ndim(s) == 0:
        raise JaxpflError(f"James and Stein's estimator needs one s for all clients, got {np.shape(s)}: take ebnm")
    center = own.mean()
    spread = (((own - center) / errors) ** 2).sum()
    weight = jnp.maximum(0, 1 - (m - 3) / jnp.where(spread > 0, spread, 1)) * (spread > 0)
    return Shrunken(center + weight * (own - center), weight, center)

r"""Cochran's test of equal means, and the estimate that all clients share if they are.

With :math:`w_i = 1 / s_i^2` the pooled mean is :math:`M = \sum_i w_i x_i / \sum_i w_i`, of standard error
:math:`(\sum_i w_i)^{-1/2}`, and :math:`Q = \sum_i w_i (x_i - M)^2` is chi-square with m - 1 degrees of freedom if all
theta_i are equal.

References: Cochran 1954, "The combination of estimates from different experiments"; Higgins and Thompson 2002,
"Quantifying heterogeneity in a meta-analysis", for I^2.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.scipy.special import gammaincc

from jaxpfl.core import full_precision
from jaxpfl.core.types import Array
from jaxpfl.estimators.normal_means.fit import checked


class Homogeneity(NamedTuple):
    """Pooled mean and its standard error, Q with its degrees of freedom and p-value, and I^2, [] each.

    Attributes:
      mean, stderr: of all clients together, if they are alike.
      statistic: Q.
      degrees: m - 1.
      p_value: probability of a Q at least as large if all theta_i are equal.
      excess: I^2 = max(0, 1 - (m - 1) / Q), the share of the estimates' spread that errors do not explain.
    """

    mean: Array
    stderr: Array
    statistic: Array
    degrees: int
    p_value: Array
    excess: Array


@full_precision.products
def homogeneity(x: Any, s: Any) -> Homogeneity:
    """Test that all theta_i are equal; arguments and errors as those of `ebnm`. Jits and vmaps."""
    own, errors = checked(x, s, one=False)
    unit = errors.min()  # squares of tiny errors would leave the range of floats
    w = (unit / errors) ** 2
    mean = (w / w.sum()) @ own
    Q = (((own - mean) / errors) ** 2).sum()
    degrees = len(own) - 1
    excess = jnp.maximum(0, 1 - degrees / jnp.where(Q > 0, Q, 1)) * (Q > 0)
    return Homogeneity(mean, unit / jnp.sqrt(w.sum()), Q, degrees, gammaincc(degrees / 2, Q / 2), excess)

r"""Noise in every local step, as DP-AdaPeD is printed (Ozkara et al. 2023, section 3.3).

Each gradient of an uploaded quantity is clipped and noised before the client's step:

.. math:: \mu^+ = \mu - \eta_2 \Bigl( \frac{h}{\max(\|h\| / C_1, 1)} + N(0, \sigma_1^2 I) \Bigr), \qquad
   \psi^+ = \psi - \eta_3 \Bigl( \frac{k}{\max(|k| / C_2, 1)} + N(0, \sigma_2^2) \Bigr)

Formal guarantees: tau such steps of one client change the mean of K uploads by up to :math:`\tau \eta C / K`, not the
paper's :math:`\sqrt\tau \eta C / K`, so the same noise protects less than Theorem 5 states; the accountant uses
provable bounds alone. Clipping and noise once at the end of the round, the default of `Mechanism`, are more effective.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from jaxpfl.core.randomness import Purpose, stream
from jaxpfl.core.types import Array, Key, PyTree
from jaxpfl.privacy.clipping import clip
from jaxpfl.privacy.noise import add_gaussian
from jaxpfl.support.errors import JaxpflError


@dataclass(frozen=True)
class StepNoise:
    """Clipping norms and standard deviations of one local step.

    Reference: Ozkara et al. 2022, Figure 2.

    Attributes:
      clipping_norm, stddev: C_1 and sigma_1, of the gradient of the uploaded parameters.
      scale_clipping_norm, scale_stddev: C_2 and sigma_2, of the gradient of an uploaded scale such as psi.
      joint: clip and noise both gradients as one vector, with C_1 and sigma_1 (the 2022 text's experiments).
    """

    clipping_norm: float
    stddev: float
    scale_clipping_norm: float
    scale_stddev: float
    joint: bool = False

    def of_parameters(self, key: Key, gradient: PyTree) -> PyTree:
        """Clipped and noised gradient of the parameters; ``key`` is that of the step."""
        return _released(stream(key, Purpose.RELEASE_NOISE), gradient, self.clipping_norm, self.stddev)

    def of_scale(self, key: Key, gradient: Array) -> Array:
        """Clipped and noised gradient of a scale, []."""
        own = stream(key, Purpose.SCALE_NOISE)
        return _released(own, gradient, self.scale_clipping_norm, self.scale_stddev)


def _released(key: Key, gradient: PyTree, limit: float, stddev: float) -> PyTree:
    for leaf in jax.tree.leaves(gradient):
        if jnp.finfo(leaf.dtype).bits < 32:
            # Rounding to a narrow type would remove a client's share of the noise.
            raise JaxpflError(f"noise = per_step needs a model in float32, got {leaf.dtype}: take central noise")
    clipped, _ = clip(gradient, jnp.asarray(limit))
    return add_gaussian(key, clipped, stddev)

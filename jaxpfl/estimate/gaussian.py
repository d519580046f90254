"""The Gaussian study: local, global, personalised and private estimates of simulated clients' means."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxpfl.compression import quantizers
from jaxpfl.errors import JaxpflError
from jaxpfl.estimate import settings
from jaxpfl.estimate.repetitions import Measured, gains, mean_square, measure, repeat
from jaxpfl.estimate.settings import Mechanism
from jaxpfl.estimators import base, gaussian, gaussian_closed_form, radius, release
from jaxpfl.estimators.base import Estimator
from jaxpfl.estimators.release import Release
from jaxpfl.types import Array, Key


@dataclass(frozen=True)
class GaussianSettings:
    """X_ij ~ N(theta_i, sx2 I), theta_i ~ N(mu, st2 I); the defaults are those of the paper's Figure 1a."""

    clients: int = 10_000
    """m."""
    samples: int = 15
    """n, of each client."""
    sigma_theta: float = 0.1
    """Standard deviation of the clients' parameters, in each dimension."""
    sigma_x: float = 0.5
    """Standard deviation of a sample about its client's parameter."""
    dim: int = 1
    """d."""
    mean: float = 0.0
    """mu, in each dimension."""
    radius: float = 1.0
    """r: what is publicly known of mu, |mu| <= r in each dimension; messages are clipped by it."""
    repetitions: int = 60
    """Independent repetitions, for the standard errors."""
    seed: int = 0
    """Of all randomness."""
    epsilon: float | None = None
    """Local privacy of each client's message; none unless given."""
    delta: float = 1e-5
    """Of local privacy (the Gaussian mechanisms)."""
    mechanism: Mechanism = "analytic"
    """analytic (Balle and Wang 2018), printed (the paper's calibration), or one-bit (pure, one dimension)."""
    bits: int | None = None
    """Quantise each entry of a message to so many bits."""

    def check(self) -> None:
        """Raises `JaxpflError` for what cannot be simulated, or not be private."""
        settings.at_least("clients", self.clients, 2)
        for name in ("samples", "dim", "repetitions"):
            settings.at_least(name, getattr(self, name), 1)
        settings.at_least("sigma_theta", self.sigma_theta, 0)
        settings.at_least("sigma_x", self.sigma_x, 0)
        settings.above_zero("radius", self.radius)
        if not abs(self.mean) <= self.radius:
            raise JaxpflError(f"mean must be within the radius of {self.radius:g}, got {self.mean}")
        settings.privacy(self.epsilon, self.delta)
        if self.bits is not None:
            quantizers.check_bits(self.bits)
        if self.mechanism == "one-bit" and self.dim > 1:
            raise JaxpflError(f"mechanism one-bit is for one dimension, got dim {self.dim}: take analytic")


def run(given: GaussianSettings) -> dict[str, Any]:
    """Simulates, and says each estimator's error beside its closed form.

    Returns:
      ``mse`` and ``gains`` by estimator, ``gain_over_local`` of the personalised one, and what was simulated.
    """
    given.check()
    estimators, exact = contenders(given)
    errors = simulate(given, estimators)
    measured = measure(errors, exact)
    return {
        "study": "gaussian",
        "settings": {name: value for name, value in vars(given).items()},
        "mse": {name: row.as_json() for name, row in measured.items()},
        "gain_over_local": gains(errors)["personalized"].mean,
        "gains": {name: row.as_json() for name, row in gains(errors).items()},
        "bounds": _bounds(given),
        "release": describe_release(given),
    }

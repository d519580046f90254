"""Settings of the Gaussian study, and those that its theory alone needs."""

from __future__ import annotations

import warnings
from dataclasses import dataclass

import jax

from jaxpfl.core import checks
from jaxpfl.estimators import radius
from jaxpfl.studies.settings import NOT_PRIVATE, LocalMechanism, at_least, check_privacy, check_uploads, refuse_given
from jaxpfl.support.errors import JaxpflError, JaxpflWarning
from jaxpfl.uploads.compression import quantizers


@dataclass(frozen=True)
class GaussianPopulation:
    """Clients and their messages, as far as theory needs them; the defaults are those of the paper's Figure 1a."""

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
    radius: float = 1.0
    """r: public bound |mu| <= r in each dimension, which determines the clipping of messages."""
    epsilon: float | None = None
    """Local privacy of each client's message; none unless given."""
    delta: float = 1e-5
    """delta of local privacy (the Gaussian mechanisms)."""
    mechanism: LocalMechanism = "analytic"
    """analytic (Balle and Wang 2018); for one dimension printed (the paper's calibration), one-bit (pure), or discrete
    (Canonne et al. 2020: whole noise on a quantiser's levels)."""
    bits: int | None = None
    """Bits to which each entry of a message is quantised; 8 for discrete noise unless given."""

    def check(self) -> None:
        """Check the settings.

        Raises:
          JaxpflError: the name, its value, and what is allowed.
        """
        at_least("clients", self.clients, 2)
        for name in ("samples", "dim"):
            checks.count(name, getattr(self, name))
        at_least("sigma_theta", self.sigma_theta, 0)
        for name in ("sigma_x", "radius"):  # gains are shares of the error that sigma_x makes
            checks.positive(name, getattr(self, name))
        check_privacy(self.epsilon, self.delta)
        if self.bits is not None:
            quantizers.check_bits(self.bits)
        if self.dim > 1 and self.mechanism != "analytic":
            raise JaxpflError(f"mechanism {self.mechanism} is for one dimension, got dim {self.dim}: take analytic")
        if self.epsilon is None:
            refuse_given(self, ("mechanism", "delta"), NOT_PRIVATE)
        if self.mechanism == "printed" and self.epsilon is not None and self.epsilon >= 1:
            text = f"mechanism printed is shown to be private for epsilon < 1 only, got {self.epsilon:g}: take analytic"
            warnings.warn(text, JaxpflWarning, stacklevel=3)

    @property
    def s2(self) -> float:
        """Variance of a client's mean about its parameter."""
        return self.sigma_x**2 / self.samples

    @property
    def st2(self) -> float:
        return self.sigma_theta**2

    @property
    def levels_bits(self) -> int:
        """Bits of the quantiser to whose levels discrete noise is added."""
        return 8 if self.bits is None else self.bits

    @property
    def bound(self) -> float:
        """Clipping bound of an entry, or for d > 1 under local privacy of the norm."""
        spread = self.st2 + self.s2
        with jax.ensure_compile_time_eval():
            if self.dim == 1:
                return float(radius.gaussian(self.radius, spread, self.clients, self.samples))
            reach = self.radius * self.dim**0.5
            return float(radius.norm(reach, spread, self.dim, self.clients, self.samples))


@dataclass(frozen=True)
class GaussianSettings(GaussianPopulation):
    """X_ij ~ N(theta_i, sx2 I), theta_i ~ N(mu, st2 I)."""

    mean: float = 0.0
    """mu, in each dimension."""
    uploads: int | None = None
    """K: number of clients that send; the others personalise as well. All unless given."""
    repetitions: int = 60
    """Independent repetitions, for the standard errors."""
    seed: int = 0
    """Seed of every random draw."""

    def check(self) -> None:
        """Check the settings.

        Raises:
          JaxpflError: the name, its value, and what is allowed.
        """
        super().check()
        checks.count("repetitions", self.repetitions)
        if not abs(self.mean) <= self.radius:
            raise JaxpflError(f"mean must be within the radius of {self.radius:g}, got {self.mean}")
        check_uploads(self.uploads, self.clients)

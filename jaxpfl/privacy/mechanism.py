"""A mechanism of user-level differential privacy: its clipping, its noise and the seed of its randomness."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields

import numpy as np

from jaxpfl.core import checks
from jaxpfl.core.protocol import NoiseStream
from jaxpfl.core.settings import about, documents_itself
from jaxpfl.privacy import banded
from jaxpfl.privacy.noise_settings import NOISE_SEEDS, NoiseSettings
from jaxpfl.privacy.refusals import Refusal
from jaxpfl.privacy.step_noise import StepNoise
from jaxpfl.support.errors import JaxpflError, shown, unknown_name

_LEAST_STDDEV = 1e-30
"""Least standard deviation whose lattice single precision can represent, with shares of a million clients."""


@documents_itself
@dataclass(frozen=True)
class Mechanism(NoiseSettings):
    """A privacy mechanism: clipping and noise.

    Implements: Ozkara et al. 2023, section 3.3.
    Reference: Ozkara et al. 2022, Figure 3.

    Raises:
      JaxpflError: for a value out of range, or adaptive clipping without central noise.

    Examples:
      >>> from jaxpfl import participation, privacy
      >>> mechanism = Mechanism(noise_multiplier=2.0, clipping_norm=0.5)
      >>> plan = privacy.plan_of(mechanism, participation.poisson(1000, rate=0.1), rounds=100)
      >>> round(plan.epsilon(delta=1e-4), 3)
      1.966
    """

    noise_multiplier: float | tuple[float, ...] = field(
        metadata=about("z; 0 clips only. One number, or one for each run.")
    )
    coefficients: tuple[float, ...] | None = field(
        default=None,
        metadata=about("For banded: the diagonals of C, of norm 1; the best ones for the run's rounds unless given."),
    )

    def __post_init__(self) -> None:
        if self.noise_seed not in NOISE_SEEDS:
            raise unknown_name("noise_seed", str(self.noise_seed), NOISE_SEEDS)
        z = np.asarray(self.noise_multiplier, float)
        if not (np.isfinite(z).all() and (z >= 0).all()):
            raise JaxpflError(f"noise_multiplier must be >= 0 and finite, got {self.noise_multiplier}")
        for limit in np.ravel(self.clipping_norm):
            checks.positive("clipping_norm", float(limit))
        stddevs = np.ravel(z)[:, None] * np.ravel(np.asarray(self.clipping_norm, float))
        if ((stddevs > 0) & (stddevs < _LEAST_STDDEV)).any():
            raise JaxpflError(
                f"noise_multiplier * clipping_norm, the noise's standard deviation, must be at least {_LEAST_STDDEV:g} "
                f"or 0, got {stddevs.min():g}: single precision holds no smaller noise"
            )
        if self.noise not in ("central", "distributed", "per_step", "banded"):
            raise JaxpflError(f"noise must be central, distributed, per_step or banded, got {shown(self.noise)}")
        self._check_bands()
        if self.noise != "per_step" and (self.joint or self.scale_clipping_norm is not None):
            raise JaxpflError("scale_clipping_norm and joint are for noise = per_step")
        if self.noise == "per_step" and (z.ndim or np.ndim(self.clipping_norm)):
            raise JaxpflError("noise = per_step takes one noise_multiplier and one clipping_norm for all runs")
        if self.noise == "distributed" and self.min_uploads is None:
            raise JaxpflError("noise = distributed needs min_uploads, the least number of uploads of a round")
        if self.by_server and self.min_uploads is not None:
            raise JaxpflError("min_uploads is for noise that the clients add: noise = distributed or per_step")
        if self.min_uploads is not None and self.min_uploads < 1:
            raise JaxpflError(f"min_uploads must be at least 1, got {self.min_uploads}")
        if self.quantile is not None:
            self._check_adaptive(self.quantile, z.max())

    def _check_bands(self) -> None:
        if self.noise != "banded":
            if self.bands is not None or self.coefficients is not None:
                raise JaxpflError(f"bands and coefficients are for noise = banded, got noise = {self.noise}")
            return
        if self.noise_seed == "secret":
            raise Refusal.SECRET_BANDS.error()
        if self.bands is not None:
            checks.count("bands", self.bands)
        if self.coefficients is not None:
            if self.bands is None:
                raise JaxpflError("coefficients need their number: give bands")
            banded.check_coefficients(self.coefficients, self.bands)

    @property
    def by_server(self) -> bool:
        """True if the server adds the noise, to the sum."""
        return self.noise in ("central", "banded")

    def _check_adaptive(self, quantile: float, z: float) -> None:
        checks.probability("quantile", quantile)
        checks.positive("quantile_lr", self.quantile_lr)
        if self.noise != "central":
            raise JaxpflError(f"adaptive clipping has central noise only: leave out quantile, or noise = {self.noise}")
        if self.count_stddev is None or not 0 < self.count_stddev < math.inf:
            raise JaxpflError(f"count_stddev must be > 0 and finite, got {self.count_stddev}")
        if 2 * self.count_stddev <= z:
            raise JaxpflError(
                f"count_stddev must be above noise_multiplier / 2 = {z / 2:g}, got {self.count_stddev}: the count "
                "alone would cost more than the whole budget"
            )

    @property
    def noise_multiplier_of_sum(self) -> np.ndarray:
        """The sum's noise over C for which sum and count together are as private as z (Andrew et al., Theorem 1)."""
        z = np.asarray(self.noise_multiplier, float)
        if self.quantile is None:
            return z
        assert self.count_stddev is not None
        return z / np.sqrt(1 - (z / (2 * self.count_stddev)) ** 2)

    def least_uploads(self, expected_cohort: float) -> int:
        """K_min, the uploads that a round needs for its sum to be released; 0 if there is no minimum."""
        if self.by_server:
            return 0
        return self.min_uploads if self.min_uploads is not None else round(expected_cohort)

    @property
    def stream(self) -> NoiseStream | None:
        """Name of the noise stream, which separates its noise from that of other mechanisms; None without noise.

        Numbers that are one per run are left out, since they are hyper-parameters.
        """
        if not np.any(self.noise_multiplier):
            return None
        settings = {field.name: getattr(self, field.name) for field in fields(self)}
        if self.noise != "per_step":
            del settings["noise_multiplier"], settings["clipping_norm"]
        if self.noise != "banded":
            del settings["bands"], settings["coefficients"]
        return NoiseStream(repr(settings), self.noise_seed == "secret")

    @property
    def step_noise(self) -> StepNoise | None:
        """Noise of local steps, for `LocalWork`; None unless the noise is added in every step."""
        if self.noise != "per_step":
            return None
        z, c1 = float(np.asarray(self.noise_multiplier)), float(np.asarray(self.clipping_norm))
        c2 = c1 if self.scale_clipping_norm is None else self.scale_clipping_norm
        return StepNoise(c1, z * c1, c2, z * c2, self.joint)

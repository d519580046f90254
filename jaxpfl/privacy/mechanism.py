r"""Mechanism for user-level differential privacy: settings, clipping, noise and seed.

With noise in every step, a client clips its gradients h for the global model mu and k for the scale psi (if psi is
uploaded), and adds noise to them. With learning rates eta, clipping norms C and standard deviations sigma, its step is
then

.. math:: \mu^+ = \mu - \eta_2 \Bigl( \frac{h}{\max(\|h\| / C_1, 1)} + N(0, \sigma_1^2 I) \Bigr), \qquad
   \psi^+ = \psi - \eta_3 \Bigl( \frac{k}{\max(|k| / C_2, 1)} + N(0, \sigma_2^2) \Bigr)

Formal guarantees: tau such steps by one client, with learning rate :math:`\eta` and clipping norm C, change the mean of
K uploads by up to :math:`\tau \eta C / K`. Theorem 5 of Ozkara et al. 2023 assumes :math:`\sqrt\tau \eta C / K`, so the
noise protects less than the theorem states. The accountants pld and rdp use only provable bounds. The default of
`Mechanism`, clipping and noise once at the end of the round, is more effective.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, fields
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np

from jaxpfl.core import checks, exclusions
from jaxpfl.core.protocol import NoiseStream
from jaxpfl.core.randomness import Purpose, stream
from jaxpfl.core.settings import about, documents_itself, read_help, setting
from jaxpfl.core.types import Array, Key, PyTree
from jaxpfl.privacy import descriptions
from jaxpfl.privacy.noise import add_gaussian, clip
from jaxpfl.support.errors import JaxpflError, shown, unknown_name

NOISE_SEEDS = ("run", "secret")


@read_help
@dataclass(frozen=True)
class NoiseSettings:
    """Settings for the clipping of uploads and for the noise that is added to them."""

    noise_multiplier: float | tuple[float, ...] | None = setting(None, text=float | None)
    """Noise multiplier z: standard deviation of the noise divided by the clipping norm; 0 only clips, without a claim.

    One number, or one for each run.
    """
    clipping_norm: float | tuple[float, ...] = setting(1.0, text=float)
    """Clipping norm C (L2) for each upload as a whole (parameters, scales, ...); with quantile, the initial norm.

    One number, or one for each run.
    """
    noise: Literal["central", "distributed", "per_step", "banded"] = setting("central", text=str)
    """Where noise is added: central (the server adds it to the sum), distributed (each client adds a share with
    variance z^2 C^2 / min_uploads, as under secure aggregation), per_step (each client adds it in every local step, as
    in DP-AdaPeD's paper; norms and noise then apply to a step) or banded (the server adds noise correlated with earlier
    rounds' noise, so that much of it cancels; clients take turns)."""
    min_uploads: int | None = setting(None)
    """Smallest number of uploads with which a round releases anything, if the clients add the noise. This number is
    public. It is required for distributed; for per_step, the default is the expected cohort size."""
    quantile: float | None = setting(None)
    """Adapt the clipping norm to this quantile of the uploads' norms (Andrew et al. 2021). Each client also reports
    whether its upload's norm is below the clipping norm; the noise multiplier includes the cost of this count."""
    quantile_lr: float = setting(0.2)
    """Learning rate of the adaptive clipping norm; its steps are multiplicative."""
    count_stddev: float | None = setting(None)
    """Standard deviation of the noise on the number of uploads below the clipping norm. The default is the larger of
    cohort / 20 and the noise multiplier; a Mechanism has no default."""
    scale_clipping_norm: float | None = setting(None)
    """For per_step: the clipping norm for the gradient of psi (default: clipping_norm)."""
    joint: bool = setting(False)
    """For per_step: clip the gradients of parameters and psi as one vector, and add noise to that vector."""
    noise_seed: Literal["run", "secret"] = setting("run", text=str)
    """Source of the randomness of cohorts and noise: run (the seed and all settings, so that the run can be repeated)
    or secret (the operating system; only the run's state and checkpoints contain the secret seed, until the run ends).
    Use secret for a model that you publish."""
    bands: int | None = setting(None, unless_given="the cycle of the cohorts")
    """For banded: number of bands b of the matrix whose inverse correlates the noise, at most the
    number of rounds between two turns of a client. The server's state contains b - 1 noise vectors of the upload's
    size."""


_released_gradients: ContextVar[list[PyTree]] = ContextVar("gradients released while an update is traced")


@contextmanager
def released_gradients() -> Iterator[list[PyTree]]:
    """Collect, while the block is traced, the gradients to which noise is added."""
    token = _released_gradients.set(gradients := [])
    try:
        yield gradients
    finally:
        _released_gradients.reset(token)


@dataclass(frozen=True)
class StepNoise:
    """Clipping norms and standard deviations of the noise in one local step.

    Reference: Ozkara et al. 2023, section 3.3; Ozkara et al. 2022, Figure 2.

    Attributes:
      clipping_norm, stddev: C_1 and sigma_1, for the gradient of the uploaded parameters.
      scale_clipping_norm, scale_stddev: C_2 and sigma_2, for the gradient of an uploaded scale such as psi.
      joint: whether to clip both gradients as one vector and add noise to this vector, with C_1 and sigma_1, as in the
        experiments of Ozkara et al. 2022.
    """

    clipping_norm: float
    stddev: float
    scale_clipping_norm: float
    scale_stddev: float
    joint: bool = False

    def release_gradient(self, key: Key, gradient: PyTree) -> PyTree:
        """Clip the parameters' gradient and add noise to it; ``key`` is the step's key."""
        _released_gradients.get([]).append(gradient)  # outside `released_gradients`, the list is discarded
        return _released(stream(key, Purpose.RELEASE_NOISE), gradient, self.clipping_norm, self.stddev, "a step")

    def release_scale(self, key: Key, gradient: Array) -> Array:
        """Clip the gradient of a scale such as psi, [], and add noise to it; ``key`` is the step's key."""
        own = stream(key, Purpose.SCALE_NOISE)
        return _released(own, gradient, self.scale_clipping_norm, self.scale_stddev, "a step of psi")


def _released(key: Key, gradient: PyTree, limit: float, stddev: float, protects: str) -> PyTree:
    for leaf in jax.tree.leaves(gradient):
        if jnp.finfo(leaf.dtype).bits < 32:
            # Rounding to a dtype of few bits could remove a client's share of the noise.
            raise JaxpflError(f"noise = per_step requires a model in float32, got {leaf.dtype}: use central noise")
    clipped, _ = clip(gradient, jnp.asarray(limit))
    return add_gaussian(key, clipped, stddev, protects)


_LEAST_STDDEV = 1e-30
"""Smallest standard deviation of noise: float32 can still represent the lattice for one client's share among a million
clients.
"""


@documents_itself
@dataclass(frozen=True)
class Mechanism(NoiseSettings):
    """Privacy mechanism: clipping and noise.

    Implements: Ozkara et al. 2023, section 3.3.
    Reference: Ozkara et al. 2022, Figure 3.

    Raises:
      JaxpflError: for a value out of range, or for a combination of settings that is not supported.

    Examples:
      >>> from jaxpfl import participation, privacy
      >>> mechanism = Mechanism(noise_multiplier=2.0, clipping_norm=0.5)
      >>> plan = privacy.plan_of(mechanism, participation.poisson(1000, rate=0.1), rounds=100)
      >>> round(plan.epsilon(delta=1e-4), 3)
      1.966
    """

    noise_multiplier: float | tuple[float, ...] = field(metadata=about())
    """Noise multiplier z; 0 clips only. One number, or one for each run."""
    coefficients: tuple[float, ...] | None = field(default=None, metadata=about())
    """For banded: values c of the noise matrix's diagonals, with norm 1; by default, the best for the run's rounds."""

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
                f"noise_multiplier * clipping_norm, the noise's standard deviation, must be 0 or at least "
                f"{_LEAST_STDDEV:g}, got {stddevs.min():g}: single precision cannot represent smaller noise"
            )
        if self.noise not in ("central", "distributed", "per_step", "banded"):
            raise JaxpflError(f"noise must be central, distributed, per_step or banded, got {shown(self.noise)}")
        exclusions.check(
            {
                "noise": self.noise,
                "client-side noise": not self.server_adds and self.noise,
                "noise_seed": self.noise_seed,
                "quantile": self.quantile,
                "several noise multipliers or norms": bool(z.ndim or np.ndim(self.clipping_norm)),
            }
        )
        if self.noise != "banded" and (self.bands is not None or self.coefficients is not None):
            raise JaxpflError(f"bands and coefficients require noise = banded, got noise = {self.noise}")
        if self.bands is not None:
            checks.count("bands", self.bands)
        if self.coefficients is not None:
            descriptions.check_coefficients(self.coefficients)
        if self.noise != "per_step" and (self.joint or self.scale_clipping_norm is not None):
            raise JaxpflError(f"scale_clipping_norm and joint require noise = per_step, got noise = {self.noise}")
        if self.noise == "distributed" and self.min_uploads is None:
            raise JaxpflError("noise = distributed requires min_uploads (smallest number of uploads), got None")
        if self.server_adds and self.min_uploads is not None:
            raise JaxpflError(f"min_uploads requires noise = distributed or per_step, got noise = {self.noise}")
        if self.min_uploads is not None and self.min_uploads < 1:
            raise JaxpflError(f"min_uploads must be at least 1, got {self.min_uploads}")
        if self.quantile is not None:
            checks.probability("quantile", self.quantile)
            checks.positive("quantile_lr", self.quantile_lr)
            if self.count_stddev is None or not 0 < self.count_stddev < math.inf:
                raise JaxpflError(f"quantile requires count_stddev, a finite number > 0, got {self.count_stddev}")
            if 2 * self.count_stddev <= z.max():
                raise JaxpflError(
                    f"count_stddev must be above noise_multiplier / 2 = {z.max() / 2:g}, got {self.count_stddev}: the "
                    "count alone would cost more than the whole budget"
                )

    @property
    def server_adds(self) -> bool:
        """True if the server adds the noise to the sum."""
        return self.noise in ("central", "banded")

    @property
    def noise_multiplier_of_sum(self) -> np.ndarray:
        """Noise multiplier of the sum alone, such that the sum and the noisy count of adaptive clipping together have
        the noise multiplier z.

        Reference: Andrew et al. 2021, Theorem 1.
        """
        z = np.asarray(self.noise_multiplier, float)
        if self.quantile is None:
            return z
        assert self.count_stddev is not None
        return z / np.sqrt(1 - (z / (2 * self.count_stddev)) ** 2)

    def least_uploads(self, expected_cohort: float) -> int:
        """Smallest number of uploads K_min for which a round releases its sum; 0 if there is no minimum."""
        if self.server_adds:
            return 0
        return self.min_uploads if self.min_uploads is not None else round(expected_cohort)

    @property
    def stream(self) -> NoiseStream | None:
        """Noise stream, with a name that differs between mechanisms; None without noise.

        If noise is added in every step, the name includes the noise multiplier and the clipping norm. Otherwise they
        are hyper-parameters, which may differ between runs of one program.
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
        """Noise in local steps, for `LocalWork`; None unless noise is added in every step."""
        if self.noise != "per_step":
            return None
        z, c1 = float(np.asarray(self.noise_multiplier)), float(np.asarray(self.clipping_norm))
        c2 = c1 if self.scale_clipping_norm is None else self.scale_clipping_norm
        return StepNoise(c1, z * c1, c2, z * c2, self.joint)

r"""Descriptions of noise and client sampling, the inputs of the privacy accountant.

A description consists of plain numbers; the mechanism itself is part of the compiled round. Every mechanism releases a
sum of clipped uploads with Gaussian noise. The accountant therefore needs only the noise multiplier z: the standard
deviation of the noise, divided by the largest change of the sum when one client is added (or its data are zeroed).

Several Gaussian releases about the same client, with noise multipliers z_j, are equivalent to one release with :math:`z
= (\sum_j z_j^{-2})^{-1/2}`, even if a later release depends on the outcome of an earlier one (Dong et al. 2022,
Corollary 3.3).

**Banded noise.** Let x be the rounds' releases without noise, and A the lower triangular matrix of ones. The server's
model is a prefix sum of the releases, an entry of A x. Let the entries of Z be independent N(0, s^2). Adding the noise
:math:`C^{-1} Z` to x is as private as adding Z to C x. If C is lower triangular, this holds even if x is chosen
adaptively (Denisov et al. 2022). Here C is a Toeplitz matrix with b bands: :math:`C_{ij} = c_{i-j}` for :math:`0 \le i
- j < b`, otherwise 0, and :math:`\|c\| = 1`. Columns of C that are at least b apart have no non-zero row in common.
Therefore a client that takes part in k rounds, at least b apart, changes C x by at most :math:`\sqrt k` times its
clipping norm. The mean squared error of the R prefix sums is

.. math:: \frac{s^2}{R} \sum_{t < R} \sum_{i \le t} w_i^2, \qquad w = A C^{-1} e_1

where e_1 is the first unit vector. With independent noise (C = I) the error is :math:`s^2 (R + 1) / 2`.

Reference: Choquette-Choo et al. 2023, "(Amplified) Banded Matrix Factorization: A unified approach to private
training", https://arxiv.org/abs/2306.08153.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import ClassVar, TypeAlias

import numpy as np

from jaxpfl.core import checks, exclusions
from jaxpfl.support.errors import JaxpflError


def combined(noise_multipliers: Iterable[float]) -> float:
    """Noise multiplier of several Gaussian releases about one client together; 0 if any of them has no noise."""
    squares = [z**2 for z in noise_multipliers]
    return 0.0 if min(squares) == 0 else sum(1 / s for s in squares) ** -0.5


@dataclass(frozen=True)
class CentralNoise:
    r"""Noise :math:`N(0, z^2 C^2 I)` that the server adds to the sum of uploads clipped to C.

    Attributes:
      noise_multiplier: noise multiplier z of the sum; 0 for clipping without noise.
      clipping_norm: clipping norm C, for the privacy statement; None for adaptive clipping.
      count_stddev: for adaptive clipping (Andrew et al. 2021), standard deviation s of the noise on the number of
        uploads with a norm below C; otherwise None. Each client sends 1/2 or -1/2, so the release of this number has
        the noise multiplier 2 s. Both releases together have the noise multiplier :math:`(z^{-2} + (2 s)^{-2})^{-1/2}`
        (Andrew et al. 2021, Theorem 1).
      releases: number of sums over the cohort that a round releases; several for EM with several iterations.
      coefficients: coefficients c of banded noise (see above and `banded_coefficients`), with norm 1; (1,) for
        independent noise. Banded noise is correlated between rounds, and z is the noise multiplier of Z.

    Raises:
      JaxpflError: for a value out of range, or if banded noise has several releases or a noisy count.
    """

    noise_multiplier: float
    clipping_norm: float | None = None
    count_stddev: float | None = None
    releases: int = 1
    coefficients: tuple[float, ...] = (1.0,)

    def __post_init__(self) -> None:
        checks.not_negative("noise_multiplier", self.noise_multiplier)
        if self.clipping_norm is not None:
            checks.positive("clipping_norm", self.clipping_norm)
        if self.count_stddev is not None:
            checks.positive("count_stddev", self.count_stddev)
        checks.count("releases", self.releases)
        check_coefficients(self.coefficients)
        exclusions.check(
            {
                "noise": "banded" if self.bands > 1 else None,
                "several releases in a round": self.releases > 1,
                "quantile": self.count_stddev is not None,
            }
        )

    @property
    def bands(self) -> int:
        """Number of bands b; 1 for independent noise."""
        return len(self.coefficients)

    @property
    def multiplier(self) -> float:
        """Noise multiplier of a round, for all its releases together."""
        count = [] if self.count_stddev is None else [2 * self.count_stddev]
        return combined([self.noise_multiplier / math.sqrt(self.releases), *count])

    def scale_to(self, multiplier: float) -> CentralNoise:
        """Scale the noise on the sum so that a round has this noise multiplier; the noise on the count is unchanged.

        Raises:
          JaxpflError: if the release of the count alone costs at least as much privacy as the whole round may cost.
        """
        rest = multiplier**-2
        if self.count_stddev is not None:
            rest -= (2 * self.count_stddev) ** -2
            if rest <= 0:
                raise JaxpflError(
                    f"count_stddev must be above noise_multiplier / 2 = {multiplier / 2:g}, got {self.count_stddev}"
                )
        return replace(self, noise_multiplier=math.sqrt(self.releases / rest))


@dataclass(frozen=True)
class DistributedNoise:
    r"""Noise that the clients add: each adds a share :math:`N(0, z^2 C^2 / K_{min} I)`, and only the sum is visible.

    Secure aggregation hides individual uploads. A round with fewer than K_min uploads releases nothing, so every
    release has a noise multiplier of at least z. A client's share of the noise is part of its upload. If a client does
    not take part, its share is visibly missing. Therefore a client's data are protected, but its participation is not
    (the relation zero-out).

    Attributes:
      noise_multiplier: noise multiplier z of the sum of K_min uploads; 0 for clipping without noise.
      min_uploads: least number K_min of uploads in a release, public; no more than a round has clients.
      clipping_norm: clipping norm C, for the privacy statement.
      alone: whether each upload is visible by itself, as with compressed uploads. The client is then protected only by
        its own share of the noise, with noise multiplier :math:`z / \sqrt{K_{min}}`.

    Raises:
      JaxpflError: for a value out of range.
    """

    noise_multiplier: float
    min_uploads: int
    clipping_norm: float | None = None
    alone: bool = False

    def __post_init__(self) -> None:
        checks.not_negative("noise_multiplier", self.noise_multiplier)
        checks.count("min_uploads", self.min_uploads)
        if self.clipping_norm is not None:
            checks.positive("clipping_norm", self.clipping_norm)

    @property
    def multiplier(self) -> float:
        """Noise multiplier of a round."""
        return self.noise_multiplier / self._shares

    def scale_to(self, multiplier: float) -> DistributedNoise:
        """Scale the noise so that a round has this noise multiplier."""
        return replace(self, noise_multiplier=multiplier * self._shares)

    @property
    def _shares(self) -> float:
        """Standard deviation of the noise on the sum, divided by the standard deviation of the noise that protects a
        client.
        """
        return math.sqrt(self.min_uploads) if self.alone else 1.0


@dataclass(frozen=True)
class PerStepNoise:
    r"""Noise of DP-AdaPeD (Ozkara et al. 2023): in every local step each client clips its gradients and adds noise.

    With clipping norm C and noise of standard deviation s, the tau steps of one client are tau adaptive Gaussian
    releases. Together they have the noise multiplier z, however the client computes its upload from them:

    .. math:: z^{-2} = \tau \; C^2 / s^2

    If each step only adds its noisy gradient to the upload (``linear``), a client is also protected by the noise of all
    K clients. A client's steps together change the sum by up to tau C. The other clients' steps do not depend on this
    client, so they may be anything. Then

    .. math:: z^{-2} = \min(\tau, \tau^2 / K) \; C^2 / s^2

    The paper assumes that the average has noise of variance tau s^2/K. This is not true, because a client's later
    gradients depend on its earlier noise and may cancel that noise. With z from either formula, a round is at least as
    private as one Gaussian release with noise multiplier z. The accounting of sampled rounds requires this. The noisy
    gradients of a client's model mu and scale psi, with noise multipliers z_1 and z_2, count as one release with
    :math:`z = (z_1^{-2} + z_2^{-2})^{-1/2}`.

    The paper's update of psi is not linear. The gradient of psi depends on mu, including the noise of the same step, so
    the sum of the clients' psi reveals that noise. Moreover, psi contains no noise after a client has raised it to its
    lower bound.

    Attributes:
      clips: clipping norms C1 for mu, and C2 for psi if it is uploaded.
      stddevs: standard deviations of the noise in one step: s1, and s2 if psi is uploaded.
      steps: number of local steps tau.
      min_uploads: least number K of uploads; no more than a round has clients. A round with fewer releases nothing.
      linear: whether the second formula applies. It requires plain gradient steps without momentum, and one learning
        rate within a round. The upload must not change after its last noise is added, and every gradient of a step must
        be computed before any noise of that step is added.

    Raises:
      JaxpflError: for a value out of range, or if ``clips`` and ``stddevs`` have different lengths.
    """

    clips: tuple[float, ...]
    stddevs: tuple[float, ...]
    steps: int
    min_uploads: int
    linear: bool = False

    def __post_init__(self) -> None:
        if not 1 <= len(self.clips) == len(self.stddevs):
            raise JaxpflError(f"clips and stddevs must be equally long, got {len(self.clips)} and {len(self.stddevs)}")
        for i, (c, s) in enumerate(zip(self.clips, self.stddevs, strict=True), 1):
            checks.positive(f"c{i}", c)
            checks.not_negative(f"sigma{i}", s)
        checks.count("steps", self.steps)
        checks.count("min_uploads", self.min_uploads)

    @property
    def clipping_norm(self) -> tuple[float, ...]:
        """Clipping norms C1, and C2 if psi is uploaded."""
        return self.clips

    @property
    def step_multiplier(self) -> float:
        """Noise multiplier of one client in one step, for mu and psi together."""
        return combined(s / c for c, s in zip(self.clips, self.stddevs, strict=True))

    @property
    def multiplier(self) -> float:
        """Noise multiplier of a round."""
        hidden_by = max(self.min_uploads / self.steps, 1) if self.linear else 1
        return self.step_multiplier * math.sqrt(hidden_by / self.steps)

    def scale_to(self, multiplier: float) -> PerStepNoise:
        """Scale all standard deviations by one factor so that a round has this noise multiplier.

        Raises:
          JaxpflError: if all noise is zero, because it cannot be scaled.
        """
        if not self.multiplier:
            raise JaxpflError(f"stddevs must be > 0 to be scaled to noise multiplier {multiplier}, got {self.stddevs}")
        factor = multiplier / self.multiplier
        return replace(self, stddevs=tuple(factor * s for s in self.stddevs))


Noise: TypeAlias = CentralNoise | DistributedNoise | PerStepNoise


@dataclass(frozen=True)
class Full:
    """Full participation: every client takes part in every round.

    Attributes:
      num_clients: number of clients m; None if unknown.
    """

    num_clients: int | None = None
    name: ClassVar[str] = "full"
    rate: ClassVar[float] = 1.0

    def __post_init__(self) -> None:
        if self.num_clients is not None:
            checks.count("clients", self.num_clients)

    @property
    def cohort(self) -> int | None:
        """Number of clients m, if known."""
        return self.num_clients


@dataclass(frozen=True)
class Poisson:
    """Poisson sampling: every client takes part independently with probability ``rate``.

    Attributes:
      rate: probability q that a client takes part in a round.
      num_clients: number of clients m; required with a cap.
      cap: largest size of a cohort. A larger draw is reduced to a random subset of this size. None for no limit.

    Raises:
      JaxpflError: for a value out of range, or a cap without the number of clients.
    """

    rate: float
    num_clients: int | None = None
    cap: int | None = None
    name: ClassVar[str] = "poisson"

    def __post_init__(self) -> None:
        checks.rate("sampling_rate", self.rate)
        if self.num_clients is not None:
            checks.count("clients", self.num_clients)
        if self.cap is not None:
            checks.count("cap", self.cap)
            if self.num_clients is None:
                raise JaxpflError("num_clients is required if cap is set, got None")

    @property
    def truncated(self) -> bool:
        """True if a cohort can exceed the cap."""
        return self.cap is not None and self.num_clients is not None and self.cap < self.num_clients


@dataclass(frozen=True)
class FixedSize:
    """Fixed-size sampling: exactly ``cohort`` of ``num_clients`` clients, drawn uniformly without replacement."""

    num_clients: int
    cohort: int
    name: ClassVar[str] = "uniform"

    def __post_init__(self) -> None:
        checks.count("clients", self.num_clients)
        checks.count("cohort", self.cohort, most=self.num_clients)

    @property
    def rate(self) -> float:
        """Probability K/m that a client takes part in a round."""
        return self.cohort / self.num_clients


@dataclass(frozen=True)
class Cyclic:
    """Cyclic participation: blocks of clients take turns.

    The blocks are fixed before the run and do not depend on the data. Each client of the block whose turn it is takes
    part with probability ``rate``.

    Attributes:
      cycle: number of rounds from one turn of a client to the next.
      rate: probability q that a client takes part in its turn.
      num_clients: number of clients m; None if unknown.
    """

    cycle: int
    rate: float = 1.0
    num_clients: int | None = None
    name: ClassVar[str] = "cyclic"

    def __post_init__(self) -> None:
        checks.count("cycle", self.cycle)
        checks.rate("sampling_rate", self.rate)

    def turns(self, rounds: int) -> int:
        """Largest number of turns that one client has in this many rounds."""
        return math.ceil(rounds / self.cycle)


Sampling: TypeAlias = Full | Poisson | FixedSize | Cyclic


@lru_cache(maxsize=64)
def banded_coefficients(bands: int, rounds: int) -> tuple[float, ...]:
    """Coefficients c, with norm 1, of the banded matrix C that minimizes the mean squared error of R prefix sums.

    L-BFGS in float64 starts from the first b coefficients of the square root of A, the lower triangular matrix of ones.

    Args:
      bands: number of bands b, at most R.
      rounds: number of rounds R.

    Raises:
      JaxpflError: if ``bands`` is outside 1 ... R.

    Examples:
      >>> [round(c, 3) for c in banded_coefficients(3, 20)]
      [0.8, 0.477, 0.363]
    """
    from scipy.optimize import minimize

    checks.count("rounds", rounds)
    checks.count("bands", bands, most=rounds)
    if bands == 1:
        return (1.0,)
    k = np.arange(1, bands)
    root = np.cumprod((2 * k - 1) / (2 * k))
    found = minimize(_log_error, root, (rounds,), jac=True, method="L-BFGS-B", options={"maxiter": 500, "gtol": 1e-8})
    c = np.concatenate([[1.0], found.x])
    return tuple((c / np.linalg.norm(c)).tolist())


def prefix_error(c: tuple[float, ...], rounds: int) -> float:
    """Root mean squared error of R prefix sums under banded noise with coefficients c and standard deviation s = 1."""
    w = _filtered(np.asarray(c), np.ones(rounds))
    return float(np.sqrt(w**2 @ np.arange(rounds, 0, -1) / rounds))


def prefix_error_ratio(c: tuple[float, ...], rounds: int) -> float:
    """Root mean squared error of R prefix sums, relative to independent noise with the same epsilon and cohorts.

    At the same noise multiplier z, both kinds of noise have the same epsilon, because each of a client's turns is then
    a release with noise multiplier z.

    Examples:
      >>> round(prefix_error_ratio(banded_coefficients(10, 100), 100), 3)
      0.415
    """
    return prefix_error(c, rounds) / prefix_error((1.0,), rounds)


def check_coefficients(c: tuple[float, ...]) -> None:
    """Check that coefficients are finite, that their norm is 1, and that the first coefficient is positive.

    Raises:
      JaxpflError: if one of these conditions does not hold.
    """
    values = np.asarray(c, float)
    if not np.isfinite(values).all() or values[0] <= 0:
        raise JaxpflError(f"coefficients must be finite, and the first must be > 0, got {c}")
    if abs(np.linalg.norm(values) - 1) > 1e-9:
        raise JaxpflError(f"coefficients must have norm 1, got {np.linalg.norm(values):g}")


def _filtered(c: np.ndarray, x: np.ndarray) -> np.ndarray:
    """Solve C w = x for w, where c contains the bands of C."""
    from scipy.signal import lfilter

    return np.asarray(lfilter([1.0], c, x))


def _log_error(free: np.ndarray, rounds: int) -> tuple[float, np.ndarray]:
    """Logarithm of |c|^2 times the mean squared error for c = (1, free), and its gradient by the adjoint method."""
    c = np.concatenate([[1.0], free])
    weights = np.arange(rounds, 0, -1) / rounds
    w = _filtered(c, np.ones(rounds))
    error, norm = w**2 @ weights, c @ c
    if not np.isfinite(error):
        return np.inf, np.zeros_like(free)
    adjoint = _filtered(c, (2 * weights * w)[::-1])[::-1]
    slope = np.array([-adjoint[j:] @ w[: rounds - j] for j in range(1, len(c))])
    return float(np.log(error) + np.log(norm)), slope / error + 2 * free / norm


def poisson_cap(num_clients: int, rate: float, overflow: float = 1e-6) -> int:
    """Compute the smallest cap, at most m, that a round's Poisson cohort exceeds with probability below ``overflow``.

    Args:
      num_clients: number of clients m.
      rate: probability q of each client; the cohort's size is Binomial(m, q).
      overflow: bound on the probability that a cohort exceeds the cap.

    Raises:
      JaxpflError: if m < 1, the rate is outside (0, 1], or ``overflow`` is outside (0, 1).
    """
    from scipy.stats import binom

    checks.count("clients", num_clients)
    checks.rate("sampling_rate", rate)
    checks.probability("overflow", overflow)
    cap = max(int(binom.isf(overflow, num_clients, rate)) - 1, 1)  # one less, because the quantile may be rounded up
    while cap < num_clients and binom.sf(cap, num_clients, rate) >= overflow:
        cap += 1
    return cap

r"""Descriptions of noise and client sampling, the inputs of the privacy accountant.

They hold plain numbers; the mechanisms themselves run inside the round. All of them release a sum of clipped uploads
with Gaussian noise, so that each is characterised by one noise multiplier z: the noise's standard deviation over the
largest change of the sum when one client appears (or has its data zeroed).

Several Gaussian releases about the same client are equivalent to one of :math:`z = (\sum_j z_j^{-2})^{-1/2}`, also
where a later one depends on the outcome of an earlier one (Dong et al. 2022, Corollary 3.3).

The server's model is a prefix sum of the rounds' releases, A x with A the lower triangle of ones. Noise
:math:`C^{-1} Z` on x, with Z independent N(0, s^2), is as private as Z on C x; for C lower triangular this holds for
adaptive x too (Denisov et al. 2022). Here C is Toeplitz with b bands, :math:`C_{ij} = c_{i-j}` for
:math:`0 \le i - j < b`, and :math:`\|c\| = 1`. Columns that are at least b apart share no row, so that a client in k
rounds, at least b apart, changes C x by at most :math:`\sqrt k` times its clipping norm. The mean squared error of
the R prefix sums is

.. math:: \frac{s^2}{R} \sum_{t < R} \sum_{i \le t} w_i^2, \qquad w = A C^{-1} e_1

and :math:`s^2 (R + 1) / 2` for independent noise, C = I.

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
    """Noise multiplier of several Gaussian releases about the same client together; 0 if one of them has no noise."""
    squares = [z**2 for z in noise_multipliers]
    return 0.0 if min(squares) == 0 else sum(1 / s for s in squares) ** -0.5


@dataclass(frozen=True)
class CentralNoise:
    r"""Noise :math:`N(0, z^2 C^2 I)` that the server adds to the sum of uploads clipped to C.

    Attributes:
      noise_multiplier: z of the sum; 0 for clipping alone.
      clipping_norm: C, for the statement; None if it adapts.
      count_stddev: under adaptive clipping (Andrew et al. 2021) the standard deviation s of the noise on the count of
        uploads below C. Each client sends 1/2 or -1/2, so that this release has z = 2 s, and both together
        :math:`(z^{-2} + (2 s)^{-2})^{-1/2}` (their Theorem 1).
      releases: sums released in one round about the same cohort, as in EM with several iterations.
      coefficients: c of a banded factorisation (`banded_coefficients`), with norm 1: noise is correlated between
        rounds, and z is the multiplier of the independent normals behind it; (1,) for independent noise.
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
        """b; 1 for independent noise."""
        return len(self.coefficients)

    @property
    def multiplier(self) -> float:
        """z of all releases of a round together."""
        count = [] if self.count_stddev is None else [2 * self.count_stddev]
        return combined([self.noise_multiplier / math.sqrt(self.releases), *count])

    def scale_to(self, multiplier: float) -> CentralNoise:
        """The same with the sum's noise scaled so that a round has this z; the count's noise is unchanged.

        Raises:
          JaxpflError: if the count's release alone costs as much.
        """
        rest = multiplier**-2
        if self.count_stddev is not None:
            rest -= (2 * self.count_stddev) ** -2
            if rest <= 0:
                raise JaxpflError(
                    f"count_stddev must be above {multiplier / 2:g}, half the noise multiplier, got {self.count_stddev}"
                )
        return replace(self, noise_multiplier=math.sqrt(self.releases / rest))


@dataclass(frozen=True)
class DistributedNoise:
    r"""Noise shares :math:`N(0, z^2 C^2 / K_{min} I)` of each client, with only the sum visible (secure aggregation).

    A round with fewer than K_min uploads releases nothing, so every release has at least z. A client's share is part of
    its upload and missing if the client does not take part, which is visible; hence a client's data are protected, but
    not its participation (the relation zero-out).

    Attributes:
      noise_multiplier: z; 0 for clipping alone.
      min_uploads: K_min, public; at most the clients of a round.
      clipping_norm: C, for the statement.
      alone: whether each upload is visible by itself, as with compressed uploads: only the client's own share of the
        noise then protects it, with :math:`z / \sqrt{K_{min}}`.
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
        """z of a round."""
        return self.noise_multiplier / self._shares

    def scale_to(self, multiplier: float) -> DistributedNoise:
        """The same with noise scaled so that a round has this z."""
        return replace(self, noise_multiplier=multiplier * self._shares)

    @property
    def _shares(self) -> float:
        """Ratio of the sum's noise to the noise that protects a client."""
        return math.sqrt(self.min_uploads) if self.alone else 1.0


@dataclass(frozen=True)
class PerStepNoise:
    r"""Noise of DP-AdaPeD as printed: in every local step each client clips its gradients and adds noise to them.

    tau steps of clipping norm C and noise s are tau adaptive Gaussian releases of one client, under any
    post-processing:

    .. math:: z^{-2} = \tau \; C^2 / s^2

    If the sum of K uploads is ``linear`` in the last step's noise, all K clients' noise also protects it: a client's
    path changes the sum by up to tau C, and the others' paths, which do not depend on it, are arbitrary.

    .. math:: z^{-2} = \min(\tau, \tau^2 / K) \; C^2 / s^2

    (The paper's variance tau s^2/K of the average does not apply: a client's later gradients depend on its earlier
    noise and may cancel it.) Either bound makes a round at least as private as one Gaussian release, as the bounds of
    sampled rounds require. mu and psi of a client are one release, of :math:`(z_1^{-2} + z_2^{-2})^{-1/2}`.

    The update of psi as printed is not linear: its gradient depends on mu with the step's noise, which the sum of the
    psi then reveals; and a psi that its client raises to the floor has no noise left.

    Attributes:
      clips: C1 for mu, and C2 for psi if it is uploaded.
      stddevs: s1, and s2: the noise of one step.
      steps: tau.
      min_uploads: K, the least number of uploads of a released round; at most the clients of a round.
      linear: whether the second bound applies: plain gradient steps, of one rate within a round and without momentum;
        no change to the upload after its last noise; and every gradient of a step computed before any of its noise.
    """

    clips: tuple[float, ...]
    stddevs: tuple[float, ...]
    steps: int
    min_uploads: int
    linear: bool = False

    def __post_init__(self) -> None:
        if not 1 <= len(self.clips) == len(self.stddevs):
            raise JaxpflError(f"clips and stddevs must have one length, got {len(self.clips)} and {len(self.stddevs)}")
        for i, (c, s) in enumerate(zip(self.clips, self.stddevs, strict=True), 1):
            checks.positive(f"c{i}", c)
            checks.not_negative(f"sigma{i}", s)
        checks.count("steps", self.steps)
        checks.count("min_uploads", self.min_uploads)

    @property
    def clipping_norm(self) -> tuple[float, ...]:
        """C1, and C2 if psi is uploaded."""
        return self.clips

    @property
    def step_multiplier(self) -> float:
        """z of one step of one client, mu and psi together."""
        return combined(s / c for c, s in zip(self.clips, self.stddevs, strict=True))

    @property
    def multiplier(self) -> float:
        """z of a round."""
        hidden_by = max(self.min_uploads / self.steps, 1) if self.linear else 1
        return self.step_multiplier * math.sqrt(hidden_by / self.steps)

    def scale_to(self, multiplier: float) -> PerStepNoise:
        """The same with all stddevs scaled by one factor so that a round has this z."""
        if not self.multiplier:
            raise JaxpflError(f"a noise multiplier of 0 cannot be scaled to {multiplier}")
        factor = multiplier / self.multiplier
        return replace(self, stddevs=tuple(factor * s for s in self.stddevs))


Noise: TypeAlias = CentralNoise | DistributedNoise | PerStepNoise


@dataclass(frozen=True)
class Full:
    """Full participation: every client in every round.

    Attributes:
      num_clients: m; None if irrelevant.
    """

    num_clients: int | None = None
    name: ClassVar[str] = "full"
    rate: ClassVar[float] = 1.0

    def __post_init__(self) -> None:
        if self.num_clients is not None:
            checks.count("clients", self.num_clients)

    @property
    def cohort(self) -> int | None:
        """m, if known."""
        return self.num_clients


@dataclass(frozen=True)
class Poisson:
    """Poisson sampling with probability ``rate``; a cohort above ``cap`` is cut to a uniformly random subset.

    Attributes:
      rate: q.
      num_clients: m; needed with a cap.
      cap: None if no cohort is cut.
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
                raise JaxpflError("a cap needs the number of clients: set clients")

    @property
    def truncated(self) -> bool:
        """True if the cap can cut a cohort."""
        return self.cap is not None and self.num_clients is not None and self.cap < self.num_clients


@dataclass(frozen=True)
class FixedSize:
    """Cohorts of exactly ``cohort`` of ``num_clients`` clients, uniformly without replacement."""

    num_clients: int
    cohort: int
    name: ClassVar[str] = "uniform"

    def __post_init__(self) -> None:
        checks.count("clients", self.num_clients)
        checks.count("cohort", self.cohort, most=self.num_clients)

    @property
    def rate(self) -> float:
        """K/m."""
        return self.cohort / self.num_clients


@dataclass(frozen=True)
class Cyclic:
    """Blocks of clients that take turns, each fixed before the run, whatever the data; a block's clients all take part,
    or each with probability ``rate``.

    Attributes:
      cycle: rounds from one turn of a client to the next.
      rate: q within the block.
      num_clients: m; None if irrelevant.
    """

    cycle: int
    rate: float = 1.0
    num_clients: int | None = None
    name: ClassVar[str] = "cyclic"

    def __post_init__(self) -> None:
        checks.count("cycle", self.cycle)
        checks.rate("sampling_rate", self.rate)

    def turns(self, rounds: int) -> int:
        """Largest number of rounds, out of so many, in which one client can take part."""
        return math.ceil(rounds / self.cycle)


Sampling: TypeAlias = Full | Poisson | FixedSize | Cyclic


@lru_cache(maxsize=64)
def banded_coefficients(bands: int, rounds: int) -> tuple[float, ...]:
    """Coefficients c, with norm 1, of the banded C that minimises the mean squared error of the prefix sums.

    They are found by L-BFGS in float64, which starts from the coefficients of the square root of A, cut to the bands.

    Args:
      bands: b, at most R.
      rounds: R.

    Raises:
      JaxpflError: for bands outside 1 ... R.

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
    """Root mean squared error of the prefix sums over R rounds, for s = 1 and a C with norm |c|."""
    w = _filtered(np.asarray(c), np.ones(rounds))
    return float(np.sqrt(w**2 @ np.arange(rounds, 0, -1) / rounds))


def prefix_error_ratio(c: tuple[float, ...], rounds: int) -> float:
    """Error of R prefix sums relative to independent noise, at an equal epsilon for the same cohorts.

    A client's k turns cost the same under both: in each, its sum is released with noise multiplier z.

    Examples:
      >>> round(prefix_error_ratio(banded_coefficients(10, 100), 100), 3)
      0.415
    """
    return prefix_error(c, rounds) / prefix_error((1.0,), rounds)


def check_coefficients(c: tuple[float, ...]) -> None:
    """Refuse coefficients that are not finite, of norm 1 and with a positive first.

    Raises:
      JaxpflError.
    """
    values = np.asarray(c, float)
    if not np.isfinite(values).all() or values[0] <= 0:
        raise JaxpflError(f"coefficients must be finite and the first of them positive, got {c}")
    if abs(np.linalg.norm(values) - 1) > 1e-9:
        raise JaxpflError(f"coefficients must have norm 1, got {np.linalg.norm(values):g}")


def _filtered(c: np.ndarray, x: np.ndarray) -> np.ndarray:
    """Solution w of C w = x."""
    from scipy.signal import lfilter

    return np.asarray(lfilter([1.0], c, x))


def _log_error(free: np.ndarray, rounds: int) -> tuple[float, np.ndarray]:
    """Logarithm of |c|^2 times the mean squared error, for c = (1, free), and its gradient by the adjoint of C."""
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
    """Least cap on a Poisson cohort that a round exceeds with probability below ``overflow``; at most m.

    Args:
      num_clients: m.
      rate: q, the probability of each client; the number in a round is Binomial(m, q).
      overflow: the probability.

    Raises:
      JaxpflError: for m < 1, a rate outside (0, 1], or an overflow outside (0, 1).
    """
    from scipy.stats import binom

    checks.count("clients", num_clients)
    checks.rate("sampling_rate", rate)
    checks.probability("overflow", overflow)
    cap = max(int(binom.isf(overflow, num_clients, rate)) - 1, 1)  # one below, in case the quantile was rounded up
    while cap < num_clients and binom.sf(cap, num_clients, rate) >= overflow:
        cap += 1
    return cap

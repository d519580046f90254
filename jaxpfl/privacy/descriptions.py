r"""What a privacy claim is about: how noise gets into a round's release, and how the clients of a round are chosen.

These are descriptions, plain numbers; the mechanisms themselves run inside the round. All of them release a sum of
clipped uploads with Gaussian noise, so that each comes down to one noise multiplier z: the noise's standard deviation
over what one client can change of the sum by appearing (or by having its data zeroed).

Several Gaussian releases about the same client are one of :math:`z = (\sum_j z_j^{-2})^{-1/2}`, also where a later one
depends on the outcome of an earlier one (Dong et al. 2022, Corollary 3.3).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import ClassVar, TypeAlias

from jaxpfl import checks
from jaxpfl.errors import JaxpflError


def combined(noise_multipliers: Iterable[float]) -> float:
    """One noise multiplier for several Gaussian releases about the same client; 0 where one of them has none."""
    squares = [z**2 for z in noise_multipliers]
    return 0.0 if min(squares) == 0 else sum(1 / s for s in squares) ** -0.5


@dataclass(frozen=True)
class CentralNoise:
    r"""The server adds :math:`N(0, z^2 C^2 I)` to the sum of uploads clipped to C.

    Attributes:
      noise_multiplier: z of the sum; 0 where uploads are only clipped.
      clipping_norm: C, for the statement; None where it adapts.
      count_stddev: for adaptive clipping (Andrew et al. 2021) the standard deviation s of the noise on the count of
        uploads below C. Each client sends 1/2 or -1/2, so that this release has z = 2 s, and both together
        :math:`(z^{-2} + (2 s)^{-2})^{-1/2}` (their Theorem 1).
      releases: sums released in one round about the same cohort, as by an EM of several iterations.
    """

    noise_multiplier: float
    clipping_norm: float | None = None
    count_stddev: float | None = None
    releases: int = 1

    def __post_init__(self) -> None:
        checks.not_negative("noise_multiplier", self.noise_multiplier)
        if self.clipping_norm is not None:
            checks.positive("clipping_norm", self.clipping_norm)
        if self.count_stddev is not None:
            checks.positive("count_stddev", self.count_stddev)
        checks.count("releases", self.releases)

    @property
    def multiplier(self) -> float:
        """z of everything that a round releases."""
        count = [] if self.count_stddev is None else [2 * self.count_stddev]
        return combined([self.noise_multiplier / math.sqrt(self.releases), *count])

    def with_multiplier(self, multiplier: float) -> CentralNoise:
        """The same with the sum's noise such that a round has this z; the count's noise stays.

        Raises:
          JaxpflError: where the count's release alone costs as much.
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
    r"""Each client adds its share, :math:`N(0, z^2 C^2 / K_{min} I)`, and only the sum is seen (secure aggregation).

    A round with fewer than K_min uploads releases nothing, so every release has at least z. A client's share is part of
    its upload: a client that did not take part would lack it, which shows; so what is protected is a client's data, not
    that it took part (the relation zero-out).

    Attributes:
      noise_multiplier: z; 0 where uploads are only clipped.
      min_uploads: K_min, public; at most the clients of a round.
      clipping_norm: C, for the statement.
      alone: whether each upload is seen by itself, as where clients compress what they send: only the client's own
        share of the noise then hides it, :math:`z / \sqrt{K_{min}}`.
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

    def with_multiplier(self, multiplier: float) -> DistributedNoise:
        """The same with noise such that a round has this z."""
        return replace(self, noise_multiplier=multiplier * self._shares)

    @property
    def _shares(self) -> float:
        """The sum's noise over what hides a client."""
        return math.sqrt(self.min_uploads) if self.alone else 1.0


@dataclass(frozen=True)
class PerStepNoise:
    r"""DP-AdaPeD as printed: in every local step each client clips its gradients and adds noise to them.

    tau steps of clip C and noise s are tau adaptive Gaussian releases of one client, whatever becomes of them:

    .. math:: z^{-2} = \tau \; C^2 / s^2

    Where the sum of K uploads is ``linear`` in the last step's noise, it is also hidden by that of all K clients: a
    client's path moves the sum by up to tau C, and others' paths, which do not depend on it, may carry anything before.

    .. math:: z^{-2} = \min(\tau, \tau^2 / K) \; C^2 / s^2

    (The average's variance tau s^2/K, which the paper takes, is not available: a client's later gradients see its
    earlier noise and may cancel it.) Both say that a round is at least as private as one Gaussian release, which is
    what bounds of sampled rounds need. mu and psi of a client are one release, of :math:`(z_1^{-2} +
    z_2^{-2})^{-1/2}`.

    The update of psi as printed is not linear: its gradient sees mu with the step's noise, of which the sum of the psi
    then tells; and a psi that its client puts back to the floor has no noise left.

    Attributes:
      clips: C1 for mu, and C2 for psi where it is uploaded.
      stddevs: s1, and s2: the noise of one step.
      steps: tau.
      min_uploads: K: the least number of uploads that a released round may have; at most the clients of a round.
      linear: whether the second bound may be used: plain gradient steps, of one rate within a round and without
        momentum; nothing done to what is uploaded after its last noise; and every gradient of a step taken before any
        of the step's noise.
    """

    clips: tuple[float, ...]
    stddevs: tuple[float, ...]
    steps: int
    min_uploads: int
    linear: bool = False

    def __post_init__(self) -> None:
        if not 1 <= len(self.clips) == len(self.stddevs):
            raise JaxpflError(f"every clip needs its stddev, got {len(self.clips)} and {len(self.stddevs)}")
        for i, (c, s) in enumerate(zip(self.clips, self.stddevs, strict=True), 1):
            checks.positive(f"c{i}", c)
            checks.not_negative(f"sigma{i}", s)
        checks.count("steps", self.steps)
        checks.count("min_uploads", self.min_uploads)

    @property
    def clipping_norm(self) -> tuple[float, ...]:
        """C1, and C2 where psi is uploaded."""
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

    def with_multiplier(self, multiplier: float) -> PerStepNoise:
        """The same with all stddevs scaled by one factor, such that a round has this z."""
        if not self.multiplier:
            raise JaxpflError(f"noise of 0 cannot be scaled to a noise multiplier of {multiplier}")
        factor = multiplier / self.multiplier
        return replace(self, stddevs=tuple(factor * s for s in self.stddevs))


Noise: TypeAlias = CentralNoise | DistributedNoise | PerStepNoise


@dataclass(frozen=True)
class Full:
    """Every client in every round.

    Attributes:
      num_clients: m; None where nothing rests on it.
    """

    num_clients: int | None = None
    name: ClassVar[str] = "full"
    rate: ClassVar[float] = 1.0

    def __post_init__(self) -> None:
        if self.num_clients is not None:
            checks.count("clients", self.num_clients)

    @property
    def cohort(self) -> int | None:
        """m, where it is known."""
        return self.num_clients


@dataclass(frozen=True)
class Poisson:
    """Every client independently with probability ``rate``; of more than ``cap`` a uniformly random subset of ``cap``.

    Attributes:
      rate: q.
      num_clients: m; needed with a cap.
      cap: None where no cohort is cut.
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
                raise JaxpflError("a cap needs the number of clients: give clients")

    @property
    def truncated(self) -> bool:
        """Whether the cap can cut a cohort."""
        return self.cap is not None and self.num_clients is not None and self.cap < self.num_clients


@dataclass(frozen=True)
class FixedSize:
    """Always ``cohort`` of ``num_clients`` clients, uniformly without replacement."""

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


Sampling: TypeAlias = Full | Poisson | FixedSize

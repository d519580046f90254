"""What a mechanism and a way to take part are worth over a run: the tie between the engine and the accountant.

Both are read off the very objects that the round is made of, so that what is accounted is what is sampled and added.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Required, TypedDict, Unpack

import numpy as np

from jaxpfl.errors import JaxpflError
from jaxpfl.participation import Participation
from jaxpfl.privacy.accounting import Accountant, PrivacyPlan
from jaxpfl.privacy.calibration import calibrate
from jaxpfl.privacy.descriptions import (
    CentralNoise,
    DistributedNoise,
    FixedSize,
    Full,
    Noise,
    PerStepNoise,
    Poisson,
    Sampling,
)
from jaxpfl.privacy.mechanism import Mechanism
from jaxpfl.privacy.refusals import Refusal


class Run(TypedDict, total=False):
    """The keywords of `plan_of`, which explains them."""

    rounds: Required[int]
    steps: int | None
    scales: int | None
    releases: int
    linear: bool
    compressed: bool


def check_compressible(noise: str) -> None:
    """Refuses noise that is not on an upload before a client compresses it: `Mechanism.noise` must be distributed.

    Raises:
      JaxpflError: with the reason.
    """
    if noise == "central":
        raise Refusal.COMPRESSED_BEFORE_NOISE.error()
    if noise == "per_step":
        raise Refusal.COMPRESSED_STEP_NOISE.error()


def plan_of(
    mechanism: Mechanism,
    participation: Participation,
    *,
    rounds: int,
    steps: int | None = None,
    scales: int | None = None,
    releases: int = 1,
    linear: bool = False,
    compressed: bool = False,
) -> PrivacyPlan:
    """The run as the accountant sees it (of a method's run: `Fit.privacy`, which knows what it releases).

    Args:
      mechanism: of every round; one noise multiplier.
      participation: of every round.
      rounds: R.
      steps: tau, local steps in a round; for noise in every step, which is accounted by them.
      scales: for the same, how many scales (psi) are uploaded beside the parameters, clipped apart from them.
      releases: sums released in a round about the same cohort: one, but for AdaMix, whose EM has several steps.
      linear: for noise in every step, whether each step only adds its noisy gradient to what is uploaded
        (`PerStepNoise`): so it is with plain SGD that stretches nothing, and no scale.
      compressed: whether each client compresses its noisy upload, which is then read by itself: no other client's noise
        hides it (``DistributedNoise.alone``), and who takes part is seen, so that all are accounted as if they always
        did.

    Raises:
      JaxpflError: for several noise multipliers, a combination that cannot be accounted, and noise in every step of
        which ``steps`` or ``scales`` are not given.
    """
    if compressed:
        check_compressible(mechanism.noise)
    noise = _noise(mechanism, participation, steps, scales, releases, linear)
    plan = PrivacyPlan(noise, sampling_of(participation), rounds)
    if not compressed:
        return plan
    assert isinstance(noise, DistributedNoise)
    return PrivacyPlan(replace(noise, alone=True), Full(participation.num_clients), rounds)


def calibrated(
    mechanism: Mechanism,
    participation: Participation,
    epsilon: float,
    delta: float,
    *,
    accountant: Accountant = "pld",
    **run: Unpack[Run],
) -> Mechanism:
    """The mechanism with the least noise whose eps over the run is at most the one asked for.

    Args:
      mechanism: its noise multiplier does not matter.
      epsilon, delta: the target.
      accountant: of the epsilon.
      run: as `plan_of` takes it.

    Raises:
      JaxpflError: for a target out of range, and as `plan_of`.
    """
    some = replace(mechanism, noise_multiplier=1.0, quantile=None, count_stddev=None)
    found = calibrate(plan_of(some, participation, **run), epsilon, delta, accountant).noise
    z = found.stddevs[0] / found.clips[0] if isinstance(found, PerStepNoise) else found.noise_multiplier
    return replace(mechanism, noise_multiplier=z)


def sampling_of(participation: Participation) -> Sampling:
    """How the accountant sees a way to take part.

    Raises:
      JaxpflError: for one of which it is not known how it draws.
    """
    num_clients = participation.num_clients
    if participation.everyone:
        return Full()
    if participation.fixed_size:
        return FixedSize(num_clients, participation.capacity)
    if participation.rate is None:
        raise JaxpflError(
            f"participation {participation.name} cannot be accounted: it says neither rate (of independent draws) nor "
            "fixed_size (uniformly without replacement)"
        )
    cap = participation.capacity if participation.capacity < num_clients else None
    return Poisson(participation.rate, num_clients, cap)


def _noise(
    mechanism: Mechanism,
    participation: Participation,
    steps: int | None,
    scales: int | None,
    releases: int,
    linear: bool,
) -> Noise:
    if np.ndim(mechanism.noise_multiplier) or np.ndim(mechanism.clipping_norm):
        raise JaxpflError("a plan is of one noise multiplier and one clipping norm; make one for each run")
    clip = float(np.asarray(mechanism.clipping_norm))
    if releases > 1 and mechanism.noise != "central":
        raise JaxpflError(f"several releases in a round are accounted with central noise, not {mechanism.noise}")
    if mechanism.noise == "central":
        adapts = mechanism.quantile is not None
        z = float(mechanism.noise_multiplier_of_sum)
        return CentralNoise(z, None if adapts else clip, mechanism.count_stddev if adapts else None, releases)
    z = float(np.asarray(mechanism.noise_multiplier))
    uploads = mechanism.least_uploads(participation.expected_cohort)
    if mechanism.noise == "distributed":
        return DistributedNoise(z, uploads, clip)
    step = mechanism.step_noise
    assert step is not None
    if steps is None or scales is None:
        missing = "steps" if steps is None else "scales"
        raise JaxpflError(f"noise in every step is accounted by the local steps and what they upload: give {missing}")
    apart = 0 if step.joint else scales
    clips = (step.clipping_norm, *[step.scale_clipping_norm] * apart)
    stddevs = (step.stddev, *[step.scale_stddev] * apart)
    return PerStepNoise(clips, stddevs, steps, uploads, linear=linear and not scales)

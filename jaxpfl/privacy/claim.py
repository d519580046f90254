"""Privacy claim of a run: epsilon and delta, computed from its mechanism and participation scheme.

The round uses the same mechanism and participation objects, so the accounting matches the actual noise and sampling.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from jaxpfl.core import exclusions
from jaxpfl.core.participation import Participation
from jaxpfl.privacy import descriptions
from jaxpfl.privacy.accounting import Accountant, PrivacyPlan, calibrate
from jaxpfl.privacy.descriptions import (
    CentralNoise,
    Cyclic,
    DistributedNoise,
    FixedSize,
    Full,
    Noise,
    PerStepNoise,
    Poisson,
    Sampling,
)
from jaxpfl.privacy.mechanism import Mechanism
from jaxpfl.support.errors import JaxpflError, warn


def planned(mechanism: Mechanism, rounds: int, cycle: int | None) -> Mechanism:
    """Fill in the number of bands and the coefficients of banded noise.

    Args:
      mechanism: mechanism with any noise; returned unchanged if the noise is not banded or already has coefficients.
      rounds: number of rounds R, for which the coefficients are optimal.
      cycle: number of rounds from one turn of a client to the next; None if clients do not take turns. The default
        number of bands is the smaller of this number and R.

    Raises:
      JaxpflError: if there are more bands than rounds, or if neither bands nor a cycle is given.
    """
    if mechanism.noise != "banded" or mechanism.coefficients is not None:
        return mechanism
    exclusions.check({"noise": "banded", "participation other than cyclic": mechanism.bands is None and cycle is None})
    bands = mechanism.bands if mechanism.bands is not None else min(cycle or 1, rounds)
    return replace(mechanism, bands=bands, coefficients=descriptions.banded_coefficients(bands, rounds))


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
    """Return the privacy plan of a run, which describes its releases to the accountant (`Fit.privacy` of `fit`).

    Args:
      mechanism: mechanism that every round uses, with one noise multiplier and one clipping norm.
      participation: sampling scheme for every round's cohort.
      rounds: number of rounds R.
      steps: number of local steps tau in a round; required for noise in every step, which is accounted per step.
      scales: number of scales (psi) that are uploaded and clipped separately from the parameters; required for noise in
        every step.
      releases: number of sums over the cohort that a round releases; 1 except for AdaMix, which releases one sum per EM
        step.
      linear: for noise in every step, whether each step only adds its noisy gradient to the upload (`PerStepNoise`).
        This holds for plain SGD that uploads no scale and has no weight decay that amplifies earlier noise.
      compressed: whether each client compresses its noisy upload. The server then reads each upload individually,
        without other clients' noise (``DistributedNoise.alone``), and sees which clients take part, so sampling does
        not amplify privacy.

    Raises:
      JaxpflError: if there are several noise multipliers or clipping norms; if no accountant supports the combination;
        or if noise in every step comes without ``steps`` or ``scales``.
    """
    exclusions.check(
        {
            "compress": compressed,
            "noise": mechanism.noise,
            "client-side noise": not mechanism.server_adds,
            "several releases in a round": releases > 1,
        }
    )
    if np.ndim(mechanism.noise_multiplier) or np.ndim(mechanism.clipping_norm):
        raise JaxpflError(
            "noise_multiplier and clipping_norm must be single numbers, got several: make a plan for each run"
        )
    z, clip = float(np.asarray(mechanism.noise_multiplier)), float(np.asarray(mechanism.clipping_norm))
    uploads = mechanism.least_uploads(participation.expected_cohort)
    noise: Noise
    if mechanism.noise == "banded":
        c = planned(mechanism, rounds, participation.cycle).coefficients
        assert c is not None
        noise = CentralNoise(z, clip, releases=releases, coefficients=c)
    elif mechanism.quantile is not None:
        noise = CentralNoise(float(mechanism.noise_multiplier_of_sum), None, mechanism.count_stddev, releases)
    elif mechanism.noise == "central":
        noise = CentralNoise(z, clip, releases=releases)
    elif mechanism.noise == "distributed":
        noise = DistributedNoise(z, uploads, clip)
    else:
        step = mechanism.step_noise
        assert step is not None
        if steps is None or scales is None:
            missing = "steps" if steps is None else "scales"
            raise JaxpflError(f"{missing} must be given for noise in every step, got None")
        apart = 0 if step.joint else scales
        clips = (step.clipping_norm, *[step.scale_clipping_norm] * apart)
        stddevs = (step.stddev, *[step.scale_stddev] * apart)
        noise = PerStepNoise(clips, stddevs, steps, uploads, linear=linear and not scales)
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
    **run: Any,
) -> Mechanism:
    """Set a mechanism's noise multiplier to the smallest value for which epsilon over the run is at most the target.

    Args:
      mechanism: mechanism whose noise multiplier is replaced. If it has one clipping norm for each run, the same noise
        multiplier is valid for all runs, because it is relative to the norm.
      participation: sampling scheme for every round's cohort.
      epsilon, delta: privacy target.
      accountant: accountant whose epsilon must be at most the target.
      run: other arguments of `plan_of`.

    Raises:
      JaxpflError: for a target out of range, or under the conditions of `plan_of`.
    """
    one_norm = float(np.ravel(np.asarray(mechanism.clipping_norm))[0])
    some = replace(mechanism, noise_multiplier=1.0, clipping_norm=one_norm, quantile=None, count_stddev=None)
    found = calibrate(plan_of(some, participation, **run), epsilon, delta, accountant).noise
    z = found.stddevs[0] / found.clips[0] if isinstance(found, PerStepNoise) else found.noise_multiplier
    return replace(mechanism, noise_multiplier=z)


def sampling_of(participation: Participation) -> Sampling:
    """Describe a participation scheme's sampling for the accountant.

    Raises:
      JaxpflError: if the scheme does not state its sampling.
    """
    num_clients = participation.num_clients
    if participation.cycle is not None:
        return Cyclic(participation.cycle, participation.rate or 1.0, num_clients)
    if participation.everyone:
        return Full()
    if participation.fixed_size:
        return FixedSize(num_clients, participation.capacity)
    if participation.rate is None:
        raise JaxpflError(
            f"participation {participation.name} must set rate (independent draws) or fixed_size (draws without "
            "replacement), got neither"
        )
    cap = participation.capacity if participation.capacity < num_clients else None
    return Poisson(participation.rate, num_clients, cap)


def check_delta(delta: float, clients: int, *, name: str = "delta", strict: bool = False) -> None:
    """Warn if delta is too large for a claim about users: at least 1 / clients.

    Even a method that publishes the data of one random client satisfies such a claim.

    Raises:
      JaxpflError: instead of the warning, if ``strict``.
    """
    if 1 / clients <= delta < 1:
        warn(
            f"{name} must be below 1 / clients = {1 / clients:g}, got {delta:g}: publishing the data of a client drawn "
            "at random would satisfy such a claim",
            strict=strict,
        )

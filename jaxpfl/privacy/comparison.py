"""Comparison of Theorem 5 of Ozkara et al. 2023 with sound guarantees for the same noise."""

from __future__ import annotations

from typing import Any

from jaxpfl.core import checks
from jaxpfl.privacy import accounting
from jaxpfl.privacy.accounting import PrivacyPlan, Relation
from jaxpfl.privacy.descriptions import CentralNoise, FixedSize, Full, PerStepNoise, Poisson
from jaxpfl.support.errors import JaxpflError


def theorem5_beside_sound(
    *,
    c1: float,
    sigma1: float,
    clients_per_round: int,
    clients: int,
    tau: int,
    steps: int,
    delta: float,
    c2: float = 0.0,
    sigma2: float = 0.0,
) -> dict[str, Any]:
    """Compute the paper's epsilon for DP-AdaPeD (Theorem 5), and sound epsilons for noise with the same variance.

    The sound epsilons cover two kinds of noise. With ``end_of_round``, local steps have no noise, and N(0, K tau
    sigma^2) is added to the sum at the end of a round. With ``per_step``, noise is added as in the paper. If psi is
    uploaded, a client is then protected only by its own noise (`PerStepNoise`).

    For each kind of noise, there are two epsilons, one for each neighboring relation:

    - ``zero_out``: neighboring data sets differ in whether one user's data are present. With end-of-round noise,
      Poisson sampling with q = K/m amplifies privacy. With per-step noise, sampling does not amplify privacy. The
      reported epsilon is then the smaller of two: the epsilon of a user who takes part in every round, and the epsilon
      of ``replace_one``.
    - ``replace_one``: neighboring data sets differ in one user's data, which may be arbitrary. Cohorts have exactly K
      clients. The accounting uses RDP unless K = m.

    Implements: Ozkara et al. 2023, Theorem 5.

    Args:
      c1, sigma1: clipping norm, and standard deviation of the noise, for the gradient of the global model mu in a step.
      c2, sigma2: the same for the scale psi; c2 = 0 if psi is not uploaded.
      clients_per_round, clients: numbers of clients K and m.
      tau: number of local steps per round.
      steps: total number of local steps T.
      delta: delta of all epsilons.

    Returns:
      A JSON-serializable dictionary. It contains the paper's epsilon and its caveat; the epsilon, noise multiplier,
      participation and accountant of each of the four sound plans; the number of rounds; the sampling rate; and delta.

    Raises:
      JaxpflError: for numbers out of range, or if tau does not divide T.
    """
    checks.count("clients", clients)
    checks.count("clients_per_round", clients_per_round, most=clients)
    checks.count("tau", tau)
    checks.count("steps", steps)
    if steps % tau:
        raise JaxpflError(f"steps must be a multiple of tau ({tau}), got {steps}")
    rounds = steps // tau

    clips, stddevs = ((c1, c2), (sigma1, sigma2)) if c2 else ((c1,), (sigma1,))
    per_step = PerStepNoise(clips, stddevs, tau, clients_per_round, linear=not c2)
    at_end = CentralNoise(per_step.step_multiplier * (clients_per_round / tau) ** 0.5)
    everyone = clients_per_round == clients
    fixed = Full() if everyone else FixedSize(clients, clients_per_round)
    sampled = Full() if everyone else Poisson(clients_per_round / clients)
    printed = PrivacyPlan(per_step, fixed, rounds, "replace-one").epsilon(delta, "paper")

    def claim(
        noise: CentralNoise | PerStepNoise, sampling: Full | Poisson | FixedSize, relation: Relation | None = None
    ) -> dict[str, Any]:
        plan = PrivacyPlan(noise, sampling, rounds, relation)
        accountant = plan.default_accountant
        return {
            "epsilon": plan.epsilon(delta, accountant),
            "noise_multiplier": plan.noise_multiplier,
            "participation": sampling.name,
            "accountant": accountant,
        }

    replaced = claim(per_step, fixed, "replace-one")
    return {
        "paper": {"epsilon": printed, "note": accounting.CAVEAT},
        "end_of_round": {"zero_out": claim(at_end, sampled), "replace_one": claim(at_end, fixed, "replace-one")},
        # A guarantee for replacing a user's data by any other data also covers removing them, so the smaller epsilon is
        # valid.
        "per_step": {
            "zero_out": min(claim(per_step, Full()), replaced, key=lambda c: c["epsilon"]),
            "replace_one": replaced,
        },
        "rounds": rounds,
        "sampling_rate": clients_per_round / clients,
        "delta": delta,
    }

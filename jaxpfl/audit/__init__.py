"""Privacy audits: compare a privacy claim with empirical lower bounds on epsilon, and test the noise and the cohorts.

An audit runs the engine's own programs on the run's data and settings, with clients that are easy to detect (canaries),
and reads every round's release, which is the noisy sum of the uploads (`subject`). An audit plays two distinguishing
games (`games`), and tests whether noise and cohorts are as the accountant assumes (`white_box`). A lower bound above
the claimed epsilon refutes the claim, and so do noise or cohorts that differ from the accountant's assumptions. An
audit that finds no such evidence does not prove the claim.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

from jaxpfl.audit import games, white_box
from jaxpfl.audit.games import Game
from jaxpfl.audit.subject import Subject, subject_of
from jaxpfl.audit.white_box import Noise
from jaxpfl.core import checks
from jaxpfl.privacy import Accountant, PrivacyPlan
from jaxpfl.privacy.audit import EpsilonBound, Finding, OneRunBound
from jaxpfl.support.errors import JaxpflError

__all__ = ["Audit", "Subject", "audit", "subject_of"]


class Audit(NamedTuple):
    """Result of an audit.

    Attributes:
      claim: the privacy plan whose epsilons are audited.
      accountant: accountant that computed the claimed epsilons.
      claimed: claimed epsilon at the delta of ``game``.
      game: result of the game with many runs ("worlds"), some with one canary and some without.
      claimed_one_run: claimed epsilon at the delta of the one-run game, which is the claim's delta.
      one_run: result of the one-run game, with many canaries; None if examples are protected.
      cohorts: results of the tests of cohort sampling; empty if examples are protected.
      noise: results of the tests of the noise measured in the releases, or the reason why it cannot be measured.
      draws: results of the tests of the random draws that the program recorded: their keys, number and standard
        deviations.
      against: evidence against the claim, one line per item; empty if there is none.
    """

    claim: PrivacyPlan
    accountant: Accountant
    claimed: float
    game: Game
    claimed_one_run: float
    one_run: OneRunBound | None
    cohorts: list[Finding]
    noise: Noise | str
    draws: list[Finding]
    against: list[str]

    def to_json(self) -> dict[str, Any]:
        """Convert the result, without the scores, to a dictionary that JSON can represent."""
        bound, one = self.game.bound, self.one_run
        noise = self.noise
        return {
            "relation": self.claim.relation,
            "accountant": self.accountant,
            "noise_multiplier": self.claim.noise_multiplier,
            "rounds": self.claim.rounds,
            "sampling_rate": self.claim.sampling.rate,
            "worlds": _bound_json(bound, self.claimed)
            | {
                "worlds": len(self.game.present) + len(self.game.absent),
                "statistic": self.game.statistic,
            },
            "one_run": one
            and _bound_json(one, self.claimed_one_run)
            | {"canaries": one.canaries, "guesses": one.guesses, "correct": one.correct},
            "noise": {"not_checked": noise}
            if isinstance(noise, str)
            else {
                "over_claimed": noise.scale,
                "standard_error": noise.error,
                "p_values": {finding.test: finding.p_value for finding in noise.findings},
            },
            "draws": {finding.test: finding.p_value for finding in self.draws},
            "cohorts": {finding.test: finding.p_value for finding in self.cohorts},
            "false_alarm": white_box.FALSE_ALARM,
            "against": self.against,
            "refuted": bool(self.against),
        }


def _bound_json(bound: EpsilonBound | OneRunBound, claimed: float) -> dict[str, Any]:
    return {
        "claimed_epsilon": claimed,
        "epsilon_lower_bound": bound.epsilon,
        "largest_bound_possible": bound.ceiling,
        "delta": bound.delta,
        "confidence": bound.confidence,
    }


def audit(
    subject: Subject,
    *,
    delta: float,
    accountant: Accountant | None = None,
    worlds: int = 400,
    worlds_delta: float = 0.1,
    canaries: int | None = None,
    canary_runs: int = 1,
    confidence: float = 0.95,
    seed: int = 0,
    progress: Callable[[str], None] = lambda what: None,
) -> Audit:
    """Audit the privacy claim of a run.

    Args:
      subject: private run to audit.
      delta: delta of the privacy claim, also used by the one-run game.
      accountant: accountant of the privacy claim; None selects the claim's default.
      worlds: smallest number of worlds (runs) in the game with one canary; about half of the worlds have the canary.
      worlds_delta: delta at which the bound from the game with one canary is compared with the claim.
      canaries: number of canaries in the one-run game; None selects all clients, but at most 500.
      canary_runs: number of runs in the one-run game, whose canaries are counted together.
      confidence: confidence level of each of the two bounds.
      seed: first seed; the runs have the seeds ``seed, seed + 1, ...``.
      progress: function that is called with a description of the current step.

    Raises:
      JaxpflError: as in `games.play` and `games.one_run`; or if an argument is out of range, or a seed exceeds 32 bits.
    """
    claim = subject.claim
    silos = subject.silo is not None
    games.check_worlds(worlds)
    if not silos:
        games.check_canaries(subject, canaries, canary_runs)
    for name, value in (("worlds_delta", worlds_delta), ("confidence", confidence)):
        checks.probability(name, value)
    if seed + 2 * worlds + canary_runs >= 2**32:
        raise JaxpflError(f"seed must be below {2**32 - 2 * worlds - canary_runs} for {worlds} worlds, got {seed}")
    accountant = accountant or claim.default_accountant
    claimed, claimed_one_run = claim.epsilon(worlds_delta, accountant), claim.epsilon(delta, accountant)
    progress("cohorts and noise")
    cohorts, noise = [], white_box.why_no_noise_check(subject) or white_box.noise(subject, seed=seed)
    draws, one_run, seen = white_box.draws(subject, seed=seed), None, []
    if not silos:
        cohorts = white_box.cohorts(subject.run.cohorts, claim.sampling, seed=seed)
        progress("many canaries in one run")
        one_run = games.one_run(
            subject, canaries=canaries, delta=delta, confidence=confidence, seed=seed, runs=canary_runs
        )
        seen = [("one run", one_run, claimed_one_run)]
    game = games.play(
        subject, worlds=worlds, delta=worlds_delta, confidence=confidence, seed=seed + canary_runs, progress=progress
    )
    against = [
        f"{name}: epsilon is at least {bound.epsilon:.4g} at delta {bound.delta:g}, but the claim is {said:.4g}"
        for name, bound, said in [("worlds", game.bound, claimed), *seen]
        if not bound.epsilon <= said  # a bound that is NaN counts against the claim
    ]
    findings = cohorts + draws
    if not isinstance(noise, str):
        findings += noise.findings
        noise = "no round had enough uploads to release anything" if math.isnan(noise.scale) else noise
    against += [f"{finding.test}: p = {finding.p_value:.2g}" for finding in white_box.faults(findings)]
    return Audit(claim, accountant, claimed, game, claimed_one_run, one_run, cohorts, noise, draws, against)

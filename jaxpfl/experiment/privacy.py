"""Privacy as a run's config says it, and what becomes of it: a mechanism for the round, and a statement."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from jaxpfl import checks
from jaxpfl.errors import JaxpflError, unknown_name
from jaxpfl.participation import Participation
from jaxpfl.privacy import Mechanism, Statement, calibrated, plan_of
from jaxpfl.privacy.mechanism import NOISE_SEEDS
from jaxpfl.privacy.statement import GIVEN_START, SAME_USERS, SPENT_BEFORE


@dataclass(frozen=True)
class PrivacyConfig:
    """User-level differential privacy; off unless epsilon or noise_multiplier is given."""

    epsilon: float | None = None
    """Budget of the whole run: the noise is calibrated to it. Needs delta."""
    delta: float | None = None
    """delta of the claim; well below 1 / clients."""
    noise_multiplier: float | None = None
    """Standard deviation of the noise over the clipping norm, in place of epsilon; 0 clips only and claims nothing."""
    clipping_norm: float = 1.0
    """L2 norm to which each upload is clipped as a whole (parameters, psi, ...); to begin with, where it adapts."""
    noise: str = "central"
    """Who adds it: central (the server, to the sum), distributed (each client its share) or per_step (each client in
    every local step, as DP-AdaPeD is printed; norms and noise are then those of a step)."""
    min_uploads: int | None = None
    """Least number of uploads for a round to release anything, where the clients add the noise."""
    quantile: float | None = None
    """Adapt the clipping norm to this quantile of the uploads' norms."""
    quantile_lr: float = 0.2
    """Rate of the clipping norm's steps."""
    count_stddev: float | None = None
    """Noise on the number of uploads below the clipping norm; cohort / 20 unless given, or the noise multiplier if that
    is more."""
    scale_clipping_norm: float | None = None
    """For per_step: the clipping norm of psi's gradient; clipping_norm unless given."""
    joint: bool = False
    """For per_step: clip and noise the gradients of parameters and psi as one vector."""
    accountant: str = "pld"
    """pld (privacy loss distributions), or rdp, which cohorts of a fixed size need."""
    noise_seed: str = "run"
    """Where cohorts and noise come from: run (its seed and all its settings, so that it can be repeated), or secret
    (the operating system; only checkpoints hold it, until the run ends), for a model that is to be given away."""

    @property
    def on(self) -> bool:
        """Whether uploads are private at all."""
        return self.epsilon is not None or self.noise_multiplier is not None

    def check(self) -> None:
        """Refuses values that no run could have.

        Raises:
          JaxpflError: with the reason.
        """
        if self.epsilon is not None and self.noise_multiplier is not None:
            raise JaxpflError("give privacy.epsilon or privacy.noise_multiplier, not both")
        if not self.on:
            changed = [name for name, value in vars(self).items() if value != getattr(PrivacyConfig, name)]
            if changed:
                raise JaxpflError(f"privacy.{changed[0]} needs privacy.epsilon or privacy.noise_multiplier")
            return
        if self.accountant not in ("pld", "rdp"):
            raise JaxpflError(f"privacy.accountant must be pld or rdp, got {self.accountant!r}")
        if self.noise_seed not in NOISE_SEEDS:
            raise unknown_name("privacy.noise_seed", self.noise_seed, NOISE_SEEDS)
        if self.noise_multiplier != 0 and self.delta is None:
            raise JaxpflError("privacy.delta must be given: a claim without it says nothing")
        if self.epsilon is not None:
            checks.positive("privacy.epsilon", self.epsilon)


class Origin(NamedTuple):
    """Whence given parameters are: the checksum of the data that they were trained on, and whether they are private."""

    data: int
    private: bool


def caveat(origin: Origin | None, data: int) -> str:
    """What the claim of a run on data of this checksum has to say of the parameters that it starts from."""
    if origin is None or origin.data != data:
        return GIVEN_START
    return SPENT_BEFORE if origin.private else SAME_USERS


class Protection(NamedTuple):
    """A mechanism, and what it is worth; None where nothing can be claimed, as without noise."""

    mechanism: Mechanism
    statement: Statement | None


def protect(
    config: PrivacyConfig, participation: Participation, of_run: dict[str, Any], caveats: tuple[str, ...] = ()
) -> Protection | None:
    """What stands between a method's clients and its server; None where the config asks for none.

    Args:
      participation: of every round.
      of_run: what else `plan_of` has to be told of the method's run.
      caveats: what weakens the claim.

    Raises:
      JaxpflError: for what cannot be accounted, and budgets that no noise keeps.
    """
    if not config.on:
        return None
    accountant: Any = config.accountant
    given: dict[str, Any] = {
        name: getattr(config, name)
        for name in ("clipping_norm", "noise", "min_uploads", "scale_clipping_norm", "joint", "noise_seed")
    }
    z = config.noise_multiplier
    if z is None:
        assert config.epsilon is not None
        assert config.delta is not None
        some = Mechanism(1.0, **given)
        found = calibrated(some, participation, config.epsilon, config.delta, **of_run, accountant=accountant)
        z = found.noise_multiplier
    if config.quantile is not None:
        usual = max(participation.expected_cohort / 20, z)
        stddev = usual if config.count_stddev is None else config.count_stddev
        given |= {"quantile": config.quantile, "quantile_lr": config.quantile_lr, "count_stddev": stddev}
    mechanism = Mechanism(z, **given)
    if z == 0:
        return Protection(mechanism, None)
    assert config.delta is not None
    plan = plan_of(mechanism, participation, **of_run)
    statement = plan.statement(config.delta, accountant)
    return Protection(mechanism, statement._replace(noise_seed=config.noise_seed, caveats=caveats))

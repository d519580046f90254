"""Privacy settings of a run: a budget for which the noise is calibrated, or the noise itself."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal

import numpy as np

from jaxpfl.core import checks
from jaxpfl.core.participation import Participation
from jaxpfl.core.settings import documents_itself, part_of, read_help, setting
from jaxpfl.privacy.accounting import Accountant
from jaxpfl.privacy.claim import calibrated
from jaxpfl.privacy.mechanism import NOISE_SEEDS, Mechanism, NoiseSettings
from jaxpfl.support.errors import JaxpflError, shown, unknown_name

UNITS = ("user", "example")
_EXAMPLE_LEVEL = ("epsilon", "delta", "noise_multiplier", "clipping_norm", "noise_seed", "accountant", "unit")


@read_help
@dataclass(frozen=True)
class _Budget:
    epsilon: float | None = setting(None)
    """Privacy budget epsilon of the whole run, for which the noise is calibrated. Needs delta."""
    delta: float | None = setting(None)
    """Delta of the privacy claim; choose it well below 1 / clients."""


@documents_itself
@dataclass(frozen=True)
class PrivacyConfig(NoiseSettings, _Budget):
    """Differential privacy for users or for examples; off unless epsilon or noise_multiplier is given."""

    unit: Literal["user", "example"] = setting("user", text=str)
    """Unit of privacy: user (a client with all its examples, protected against observers of the server's releases) or
    example (a single example, or all examples of a person with person, protected against everyone outside its silo:
    every client uses DP-SGD with Poisson batches, clips the gradient of each example or person to C, and adds noise
    that depends on its number of examples)."""
    accountant: Accountant = setting("pld", text=str)
    """Accountant: pld (privacy loss distributions) or rdp (Renyi DP, for cohorts of a fixed size)."""

    @property
    def on(self) -> bool:
        """True if epsilon or noise_multiplier is given."""
        return self.epsilon is not None or self.noise_multiplier is not None

    def check(self) -> None:
        """Check for values that are invalid in every run.

        Raises:
          JaxpflError: for a value or a combination that is invalid; the message states the reason.
        """
        if self.epsilon is not None and self.noise_multiplier is not None:
            raise JaxpflError("give privacy.epsilon or privacy.noise_multiplier, not both")
        if not self.on:
            changed = [field.name for field in fields(self) if getattr(self, field.name) != field.default]
            if changed:
                raise JaxpflError(f"privacy.{changed[0]} requires privacy.epsilon or privacy.noise_multiplier")
            return
        if self.accountant not in ("pld", "rdp"):
            raise JaxpflError(f"privacy.accountant must be pld or rdp, got {shown(self.accountant)}")
        if self.noise_seed not in NOISE_SEEDS:
            raise unknown_name("privacy.noise_seed", self.noise_seed, NOISE_SEEDS)
        if self.unit not in UNITS:
            raise unknown_name("privacy.unit", self.unit, UNITS)
        if self.is_example_level:
            for field in fields(self):
                value = getattr(self, field.name)
                if field.name not in _EXAMPLE_LEVEL and value != field.default:
                    raise JaxpflError(f"privacy.{field.name} = {value} requires privacy.unit = user, got example")
            for name in ("noise_multiplier", "clipping_norm"):
                if np.ndim(getattr(self, name) or 0):
                    numbers = shown(getattr(self, name))
                    raise JaxpflError(f"privacy.{name} must be one number if privacy.unit = example, got {numbers}")
        if self.noise_multiplier != 0 and self.delta is None:
            raise JaxpflError("privacy.delta is missing: a privacy claim consists of epsilon and delta")
        if self.epsilon is not None:
            checks.positive("privacy.epsilon", self.epsilon)

    @property
    def is_example_level(self) -> bool:
        """True if individual examples are protected; False if users are."""
        return self.unit == "example"

    def mechanism(self, participation: Participation, of_run: Mapping[str, Any]) -> Mechanism | None:
        """Build the user-level mechanism, calibrated if a budget is given; None without privacy.

        Args:
          participation: sampling scheme for every round's cohort.
          of_run: other arguments of `plan_of`, which depend on the method and the run.

        Raises:
          JaxpflError: if the run cannot be accounted for, or if no noise can meet the budget.
        """
        if not self.on:
            return None
        # z covers sum and count together, so it is calibrated without adaptive clipping. count_stddev may depend on z.
        given = dict[str, Any](vars(part_of(NoiseSettings, self)))
        given.update(quantile=None, quantile_lr=NoiseSettings.quantile_lr, count_stddev=None)
        z = self.noise_multiplier
        if z is None:
            assert self.epsilon is not None
            assert self.delta is not None
            given["noise_multiplier"] = 1.0
            budget = self.epsilon, self.delta
            z = calibrated(
                Mechanism(**given), participation, *budget, **of_run, accountant=self.accountant
            ).noise_multiplier
        given["noise_multiplier"] = z
        if self.quantile is not None:
            usual = max(participation.expected_cohort / 20, float(max(z) if isinstance(z, tuple) else z))
            stddev = usual if self.count_stddev is None else self.count_stddev
            given.update(quantile=self.quantile, quantile_lr=self.quantile_lr, count_stddev=stddev)
        return Mechanism(**given)

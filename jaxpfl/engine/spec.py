"""Description of a run as one frozen value, made from Python keywords, flags, config files or ``config.json``.

A setting is a field of one of the parts in `jaxpfl.engine.spec_parts`. `fit` takes the fields of all parts as keywords,
and `jaxpfl.runs.config.RunConfig` has them as its own fields; `RunSpec` nests them, and `assemble` makes a
`Simulation` of it. A new setting is a field there, and a line where it is used.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from jaxpfl.algorithms import Method
from jaxpfl.algorithms.parts import augmentation, schedules
from jaxpfl.core.participation import RELIABLE, Availability
from jaxpfl.core.settings import check, part_of
from jaxpfl.core.types import PyTree
from jaxpfl.data import Split
from jaxpfl.engine.execution_plan import ExecutionPlan
from jaxpfl.engine.spec_parts import (
    PARTS,
    Adversary,
    Aggregation,
    Coding,
    Cohorts,
    Neighbourhood,
    Newcomers,
    Training,
    Work,
)
from jaxpfl.models import metrics
from jaxpfl.privacy import Mechanism, PrivacyConfig, Refusal
from jaxpfl.support.errors import JaxpflError
from jaxpfl.uploads.robust import resolve


@dataclass(frozen=True, kw_only=True, eq=False)
class RunSpec:
    """A run: a method and all its settings. `assemble` makes it a `Simulation`, given the data.

    Attributes:
      method: the method.
      hyper: hyper-parameters by name, over ``work.lr`` and ``aggregation.server_lr``; a value is a number or, for a
        sweep, one number for each run.
      options: the method's static options by name.
      seeds: of the runs, [S].
      privacy: clipping and noise of the uploads, or of examples' gradients; None where neither is private.
      plan: the way to execute; changes speed and memory only.
      split: the split of the data set; None for a federation of the caller's own.
      num_classes: the number of classes; the largest label plus one unless given.
      warm_start: parameters that every model starts from; None for random ones.

    Raises:
      JaxpflError: for a setting of another type or outside its range.
    """

    method: Method
    hyper: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    seeds: Sequence[int] = (0,)
    training: Training = field(default_factory=Training)
    cohorts: Cohorts = field(default_factory=Cohorts)
    work: Work = field(default_factory=Work)
    aggregation: Aggregation = field(default_factory=Aggregation)
    adversary: Adversary = field(default_factory=Adversary)
    availability: Availability = RELIABLE
    coding: Coding = field(default_factory=Coding)
    newcomers: Newcomers = field(default_factory=Newcomers)
    neighbourhood: Neighbourhood = field(default_factory=Neighbourhood)
    privacy: Mechanism | PrivacyConfig | None = None
    plan: ExecutionPlan = field(default_factory=ExecutionPlan)
    split: Split | None = None
    num_classes: int | None = None
    warm_start: PyTree | None = None

    def __post_init__(self) -> None:
        for name in PARTS:
            check(getattr(self, name))
        self.availability.check()
        self.adversary.check()
        if (patience := self.training.patience) is not None and self.training.eval_every is None:
            raise JaxpflError(f"patience = {patience} counts evaluations, and there is one: give eval_every")
        metrics.by_name(self.training.metrics)
        schedules.of(self.work.lr_schedule, self.training.rounds)
        if self.work.augment is not None:
            augmentation.parse(self.work.augment)
        self._check_noise_and_steps()
        self._check_uploads()
        self._check_robustness()
        if isinstance(self.privacy, PrivacyConfig):
            self.privacy.check()
            if not self.privacy.on:  # None is the word for no privacy: a run must not be public by an oversight
                raise JaxpflError("privacy needs privacy.epsilon or privacy.noise_multiplier; None is without privacy")

    def _check_noise_and_steps(self) -> None:
        clip, private = self.work.clip_gradients, self.privacy
        if self.work.local_epochs is not None and private is not None and private.noise == "per_step":
            raise JaxpflError(
                f"local_epochs = {self.work.local_epochs}: under privacy.noise = per_step a client's number of noisy "
                "steps would show its number of examples: give local_steps"
            )
        if clip is not None and private is not None and (self.guards_examples or private.noise == "per_step"):
            what = "privacy.unit = example" if self.guards_examples else "privacy.noise = per_step"
            raise JaxpflError(
                f"clip_gradients = {clip:g} would clip the noise of {what}, which itself clips gradients, to "
                "privacy.clipping_norm: leave one out"
            )
        if self.work.augment is not None and self.guards_examples:
            raise JaxpflError(
                f"augment = {self.work.augment} is of batches, and privacy.unit = example takes the gradient of each "
                "example by itself: leave it out"
            )

    def _check_uploads(self) -> None:
        if self.options.get("fednova") and self.is_private:
            raise JaxpflError(
                "fednova uploads each client's number of steps, which privacy would distort: leave one out"
            )
        if self.method.asynchronous:
            for what, given, why in (
                ("privacy", self.is_private or self.guards_examples, "no accountant covers cohorts that follow time"),
                ("compress", self.coding.compress is not None, "arrivals need an upload's length before it is made"),
            ):
                if given:
                    raise JaxpflError(f"{self.method.name} has asynchronous rounds, without {what}: {why}")

    def _check_robustness(self) -> None:
        aggregate = self.aggregation.aggregate
        if resolve(aggregate).rule is not None:
            if self.options.get("fednova"):
                raise JaxpflError(f"fednova divides a sum of uploads, which aggregate = {aggregate} is not")
            if self.is_private:
                raise Refusal.ROBUST_AGGREGATE.error()
            if self.aggregation.weighting == "examples":
                raise JaxpflError(
                    f"weighting = examples: under aggregate = {aggregate} clients count the same, as a weight is a "
                    "client's own word; give uniform, or leave it out"
                )
        if self.adversary.attack is not None and self.is_private:
            raise Refusal.ATTACKERS.error()

    @property
    def is_private(self) -> bool:
        """True if clients' uploads are clipped, with or without noise."""
        if isinstance(self.privacy, PrivacyConfig):
            return self.privacy.on and not self.privacy.of_examples
        return self.privacy is not None

    @property
    def guards_examples(self) -> bool:
        """True if the gradients of single examples are clipped in every client."""
        return isinstance(self.privacy, PrivacyConfig) and self.privacy.on and self.privacy.of_examples


def spec_of(method: Method, settings: Any, **more: Any) -> RunSpec:
    """The run of a method with settings that lie side by side.

    Args:
      method: the method.
      settings: `Settings`, or another object with their names as attributes.
      more: what else `RunSpec` has.
    """
    return RunSpec(method=method, **{name: part_of(part, settings) for name, part in PARTS.items()}, **more)

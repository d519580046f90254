"""Accounting of a method behind a mechanism: the releases of its rounds, read off the method itself."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from jaxpfl.algorithms import METHODS, LocalWork, Method, Optimizer
from jaxpfl.core.participation import Participation
from jaxpfl.engine.state import check_values
from jaxpfl.privacy import Mechanism, PrivacyPlan, plan_of


def of_round(
    method: Method, hp: Any, options: dict[str, Any], *, steps: int, optimizer: Optimizer = "sgd"
) -> dict[str, Any]:
    """Arguments of `plan_of` and `calibrated` that depend on a method's round.

    Args:
      method: one that uploads.
      hp: its hyper-parameters.
      options: those of its static options that are not at their defaults.
      steps: tau.
      optimizer: the clients'.
    """
    # A step w - lr (gradient + (decay + prox) w) must not stretch what was added before: |1 - lr (decay + prox)| <= 1.
    pull = getattr(hp, "weight_decay", 0.0) + getattr(hp, "prox", 0.0)
    stretches = np.any(getattr(hp, "lr", 0.0) * pull > 2)
    releases = 1 if method.releases is None else method.releases(method.options | options)
    ours = method is METHODS.get(method.name)  # of another one it is unknown how it makes its upload
    linear = ours and optimizer == "sgd" and not stretches
    return {"steps": steps, "scales": method.scales, "releases": releases, "linear": linear}


def plans(
    method: Method,
    hp: Any,
    options: dict[str, Any],
    mechanism: Mechanism,
    participation: Participation,
    work: LocalWork,
    *,
    rounds: int,
    runs: int,
    compressed: bool,
) -> tuple[PrivacyPlan | None, ...]:
    """Privacy plan of each run; None for a run without noise, for which nothing can be claimed.

    Raises:
      JaxpflError: if the mechanism cannot be accounted, or its numbers are not one per run.
    """
    told = of_round(method, hp, options, steps=work.steps, optimizer=work.optimizer) | {"compressed": compressed}

    def each(name: str) -> list[float]:
        values = getattr(mechanism, name)
        check_values(name, values, runs)
        return np.broadcast_to(np.asarray(values, float), runs).tolist()

    def plan(z: float, clip: float) -> PrivacyPlan | None:
        one = replace(mechanism, noise_multiplier=z, clipping_norm=clip)
        return None if z == 0 else plan_of(one, participation, rounds=rounds, **told)

    return tuple(map(plan, each("noise_multiplier"), each("clipping_norm")))

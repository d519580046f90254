"""Every row of the table of settings that cannot go together is refused where they are given, with its reason."""

import re
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import numpy as np
import pytest

import jaxpfl
from jaxpfl import JaxpflError
from jaxpfl.audit import subject_of
from jaxpfl.core import exclusions
from jaxpfl.core.participation import full
from jaxpfl.engine.build import assemble
from jaxpfl.engine.spec import RunSpec
from jaxpfl.privacy import CentralNoise, FixedSize, Full, Mechanism, Poisson, PrivacyConfig, PrivacyPlan, plan_of
from jaxpfl.privacy.silos import mechanism_of
from jaxpfl.runs.config import RunConfig
from jaxpfl.runs.sweep.definition import Search, define
from jaxpfl.runs.sweep.grid import Grid, parse

RNG = np.random.default_rng(0)
CLIENTS = [(RNG.normal(size=(8, 3)).astype(np.float32), np.arange(8) % 2) for _ in range(6)]
FEDERATION = jaxpfl.stack_clients(CLIENTS, test=CLIENTS)
SHARES = {"privacy.noise": "distributed", "privacy.min_uploads": 2}
STEPS = {"privacy.noise": "per_step"}
RUNS: dict[str, dict[str, Any]] = {
    "privacy": {"privacy.noise": "central"},
    "unit = example": {"privacy.unit": "example"},
    "noise = central": {"privacy.noise": "central"},
    "noise = banded": {"privacy.noise": "banded", "participation": "cyclic", "cohort": 2},
    "noise = per_step": STEPS,
    "client-side noise": SHARES,
    "noise_seed = secret": {"privacy.noise_seed": "secret"},
    "quantile": {"privacy.quantile": 0.5},
    "several noise multipliers or norms": {"privacy.noise_multiplier": (1.0, 2.0), "seeds": 2},
    "steps without noise": {"method": "apfl"},
    "noise_seed = secret and training after the last round": {"method": "fedavg-ft", "privacy.noise_seed": "secret"},
    "weighting = examples": {"weighting": "examples"},
    "participation = replacement": {"participation": "with-replacement"},
    "participation = poisson": {"participation": "poisson", "cohort": 3},
    "participation = cyclic": {"participation": "cyclic", "cohort": 3},
    "participation = uniform": {"participation": "uniform", "cohort": 3},
    "participation other than cyclic": {"participation": "full", "cohort": None},
    "capped cohorts": {"participation": "poisson", "cohort": 3, "cohort_cap": 4},
    "accountant = pld": {"privacy.epsilon": 8.0},
    "accountant = rdp": {"privacy.epsilon": 8.0, "privacy.accountant": "rdp"},
    "fednova": {"options": {"fednova": True}},
    "aggregate": {"aggregate": "median"},
    "attack": {"attack": "sign-flip", "attackers": 0.3},
    "compress": {"compress": "sign"},
    "feedback": {"compress": "sign:feedback=true", **SHARES},
    "local_epochs": {"local_epochs": 1},
    "clip_gradients": {"clip_gradients": 1.0},
    "augment": {"augment": "mixup:alpha=0.2"},
    "draw": {"draw": "epoch"},
    "graph of the data": {"method": "network-lasso"},
    "pooled data": {"method": "pooled"},
    "asynchronous rounds": {"method": "fedbuff", "cohort": 3},
}
"""Settings of a run by their words in the table."""
SEARCHES: dict[str, dict[str, Any]] = {
    "a sweep": {},
    "plan.clients_in = disk": {"plan": jaxpfl.ExecutionPlan(clients_in="disk")},
    "eval_every": {"eval_every": 1},
    "checkpoint_every": {"checkpoint_every": 1},
    "patience": {"patience": 2},
    "halving": {"halving": 2},
    "select = none": {"select": "none"},
    "budget = steps": {"budget": "steps"},
    "an axis of the problem": {"axis": "clients=5,6"},
    "an axis of rounds": {"axis": "rounds=5,6"},
}
"""Settings of a sweep by their words in the table."""


class Normalised(nn.Module):
    """A model with running statistics."""

    @nn.compact
    def __call__(self, x: Any, train: bool = False) -> Any:
        return nn.Dense(2)(nn.BatchNorm(use_running_average=not train)(x))


def silos() -> Any:
    given: dict[str, Any] = {"batch_size": 2, "releases": 1, "rounds": 1, "clipping_norm": 1.0}
    return mechanism_of(np.array([4]), per_round=int, once=int, **given)


def audited() -> Any:
    config = PrivacyConfig(noise_multiplier=1.0, delta=1e-3, noise="banded")
    spec = RunSpec(method=jaxpfl.METHODS["fedavg"], privacy=config, participation="cyclic", cohort=2)
    return subject_of(assemble(spec, FEDERATION), "fedavg")


CALLS: dict[tuple[str, str], Callable[[], Any]] = {
    ("privacy", "running statistics"): lambda: run({"privacy.noise": "central", "model": Normalised()}),
    ("noise_multiplier = 0", "a privacy claim"): lambda: PrivacyPlan(CentralNoise(0.0), Full(), 1).epsilon(1e-5),
    ("client-side noise", "several releases in a round"): lambda: plan_of(
        Mechanism(1.0, noise="distributed", min_uploads=2), full(6), rounds=2, releases=2
    ),
    ("noise = banded", "quantile"): lambda: CentralNoise(1.0, count_stddev=1.0, coefficients=(0.8, 0.6)),
    ("noise = banded", "several releases in a round"): lambda: CentralNoise(1.0, releases=2, coefficients=(0.8, 0.6)),
    ("accountant = pld", "participation = uniform"): lambda: PrivacyPlan(CentralNoise(1.0), FixedSize(6, 3), 2).epsilon(
        1e-5
    ),
    ("accountant = rdp", "capped cohorts"): lambda: PrivacyPlan(CentralNoise(1.0), Poisson(0.5, 6, 4), 2).epsilon(
        1e-5, "rdp"
    ),
    ("accountant = paper", "adaptive clipping or cyclic participation"): lambda: PrivacyPlan(
        CentralNoise(1.0, count_stddev=1.0), Full(), 1
    ).epsilon(1e-5, "paper"),
    ("accountant = paper", "unit = example"): lambda: silos().epsilons(1e-5, "paper"),
    ("an audit", "noise = banded"): audited,
    ("an audit", "participation = cyclic"): audited,
}
"""Calls by the words of both settings, for those that are not of a run by `fit`."""


def run(settings: dict[str, Any]) -> None:
    private = {name.removeprefix("privacy."): value for name, value in settings.items() if "." in name}
    given = {name: value for name, value in settings.items() if "." not in name}
    if private:
        noise: dict[str, Any] = {} if "epsilon" in private else {"noise_multiplier": 1.0}
        given["privacy"] = PrivacyConfig(**noise | {"delta": 1e-3} | private)
    jaxpfl.fit(given.pop("method", "fedavg"), FEDERATION, **{"model": "linear", "rounds": 2, "batch_size": 4} | given)


def sweep(settings: dict[str, Any]) -> None:
    search = {name: settings.pop(name) for name in ("halving", "select", "budget") if name in settings}
    axis = settings.pop("axis", "lr=.1")
    define(("local",), RunConfig(rounds=5, **settings), Grid((parse(axis),)), Search(**search))


def give(what: str, other: str) -> None:
    if (what, other) in CALLS:
        CALLS[what, other]()
    elif what in SEARCHES:
        sweep(SEARCHES[what] | SEARCHES[other])
    else:
        run(RUNS[what] | RUNS[other])


@pytest.mark.parametrize(("what", "other", "why"), exclusions.rows())
def test_settings_that_cannot_go_together_are_refused(what: str, other: str, why: str):
    with pytest.raises(JaxpflError, match=re.escape(why)) as caught:
        give(what, other)
    assert "\n" not in str(caught.value)

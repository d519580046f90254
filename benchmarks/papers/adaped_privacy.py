"""Private tables and figures of Ozkara et al.: Table 2, Figures 1b and 2, and FedEM beside AdaPeD."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from .adaped_learning import (
    FEMNIST,
    MAIN_2022,
    MAIN_2023,
    MNIST,
    PAPER_2022,
    PAPER_2023,
    WRITER_DIGITS,
    WRITERS,
)
from .declared import Contender, Experiment, Figure, Printed, Training

DELTA = 1e-4
NORMS = (0.01, 0.03, 0.1, 0.3)
SOUND = (
    "the printed epsilon follows from Theorem 5, which is not a valid bound, and the paper does not state "
    "delta, the clipping norms and the noise: here, dp-accounting computes epsilon at delta 1e-4"
)
_AXES = Figure("epsilon", "test accuracy, %")
_EPSILONS = (4.0, 6.0, 9.0)


def _private(
    data: str, config: Mapping[str, Any], epsilon: float, rows: tuple[Contender, ...], **more: Any
) -> Training:
    """Return a case with one epsilon; the clipping norm of each row is searched."""
    everyone = config["cohort"] == config["clients"]
    noise = {"epsilon": epsilon, "delta": DELTA, "clipping_norm": 0.1}
    values = {"local_steps": 10, "seeds": 5, **config, "privacy": noise}
    values |= {} if everyone else {"participation": "poisson"}
    return Training(f"{data}, eps {epsilon:g}", values, rows, {"privacy.clipping_norm": NORMS}, x=epsilon, **more)


def _table_2(epsilon: float, fedavg: Printed, adaped: Printed) -> Training:
    rows = (
        Contender("fedavg", "DP-FedAvg", fedavg, score="global_accuracy"),
        Contender("adaped", "DP-AdaPeD", adaped, MAIN_2023),
    )
    return _private("MNIST", {**MNIST, "cohort": 50}, epsilon, rows)


def _writers(data: str, config: Mapping[str, Any]) -> tuple[Training, ...]:
    rows = (
        Contender("adaped", "DP-AdaPeD", set=MAIN_2022),
        Contender("adaped", "DP-AdaPeD, unsampled iterations", set=(*MAIN_2022, "idle_rounds=10")),
    )
    return tuple(_private(data, config, epsilon, rows) for epsilon in _EPSILONS)


def _per_step(epsilon: float) -> Training:
    """Return a case with noise in the local steps, which for cohorts of a fixed size is accounted for by Renyi DP."""
    row = Contender("adaped", "DP-AdaPeD, unsampled iterations", set=(*MAIN_2022, "idle_rounds=10"))
    found = _private("FEMNIST", FEMNIST, epsilon, (row,))
    noise = {"noise": "per_step", "joint": True, "accountant": "rdp"}
    config = {**found.config, "privacy": {**found.config["privacy"], **noise}, "participation": "uniform"}
    return replace(found, config=config)


EXPERIMENTS = (
    Experiment(
        "adaped-table2",
        f"{PAPER_2023}, Table 2",
        "MNIST, full participation, user-level privacy: DP-FedAvg beside DP-AdaPeD",
        400,
        (
            _table_2(3.35, Printed(11.73, 0.85), Printed(93.32, 1.18)),
            _table_2(13.16, Printed(29.91, 1.28), Printed(98.51, 0.90)),
            _table_2(27.30, Printed(55.79, 0.29), Printed(99.01, 0.65)),
        ),
        note=SOUND,
    ),
    Experiment(
        "adaped-figure1b",
        f"{PAPER_2023}, Figure 1b",
        "FEMNIST, K/m .33: accuracy of DP-AdaPeD against epsilon, without and with unsampled iterations",
        150,
        _writers("FEMNIST", FEMNIST),
        _AXES,
        note=f"the paper shows curves without numbers; {SOUND}",
    ),
    Experiment(
        "adaped-figure1b-writers",
        f"{PAPER_2023}, Figure 1b, on other data",
        "MNIST by writer, K/m .33: accuracy of DP-AdaPeD against epsilon, without and with unsampled iterations",
        150,
        _writers("writers", WRITER_DIGITS),
        _AXES,
        note=f"{WRITERS}; {SOUND}",
    ),
    Experiment(
        "adaped-figure2-2022",
        f"{PAPER_2022}, Figure 2",
        "FEMNIST, K/m .33: DP-AdaPeD with unsampled iterations, mu and psi clipped and noised as one in each step",
        150,
        tuple(_per_step(epsilon) for epsilon in _EPSILONS),
        _AXES,
        quick_cases=(0, 2),
        note=f"the paper shows curves without numbers; {SOUND}",
    ),
    Experiment(
        "adaped-figure3-2022",
        f"{PAPER_2022}, Figure 3",
        "MNIST, full participation: DP-FedEM beside DP-AdaPeD against epsilon",
        900,
        tuple(
            _private(
                "MNIST",
                {**MNIST, "cohort": 50},
                epsilon,
                (Contender("adaped", "DP-AdaPeD", set=MAIN_2022), Contender("fedem", "DP-FedEM", set=("lr=0.2",))),
            )
            for epsilon in (5.0, 10.0, 15.0, 20.0, 25.0)
        ),
        _AXES,
        quick_cases=(0, 4),
        note=f"the paper shows curves without numbers; {SOUND}",
    ),
)

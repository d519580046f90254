"""PersFL of Divi et al.: Tables 2 to 7, and the grid of Figure 6."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from .adaped_learning import RATES
from .compare import spread
from .declared import Contender, Experiment, Figure, Printed, Reaching, Students, Training

PAPER = "Divi et al. 2021"
UNSTATED = (
    "the paper does not state the rates, the batch size, the epochs and the hyper-parameters of the other "
    "methods: here, a round has 10 steps with batches of 20, validation chooses the rate of the local "
    "models, and other settings have jaxpfl's defaults"
)
CHOICES = "the paper lists the choices of each user, from which we computed the mean and ±"
_TEMPERATURES = (1, 5, 9, 13, 17, 21, 25)
_IMITATIONS = (0.0, 0.25, 0.5, 0.75, 1.0)

_COMMON: Mapping[str, Any] = {
    "clients": 10,
    "cohort": 10,
    "pool_test": True,
    "test_share": 0.2,
    "validation_share": 0.25,
    "local_steps": 10,
    "batch_size": 20,
    "seeds": 5,
}
_DATA: Mapping[str, Mapping[str, Any]] = {
    "mnist": {"data": "mnist", "model": "mlp:100"},
    "cifar10": {"data": "cifar10", "model": "cnn"},
}
_SPLITS: Mapping[str, Mapping[str, Any]] = {
    "DS-1": {"classes_per_client": 4},
    "DS-2": {"partition": "dirichlet-class", "alpha": 0.9},
    "DS-3": {"classes_per_client": 2, "sigma": 2.0},
}
_TITLES = {"mnist": "MNIST", "cifar10": "CIFAR-10"}

# For each data set and split: mean and standard deviation over users, and rounds, of the five methods.
_METHODS = ("fedavg", "persfl", "fedper", "pfedme", "perfedavg")
_LABELS = ("FedAvg", "PersFL", "FedPer", "pFedMe", "Per-FedAvg")
_Rows = tuple[tuple[float, float, int], ...]
_MAIN: Mapping[tuple[str, str], _Rows] = {
    ("cifar10", "DS-1"): ((45.0, 5.1, 50), (81.9, 4.9, 50), (78.2, 5.6, 50), (69.0, 6.7, 800), (66.9, 5.1, 800)),
    ("cifar10", "DS-2"): ((48.7, 2.0, 25), (59.6, 1.7, 25), (55.1, 2.1, 25), (59.2, 1.4, 1000), (57.6, 1.5, 800)),
    ("cifar10", "DS-3"): ((46.6, 9.4, 100), (82.3, 7.2, 50), (79.2, 7.9, 100), (78.1, 9.2, 800), (77.8, 9.5, 1000)),
    ("mnist", "DS-1"): ((92.0, 1.7, 100), (98.6, 0.4, 100), (98.3, 0.3, 100), (94.8, 1.0, 800), (98.9, 0.6, 800)),
    ("mnist", "DS-2"): ((85.5, 1.3, 50), (88.0, 1.3, 25), (85.5, 1.3, 50), (87.1, 1.2, 800), (87.6, 1.0, 800)),
    ("mnist", "DS-3"): ((96.4, 1.3, 100), (99.4, 0.3, 100), (99.4, 0.5, 100), (98.2, 0.5, 800), (97.3, 0.8, 800)),
}
# For each data set: mean and standard deviation over users for the three splits.
_Splits = tuple[tuple[float, float], ...]
_LAST_TEACHER: Mapping[str, _Splits] = {
    "cifar10": ((80.9, 5.0), (58.0, 1.8), (81.6, 7.5)),
    "mnist": ((98.6, 0.3), (88.1, 1.2), (99.4, 0.3)),
}
_GENERALISED: Mapping[str, _Splits] = {
    "cifar10": ((81.5, 4.9), (58.2, 1.6), (81.7, 7.4)),
    "mnist": ((98.7, 0.3), (87.3, 1.3), (99.5, 0.4)),
}
# Table 5: T and lambda that each of the ten users chose, as means over runs.
_CHOICES: Mapping[tuple[str, str], Mapping[str, tuple[float, ...]]] = {
    ("cifar10", "DS-1"): {
        "T": (12.2, 8.2, 7.4, 17, 17, 12.2, 20.2, 12.2, 12.2, 20.2),
        "lambda": (0.45, 0.4, 0.45, 0.3, 0.5, 0.55, 0.6, 0.4, 0.5, 0.3),
    },
    ("cifar10", "DS-2"): {
        "T": (8.2, 25, 12.2, 21, 11.4, 16.2, 17, 2.6, 21, 17),
        "lambda": (0.6, 0.7, 0.65, 0.6, 0.75, 0.6, 0.7, 0.65, 0.75, 0.75),
    },
    ("cifar10", "DS-3"): {
        "T": (6.6, 12.2, 2.6, 17, 11.4, 20.2, 7.4, 4.2, 2.6, 8.2),
        "lambda": (0.25, 0.5, 0.3, 0.35, 0.15, 0.35, 0.2, 0.1, 0.35, 0.6),
    },
    ("mnist", "DS-1"): {
        "T": (1, 1, 1.8, 1, 1, 1, 1, 1, 1, 1),
        "lambda": (0, 0, 0.1, 0, 0.05, 0.05, 0.05, 0, 0.1, 0),
    },
    ("mnist", "DS-2"): {
        "T": (11.4, 5.8, 15.4, 10.6, 11.4, 1.8, 11.4, 11.4, 3.4, 6.6),
        "lambda": (0.45, 0.6, 0.4, 0.45, 0.6, 0.65, 0.4, 0.45, 0.6, 0.5),
    },
    ("mnist", "DS-3"): {
        "T": (1, 1, 1, 1, 1, 5.8, 1, 1, 1, 1),
        "lambda": (0, 0, 0, 0, 0, 0.05, 0, 0, 0, 0),
    },
}
_SCORINGS = {"mnist": 20, "cifar10": 10}
"""Number of times that each method is scored. Each time, PersFL trains 29 students for every user and run, which takes
minutes for CIFAR-10."""
_COPIED = "the paper's column equals the column of FedAvg for all ten users, so it is probably a copy"
_LEAST = 100
"""Minimum number of rounds of each method in the tables that show how many rounds the methods need."""
_MINUTES = {"mnist": 40, "cifar10": 240}


def reached(data: str) -> str:
    """Return the criterion of Table 7 in words."""
    return (
        f"this is the first of {_SCORINGS[data]} evaluations whose validation accuracy is within one point of the "
        "run's best: the paper states no criterion; a run has the paper's number of rounds, but at least 100"
    )


def config(data: str, split: str) -> dict[str, Any]:
    """Return the settings that all tables of a data set and split share."""
    return {**_COMMON, **_DATA[data], **_SPLITS[split]}


def _case(data: str, split: str, rows: tuple[Contender, ...], **more: Any) -> Training:
    return Training(
        f"{_TITLES[data]}, {split}", config(data, split), rows, {"lr": RATES}, "clients", note=UNSTATED, **more
    )


def main_case(data: str, split: str) -> Training:
    """Return the case with the five methods of Tables 2 and 3 on a data set and split."""
    rows = []
    for method, label, (mean, std, rounds) in zip(_METHODS, _LABELS, _MAIN[data, split], strict=True):
        copied = (data, split, method) == ("mnist", "DS-2", "fedper")
        search = {"pfedme.lr": RATES} if method == "pfedme" else None  # lr would also change w's rate
        note = _COPIED if copied else ""
        rows.append(Contender(method, label, Printed(mean, std), rounds=rounds, search=search, note=note))
    return _case(data, split, tuple(rows))


def _variants(data: str, other: Contender, printed: _Splits) -> tuple[Training, ...]:
    """Return cases that compare PersFL with a variant, for each split."""
    found = []
    for split, value in zip(_SPLITS, printed, strict=True):
        mean, std, rounds = _MAIN[data, split][1]
        variant = Contender(other.method, other.label, Printed(*value), other.set, rounds)
        found.append(_case(data, split, (Contender("persfl", "PersFL", Printed(mean, std), rounds=rounds), variant)))
    return tuple(found)


def _students(data: str) -> tuple[Students, ...]:
    """Return cases with the choices of PersFL's users, for each split."""
    found = []
    for split in _SPLITS:
        training = _case(data, split, (Contender("persfl", "PersFL", rounds=_MAIN[data, split][1][2]),))
        printed = {name: Printed(*spread(values)) for name, values in _CHOICES[data, split].items()}
        found.append(Students(training.setting, training, printed))
    return tuple(found)


def _rounds(data: str) -> tuple[Reaching, ...]:
    """Return cases with the rounds of the five methods, for each split."""
    found = []
    for split in _SPLITS:
        main = main_case(data, split)
        rows = tuple(
            replace(row, printed=Printed(rounds), rounds=max(rounds, _LEAST), note="")
            for row, (*_, rounds) in zip(main.contenders, _MAIN[data, split], strict=True)
        )
        found.append(Reaching(main.setting, replace(main, contenders=rows, spread="runs"), _SCORINGS[data]))
    return tuple(found)


def _tables(data: str) -> tuple[Experiment, ...]:
    number = {"cifar10": 2, "mnist": 3}[data]
    title, each = _TITLES[data], _MINUTES[data]
    main = tuple(
        Experiment(
            f"persfl-{split.lower().replace('-', '')}-{data}",
            f"{PAPER}, Table {number}",
            f"{title}, {split}, 10 users: accuracy of five methods",
            each,
            (main_case(data, split),),
        )
        for split in _SPLITS
    )
    return (
        *main,
        Experiment(
            f"persfl-table4-{data}",
            f"{PAPER}, Table 4",
            f"{title}: PersFL with the last global model as the teacher",
            each,
            _variants(data, Contender("persfl", "PersFL, last teacher", set=("teacher=last",)), _LAST_TEACHER[data]),
        ),
        Experiment(
            f"persfl-table5-{data}",
            f"{PAPER}, Table 5",
            f"{title}: T and lambda that users choose, means over users",
            each,
            _students(data),
            note=CHOICES,
        ),
        Experiment(
            f"persfl-table6-{data}",
            f"{PAPER}, Table 6",
            f"{title}: PersFL beside generalised distillation",
            each,
            _variants(data, Contender("persfl-gd", "PersFL-GD"), _GENERALISED[data]),
        ),
        Experiment(
            f"persfl-table7-{data}",
            f"{PAPER}, Table 7",
            f"{title}: rounds until five methods are within a point of their best, and a client's uploads by then",
            each,
            _rounds(data),
            quick_cases=(0,),
            note=reached(data),
        ),
    )


GRID = (
    "one seed instead of the paper's five; the paper states neither the rate nor the number of local steps: "
    "here, the rate is .1 (not searched), and a round has 10 steps with batches of 20"
)


def _grid() -> tuple[Training, ...]:
    """Return cases with the accuracy at one lambda and T for all users."""
    common = {**config("mnist", "DS-1"), "rounds": 100, "lr": 0.1, "seeds": 1}
    return tuple(
        Training(
            f"T = {temperature}",
            common,
            tuple(
                Contender(
                    "persfl",
                    f"lambda = {imitation:g}",
                    set=(f"imitations={imitation}", f"temperatures={float(temperature)}"),
                )
                for imitation in _IMITATIONS
            ),
            spread="clients",
            x=float(temperature),
            note=GRID,
        )
        for temperature in _TEMPERATURES
    )


EXPERIMENTS = (
    *_tables("mnist"),
    *_tables("cifar10"),
    Experiment(
        "persfl-lambda-T",
        f"{PAPER}, Figure 6",
        "MNIST, DS-1: accuracy of PersFL over lambda and T, mean over users",
        30,
        _grid(),
        Figure("temperature T", "test accuracy, %"),
        quick_cases=(6,),
        note="values are means over users: the paper shows a grid for each user, without numbers in the text",
    ),
)

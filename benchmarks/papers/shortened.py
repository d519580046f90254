"""Tables whose full size takes days on two cores, cut to an hour: fewer rounds and rates, or a smaller network.

Their values are of these settings alone; a printed number stands beside rows of as many rounds as in print.
"""

from __future__ import annotations

from dataclasses import replace

from . import adaped_learning, others, persfl
from .adaped_learning import PAPER_2023, WEAK
from .declared import UNPRINTED, Experiment, Training

RATES = (0.05, 0.1, 0.2)
"""Three of the paper's rates."""
ROUNDS = 300
_BOARD = ("local", "fedavg", "fedavg-ft", "ditto", "fedper", "adaped", "apfl", "fedrod", "adaped-plus")
_SLOW = 100
"""Rounds in place of print's 800 to 1000 of pFedMe and Per-FedAvg."""


def _users(split: str) -> Training:
    """PersFL's CIFAR-10, with pFedMe and Per-FedAvg for as many rounds as the others at the most."""
    case = persfl.main_case("cifar10", split)
    rows = tuple(
        replace(
            row,
            printed=row.printed if row.rounds and row.rounds <= _SLOW else UNPRINTED,
            rounds=min(row.rounds or _SLOW, _SLOW),
            search=None if row.search is None else dict.fromkeys(row.search, RATES),
        )
        for row in case.contenders
    )
    return replace(case, contenders=rows, search={"lr": RATES})


def _board(data: str, title: str) -> Training:
    """PFLlib's board with the paper's network of Ozkara et al., for ten rounds."""
    case = others.case_of(f"pfllib-{data}")
    rows = tuple(row for row in case.contenders if row.method in _BOARD)
    config = {**case.config, "model": "cnn", "rounds": 10}
    return replace(case, setting=f"{title}, 10 rounds", config=config, contenders=rows, every=5)


def _fedem() -> Training:
    """FedEM's 100 clients with a perceptron, for 60 rounds."""
    case = others.case_of("fedem-mnist")
    config = {**case.config, "model": "mlp:100", "rounds": 60}
    return replace(case, setting="MNIST, Dirichlet .4, perceptron, 60 rounds", config=config, every=20)


EXPERIMENTS = (
    Experiment(
        "adaped-table1-cifar10-300",
        f"{PAPER_2023}, Table 1, cut",
        f"CIFAR-10, 50 clients of 4 classes, K/m .2, {ROUNDS} of 1500 rounds: seven methods and local training, also "
        "at equal gradient steps",
        60,
        (adaped_learning.cifar_on_the_way(f"CIFAR-10, {ROUNDS} rounds", ROUNDS, 100, RATES),),
        note=f"{ROUNDS} rounds of print's 1500: without numbers beside; three of its rates; {WEAK}",
    ),
    *(
        Experiment(
            f"persfl-{split.lower().replace('-', '')}-cifar10-{_SLOW}",
            f"{persfl.PAPER}, Table 2, cut",
            f"CIFAR-10, {split}, 10 users, at most {_SLOW} rounds: accuracy of five methods",
            60,
            (_users(split),),
            note=f"pFedMe and Per-FedAvg for {_SLOW} rounds in place of print's 800 to 1000, three rates",
        )
        for split in ("DS-1", "DS-2")
    ),
    *(
        Experiment(
            f"pfllib-{data}-10",
            f"{others.PFLLIB}, cut",
            f"{title}, 20 clients, all join, one epoch of batch 10, Dirichlet .1 per class, 10 of 2000 rounds: "
            "nine methods",
            minutes,
            (_board(data, title),),
            note=f"ten rounds of the board's 2000, a smaller network, {others.NO_SUCH_COLUMN}, without numbers",
        )
        for data, title, minutes in (("mnist", "MNIST", 100), ("cifar10", "CIFAR-10", 40))
    ),
    Experiment(
        "fedem-mnist-60",
        f"{others.FEDEM}, cut",
        "100 clients, all join, one epoch of batch 128, Dirichlet .4 per class, 60 of 200 rounds of a perceptron",
        20,
        (_fedem(),),
        note=f"60 rounds of print's 200, and a perceptron in place of its network; {others.EMNIST_SPLIT}",
    ),
)

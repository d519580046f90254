"""Tables whose full runs take days on two cores, reduced to an hour or two by fewer rounds and a smaller network.

Their values apply to these settings only, so there are no published values to compare with.
"""

from __future__ import annotations

from dataclasses import replace

from . import others
from .declared import Experiment, Training

_BOARD = ("local", "fedavg", "fedavg-ft", "ditto", "fedper", "adaped", "apfl", "fedrod", "adaped-plus")


def _board(data: str, title: str) -> Training:
    """Return PFLlib's board with the network of Ozkara et al. and ten rounds."""
    case = others.case_of(f"pfllib-{data}")
    rows = tuple(row for row in case.contenders if row.method in _BOARD)
    config = {**case.config, "model": "cnn", "rounds": 10}
    return replace(case, setting=f"{title}, 10 rounds", config=config, contenders=rows, every=5)


def _fedem() -> Training:
    """Return FedEM's 100 clients with a perceptron and 60 rounds."""
    case = others.case_of("fedem-mnist")
    config = {**case.config, "model": "mlp:100", "rounds": 60}
    return replace(case, setting="MNIST, Dirichlet .4, perceptron, 60 rounds", config=config, every=20)


EXPERIMENTS = (
    *(
        Experiment(
            f"pfllib-{data}-10",
            f"{others.PFLLIB}, cut",
            f"{title}, 20 clients, all join, one epoch of batch 10, Dirichlet .1 per class, 10 of 2000 rounds: "
            "nine methods",
            minutes,
            (_board(data, title),),
            note=f"this run has ten rounds instead of the board's 2000, and a smaller network; {others.NO_SUCH_COLUMN}",
        )
        for data, title, minutes in (("mnist", "MNIST", 100), ("cifar10", "CIFAR-10", 40))
    ),
    Experiment(
        "fedem-mnist-60",
        f"{others.FEDEM}, cut",
        "100 clients, all join, one epoch of batch 128, Dirichlet .4 per class, 60 of 200 rounds of a perceptron",
        20,
        (_fedem(),),
        note="this run has 60 rounds instead of the paper's 200, and a perceptron instead of the paper's network; "
        f"{others.EMNIST_SPLIT}",
    ),
)

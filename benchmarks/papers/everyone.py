"""Every registered method in the settings of the papers' first tables, scored during training."""

from __future__ import annotations

from jaxpfl.algorithms import METHODS

from . import persfl
from .adaped_learning import MNIST, PAPER_2022, SEEDS
from .declared import Contender, Experiment, Training

_ALL = (
    "each method has its default rates, without decay; some methods were not run: fedbn (the network has no "
    "normalization), pooled, "
)
_LEFT_OUT = ("fedbn", "pooled", "network-lasso")


def _rows(*left_out: str) -> tuple[Contender, ...]:
    return tuple(Contender(name, name, set=("lr_decay=1",)) for name in METHODS if name not in left_out)


def _mnist() -> Training:
    """Return the case with every method on Table 1's clients of MNIST."""
    config = {**MNIST, "local_steps": 10, "seeds": SEEDS}
    note = (
        f"{_ALL}network-lasso, persfl and persfl-gd (which need validation examples), and cfl (which needs all clients "
        "in each round)"
    )
    rows = _rows(*_LEFT_OUT, "persfl", "persfl-gd", "cfl")
    return Training("MNIST, K/m .1", config, rows, note=note, every=50, quick=("ditto",))


def _ds1() -> Training:
    """Return the case with every method on DS-1."""
    config = {**persfl.config("mnist", "DS-1"), "rounds": 100, "seeds": SEEDS}
    note = f"{_ALL}network-lasso, and fedbuff (which equals fedavg if all clients take part)"
    return Training("MNIST, DS-1", config, _rows(*_LEFT_OUT, "fedbuff"), note=note, every=20, quick=("ditto",))


EXPERIMENTS = (
    Experiment(
        "mnist-all",
        f"{PAPER_2022}, Table 1's setting",
        "MNIST, 50 clients of 3 classes, K/m .1, 300 rounds: accuracy of every method, also at equal gradient steps",
        60,
        (_mnist(),),
        note="there are no published values here, because adaped-table1-mnist compares the paper's seven methods, "
        "with searched rates",
    ),
    Experiment(
        "ds1-mnist-all",
        f"{persfl.PAPER}, DS-1",
        "MNIST, DS-1, 10 users, 100 rounds: accuracy of every method, also at equal gradient steps",
        40,
        (_ds1(),),
        note="there are no published values here, because the paper has only five of these methods and does not "
        "state their rates",
    ),
)

"""Other known benchmarks: PFLlib's board, fedjax's EMNIST recipe, Ditto's point estimation, FedEM's clients."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from ..studies.ditto import DittoSettings, error, name_of
from .declared import UNPRINTED, Contender, Estimate, Estimation, Experiment, Printed, Training

SEEDS = 5
_FIXED = ("lr_decay=1", "weight_decay=0")
"""Settings without weight decay and without decay of the learning rates."""

PFLLIB = "PFLlib, pfllib.com/benchmark"
_SETTING = "20 clients, all join, one epoch of batch 10, rate .005, Dirichlet .1 per class, merged and re-split 75/25"
_SPLIT: Mapping[str, Any] = {
    "partition": "dirichlet-class",
    "alpha": 0.1,
    "pool_test": True,
    "test_share": 0.25,
    "clients": 20,
    "cohort": 20,
    "local_epochs": 1,
    "batch_size": 10,
    "lr": 0.005,
    "seeds": SEEDS,
}
BOARD = (
    "accuracies are over all test examples, as on the board; the board's best round is the best of all "
    "rounds, and here it is the best of the scored rounds; this run differs from the board: there, a client "
    "has at least one example (here 10), pixels are between -1 and 1 (here standardized), an epoch drops the "
    "last examples (here it keeps them), and the seeds are different"
)
OWN_VALUES = (
    "lambda, alpha and similar hyper-parameters have the defaults of the board's command line if these work "
    "(pFedMe: 5 inner steps at .01, lambda 1, FedBABU: 10 epochs of fine-tuning), and otherwise jaxpfl's "
    "defaults; jaxpfl has some methods of the board that were not run here: MOON, FedAMP, DBE, FedProto, "
    "FedPAC; jaxpfl lacks some methods of the board: FedGen, FedNTD, FedMTL, FedFomo, FedPHP, APPLE, FedGC, "
    "FedCP, GPFL, FedGH, FedCAC, FedDistill, FedKD, FedPCL; FedBN has no personal part in a network without "
    "normalization"
)
NO_SUCH_COLUMN = (
    "there are no published values for these data: the board has Fashion-MNIST, CIFAR-100, Tiny-ImageNet and AG News"
)

# For each method of the board: label, settings, and the published value of Fashion-MNIST's practical setting.
_GLOBAL = ("fedavg", "FedAvg", (), (85.85, 0.19)), ("fedprox", "FedProx", (), (85.63, 0.57))
_BOARD: tuple[tuple[str, str, tuple[str, ...], tuple[float, float] | None], ...] = (
    ("local", "local", (), None),
    *_GLOBAL,
    ("scaffold", "SCAFFOLD", (), None),
    ("feddyn", "FedDyn", (), None),
    ("fedavg-ft", "FedAvg, an epoch of fine-tuning", ("fine_tune_epochs=1",), None),
    ("perfedavg", "Per-FedAvg", ("alpha=0.005",), (95.10, 0.10)),
    ("pfedme", "pFedMe", ("inner_steps=5", "lam=1", "lr=0.01", "lr_global=0.005"), (97.25, 0.17)),
    ("ditto", "Ditto", (), (97.47, 0.04)),
    ("apfl", "APFL", (), None),
    ("apfl", "APFL, own w", ("keep_w=true",), (97.25, 0.08)),
    ("fedper", "FedPer", (), None),
    ("fedrep", "FedRep", (), None),
    ("lg-fedavg", "LG-FedAvg", (), None),
    ("fedbabu", "FedBABU", ("fine_tune_epochs=10",), None),
    ("fedrod", "FedRoD", (), None),
    ("fedala", "FedALA", (), (97.66, 0.02)),
    ("fml", "FML", (), None),
    ("adaped", "AdaPeD", (), None),
    ("adaped-plus", "adaped-plus", (), None),
)
_BODY = ("fedper", "fedrep", "lg-fedavg", "fedbabu", "fedrod", "fedala")
"""Methods that split a network into body and head."""


def _board(*, printed: bool = False, without: tuple[str, ...] = ()) -> tuple[Contender, ...]:
    return tuple(
        Contender(method, label, Printed(*value) if printed and value else UNPRINTED, (*own, *_FIXED))
        for method, label, own, value in _BOARD
        if method not in without
    )


def _pfllib(
    name: str, title: str, config: Mapping[str, Any], minutes: float, rows: tuple[Contender, ...], note: str
) -> Experiment:
    case = Training(
        title, {**_SPLIT, **config}, rows, note="; ".join((BOARD, OWN_VALUES)), every=10, quick=("local", "ditto")
    )
    return Experiment(name, PFLLIB, f"{title}: {_SETTING}", minutes, (case,), note=note)


_DEEP: Mapping[str, Any] = {"model": "cnn-fedavg", "rounds": 2000}

FEDJAX = "fedjax, EMNIST"
_OPTIMIZER = ("server_lr=0.0031622776601683794", *_FIXED)
EMNIST_RECIPE = (
    "not the paper's data: MNIST by writer, with one writer per client, replaces EMNIST; rates and Adam's "
    "parameters are from fedjax's example (10^-1.5, 10^-2.5, .9, .999, 1e-4), but the network is not, "
    "because fedjax's network has dropout"
)
FEDEM = "Marfoq et al. 2021 (FedEM), EMNIST"
EMNIST_SPLIT = (
    "not the paper's data: MNIST's 70000 digits replace a tenth of EMNIST (81425 characters of 62 classes); "
    "the paper divides its rates by ten after half and three quarters of the rounds, but here they are "
    "constant"
)
DITTO = "Li et al. 2021 (Ditto), point estimation"


def _fedem(method: str, label: str, *own: str) -> Contender:
    return Contender(method, label, set=(*own, *_FIXED))


def _ditto(tau: float) -> Estimation:
    given = DittoSettings(tau=tau)

    def exact(factor: float) -> Printed:
        return Printed(float(error(given, factor * given.best)))

    rows = tuple(Estimate(f"Ditto, lambda = {one:g} lambda*", name_of(one), exact(one)) for one in given.factors)
    rows += (
        Estimate("the posterior mean", "personalized", exact(1.0)),
        Estimate("one mean for all", "global", exact(math.inf)),
        Estimate("distance of Ditto at lambda* from the posterior mean", "oracle_gap", Printed(0.0)),
        Estimate("largest |z| of these errors", "largest_z"),
    )
    return Estimation(f"lambda* = {given.best:.4g}", "ditto", {"tau": tau, "repetitions": 2000}, rows, repetitions=50)


EXPERIMENTS = (
    _pfllib("pfllib-mnist", "MNIST", {"data": "mnist", **_DEEP}, 140_000, _board(), NO_SUCH_COLUMN),
    _pfllib(
        "pfllib-cifar10",
        "CIFAR-10",
        {"data": "cifar10", **_DEEP},
        250_000,
        _board(),
        NO_SUCH_COLUMN,
    ),
    _pfllib(
        "pfllib-fashion",
        "Fashion-MNIST",
        {"data": "fashion-mnist", **_DEEP},
        140_000,
        _board(printed=True),
        "the published values are the board's for its practical setting, after its best rounds; the "
        "published values of FedPer, FedRep, FedBABU, FedRoD, LG-FedAvg and FML were not available",
    ),
    _pfllib(
        "pfllib-mnist-linear",
        "MNIST, logistic regression, 10 rounds",
        {"data": "mnist", "model": "linear", "rounds": 10},
        15,
        _board(without=_BODY),
        f"{NO_SUCH_COLUMN}; a linear model has no body to share for FedPer and similar methods",
    ),
    Experiment(
        "fedjax-writers",
        FEDJAX,
        "MNIST by writer, 539 clients of one: 1000 rounds of 10 clients, one epoch of batch 10, server Adam",
        200,
        (
            Training(
                "writers, 1000 rounds",
                {
                    **{"data": "mnist-writers", "partition": "natural", "users_per_client": 1, "clients": 539},
                    **{"model": "cnn", "cohort": 10, "rounds": 1000, "local_epochs": 1, "batch_size": 10},
                    "test_share": 0.12,
                    **{"lr": 10**-1.5, "server_optimizer": "adam:eps=1e-4", "seeds": SEEDS},
                },
                (
                    Contender("fedavg", "FedAvg", set=_OPTIMIZER),
                    Contender("fedavg-ft", "an epoch of fine-tuning", set=("fine_tune_epochs=1", *_OPTIMIZER)),
                    Contender("local", "local", set=_FIXED),
                    Contender("apfl", "APFL", set=_OPTIMIZER),
                ),
                every=100,
                quick=("fedavg-ft",),
            ),
        ),
        note=EMNIST_RECIPE,
    ),
    Experiment(
        "fedem-mnist",
        FEDEM,
        "100 clients, all join, one epoch of batch 128, 200 rounds, Dirichlet .4 per class, merged and re-split 80/20",
        6000,
        (
            Training(
                "MNIST, Dirichlet .4",
                {
                    **{"data": "mnist", "partition": "dirichlet-class", "alpha": 0.4, "pool_test": True},
                    **{"test_share": 0.2, "clients": 100, "cohort": 100, "local_epochs": 1, "batch_size": 128},
                    **{"model": "cnn-fedavg", "rounds": 200, "seeds": SEEDS, "lr": 0.01},
                },
                (
                    _fedem("local", "local"),
                    _fedem("fedavg", "FedAvg"),
                    _fedem("fedavg-ft", "FedAvg+", "fine_tune_epochs=1"),
                    _fedem("fedprox", "FedProx", "prox=0.1"),
                    _fedem("pfedme", "pFedMe", "lam=1"),
                    _fedem("apfl", "APFL"),
                    _fedem("fedem", "FedEM", "components=3", "lr=0.05"),
                ),
                every=5,
                quick=("fedem",),
            ),
        ),
        note=EMNIST_SPLIT,
    ),
    Experiment(
        "ditto-oracle",
        DITTO,
        "means of 100 clients of 10 samples: error of Ditto over lambda beside the posterior mean's",
        3,
        tuple(map(_ditto, (1.0, 10**-0.5, 0.1))),
        quick_cases=(1,),
        note="the column paper contains the closed form, not a published number; lambda* = sigma^2 / (n tau^2)",
    ),
)


def case_of(name: str) -> Training:
    """Return the trained setting of an experiment of this module."""
    (case,) = next(one for one in EXPERIMENTS if one.name == name).cases
    assert isinstance(case, Training)
    return case

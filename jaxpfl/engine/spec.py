"""Description of a run as one frozen value, made from Python keywords, flags, config files or ``config.json``.

A setting is a field of one of the parts below, declared with its help, type and range (`jaxpfl.settings`). `fit` takes
the fields of all parts as keywords, and `jaxpfl.experiment.config.RunConfig` has them as its own fields; `RunSpec`
nests them, and `assemble` makes a `Simulation` of it. A new setting is a field here, and a line where it is used.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import flax.linen as nn

from jaxpfl.algorithms import Method, Optimizer
from jaxpfl.compression import Compressor
from jaxpfl.data import Split
from jaxpfl.engine.execution_plan import ExecutionPlan
from jaxpfl.errors import JaxpflError
from jaxpfl.models import Model
from jaxpfl.participation import RELIABLE, Availability, Failures
from jaxpfl.privacy import Mechanism, PrivacyConfig
from jaxpfl.settings import COUNT, POSITIVE, RATE, SHARE, Kind, Range, check, part_of, setting
from jaxpfl.similarity.graphs import Graph
from jaxpfl.types import PyTree

_MODEL = Kind(
    "a registered name, a flax.linen module (an instance) or a Model",
    lambda value: isinstance(value, str | Model | nn.Module),
)
_OPTIMIZER = Kind(
    "a name, or a function of the learning rate (optax.adam, not optax.adam(0.1))",
    lambda value: isinstance(value, str) or callable(value),
)
_COMPRESSOR = Kind("a name with arguments or a Compressor", lambda value: isinstance(value, str | Compressor))
_GRAPH = Kind("a name or a Graph", lambda value: isinstance(value, str | Graph))


@dataclass(frozen=True, kw_only=True)
class Training:
    """The model, its loss, and the length of the run."""

    model: str | Model | nn.Module = setting(
        "mlp",
        "Model: linear, mlp, mlp:128,64 (hidden sizes), cnn and others.",
        python="Also a flax.linen module, or any Model(init, apply).",
        kind=_MODEL,
        text=str,
    )
    label_smoothing: float = setting(
        0.0,
        "Label smoothing s of the training loss: the target of an example is (1 - s) one-hot + s / classes. Scores, "
        "and the terms by which a method distils, are not smoothed.",
        range=SHARE,
        since="0.2",
    )
    rounds: int = setting(100, "Federated rounds.", range=COUNT, unit="rounds")
    eval_every: int | None = setting(
        None,
        "Score all clients after every so many rounds, and at the end.",
        unless_given="at the end alone unless given",
        range=COUNT,
        unit="rounds",
    )


@dataclass(frozen=True, kw_only=True)
class Cohorts:
    """The clients of each round."""

    cohort: int | None = setting(
        None,
        "Clients in a round, a count K <= m (for Poisson participation the expected one).",
        unless_given="all unless given",
        range=COUNT,
        unit="clients",
    )
    participation: str | None = setting(
        None,
        "Sampling of cohorts: full, uniform (exactly K), or poisson (each independently, at the rate K/m).",
        unless_given="unless given full where K = m, else uniform, and poisson with privacy",
    )
    cohort_cap: int | None = setting(
        None,
        "Slots of a Poisson cohort: clients beyond it are left out and counted.",
        unless_given="unless given so many that a round needs more with a probability below 1e-6",
        range=COUNT,
        unit="clients",
    )


@dataclass(frozen=True, kw_only=True)
class Work:
    """The local work of a client in a round."""

    local_steps: int = setting(
        10, "Local steps (mini-batches) of a client in a round.", range=COUNT, unit="mini-batches"
    )
    batch_size: int = setting(
        20, "Examples in a mini-batch (a client with fewer uses all of them).", range=COUNT, unit="examples"
    )
    draw: str = setting(
        "epoch",
        "Sampling of mini-batches: epoch (every example once before any twice), step (anew each step, without "
        "replacement in a batch) or replacement.",
    )
    client_optimizer: Optimizer = setting(
        "sgd",
        "Optimizer of the local steps: an optax name, or name:argument=value,..., such as adam:b1=0.8; new in "
        "every round.",
        python="Also a function of the learning rate, optax.adam.",
        kind=_OPTIMIZER,
        text=str,
    )
    lr: float | Sequence[float] | None = setting(
        None,
        "Learning rate of every method: all its rates, lr_personal and lr_global among them.",
        unless_given="each method's own unless given",
        python="Also a list, one for each run of a sweep. A rate in ``hyper`` is the one of that name, and wins.",
        range=POSITIVE,
        kind=RATE,
        text=float | None,
    )


@dataclass(frozen=True, kw_only=True)
class Aggregation:
    """The server's step."""

    weighting: str | None = setting(
        None,
        "Weights of the clients in the server's mean, for methods that weigh them: examples or uniform.",
        unless_given="examples unless given, and uniform with privacy",
    )
    server_optimizer: Optimizer = setting(
        "sgd",
        "Optimizer of the server, acting on the mean increment, in the form of the clients' one; also fedavgm, "
        "fedadagrad, fedadam and fedyogi. sgd at a server rate of 1 is averaging.",
        python="Also a function of the learning rate.",
        kind=_OPTIMIZER,
        text=str,
    )
    server_lr: float | Sequence[float] | None = setting(
        None,
        "Learning rate of every method's server.",
        unless_given="1 unless given",
        python="Also a list, one for each run of a sweep.",
        range=POSITIVE,
        kind=RATE,
        text=float | None,
    )


@dataclass(frozen=True, kw_only=True)
class Coding:
    """The compression of uploads."""

    compress: str | Compressor | None = setting(
        None,
        "Compression of uploads: lossless, qsgd, top-k, sign, uniform, tv or codebook, with arguments, such "
        "as qsgd:levels=4, top-k:share=0.01, uniform:bits=4, tv:gamma=0.1,codebook=3; feedback=false leaves out error "
        "feedback, feedback=true gives it to qsgd and uniform. With privacy, its noise must be distributed.",
        unless_given="none unless given",
        python='``Fit.history["upload_bits"]`` is their size.',
        kind=_COMPRESSOR,
        text=str | None,
    )


@dataclass(frozen=True, kw_only=True)
class Newcomers:
    """The adaptation of clients that are never trained."""

    adapt_rounds: int = setting(
        10,
        "Rounds in which an unseen client adapts the server's last message before it is scored.",
        range=Range(0),
        unit="rounds",
    )


@dataclass(frozen=True, kw_only=True)
class Neighbourhood:
    """The graph of the clients, for methods that ask for one."""

    graph: str | Graph | None = setting(
        None,
        "Graph of the clients, for network-lasso: the nearest by their data, their features' covariances (features) or "
        "locally trained models, or on the command line a CSV file with two client ids on each line.",
        unless_given="data unless given",
        python="Also a Graph whose nodes are the federation's clients.",
        kind=_GRAPH,
        text=str | None,
    )
    neighbours: int | None = setting(
        None,
        "Least number of neighbours of a client in a graph of nearest neighbours.",
        unless_given="5 unless given",
        range=COUNT,
        unit="clients",
    )


PARTS: Mapping[str, type] = {
    "training": Training,
    "cohorts": Cohorts,
    "work": Work,
    "aggregation": Aggregation,
    "availability": Availability,
    "coding": Coding,
    "newcomers": Newcomers,
    "neighbourhood": Neighbourhood,
}
"""Field of a `RunSpec` -> the part that it holds, whose settings are keywords of `fit` and flags."""


@dataclass(frozen=True, kw_only=True)
class Settings(Neighbourhood, Newcomers, Coding, Failures, Aggregation, Work, Cohorts, Training):
    """The settings of all `PARTS`, side by side."""


@dataclass(frozen=True, kw_only=True, eq=False)
class RunSpec:
    """A run: a method and all its settings. `assemble` makes it a `Simulation`, given the data.

    Attributes:
      method: the method.
      hyper: hyper-parameters by name, over ``work.lr`` and ``aggregation.server_lr``; a value is a number or, for a
        sweep, one number for each run.
      options: the method's static options by name.
      seeds: of the runs, [S].
      privacy: clipping and noise of the uploads; None where they are not private.
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
        if isinstance(self.privacy, PrivacyConfig):
            self.privacy.check()
            if not self.privacy.on:  # None is the word for no privacy: a run must not be public by an oversight
                raise JaxpflError("privacy needs privacy.epsilon or privacy.noise_multiplier; None is without privacy")

    @property
    def is_private(self) -> bool:
        """True if clients' uploads are clipped, with or without noise."""
        return self.privacy.on if isinstance(self.privacy, PrivacyConfig) else self.privacy is not None


def spec_of(method: Method, settings: Any, **more: Any) -> RunSpec:
    """The run of a method with settings that lie side by side.

    Args:
      method: the method.
      settings: `Settings`, or another object with their names as attributes.
      more: what else `RunSpec` has.
    """
    return RunSpec(method=method, **{name: part_of(part, settings) for name, part in PARTS.items()}, **more)

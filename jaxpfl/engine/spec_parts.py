"""Settings of a run in parts, each a frozen dataclass of fields with help, type and range (`jaxpfl.core.settings`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jaxpfl.algorithms import Optimizer
from jaxpfl.algorithms.parts.schedules import OWN
from jaxpfl.core.participation import Availability, Failures
from jaxpfl.core.settings import COUNT, POSITIVE, RATE, SHARE, Kind, Range, check, setting
from jaxpfl.models import Model, Task
from jaxpfl.models.base import module_adapter
from jaxpfl.similarity.graphs import Graph
from jaxpfl.support.errors import JaxpflError
from jaxpfl.uploads.compression import Compressor
from jaxpfl.uploads.robust import ATTACKS, attack_of

_MODEL = Kind(
    "a registered name, a flax.linen, flax.nnx or equinox module (an instance) or a Model",
    lambda value: isinstance(value, str | Model) or module_adapter(value) is not None,
)
_OPTIMIZER = Kind(
    "a name, or a function of the learning rate (optax.adam, not optax.adam(0.1))",
    lambda value: isinstance(value, str) or callable(value),
)
_COMPRESSOR = Kind("a name with arguments or a Compressor", lambda value: isinstance(value, str | Compressor))
_TASK = Kind("a name or a Task", lambda value: isinstance(value, str | Task))
_LOSS = Kind("a name or a function", lambda value: isinstance(value, str) or callable(value))
_METRICS = Kind(
    "names, or a dictionary of functions by name",
    lambda value: (
        isinstance(value, str)
        or (isinstance(value, Sequence | Mapping) and all(isinstance(name, str) for name in value))
    ),
)
_SCHEDULE = Kind("a name or a function of the round", lambda value: isinstance(value, str) or callable(value))
_GRAPH = Kind("a name or a Graph", lambda value: isinstance(value, str | Graph))


@dataclass(frozen=True, kw_only=True)
class Training:
    """The model, its loss, and the length of the run."""

    model: Any = setting(
        "mlp",
        "Model: linear, mlp, mlp:128,64 (hidden sizes), cnn and others.",
        python="Also a flax.linen, flax.nnx or equinox module (of the last two, `from_nnx` and `from_equinox` make "
        "models whose parameters differ by seed), or any Model(init, apply).",
        kind=_MODEL,
        text=str,
    )
    task: str | Task | None = setting(
        None,
        "Task: classification, regression, next-token (a label at each position of a sequence), binary (one logit, "
        "labels 0 and 1), ranking (the same, scored by the area under the ROC curve) or multilabel (a label of "
        "several 0 and 1 for each example).",
        unless_given="classification unless given, or what the data set's labels are",
        python="Also a Task of your own, with its model, loss and metrics.",
        kind=_TASK,
        text=str | None,
        since="0.2",
    )
    loss: str | Callable[..., Any] | None = setting(
        None,
        "Loss of a regression: squared, absolute, huber:delta=1, quantile:q=0.5 or poisson (of the logarithm of a "
        "rate).",
        unless_given="the task's own unless given",
        python="Also a function of predictions and labels with one value per example, for any task.",
        kind=_LOSS,
        text=str | None,
        since="0.2",
    )
    label_smoothing: float = setting(
        0.0,
        "Label smoothing s of the training loss: the target of an example is (1 - s) one-hot + s / classes. Scores, "
        "and the terms by which a method distils, are not smoothed.",
        range=SHARE,
        since="0.2",
    )
    metrics: Any = setting(
        None,
        "Metrics beside the task's own, names with commas between them: accuracy, balanced_accuracy, macro_f1, auc or "
        "calibration_error, of classes or labels 0 and 1; a regression has rmse, mae and r2 anyway.",
        unless_given="none unless given",
        python="Also a list of names, or a dictionary by name of names and of functions of predictions and labels with "
        "one value per example, or `jaxpfl.per_client` of one of all of a client's examples.",
        kind=_METRICS,
        text=str | None,
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
    patience: int | None = setting(
        None,
        "Stop a method once each of its seeds has had so many evaluations in a row without a better validation score. "
        "The best round on validation is reported with or without it; test examples have no part in either.",
        unless_given="all rounds unless given",
        range=COUNT,
        unit="evaluations",
        since="0.2",
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
        "Sampling of cohorts: full, uniform (exactly K), poisson (each independently, at the rate K/m), or cyclic "
        "(blocks of clients take turns).",
        unless_given="unless given full where K = m, else uniform; private: poisson, with banded noise cyclic",
    )
    cohort_cap: int | None = setting(
        None,
        "Slots of a Poisson cohort: clients beyond it are left out and counted.",
        unless_given="unless given so many that a round needs more with a probability below 1e-6",
        range=COUNT,
        unit="clients",
    )
    cycle: int | None = setting(
        None,
        "Rounds between two turns of a client (participation cyclic); of the m/cycle clients whose turn it is each "
        "takes part independently, at the rate K cycle/m.",
        unless_given="unless given ceil(m/K), and all of them take part",
        range=COUNT,
        unit="rounds",
        since="0.2",
    )


@dataclass(frozen=True, kw_only=True)
class Work:
    """The local work of a client in a round."""

    local_steps: int = setting(
        10, "Local steps (mini-batches) of a client in a round.", range=COUNT, unit="mini-batches"
    )
    local_epochs: int | None = setting(
        None,
        "Passes of a client over its own training examples in a round, in place of local_steps: with n examples it "
        "takes ceil(epochs n / b) steps of b = min(batch_size, n) examples. A method's own number of steps in training "
        "(ditto.personal_steps) is cut to these; rates decay by the steps of the client with the most.",
        unless_given="local_steps unless given",
        range=COUNT,
        unit="epochs",
        since="0.2",
    )
    batch_size: int = setting(
        20, "Examples in a mini-batch (a client with fewer uses all of them).", range=COUNT, unit="examples"
    )
    draw: str = setting(
        "epoch",
        "Sampling of mini-batches: epoch (every example once before any twice), step (anew each step, without "
        "replacement in a batch) or replacement.",
    )
    augment: str | None = setting(
        None,
        "Augmentation of the mini-batches: flip (left to right), crop:padding=4, mixup:alpha=0.2, or several joined by "
        "+, such as flip+crop. Scores are of the examples as they are.",
        unless_given="none unless given",
        since="0.2",
    )
    client_optimizer: Optimizer = setting(
        "sgd",
        "Optimizer of the local steps: an optax name, or name:argument=value,..., such as adam:b1=0.8; new in "
        "every round unless keep_optimizer.",
        python="Also a function of the learning rate, optax.adam.",
        kind=_OPTIMIZER,
        text=str,
    )
    keep_optimizer: bool = setting(
        False,
        "Each client keeps its optimizer states: it goes on with the momentum or moments of its own last round, "
        "however long it was out of the cohort. They never leave the client; rounds alone and personalisation begin "
        "anew.",
        since="0.2",
    )
    lr: float | Sequence[float] | None = setting(
        None,
        "Learning rate of every method: lr, lr_personal, lr_global, lr_head and lr_alpha. Other step sizes (priors, "
        "scales, mixtures, adaptation, server) keep their values: lr_psi, lr_location, lr_scale, lr_weights, "
        "server_lr, fedamp.alpha and perfedavg.alpha.",
        unless_given="each method's own unless given",
        python="Also a list, one for each run of a sweep. A rate in ``hyper`` is the one of that name, and wins.",
        range=POSITIVE,
        kind=RATE,
        text=float | None,
    )
    clip_gradients: float | None = setting(
        None,
        "Largest L2 norm of the gradient of a local step, over all parameters that the step moves: a longer one, with "
        "its proximal and correction terms and without weight decay, is scaled down to it. Not privacy.clipping_norm, "
        "which bounds an upload.",
        unless_given="gradients are not clipped unless given",
        range=POSITIVE,
        since="0.2",
    )
    lr_schedule: str | Callable[..., Any] = setting(
        OWN,
        "Schedule of every rate that decays, over the whole run: decay (each method's own lr_decay), constant, cosine, "
        "linear, step:every=30,factor=0.1 or exponential:factor=0.99, in rounds, with warmup=ROUNDS in any; "
        "cosine:end=0.01 ends there. Personalisation and new clients take the rates themselves.",
        python="Also a function of the round (from 0) to a factor in [0, 1] on every rate, whose largest is 1, such as "
        "``optax.cosine_decay_schedule(1.0, rounds)``; it is tabulated over the rounds, and the last factor holds on.",
        kind=_SCHEDULE,
        text=str,
        since="0.2",
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

    aggregate: str = setting(
        "mean",
        "Aggregation of the uploads: mean, or one that outliers move little: median, trimmed-mean:fraction=0.2, "
        "krum:attackers=2, multi-krum:attackers=2, geometric-median or norm-bound:bound=1. Clients then count "
        "the same.",
        since="0.2",
    )


@dataclass(frozen=True, kw_only=True)
class Adversary:
    """Clients that attack the others."""

    attack: str | None = setting(
        None,
        "Attack of some clients: sign-flip:factor=1, scale:factor=10 or noise:deviation=1 in place of their updates, "
        "or label-flip in their training data. Scores are those of the honest clients; the attackers' stand apart.",
        unless_given="none unless given",
        since="0.2",
    )
    attackers: float = setting(
        0.0, "Share of the clients that attack, rounded to a number of them.", range=SHARE, since="0.2"
    )
    attack_seed: int = setting(
        0,
        "Seed of the draw of the attackers, who are the same in every run.",
        range=Range(0, 2**32 - 1),
        since="0.2",
    )

    def check(self) -> None:
        """Refuse an unknown attack, one of nobody, and attackers without one.

        Raises:
          JaxpflError.
        """
        check(self)
        if self.attack is not None:
            attack_of(self.attack)
            if not self.attackers:
                raise JaxpflError(f"attack = {self.attack} needs attackers > 0, the share of the clients that attack")
        elif self.attackers:
            raise JaxpflError(f"attackers = {self.attackers:g} needs an attack: {', '.join(ATTACKS)}")


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
    "adversary": Adversary,
    "availability": Availability,
    "coding": Coding,
    "newcomers": Newcomers,
    "neighbourhood": Neighbourhood,
}
"""Field of a `RunSpec` -> the part that it holds, whose settings are keywords of `fit` and flags."""


@dataclass(frozen=True, kw_only=True)
class Settings(Neighbourhood, Newcomers, Coding, Failures, Adversary, Aggregation, Work, Cohorts, Training):
    """The settings of all `PARTS`, side by side."""

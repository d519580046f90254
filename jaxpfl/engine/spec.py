"""Settings of a run: one flat frozen dataclass that `fit`'s keywords, flags, config files and sweeps share.

A setting is a field with its help, type and range (`jaxpfl.core.settings`). `fit` takes the fields of `RunSpec` as
keywords, `jaxpfl.runs.config.RunConfig` includes the fields of `Settings`, and `jaxpfl.engine.build` makes a
`Simulation` of a `RunSpec` and its data. A new setting is a field here, and a line where it is used.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Integral
from typing import Any

from jaxpfl import algorithms
from jaxpfl.algorithms import Method, Optimizer
from jaxpfl.algorithms.parts import augmentation, schedules
from jaxpfl.algorithms.parts.hyper import rates, replace
from jaxpfl.core import exclusions
from jaxpfl.core.participation import Availability
from jaxpfl.core.settings import (
    BY_NAME,
    COUNT,
    POSITIVE,
    RATE,
    SEEDS,
    SHARE,
    Kind,
    Range,
    about,
    check,
    instance_of,
    part_of,
    read_help,
    restated,
    setting,
)
from jaxpfl.core.types import PyTree
from jaxpfl.engine.execution_plan import ExecutionPlan
from jaxpfl.models import Model, Task, metrics
from jaxpfl.models.base import module_adapter
from jaxpfl.privacy import Mechanism, PrivacyConfig
from jaxpfl.similarity.graphs import Graph
from jaxpfl.support.errors import JaxpflError
from jaxpfl.uploads import robust
from jaxpfl.uploads.compression import Compressor

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


@read_help
@dataclass(frozen=True, kw_only=True)
class Settings:
    """Settings of a run that have a form as text."""

    model: Any = setting("mlp", kind=_MODEL, text=str)
    """Model: linear, mlp, mlp:128,64 (hidden sizes), cnn and others.

    Also a flax.linen, flax.nnx or equinox module (of the last two, `from_nnx` and `from_equinox` make models whose
    parameters differ by seed), or any Model(init, apply).
    """
    task: str | Task | None = setting(
        None,
        unless_given="classification unless given, or what the data set's labels are",
        kind=_TASK,
        text=str | None,
    )
    """Task: classification, regression, next-token (a label at each position of a sequence), binary (one logit,
    labels 0 and 1), ranking (the same, scored by the area under the ROC curve) or multilabel (a label of several 0
    and 1 for each example).

    Also a Task of your own, with its model, loss and metrics.
    """
    loss: str | Callable[..., Any] | None = setting(
        None, unless_given="the task's own unless given", kind=_LOSS, text=str | None
    )
    """Loss of a regression: squared, absolute, huber:delta=1, quantile:q=0.5 or poisson (of the logarithm of a
    rate).

    Also a function of predictions and labels with one value per example, for any task.
    """
    label_smoothing: float = setting(0.0, range=SHARE)
    """Label smoothing s of the training loss: the target of an example is (1 - s) one-hot + s / classes. Scores, and
    the terms by which a method distils, are not smoothed."""
    metrics: Any = setting(None, unless_given="none unless given", kind=_METRICS, text=str | None)
    """Metrics beside the task's own, names with commas between them: accuracy, balanced_accuracy, macro_f1, auc or
    calibration_error, of classes or labels 0 and 1; a regression has rmse, mae and r2 anyway.

    Also a list of names, or a dictionary by name of names and of functions of predictions and labels with one value
    per example, or `jaxpfl.per_client` of one of all of a client's examples.
    """
    rounds: int = setting(100, range=COUNT, unit="rounds")
    """Federated rounds."""
    eval_every: int | None = setting(None, unless_given="at the end alone unless given", range=COUNT, unit="rounds")
    """Score all clients after every so many rounds, and at the end."""
    patience: int | None = setting(None, unless_given="all rounds unless given", range=COUNT, unit="evaluations")
    """Stop a method once each of its seeds has had so many evaluations in a row without a better validation score.
    The best round on validation is reported with or without it; test examples have no part in either."""
    cohort: int | None = setting(None, unless_given="all unless given", range=COUNT, unit="clients")
    """Clients in a round, a count K <= m (for Poisson participation the expected one)."""
    participation: str | None = setting(
        None, unless_given="unless given full where K = m, else uniform; private: poisson, with banded noise cyclic"
    )
    """Sampling of cohorts: full, uniform (exactly K), poisson (each independently, at the rate K/m), or cyclic
    (blocks of clients take turns)."""
    cohort_cap: int | None = setting(
        None,
        unless_given="by default enough that a round needs more with a probability below 1e-6",
        range=COUNT,
        unit="clients",
    )
    """Slots of a Poisson cohort: clients beyond it are left out and counted."""
    cycle: int | None = setting(
        None, unless_given="unless given ceil(m/K), and all of them take part", range=COUNT, unit="rounds"
    )
    """Rounds between two turns of a client (participation cyclic); of the m/cycle clients whose turn it is each
    takes part independently, at the rate K cycle/m."""
    local_steps: int = setting(10, range=COUNT, unit="mini-batches")
    """Local steps (mini-batches) of a client in a round."""
    local_epochs: int | None = setting(None, unless_given="local_steps unless given", range=COUNT, unit="epochs")
    """Passes of a client over its own training examples in a round, in place of local_steps: with n examples it
    takes ceil(epochs n / b) steps of b = min(batch_size, n) examples. A method's own number of steps in training
    (ditto.personal_steps) is cut to these; rates decay by the steps of the client with the most."""
    batch_size: int = setting(20, range=COUNT, unit="examples")
    """Examples in a mini-batch (a client with fewer uses all of them)."""
    draw: str = setting("epoch")
    """Sampling of mini-batches: epoch (every example once before any twice), step (anew each step, without
    replacement in a batch) or replacement."""
    augment: str | None = setting(None, unless_given="none unless given")
    """Augmentation of the mini-batches: flip (left to right), crop:padding=4, mixup:alpha=0.2, or several joined by
    +, such as flip+crop. Scores are of the examples as they are."""
    client_optimizer: Optimizer = setting("sgd", kind=_OPTIMIZER, text=str)
    """Optimizer of the local steps: an optax name, or name:argument=value,..., such as adam:b1=0.8; new in every
    round unless keep_optimizer.

    Also a function of the learning rate, optax.adam.
    """
    keep_optimizer: bool = setting(False)
    """Each client keeps its optimizer states: it goes on with the momentum or moments of its own last round, however
    long it was out of the cohort. They never leave the client; rounds alone and personalisation begin anew."""
    lr: float | Sequence[float] | None = setting(
        None, unless_given="each method's own unless given", range=POSITIVE, kind=RATE, text=float | None
    )
    """Learning rate of every method: lr, lr_personal, lr_global, lr_head and lr_alpha. Other step sizes (priors,
    scales, mixtures, adaptation, server) keep their values: lr_psi, lr_location, lr_scale, lr_weights, server_lr,
    fedamp.alpha and perfedavg.alpha.

    Also a list, one for each run of a sweep. A rate in ``hyper`` sets the rate of that name alone, and wins.
    """
    clip_gradients: float | None = setting(None, unless_given="gradients are not clipped unless given", range=POSITIVE)
    """Largest L2 norm of the gradient of a local step, over all parameters that the step moves: a longer one, with
    its proximal and correction terms and without weight decay, is scaled down to it. Not privacy.clipping_norm,
    which bounds an upload."""
    lr_schedule: str | Callable[..., Any] = setting(schedules.OWN, kind=_SCHEDULE, text=str)
    """Schedule of every rate that decays, over the whole run: decay (each method's own lr_decay), constant, cosine,
    linear, step:every=30,factor=0.1 or exponential:factor=0.99, in rounds, with warmup=ROUNDS in any;
    cosine:end=0.01 ends there. Personalisation and new clients take the rates themselves.

    Also a function of the round (from 0) to a factor in [0, 1] on every rate, whose largest is 1, such as
    ``optax.cosine_decay_schedule(1.0, rounds)``; it is tabulated over the rounds, and the last factor holds on.
    """
    weighting: str | None = setting(None, unless_given="examples unless given, and uniform with privacy")
    """Weights of the clients in the server's mean, for methods that weigh them: examples or uniform."""
    server_optimizer: Optimizer = setting("sgd", kind=_OPTIMIZER, text=str)
    """Optimizer of the server, acting on the mean increment, in the form of the clients' one; also fedavgm,
    fedadagrad, fedadam and fedyogi. sgd at a server rate of 1 is averaging.

    Also a function of the learning rate.
    """
    server_lr: float | Sequence[float] | None = setting(
        None, unless_given="1 unless given", range=POSITIVE, kind=RATE, text=float | None
    )
    """Learning rate of every method's server.

    Also a list, one for each run of a sweep.
    """
    aggregate: str = setting("mean")
    """Aggregation of the uploads: mean, or one that outliers move little: median, trimmed-mean:fraction=0.2,
    krum:attackers=2, multi-krum:attackers=2, geometric-median or norm-bound:bound=1. Clients then count the same."""
    attack: str | None = setting(None, unless_given="none unless given")
    """Attack of some clients: sign-flip:factor=1, scale:factor=10 or noise:deviation=1 in place of their updates, or
    label-flip in their training data. Scores cover the honest clients; the attackers' stand apart."""
    attackers: float = setting(0.0, range=SHARE)
    """Share of the clients that attack, rounded to a number of them."""
    attack_seed: int = setting(0, range=Range(0, 2**32 - 1))
    """Seed of the draw of the attackers, who are the same in every run."""
    dropout: Any = restated(Availability, "dropout", 0.0)
    stragglers: Any = restated(Availability, "stragglers", 0.0)
    same_stragglers: bool = restated(Availability, "same_stragglers", False)
    time_model: str | None = restated(Availability, "time_model", None, "none unless given")
    compress: str | Compressor | None = setting(
        None, unless_given="none unless given", kind=_COMPRESSOR, text=str | None
    )
    """Compression of uploads: lossless, qsgd, top-k, sign, uniform, tv or codebook, with arguments, such as
    qsgd:levels=4, top-k:share=0.01, uniform:bits=4, tv:gamma=0.1,codebook=3; feedback=false leaves out error
    feedback, feedback=true gives it to qsgd and uniform. With privacy, its noise must be distributed.

    ``Fit.history["upload_bits"]`` is their size.
    """
    adapt_rounds: int = setting(10, range=Range(0), unit="rounds")
    """Rounds in which an unseen client adapts the server's last message before it is scored."""
    graph: str | Graph | None = setting(None, unless_given="data unless given", kind=_GRAPH, text=str | None)
    """Graph of the clients, for network-lasso: the nearest by their data, their features' covariances (features) or
    locally trained models, or on the command line a CSV file with two client ids on each line.

    Also a Graph whose nodes are the federation's clients.
    """
    neighbours: int | None = setting(None, unless_given="5 unless given", range=COUNT, unit="clients")
    """Least number of neighbours of a client in a graph of nearest neighbours."""


@read_help
@dataclass(frozen=True, kw_only=True, eq=False)
class RunSpec(Settings):
    """A run: a method and all its settings. `jaxpfl.engine.build` makes it a `Simulation`, with the data.

    Raises:
      JaxpflError: for a setting of another type or outside its range, and settings that cannot go together.
    """

    method: Method = field(metadata=about(kind=instance_of("a registered name or a Method", str, Method)))
    """A registered name, or a `Method` of your own."""
    seeds: Sequence[int] = setting(1, kind=SEEDS)
    """Number of runs (seeds 0, 1, ...), or the seeds themselves; they run in one program. A seed may stand there
    several times where the runs' hyper-parameters or their noise differ."""
    hyper: Mapping[str, Any] = setting(None, kind=BY_NAME)
    """Hyper-parameters by name; a value is a number or, for a sweep, one number for each run."""
    options: Mapping[str, Any] = setting(None, kind=BY_NAME)
    """The method's static options by name."""
    num_classes: int | None = setting(None)
    """Number of classes; the largest label plus one unless given."""
    warm_start: PyTree | None = setting(None)
    """Parameters that every model starts from in place of random ones, as the model's own init gives them, or by
    path ("head/kernel")."""
    privacy: Mechanism | PrivacyConfig | None = setting(
        None, kind=instance_of("a jaxpfl.privacy.Mechanism or PrivacyConfig", Mechanism, PrivacyConfig)
    )
    """Clipping of what clients upload, and noise: a Mechanism, or a PrivacyConfig with a budget, to which the noise
    is calibrated; with its unit = example, of every example's gradient instead. `Fit.statement` says what that is
    worth. Clients whose uploads are private weigh the same. What cannot be accounted is refused."""
    plan: ExecutionPlan = setting(None, kind=instance_of("an ExecutionPlan", ExecutionPlan))
    """The way to execute."""

    def __post_init__(self) -> None:
        check(self)
        resolved = {
            "method": algorithms.get(self.method) if isinstance(self.method, str) else self.method,
            "hyper": dict(self.hyper or {}),
            "options": dict(self.options or {}),
            "plan": self.plan or ExecutionPlan(),
            "seeds": self.seeds,
        }
        if isinstance(self.seeds, Integral):
            resolved["seeds"] = range(int(self.seeds))
        elif not isinstance(self.seeds, range):  # of a run with as many seeds as there may be, none is written out
            resolved["seeds"] = tuple(map(int, self.seeds))
        for name, value in resolved.items():
            object.__setattr__(self, name, value)
        _ = self.availability
        if self.attack is not None:
            robust.attack_of(self.attack)
            if not self.attackers:
                raise JaxpflError(f"attack = {self.attack} needs attackers > 0, the share of the clients that attack")
        elif self.attackers:
            raise JaxpflError(f"attackers = {self.attackers:g} needs an attack: {', '.join(robust.ATTACKS)}")
        if self.patience is not None and self.eval_every is None:
            raise JaxpflError(f"patience = {self.patience} counts evaluations, but there is only one: set eval_every")
        metrics.parse_metrics(self.metrics)
        if self.lr_schedule != schedules.OWN:
            schedules.resolve(self.lr_schedule, self.rounds)
        if self.augment is not None:
            augmentation.parse(self.augment)
        self._check_exclusions()
        if isinstance(self.privacy, PrivacyConfig):
            self.privacy.check()
            if not self.privacy.on:  # None is the word for no privacy: a run must not be public by an oversight
                raise JaxpflError("privacy needs privacy.epsilon or privacy.noise_multiplier; use None for no privacy")

    def _check_exclusions(self) -> None:
        private, replaced = self.privacy, self.participation in ("replacement", "with-replacement")
        exclusions.check(
            {
                "privacy": self.is_private,
                "unit": "example" if self.guards_examples else None,
                "noise": private.noise if private is not None and self.is_private else None,
                "participation": "replacement" if replaced else self.participation,
                "weighting": self.weighting,
                "fednova": bool(self.options.get("fednova")),
                "aggregate": self.aggregate if self.is_robust else None,
                "attack": self.attack,
                "asynchronous rounds": self.method.asynchronous and self.method.name,
                "compress": self.compress if isinstance(self.compress, str) else self.compress is not None,
                "local_epochs": self.local_epochs,
                "clip_gradients": self.clip_gradients,
                "augment": self.augment,
            }
        )

    @property
    def hp(self) -> Any:
        """The method's hyper-parameters: its defaults, then the rates, then those given by name; checked.

        Raises:
          JaxpflError: for a name that the method does not have, and a value outside its range.
        """
        given = {} if self.lr is None else dict.fromkeys(rates(self.method.hyper), self.lr)
        if self.server_lr is not None and hasattr(self.method.hyper, "server_lr"):
            given["server_lr"] = self.server_lr
        return replace(self.method.name, self.method.hyper, given | dict(self.hyper))

    @property
    def availability(self) -> Availability:
        """Dropout, stragglers and the time model, with lists as tuples."""
        return part_of(Availability, self).checked()

    @property
    def is_private(self) -> bool:
        """True if clients' uploads are clipped, with or without noise."""
        if isinstance(self.privacy, PrivacyConfig):
            return self.privacy.on and not self.privacy.is_example_level
        return self.privacy is not None

    @property
    def guards_examples(self) -> bool:
        """True if the gradients of single examples are clipped in every client."""
        return isinstance(self.privacy, PrivacyConfig) and self.privacy.on and self.privacy.is_example_level

    @property
    def is_robust(self) -> bool:
        """True if uploads are aggregated by anything but the mean."""
        return self.aggregate != robust.MEAN and robust.resolve(self.aggregate).rule is not None

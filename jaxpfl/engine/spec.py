"""Settings of a run: one flat frozen dataclass for `fit`'s keywords, flags, config files and sweeps.

A setting is a field with its help, type and range (`jaxpfl.core.settings`). `fit` accepts the fields of `RunSpec` as
keywords, `jaxpfl.runs.config.RunConfig` includes the fields of `Settings`, and `jaxpfl.engine.build` makes a
`Simulation` from a `RunSpec` and data. To add a setting, add a field here and use it where it has an effect.

The functions at the end warn about settings without effect, unusual learning rates, doubtful data, and doubtful privacy
claims.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from numbers import Integral
from types import FunctionType
from typing import Any

import jax
import numpy as np
from flax import linen as nn

from jaxpfl import algorithms
from jaxpfl.algorithms import Method, Optimizer
from jaxpfl.algorithms.parts import augmentation, schedules
from jaxpfl.algorithms.parts.hyper import rates, replace
from jaxpfl.algorithms.parts.optimizers import resolve
from jaxpfl.algorithms.parts.servers import check_rate
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
    is_default,
    is_given,
    part_of,
    read_help,
    restated,
    setting,
)
from jaxpfl.core.types import Federation, PyTree
from jaxpfl.data.stack import labels, listed
from jaxpfl.engine.client_graph import SPACES
from jaxpfl.engine.execution_plan import ExecutionPlan
from jaxpfl.models import Model, Task, metrics
from jaxpfl.models.base import CLASSIFICATION, NEXT_TOKEN, module_adapter
from jaxpfl.privacy import Mechanism, PrivacyConfig
from jaxpfl.privacy.claim import check_delta
from jaxpfl.similarity.graphs import Graph
from jaxpfl.support import own_code
from jaxpfl.support.errors import JaxpflError, shown, warn
from jaxpfl.uploads import robust
from jaxpfl.uploads.compression import Compressor

MODEL = Kind(
    "a registered name, a flax.linen, flax.nnx or equinox module (an instance), a Model, or a function "
    "(num_outputs, input_shape) that returns one",
    lambda value: (
        isinstance(value, str | Model | FunctionType)
        or module_adapter(value) is not None
        or (isinstance(value, type) and issubclass(value, nn.Module))
    ),
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


OWN = ("model", "task", "loss")
"""Settings that may name an object in a user's file, ``FILE.py:NAME``."""


@read_help
@dataclass(frozen=True, kw_only=True)
class Settings:
    """Settings of a run that can be written as text, in flags and config files."""

    model: Any = setting("mlp", kind=MODEL, text=str)
    """Model: linear, mlp, mlp:128,64 (hidden sizes), cnn and others; or FILE.py:NAME, a model of your own.

    Also a flax.linen, flax.nnx or equinox module, any Model(init, apply), a flax.linen class without required
    arguments, or a function (num_outputs, input_shape) that returns one of these. An nnx or equinox module has the same
    initial parameters for every seed; `from_nnx` and `from_equinox` make models that draw them for each seed.
    """
    task: str | Task | None = setting(
        None,
        unless_given="the data set's own task, or classification",
        kind=_TASK,
        text=str | None,
    )
    """Task: classification, regression, next-token (a label at each position of a sequence), binary (one logit, labels
    0 and 1), ranking (like binary, but scored by the area under the ROC curve) or multilabel (several labels 0 or 1 for
    each example); or FILE.py:NAME, a Task of your own.

    Also a Task of your own, with its model, loss and metrics.
    """
    loss: str | Callable[..., Any] | None = setting(None, unless_given="the task's own", kind=_LOSS, text=str | None)
    """Loss of a regression: squared, absolute, huber:delta=1, quantile:q=0.5 or poisson (the model predicts the
    logarithm of a rate). For any task, FILE.py:NAME, a function of your own.

    Also a function of predictions and labels that returns one value for each example, for any task.
    """
    label_smoothing: float = setting(0.0, range=SHARE)
    """Label smoothing s of the training loss: an example's target is (1 - s) times its one-hot label, plus s divided by
    the number of classes. Scores and distillation losses are not smoothed."""
    metrics: Any = setting(None, unless_given="none", kind=_METRICS, text=str | None)
    """Metrics in addition to the task's own (a regression always has rmse, mae and r2), separated by commas: accuracy,
    balanced_accuracy, macro_f1, auc or calibration_error, for tasks with classes or labels 0 and 1.

    Also a list of names, or a dictionary of metrics by name. A metric is then a name, a function of predictions and
    labels that returns one value for each example, or `jaxpfl.per_client(f)` for a function f of all of a client's
    examples.
    """
    rounds: int = setting(100, range=COUNT, unit="rounds")
    """Number of federated rounds."""
    eval_every: int | None = setting(None, unless_given="only at the end", range=COUNT, unit="rounds")
    """Number of rounds between two evaluations of all clients. The last round is always evaluated."""
    patience: int | None = setting(None, unless_given="no early stopping", range=COUNT, unit="evaluations")
    """Early stopping by validation scores, never test scores; the best round is reported in any case. A method stops
    when each of its seeds has had this number of consecutive evaluations without a better score."""
    cohort: int | None = setting(None, unless_given="all", range=COUNT, unit="clients")
    """Number K <= m of clients in a round; for Poisson participation, the expected number."""
    participation: str | None = setting(
        None, unless_given="full if K = m, else uniform; with privacy poisson, or cyclic for banded noise"
    )
    """Sampling of cohorts: full (all clients), uniform (exactly K clients), poisson (each client independently, with
    probability K/m), or cyclic (blocks of clients take turns)."""
    cohort_cap: int | None = setting(
        None,
        unless_given="so large that a round exceeds it with a probability below 1e-6",
        range=COUNT,
        unit="clients",
    )
    """Maximum size of a Poisson cohort; clients that are drawn beyond it are left out and counted."""
    cycle: int | None = setting(
        None, unless_given="ceil(m/K), and each client takes part in its turn", range=COUNT, unit="rounds"
    )
    """Number of rounds from one turn of a client to the next, for cyclic participation. In each round it is the turn of
    m/cycle clients, each of which takes part independently with probability K cycle/m."""
    local_steps: int = setting(10, range=COUNT, unit="mini-batches")
    """Number of a client's local steps (mini-batches) in a round."""
    local_epochs: int | None = setting(None, unless_given="none, local_steps applies", range=COUNT, unit="epochs")
    """Number of a client's passes over its own training examples in a round, instead of local_steps: a client with n
    examples takes ceil(epochs n / b) steps with b = min(batch_size, n) examples each. A method's other numbers of
    training steps (ditto.personal_steps) are limited to this number of steps. Learning rates decay by the steps of the
    client with the most examples."""
    batch_size: int = setting(20, range=COUNT, unit="examples")
    """Number of examples in a mini-batch. A client with fewer examples uses all of them."""
    draw: str = setting("epoch")
    """Sampling of mini-batches: epoch (in an epoch, every example occurs once), step (each step draws new examples,
    without replacement within the batch) or replacement (with replacement)."""
    augment: str | None = setting(None, unless_given="none")
    """Augmentation of the mini-batches: flip (left to right), crop:padding=4, mixup:alpha=0.2, or several joined by +,
    such as flip+crop. Scores use the examples without augmentation."""
    client_optimizer: Optimizer = setting("sgd", kind=_OPTIMIZER, text=str)
    """Optimizer of the local steps: an optax name, or name:argument=value,..., such as adam:b1=0.8. Its state is reset
    in every round unless keep_optimizer is given.

    Also a function of the learning rate, such as optax.adam.
    """
    keep_optimizer: bool = setting(False)
    """Each client keeps its optimizer states, and continues with the momentum or moments of its last round in the
    cohort, however long ago that round was. The states never leave the client. Training outside the cohort and
    personalization start with new optimizer states."""
    lr: float | Sequence[float] | None = setting(
        None, unless_given="each method's own", range=POSITIVE, kind=RATE, text=float | None
    )
    """Learning rate of every method; sets lr, lr_personal, lr_global, lr_head and lr_alpha. Other step sizes (priors,
    scales, mixtures, adaptation, server) keep their values: lr_psi, lr_location, lr_scale, lr_weights, server_lr,
    fedamp.alpha and perfedavg.alpha.

    Also a list with one rate for each run of a sweep. A rate in ``hyper`` sets only the rate with that name, and takes
    precedence.
    """
    clip_gradients: float | None = setting(None, unless_given="no clipping", range=POSITIVE)
    """Largest L2 norm of the gradient in a local step, over all parameters that the step updates. A longer gradient is
    scaled down to this norm. The gradient includes proximal and correction terms, but not weight decay. The norm of an
    upload is bounded by privacy.clipping_norm instead."""
    lr_schedule: str | Callable[..., Any] = setting(schedules.OWN, kind=_SCHEDULE, text=str)
    """Schedule, over the rounds of a run, for every learning rate that decays: decay (each method's own lr_decay),
    constant, cosine, linear, step:every=30,factor=0.1 (every 30 rounds) or exponential:factor=0.99 (each round). All
    except decay accept warmup=ROUNDS, and cosine:end=0.01 sets the last factor. Personalization and new clients use the
    rates without a schedule.

    Also a function of the round (from 0) that returns a factor in [0, 1] for every rate, with a largest value of 1,
    such as ``optax.cosine_decay_schedule(1.0, rounds)``. After the last round, the last factor continues to apply.
    """
    weighting: str | None = setting(None, unless_given="examples, or uniform with privacy")
    """Weights of the clients in the server's mean, for methods that weight clients: examples or uniform."""
    server_optimizer: Optimizer = setting("sgd", kind=_OPTIMIZER, text=str)
    """Optimizer of the server, applied to the mean of the clients' model updates: written as for client_optimizer, or
    fedavgm, fedadagrad, fedadam or fedyogi. sgd with a server learning rate of 1 is averaging.

    Also a function of the learning rate.
    """
    server_lr: float | Sequence[float] | None = setting(
        None, unless_given="1", range=POSITIVE, kind=RATE, text=float | None
    )
    """Learning rate of every method's server.

    Also a list with one rate for each run of a sweep.
    """
    aggregate: str = setting("mean")
    """Aggregation of the uploads: mean, or a rule that is robust to outliers: median, trimmed-mean:fraction=0.2,
    krum:attackers=2, multi-krum:attackers=2, geometric-median or norm-bound:bound=1. A robust rule gives all clients
    the same weight."""
    attack: str | None = setting(None, unless_given="none")
    """Attack by some clients: sign-flip:factor=1, scale:factor=10 or noise:deviation=1 changes their uploads, and
    label-flip changes their training labels. Scores cover the honest clients; the attackers' scores are reported
    separately."""
    attackers: float = setting(0.0, range=SHARE)
    """Share of the clients that attack. The number of attackers is rounded."""
    attack_seed: int = setting(0, range=Range(0, 2**32 - 1))
    """Seed for the draw of the attackers, which are the same in every run."""
    dropout: Any = restated(Availability, "dropout", 0.0)
    stragglers: Any = restated(Availability, "stragglers", 0.0)
    same_stragglers: bool = restated(Availability, "same_stragglers", False)
    time_model: str | None = restated(Availability, "time_model", None, "none")
    compress: str | Compressor | None = setting(None, unless_given="none", kind=_COMPRESSOR, text=str | None)
    """Compression of uploads: lossless, qsgd, top-k, sign, uniform, tv or codebook, with arguments, such as
    qsgd:levels=4, top-k:share=0.01, uniform:bits=4, tv:gamma=0.1,codebook=3. feedback=false turns error feedback off,
    and feedback=true turns it on for qsgd and uniform. With privacy, the noise must be distributed.

    ``Fit.history["upload_bits"]`` is the size of all uploads in a round.
    """
    adapt_rounds: int = setting(10, range=Range(0), unit="rounds")
    """Number of rounds in which an unseen client trains from the server's last message before it is scored."""
    graph: str | Graph | None = setting(None, unless_given="data", kind=_GRAPH, text=str | None)
    """Graph of the clients, for network-lasso. data, features and models join nearest neighbors: data compares input
    distributions, features compares feature covariances, and models compares locally trained models. On the command
    line, also a CSV file with two client ids on each line.

    Also a Graph whose nodes are the federation's clients.
    """
    neighbours: int | None = setting(None, unless_given="5", range=COUNT, unit="clients")
    """Number of nearest neighbors to which the graph joins each client."""


@read_help
@dataclass(frozen=True, kw_only=True, eq=False)
class RunSpec(Settings):
    """A method and all settings of its run. `jaxpfl.engine.build` makes a `Simulation` from it and the data.

    Raises:
      JaxpflError: if a setting has the wrong type or is out of range, or if two settings exclude each other.
    """

    method: Method = field(metadata=about(kind=instance_of("a registered name or a Method", str, Method)))
    """A registered name, or a `Method` of your own."""
    seeds: Sequence[int] = setting(1, kind=SEEDS)
    """Number of runs (with seeds 0, 1, ...), or a list of seeds. One program trains all runs. A seed may occur several
    times if the hyper-parameters or the noise of its runs differ."""
    hyper: Mapping[str, Any] = setting(None, kind=BY_NAME)
    """Hyper-parameters by name; a value is a number or, for a sweep, one number for each run."""
    options: Mapping[str, Any] = setting(None, kind=BY_NAME)
    """The method's static options by name."""
    num_classes: int | None = setting(None)
    """Number of classes; by default, the largest label plus one."""
    warm_start: PyTree | None = setting(None)
    """Initial parameters of every model, instead of random ones: a tree like the result of the model's init, or a
    dictionary by path ("head/kernel")."""
    privacy: Mechanism | PrivacyConfig | None = setting(
        None, kind=instance_of("a jaxpfl.privacy.Mechanism or PrivacyConfig", Mechanism, PrivacyConfig)
    )
    """Clipping and noise: a Mechanism, or a PrivacyConfig with a budget to which the noise is calibrated. Clipping and
    noise apply to the clients' uploads, or to the gradients of individual examples if a PrivacyConfig has unit =
    example. `Fit.statement` returns the privacy guarantee. Clients with private uploads all have the same weight. A run
    that cannot be accounted for is refused."""
    plan: ExecutionPlan = setting(None, kind=instance_of("an ExecutionPlan", ExecutionPlan))
    """Choices that affect the speed and the memory of a run."""

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
        elif not isinstance(self.seeds, range):  # a range stays a range, because it may have billions of seeds
            resolved["seeds"] = tuple(map(int, self.seeds))
        resolved |= {
            one.name: own_code.load(value, one.metadata["kind"].holds, one.name)
            for one in fields(self)
            if one.name in OWN and own_code.is_reference(value := getattr(self, one.name))
        }
        for name, value in resolved.items():
            object.__setattr__(self, name, value)
        _ = self.availability
        if self.attack is not None:
            robust.attack_of(self.attack)
            if not self.attackers:
                raise JaxpflError(f"attack = {self.attack} requires attackers > 0, the share of clients that attack")
        elif self.attackers:
            raise JaxpflError(f"attackers = {self.attackers:g} requires an attack: {', '.join(robust.ATTACKS)}")
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
            if not self.privacy.on:  # a PrivacyConfig without noise is an oversight; None means no privacy
                raise JaxpflError("privacy requires epsilon or noise_multiplier; use None for no privacy")

    def _check_exclusions(self) -> None:
        private, replaced = self.privacy, self.participation in ("replacement", "with-replacement")
        given = {
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
        exclusions.check(given)

    @property
    def hp(self) -> Any:
        """Hyper-parameters of the method.

        The method's defaults are overridden by ``lr`` and ``server_lr``, and these by the values in ``hyper``.

        Raises:
          JaxpflError: if a name is not a hyper-parameter of the method, or if a value is out of range.
        """
        given = {} if self.lr is None else dict.fromkeys(rates(self.method.hyper), self.lr)
        if self.server_lr is not None and hasattr(self.method.hyper, "server_lr"):
            given["server_lr"] = self.server_lr
        return replace(self.method.name, self.method.hyper, given | dict(self.hyper))

    @property
    def availability(self) -> Availability:
        """Settings of dropout, stragglers and the time model. They are checked, and lists are converted to tuples."""
        return part_of(Availability, self).checked()

    @property
    def is_private(self) -> bool:
        """True if clients' uploads are clipped, with or without noise."""
        if isinstance(self.privacy, PrivacyConfig):
            return self.privacy.on and not self.privacy.is_example_level
        return self.privacy is not None

    @property
    def guards_examples(self) -> bool:
        """True if privacy protects examples: every client clips the gradients of individual examples."""
        return isinstance(self.privacy, PrivacyConfig) and self.privacy.on and self.privacy.is_example_level

    @property
    def is_robust(self) -> bool:
        """True if the aggregation of uploads is not the mean."""
        return self.aggregate != robust.MEAN and robust.resolve(self.aggregate).rule is not None


def without_effect(settings: Settings) -> dict[str, str]:
    """Find the settings that other settings override; return setting -> reason why it has no effect."""
    task, found = settings.task, {}
    if isinstance(task, Task) or own_code.is_reference(task):
        named = "the given Task" if isinstance(task, Task) else f"task = {task}"
        found |= dict.fromkeys(("model", "num_classes"), f"{named} has its own model")
    elif task not in (None, CLASSIFICATION, NEXT_TOKEN):
        found["num_classes"] = f"task = {task} has no classes"
    if settings.local_epochs is not None:
        found["local_steps"] = f"local_epochs = {settings.local_epochs} takes its place"
    return found


def refuse(settings: Settings, without: Mapping[str, str], recorded: Settings | None = None) -> None:
    """Refuse the given settings without effect, except settings that have their recorded value.

    Args:
      settings: settings as the user gave them.
      without: settings without effect, as `without_effect` returns them.
      recorded: settings of an earlier run that ``settings`` takes as defaults; None if there is none.

    Raises:
      JaxpflError: if a setting without effect was given.
    """
    for name, why in without.items():
        value = getattr(settings, name, None)
        if value is None or not is_given(settings, name) or (recorded and value == getattr(recorded, name)):
            continue
        what = f"{name} = {value}" if isinstance(value, str | int | float) else name
        raise JaxpflError(f"{what} has no effect, because {why}: leave it out")


def check_settings(specs: list[RunSpec], *, newcomers: bool, strict: bool = False) -> None:
    """Warn about settings without effect, unusual learning rates, and asynchronous rounds with all clients.

    The function also warns about sweeps in which the value and the seed change together.

    Args:
      specs: one run for each method, all with the same settings.
      newcomers: whether there are unseen clients.
      strict: whether to raise errors instead of warnings.

    Raises:
      JaxpflError: if a hyper-parameter is out of range, or if a name is unknown; with ``strict``, also instead of a
        warning.
    """
    server_rates = [np.max(getattr(spec.hp, "server_lr", 0.0)) for spec in specs]
    if specs[0].server_optimizer != "sgd":
        check_rate(specs[0].server_optimizer, max(server_rates), strict=strict)
    for spec in specs:
        if spec.method.asynchronous and spec.cohort is None:
            warn(
                f"{spec.method.name} with all clients in the cohort waits for the slowest client, as a synchronous "
                "method does: set a smaller cohort",
                strict=strict,
            )
        others = [name for name in rates(spec.method.hyper) if name not in spec.hyper]
        if spec.lr is None and np.ndim(spec.hyper.get("lr", 0)) and others:
            at = ", ".join(f"{name} = {np.asarray(getattr(spec.method.hyper, name)):g}" for name in others)
            warn(
                f"hyper sets lr, but other learning rates of {spec.method.name} keep their defaults ({at}): "
                "fit(lr=...) sets all of them",
                strict=strict,
            )
        if len(spec.seeds) > 1:
            _check_seeds(spec, strict=strict)
    if idle := unused(specs, newcomers=newcomers):
        warn("; ".join(idle), strict=strict)


def _check_seeds(spec: RunSpec, *, strict: bool) -> None:
    """Warn if the values of a sweep do not all have the same seeds; raise an error if ``strict``.

    The effects of the value and of the seed could then not be separated.
    """
    found = vars(spec.hp) | vars(spec.availability) | (vars(spec.privacy) if spec.privacy else {})
    lists = {name: np.asarray(value).tolist() for name, value in found.items() if np.ndim(value) == 1}
    swept = {name: values for name, values in lists.items() if len(values) == len(spec.seeds) and len(set(values)) > 1}
    seeds: dict[tuple[float, ...], list[int]] = {}
    for run, seed in zip(zip(*swept.values(), strict=True), spec.seeds, strict=False):
        seeds.setdefault(run, []).append(seed)
    if len({tuple(sorted(own)) for own in seeds.values()}) > 1:
        name, values = next(iter(swept.items()))
        warn(
            f"{name} = {shown(values)} differs between runs whose seeds {shown(list(spec.seeds))} differ too, so "
            f"the effects are mixed: give every value the same seeds, such as seeds={[spec.seeds[0]] * len(values)}",
            strict=strict,
        )


def check_federation(
    federation: Federation, unseen: Federation | None, task: str | Task | None, *, strict: bool = False
) -> None:
    """Warn about clients that cannot be scored because they have no test examples; raise an error if ``strict``.

    Raises:
      JaxpflError: if the inputs of unseen clients and of trained clients differ in shape.
    """
    if unseen is not None and federation.input_shape != unseen.input_shape:
        here, there = federation.input_shape, unseen.input_shape
        raise JaxpflError(f"unseen clients' inputs must have the federation's shape {here}, got {there}")
    untested = np.asarray(federation.test.size) == 0
    if unseen is not None and untested.all() and np.asarray(unseen.test.size).any():
        warn("no trained client has test examples: only unseen clients are scored", strict=strict)
    elif untested.all():
        warn("no client has test examples: every score will be NaN", strict=strict)
    elif untested.any():
        ids = listed(labels(np.asarray(federation.client_ids), federation.client_names)[untested])
        warn(
            f"{untested.sum()} of {len(untested)} clients have no test examples (namely {ids}): scores cover only "
            "the other clients",
            strict=strict,
        )


def check_claim(spec: RunSpec, federation: Federation, *, strict: bool = False) -> None:
    """Warn if delta is so large that the privacy claim means nothing; raise an error if ``strict``.

    A method that publishes all data of one random client satisfies a privacy claim about users with delta =
    1 / clients. A method that publishes one random example of each client satisfies a claim about examples with delta =
    1 / examples, where ``examples`` is the number of examples of the largest client.
    Likewise, a claim about persons is satisfied with delta = 1 / persons.
    """
    delta = spec.privacy.delta if isinstance(spec.privacy, PrivacyConfig) else None
    if spec.guards_examples:
        train = federation.train
        unit, counts = ("example", train.size) if train.persons is None else ("person", train.count_persons()[0])
        largest = int(np.max(np.asarray(counts), initial=1))
        if delta is not None and 1 / largest <= delta < 1:
            warn(
                f"privacy.delta should be below {1 / largest:g} (the largest client has {largest} {unit}s), got "
                f"{delta:g}: even publishing one random {unit} of each client would satisfy such a claim",
                strict=strict,
            )
        return
    if delta is not None:
        check_delta(delta, federation.num_clients, name="privacy.delta", strict=strict)


def unused(specs: Sequence[RunSpec], *, newcomers: bool) -> list[str]:
    """Return a sentence for each setting that differs from its default but has no effect, with the reason.

    Args:
      specs: one run for each method, all with the same settings. A setting has an effect if at least one method uses
        it.
      newcomers: whether there are unseen clients.
    """
    first, methods = specs[0], [spec.method for spec in specs]
    none = f"no method of the run ({', '.join(method.name for method in methods)})"
    reasons: dict[str, str] = {}
    if not any(method.graph for method in methods):
        reasons |= dict.fromkeys(("graph", "neighbours"), f"{none} uses a graph of the clients")
    elif (graph := first.graph) is not None and graph not in SPACES:
        named = graph if isinstance(graph, str) else "the graph"
        reasons["neighbours"] = f"{named} already defines the neighbors"
    if not any(rates(method.hyper) for method in methods):
        reasons |= dict.fromkeys(("lr", "lr_schedule"), f"{none} has a learning rate")
    if not any(hasattr(method.hyper, "server_lr") for method in methods):
        of_server = "server_optimizer", "server_lr"
        reasons |= dict.fromkeys(of_server, f"{none} has a server optimizer")
    if not any(method.weighs for method in methods):
        reasons["weighting"] = f"{none} weights its clients"
    optimizer = first.client_optimizer
    if first.keep_optimizer and not jax.tree.leaves(resolve(optimizer)(0.1).init(np.zeros(1))):
        reasons["keep_optimizer"] = f"{optimizer if isinstance(optimizer, str) else 'the optimizer'} has no state"
    if not any(method.uploads for method in methods):
        reasons |= dict.fromkeys(("compress", "aggregate"), f"{none} uploads anything")
        if first.attack is not None and robust.attack_of(first.attack).change is not None:
            reasons["attack"] = f"{none} uploads anything"
    if first.attack is None:
        reasons["attack_seed"] = "no client attacks"
    if not newcomers:
        reasons["adapt_rounds"] = "there are no unseen_clients"
    found = {}
    for name, reason in reasons.items():
        value = getattr(first, name)
        if not is_default(first, name):
            found[name if isinstance(value, Graph) else f"{name} = {value}"] = reason
    if (schedule := first.lr_schedule) != schedules.OWN:
        for spec in specs:
            if "lr_decay" in spec.hyper:
                found[f"{spec.method.name}.lr_decay = {spec.hyper['lr_decay']}"] = (
                    f"lr_schedule{f' = {schedule}' if isinstance(schedule, str) else ''} takes its place"
                )
    if first.is_private and not any(method.uploads for method in methods):
        privacy, what = first.privacy, "privacy"
        if isinstance(privacy, PrivacyConfig):
            name = "noise_multiplier" if privacy.epsilon is None else "epsilon"
            what = f"privacy.{name} = {getattr(privacy, name)}"
        found[what] = f"{none} uploads anything"
    return [f"{what} has no effect: {reason}" for what, reason in found.items()]

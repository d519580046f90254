"""What a run is: one frozen dataclass that the command line, config files and ``config.json`` share."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, field
from typing import Any

from jaxpfl import compression
from jaxpfl.engine.assemble import LARGEST, check_positive
from jaxpfl.engine.execution_plan import ExecutionPlan
from jaxpfl.errors import JaxpflError, unknown_name
from jaxpfl.experiment.presets import preset
from jaxpfl.experiment.privacy import PrivacyConfig
from jaxpfl.participation import availability


@dataclass(frozen=True)
class DataConfig:
    """Which data, and how they are split among clients."""

    data: str = "digits"
    """Data set: digits (embedded), planted (drawn), mnist, mnist-writers, cifar10, femnist, ..., or idx:, leaf:,
    libsvm:, npz: or tfds: and a folder, file (relative to --data-dir, or absolute) or name; jaxpfl data list shows
    them."""
    data_dir: str | None = None
    """Where data sets lie; $JAXPFL_DATA_DIR unless given, then ./data."""
    partition: str | None = None
    """How examples are dealt to clients: iid, classes (a number of classes for each client), shards, dirichlet,
    dirichlet-class, lognormal, natural (a client is a writer or user), superclasses or clusters (iid, with labels that
    each cluster of clients permutes in its own way); by data set unless given."""
    clients: int | None = None
    """Number of clients m; by data set unless given."""
    classes_per_client: int | None = None
    """Classes that each client holds, for --partition classes; by data set unless given."""
    shards_per_client: int | None = None
    """Shards of the examples sorted by class that each client holds, for --partition shards; 2 unless given."""
    alpha: float | None = None
    """Dirichlet concentration, for --partition dirichlet and dirichlet-class: small is very unlike, large is iid."""
    min_examples: int | None = None
    """Examples that every client must hold, for --partition dirichlet-class, and classes with a --sigma; 10 unless
    given."""
    sigma: float | None = None
    """Standard deviation of the logarithm of the clients' sizes, for --partition lognormal and, where sizes are to
    differ, classes."""
    users_per_client: int | None = None
    """Users (writers, speakers) that each client consists of, for --partition natural; 1 unless given."""
    superclasses_per_client: int | None = None
    """Superclasses that each client holds, for --partition superclasses."""
    clusters: int | None = None
    """Clusters of clients, for --partition clusters."""
    test_share: float | None = None
    """Share of each client's examples kept for testing, where the data set has no official test set; 0.5 for most."""
    validation_share: float = 0.0
    """Share of each client's training examples set apart for validation."""
    pool_test: bool = False
    """Put the official test set together with the training set; each client's examples are then split by
    --test-share."""
    split_seed: int = 0
    """Seed of the split into clients, train and test; the run seeds do not change the split."""
    drop_empty: bool = False
    """Drop clients without training examples instead of refusing them."""
    standardize: bool = False
    """Bring each feature to mean 0 and deviation 1 over the training examples of the clients that are trained. Pixels
    are standardised whenever they are loaded."""
    unseen_clients: int = 0
    """Clients beside the --clients that are never trained: they arrive at the end, adapt and are scored."""


@dataclass(frozen=True)
class RunConfig(DataConfig):
    """One experiment: data, split, work, methods, seeds. Fields left at None take the data set's preset.

    The documentation of each field is what ``--help`` shows.
    """

    model: str | None = None
    """Model: linear, mlp, mlp:128,64 (hidden sizes), cnn, ...; by data set unless given."""
    warm_start: str | None = None
    """Parameters that every model starts from: a run folder or exported models, for its global model (PATH:METHOD where
    there are several methods), or an .npz file of parameters by path."""
    cohort: int | None = None
    """Clients in a round, a count K <= m (for Poisson participation the expected one); by data set unless given."""
    participation: str | None = None
    """How they are drawn: full, uniform (exactly K), or poisson (each independently, at the rate K/m). Unless given,
    full where K = m, else uniform; with --privacy.* poisson."""
    cohort_cap: int | None = None
    """Slots of a Poisson cohort: clients beyond it are left out and counted. Unless given, so many that a round needs
    more with a probability below 1e-6."""
    weighting: str | None = None
    """Of the clients in the server's mean, for methods that weigh them: examples or uniform; examples unless given, and
    uniform with --privacy.*."""
    local_steps: int | None = None
    """Local steps (mini-batches) of a client in a round; 10 for most data sets."""
    batch_size: int | None = None
    """Examples in a mini-batch; by data set unless given."""
    draw: str = "epoch"
    """How mini-batches are drawn: epoch (every example once before any twice), step (anew each step, without
    replacement in a batch) or replacement."""
    rounds: int | None = None
    """Federated rounds; by data set unless given."""
    dropout: float = 0.0
    """Probability that a client of a round does its work and uploads nothing."""
    stragglers: float = 0.0
    """Probability that a client takes fewer local steps in a round, a number uniform on 1 ... LOCAL_STEPS."""
    same_stragglers: bool = False
    """The same clients are slow in every round, each with its own number of steps; else drawn anew in each round."""
    adapt_rounds: int = 10
    """Rounds that an unseen client works with the server's last message before it is scored."""
    lr: float | None = None
    """Learning rate of every method; each method's own unless given."""
    graph: str | None = None
    """Which clients are neighbours, for network-lasso: the nearest by their data, their features' covariances
    (features) or locally trained models, or a CSV file with two client ids on each line; data unless given."""
    neighbours: int | None = None
    """Neighbours that each client has at least in such a graph of the nearest; 5 unless given."""
    client_optimizer: str = "sgd"
    """Optimiser of the local steps: an optax name, or name:argument=value,..., such as adam:b1=0.8; new every round."""
    server_optimizer: str = "sgd"
    """Optimiser of the server, acting on the mean increment, in the same form; also fedavgm, fedadagrad, fedadam and
    fedyogi. sgd at --server-lr 1 is averaging."""
    server_lr: float | None = None
    """Learning rate of every method's server; 1 unless given."""
    compress: str | None = None
    """How clients code what they upload: lossless, qsgd, top-k, sign, uniform, tv or codebook, with arguments, such as
    qsgd:levels=4, top-k:share=0.01, uniform:bits=4, tv:gamma=0.1,codebook=3; feedback=false leaves out error feedback,
    feedback=true gives it to qsgd and uniform. Unless given, nothing is coded."""
    set: tuple[str, ...] = ()
    """A method's own hyper-parameters or options: METHOD.name=value."""
    seed: int = 0
    """First run seed."""
    seeds: int | None = None
    """Number of run seeds, all in one program; by data set unless given."""
    eval_every: int = 10
    """Score all clients after every so many rounds, and at the end."""
    checkpoint_every: int = 50
    """Write a checkpoint after every so many rounds, and at the end."""
    privacy: PrivacyConfig = field(default_factory=PrivacyConfig)
    """User-level differential privacy of what clients upload: clipping, noise, and what it is worth."""
    plan: ExecutionPlan = field(default_factory=ExecutionPlan)
    """How to execute: changes speed and memory, not results (up to the rounding of additions)."""


_MAY_GROW = ("rounds",)
# These do not change what the run is: how it executes, how often it is saved, and where its data lie and its first
# parameters (whose values the fingerprint holds).
_FREE = ("plan", "checkpoint_every", "data_dir", "warm_start")


def resolve(config: RunConfig) -> RunConfig:
    """The same experiment with every preset filled in; what depends on the data themselves is filled in by `prepare`.

    Raises:
      JaxpflError: for counts below one, shares outside [0, 1), and a cohort larger than the number of clients.
    """
    values = preset(config.data, config.partition)
    given = {f.name: getattr(config, f.name) for f in dataclasses.fields(config)}
    # A cohort preset belongs to the preset's number of clients; a smaller federation takes part whole.
    clients = given["clients"] if given["clients"] is not None else values["clients"]
    if clients is None:  # as many as there are users, which `prepare` counts
        del values["cohort"]
    else:
        values["cohort"] = min(values["cohort"], max(clients, 1))
    config = dataclasses.replace(config, **{k: v for k, v in values.items() if given[k] is None})
    counts = ("clients", "classes_per_client", "cohort", "local_steps", "batch_size", "rounds", "seeds", "neighbours")
    for name in (*counts, "eval_every", "checkpoint_every"):
        if getattr(config, name) is not None:
            check_positive(**{name: getattr(config, name)})
    for name, value in vars(config).items():
        if isinstance(value, int) and value > LARGEST and name not in ("seed", "split_seed"):
            raise JaxpflError(f"{name} must be at most {LARGEST}, got {value}")
    for name, low in (("test_share", "> 0"), ("validation_share", ">= 0")):
        value = getattr(config, name)
        if not (0 < value < 1 or (value == 0 and low == ">= 0")):
            raise JaxpflError(f"{name} must be {low} and < 1, got {value}")
    for name, runs in (("seed", config.seeds), ("split_seed", 1)):
        value = getattr(config, name)
        if not 0 <= value <= 2**32 - (runs or 1):
            raise JaxpflError(f"{name} must be at least 0, and every seed below 2**32, got {value}")
    for name in ("unseen_clients", "adapt_rounds"):
        value = getattr(config, name)
        if not isinstance(value, int) or value < 0:
            raise JaxpflError(f"{name} must be a whole number of at least 0, got {value!r}")
    availability(config.dropout, config.stragglers, same_stragglers=config.same_stragglers)
    config.privacy.check()
    if config.compress is not None:
        compression.resolve(config.compress)
    for name in ("lr", "server_lr"):
        value = getattr(config, name)
        if value is not None and not 0 < value < float("inf"):
            raise JaxpflError(f"{name} must be > 0 and finite, got {value}")
    return config


def method_settings(config: RunConfig, method: str, methods: tuple[str, ...]) -> dict[str, str]:
    """The ``--set`` entries of one method, name -> value as text.

    An entry without a method's name is for the only method of the run.

    Raises:
      JaxpflError: for an entry that is not ``METHOD.name=value``, or names a method that is not part of the run.
    """
    settings = {}
    for entry in config.set:
        target, equals, value = entry.partition("=")
        owner, dot, name = target.partition(".")
        if not dot and len(methods) == 1:
            owner, name = methods[0], target
        if not equals or not name or not value:
            raise JaxpflError(f"--set takes METHOD.name=value, got {entry!r}")
        if owner not in methods:
            raise unknown_name("method in --set", owner, methods)
        if owner == method:
            settings[name] = value
    return settings


def to_json(config: RunConfig) -> dict[str, Any]:
    """The config as JSON-able values."""
    return json.loads(json.dumps(dataclasses.asdict(config)))


def differences(old: dict[str, Any], new: dict[str, Any]) -> tuple[list[str], list[str]]:
    """What a resumed run changes: (semantic differences, allowed ones), each ``name: old -> new``.

    The plan, more rounds, and the folder of the data may change; anything else is another experiment.
    """
    semantic, allowed = [], []
    for name in sorted(old.keys() | new.keys()):
        was, now = old.get(name), new.get(name)
        if was == now:
            continue
        grown = name in _MAY_GROW and isinstance(was, int) and isinstance(now, int) and now > was
        free = name in _FREE or grown
        (allowed if free else semantic).append(f"{name}: {was} -> {now}")
    return semantic, allowed

"""From a config to data, task and compiled methods."""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxpfl import algorithms, choices, compression, data, participation
from jaxpfl.algorithms import LocalWork
from jaxpfl.algorithms.parts.hyper import PAPER, replace, with_rate, with_server_rate
from jaxpfl.algorithms.parts.server_optimizer import check_rate
from jaxpfl.engine import Simulation, accounted
from jaxpfl.engine.assemble import build, draw_cohorts, make_simulation, make_task, weighting_under
from jaxpfl.engine.client_graph import NEIGHBOURS, graph_for
from jaxpfl.engine.execution_plan import resolve as resolve_plan
from jaxpfl.engine.groups import make_groups
from jaxpfl.engine.state import server_context
from jaxpfl.errors import JaxpflError, unknown_name, warn
from jaxpfl.experiment import graph_file
from jaxpfl.experiment.config import RunConfig, method_settings
from jaxpfl.experiment.presets import model_for, preset
from jaxpfl.experiment.privacy import Origin, Protection, caveat, protect
from jaxpfl.experiment.unused import unused
from jaxpfl.models import Task
from jaxpfl.models.given import start_from
from jaxpfl.participation import Participation
from jaxpfl.privacy.statement import GIVEN_START
from jaxpfl.similarity.graphs import Graph
from jaxpfl.types import Federation, PyTree

_NOT_PRIVATE = (
    "the means and deviations of all training examples are in every client's inputs, and the privacy claim does not "
    "cover them"
)
NOISE_MULTIPLIER = "privacy.noise_multiplier"
"""Its name among a private method's hyper-parameters."""
NOISE = 2
"""The way in which private runs draw their noise: a checkpoint of another goes on with noise that others share."""


class Experiment(NamedTuple):
    """A resolved config with its data and model.

    Attributes:
      config: the config.
      methods: names of the methods.
      federation: the clients that are trained.
      task: model, loss and metrics.
      start: the checksum of the parameters that it starts from, if given.
      unseen: the clients that arrive at the end, if any.
      graph: which clients are neighbours, where a method asks for it.
      scaling: by which all inputs were standardised, where that was asked for.
      caveats: what weakens its claims of privacy.
    """

    config: RunConfig
    methods: tuple[str, ...]
    federation: Federation
    task: Task
    start: int | None
    unseen: Federation | None = None
    graph: Graph | None = None
    scaling: data.Scaling | None = None
    caveats: tuple[str, ...] = ()

    def simulation(self, name: str) -> Simulation:
        """The compiled programs of one method."""
        config, method = self.config, algorithms.get(name)
        _, options = _split_settings(config, name, self.methods)
        protection = self.protection(name)
        mechanism = None if protection is None else protection.mechanism
        return make_simulation(
            method,
            self.task,
            dataclasses.replace(local_work(config, self.federation, self.unseen), privacy=mechanism, graph=self.graph),
            self.federation,
            cohorts(config, self.federation.num_clients),
            self.hyper(name),
            options=options,
            privacy=mechanism,
            compressor=None if config.compress is None else compression.resolve(config.compress),
            availability=participation.availability(
                config.dropout, config.stragglers, same_stragglers=config.same_stragglers
            ),
            plan=config.plan,
            unseen=self.unseen,
            adapt_rounds=config.adapt_rounds,
        )

    def hyper(self, name: str) -> Any:
        """One method's hyper-parameters."""
        return _hyper(self.config, name, self.methods)

    def all_hyper(self, name: str) -> dict[str, float]:
        """One method's hyper-parameters by name, its noise multiplier among them where it is private."""
        hyper = {field: float(value) for field, value in vars(self.hyper(name)).items()}
        if (protection := self.protection(name)) is not None:  # calibrated noise depends on the rounds
            hyper[NOISE_MULTIPLIER] = float(np.asarray(protection.mechanism.noise_multiplier))
        return hyper

    def protection(self, name: str) -> Protection | None:
        """What makes one method's uploads private, and what that is worth; None where nothing does."""
        config, method = self.config, algorithms.get(name)
        if not method.uploads:
            return None
        options, steps = _split_settings(config, name, self.methods)[1], require(config.local_steps)
        of_run = accounted.of_round(
            method, self.hyper(name), options, steps=steps, optimizer=config.client_optimizer
        ) | {"rounds": require(config.rounds), "compressed": config.compress is not None}
        return protect(config.privacy, cohorts(config, self.federation.num_clients), of_run, self.caveats)

    def fingerprint(self) -> dict[str, Any]:
        """What the config does not say but the numbers depend on: every hyper-parameter, and the data themselves."""
        return {
            "hyper": {name: self.all_hyper(name) for name in self.methods},
            "data": _checksum((self.federation, self.unseen)),
            "warm_start": self.start,
            "graph": None if self.graph is None else _checksum(self.graph),
            "noise": NOISE if self.config.privacy.on else None,
        }


def prepare(
    config: RunConfig,
    methods: tuple[str, ...],
    *,
    strict: bool = False,
    initial: Mapping[str, np.ndarray] | None = None,
    origin: Origin | None = None,
) -> Experiment:
    """Loads and splits the data and checks every name and value, before anything is written.

    Args:
      config: a resolved config.
      methods: registered names.
      strict: refuse what is otherwise warned about (a batch larger than the smallest client, or a flag of no use, say).
      initial: the parameters that ``config.warm_start`` names, by path, as `warm_start.read` reads them.
      origin: what is known of them, as `warm_start.origin` says.
    """
    if (config.warm_start is None) != (initial is None):
        raise ValueError("give the parameters that config.warm_start names, and no others")
    if not methods:
        raise JaxpflError("at least one method is needed")
    if len(set(methods)) != len(methods):
        raise JaxpflError(f"each method can be named once, got {', '.join(methods)}")
    rates = [getattr(_hyper(config, name, methods), "server_lr", 0.0) for name in methods]
    check_rate(config.server_optimizer, max(rates), strict=strict)
    if idle := unused(config, methods):
        warn("; ".join(idle), strict=strict)
    # Refused before the data are read: a cohort that no split could serve.
    if config.clients is not None:
        cohorts(config, config.clients)
    source, federation = load_federation(config)
    unseen = None
    if config.unseen_clients:
        federation, unseen = data.set_apart(federation, config.unseen_clients, config.split_seed)
    scaling = None
    if config.standardize:
        data.check_standardizable(source)
        scaling = data.scaling_of(federation)  # newcomers have no part in it
        federation = data.scaled(federation, scaling)
        unseen = None if unseen is None else data.scaled(unseen, scaling)
        if config.privacy.on:
            warn(f"standardize = True: {_NOT_PRIVATE}", strict=strict)
    data.check_labels(federation, strict)
    data.check_scales(federation, strict)
    if config.model is None:
        config = dataclasses.replace(config, model=model_for(source))
    if config.cohort is None:
        usual = preset(config.data, config.partition)["cohort"]
        config = dataclasses.replace(config, cohort=min(usual, federation.num_clients))
    drawn = cohorts(config, federation.num_clients)  # clients may have been dropped
    _check_delta(config, federation.num_clients, strict)
    clients, capacity = federation.num_clients, drawn.capacity
    resolve_plan(config.plan, cohort=capacity, num_clients=clients, model_bytes=1)  # refuses its devices
    if not np.asarray(federation.test.mask).any():
        raise JaxpflError("no client has test examples: use fewer clients, or a larger --test-share")
    data.check_batch_size(federation, require(config.batch_size), strict)
    task = make_task(require(config.model), federation, source.num_classes)
    start = None
    if initial is not None:
        task, start = start_from(task, initial), _checksum(dict(initial))
    work = local_work(config, federation, unseen)
    work.batches(work.steps)  # refuses an unknown way to draw, and more of them than can be counted
    graph = _graph(config, methods, federation, task, work)
    work = dataclasses.replace(work, graph=graph)
    for name in methods:  # a method may refuse its options, the task, how many take part, or the data
        algorithm = build(algorithms.get(name), task, work, _split_settings(config, name, methods)[1])
        begin = partial(algorithm.server.init, hp=_hyper(config, name, methods), ctx=server_context(drawn, 0))
        jax.eval_shape(begin, jax.random.key(0))
        make_groups(algorithm, np.asarray(federation.client_ids), devices=1)
        for part in (federation, unseen):
            if part is not None:
                algorithm.check_data(part)
    caveats: tuple[str, ...] = ()
    if config.privacy.on and initial is not None:
        caveats = (caveat(origin, _checksum((federation, unseen))),)
        if caveats[0] != GIVEN_START:
            warn(f"warm_start = {config.warm_start}: {caveats[0]}", strict=strict)
    experiment = Experiment(config, methods, federation, task, start, unseen, graph, scaling, caveats)
    if config.privacy.on or config.compress is not None:
        # What a method uploads, and so whether it can be private and compressed, shows when it is traced.
        for name in methods:
            experiment.simulation(name).bytes_per_client()
    return experiment


def _check_delta(config: RunConfig, clients: int, strict: bool) -> None:
    """Warns of a claim that means nothing: to publish one client at random, whole, has a delta of 1 / clients."""
    delta = config.privacy.delta
    if delta is not None and 1 / clients <= delta < 1:
        warn(
            f"privacy.delta = {delta:g} is not below 1 / clients = {1 / clients:g}: such a claim holds even where the "
            "data of a client drawn at random are published",
            strict=strict,
        )


def load_federation(config: RunConfig) -> tuple[data.Source, Federation]:
    """The data set of a resolved config, and its split into clients, unseen ones among them; not standardised."""
    source = data.load(config.data, config.data_dir)
    federation = data.federate(
        source,
        partition=require(config.partition),
        clients=None if config.clients is None else config.clients + config.unseen_clients,
        classes_per_client=config.classes_per_client,
        shards_per_client=config.shards_per_client,
        alpha=config.alpha,
        min_examples=config.min_examples,
        sigma=config.sigma,
        users_per_client=config.users_per_client,
        superclasses_per_client=config.superclasses_per_client,
        clusters=config.clusters,
        test_share=require(config.test_share),
        validation_share=config.validation_share,
        pool_test=config.pool_test,
        split_seed=config.split_seed,
        drop_empty=config.drop_empty,
    )
    return source, federation


def _graph(
    config: RunConfig, methods: tuple[str, ...], federation: Federation, task: Task, work: LocalWork
) -> Graph | None:
    """The graph that a method of the run asks for; None where none does."""
    asking = [method for method in map(algorithms.get, methods) if method.graph]
    if not asking:
        return None
    if graph_file.is_named(config.graph):
        graph = graph_file.read(Path(require(config.graph)), np.asarray(federation.client_ids))
    else:
        near = config.neighbours or NEIGHBOURS
        graph = graph_for(asking[0], config.graph, federation, task, work, neighbours=near)
    if graph is not None and not graph.edges:  # its states have no rows, which no checkpoint holds
        raise JaxpflError(f"graph = {config.graph or 'data'} has no edges: {asking[0].name} needs neighbours")
    return graph


def local_work(config: RunConfig, federation: Federation, unseen: Federation | None = None) -> LocalWork:
    """The work in a round of all clients that there are."""
    sizes = [np.asarray(part.train.size) for part in (federation, unseen) if part is not None]
    return LocalWork(
        np.concatenate(sizes),
        require(config.local_steps),
        require(config.batch_size),
        config.draw,
        optimizer=config.client_optimizer,
        server_optimizer=config.server_optimizer,
        weighting=weighting_under(config.privacy.on, config.weighting),
        unseen=0 if unseen is None else unseen.num_clients,
    )


def cohorts(config: RunConfig, num_clients: int) -> Participation:
    """How the cohorts of a resolved config are drawn."""
    return draw_cohorts(
        num_clients,
        config.cohort,
        config.participation,
        config.cohort_cap,
        private=config.privacy.on,
        cuts=config.privacy.accountant == "pld",
    )


def _checksum(tree: PyTree) -> int:
    checksum = 0
    for leaf in jax.tree.leaves(tree):
        checksum = zlib.crc32(np.ascontiguousarray(leaf).data, checksum)
    return checksum


def require(value: Any) -> Any:
    """A field that `resolve` has filled in."""
    if value is None:
        raise JaxpflError("the config is not resolved")
    return value


def _hyper(config: RunConfig, name: str, methods: tuple[str, ...]) -> Any:
    """A method's defaults, then ``--lr`` and ``--server-lr``, then ``--set``; checked."""
    method = algorithms.get(name)
    hp = method.hyper if config.lr is None else with_rate(method.hyper, config.lr)
    hp = hp if config.server_lr is None else with_server_rate(hp, config.server_lr)
    return replace(name, hp, _split_settings(config, name, methods)[0])


def method_options(config: RunConfig, name: str, methods: tuple[str, ...]) -> dict[str, Any]:
    """A method's static options that ``--set`` gives."""
    return _split_settings(config, name, methods)[1]


def _split_settings(
    config: RunConfig, name: str, methods: tuple[str, ...]
) -> tuple[dict[str, float | str], dict[str, Any]]:
    """The ``--set`` entries of a method as (hyper-parameters, static options), values parsed."""
    method, hyper, options = algorithms.get(name), {}, {}
    names = [field.name for field in dataclasses.fields(method.hyper)]
    for key, text in method_settings(config, name, methods).items():
        if key in method.options:
            options[key] = choices.typed(f"{name}.{key}", text, type(method.options[key]))
        elif key not in names:
            raise unknown_name(f"hyper-parameter of {name}", key, [*names, *method.options])
        else:
            hyper[key] = text if text == PAPER else choices.typed(f"{name}.{key}", text, float)
    return hyper, options

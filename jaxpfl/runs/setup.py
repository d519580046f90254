"""From a config to data, task and compiled methods, and the privacy claims that depend on these inputs.

The data are identified by their checksum. A graph of clients is a CSV file with one edge (two client ids) on each line;
a header and repeated edges are allowed. Given parameters have an origin.
"""

from __future__ import annotations

import csv
import dataclasses
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax
import numpy as np

from jaxpfl import __version__, data
from jaxpfl.core.settings import part_of
from jaxpfl.core.trees import checksum
from jaxpfl.core.types import ClientData, Federation
from jaxpfl.data import Split
from jaxpfl.data.sources import csv_text
from jaxpfl.engine import Simulation
from jaxpfl.engine.advice import check_claim, check_federation, check_settings
from jaxpfl.engine.build import Assembled, build, cohorts_of, graph_of, put_together, work_of
from jaxpfl.engine.execution_plan import resolve as resolve_plan
from jaxpfl.engine.groups import make_groups
from jaxpfl.engine.placement import agree_on
from jaxpfl.engine.spec import Settings
from jaxpfl.engine.state import server_context
from jaxpfl.engine.tasks import task_of
from jaxpfl.models import Task
from jaxpfl.models.base import CLASSIFICATION, NEXT_TOKEN
from jaxpfl.privacy import Mechanism, PrivacyConfig, SiloMechanism, Statement
from jaxpfl.privacy.statement import GIVEN_START, SAME_USERS, SPENT_BEFORE, STOPPED
from jaxpfl.runs import data_sets
from jaxpfl.runs.config import ORDERS, TEST_USERS, RunConfig, spec_for, to_json
from jaxpfl.runs.data_sets import is_table, model_for, preset, source_of
from jaxpfl.runs.scores import HEADLINES, Headline
from jaxpfl.similarity import graphs
from jaxpfl.similarity.graphs import Graph
from jaxpfl.support import files, processes
from jaxpfl.support.errors import JaxpflError, shown, warn

_NOT_PRIVATE = (
    "the means and deviations of all training examples are in every client's inputs, and the privacy claim does not "
    "cover them"
)
NOISE_MULTIPLIER = "privacy.noise_multiplier"
"""Name of the noise multiplier among a private method's hyper-parameters."""
NOISE = 2
"""Version of the noise streams of private runs: with another one, a resumed run would share noise with others."""


class Experiment(NamedTuple):
    """A resolved config with its data and model.

    Attributes:
      config: the config.
      methods: names of the methods.
      runs: the run of each method, by name.
      federation: the trained clients.
      task: model, loss and metrics.
      start: checksum of the initial parameters, if given.
      unseen: the clients that arrive at the end, if any.
      graph: the graph of the clients, if a method needs it.
      scaling: scaling of all inputs, if they were standardised.
      class_names: names as `Source.class_names`.
      caveats: weaknesses of the experiment's privacy claims.
    """

    config: RunConfig
    methods: tuple[str, ...]
    runs: Mapping[str, Assembled]
    federation: Federation
    task: Task
    start: int | None
    unseen: Federation | None = None
    graph: Graph | None = None
    scaling: data.Scaling | None = None
    class_names: np.ndarray | None = None
    caveats: tuple[str, ...] = ()

    @property
    def headline(self) -> Headline:
        """The metric that reports and selections use."""
        name, task = self.task.headline, self.task
        return HEADLINES.get(name, Headline(name, task.lower, percent=False))

    @property
    def scored_splits(self) -> tuple[Literal["test", "validation"], ...]:
        """The splits that have examples to score."""
        return ("test", "validation") if self.federation.validation.capacity else ("test",)

    def simulation(self, name: str) -> Simulation:
        """The compiled programs of one method."""
        return dataclasses.replace(self.runs[name], task=self.task).simulation()

    def described(self) -> Experiment:
        """The experiment with its clients and their numbers of examples, but without the examples."""
        federation, unseen = _without_examples(self.federation), self.unseen and _without_examples(self.unseen)
        runs = {name: dataclasses.replace(run, federation=federation, unseen=unseen) for name, run in self.runs.items()}
        return self._replace(federation=federation, unseen=unseen, runs=runs)

    def all_hyper(self, name: str) -> dict[str, float]:
        """One method's hyper-parameters by name, its noise multiplier among them where it is private."""
        run = self.runs[name]
        hyper = {field: float(value) for field, value in vars(run.hp).items()}
        if run.mechanism is not None:  # calibrated noise depends on the rounds
            hyper[NOISE_MULTIPLIER] = float(np.asarray(run.mechanism.noise_multiplier))
        return hyper

    def protection(self, name: str) -> Protection | None:
        """The privacy of one method's uploads; None where nothing is private."""
        return protection_of(self.runs[name], self.caveats)

    def fingerprint(self) -> dict[str, Any]:
        """Fingerprint of all that the results depend on beside the config: every hyper-parameter, and the data
        themselves.
        """
        return {
            "hyper": {name: self.all_hyper(name) for name in self.methods},
            "data": data_checksum(self.federation, self.unseen),
            "warm_start": self.start,
            "graph": None if self.graph is None else checksum(self.graph),
            "noise": NOISE if self.config.privacy.on else None,
            "orders": ORDERS,
        }


def prepare(
    config: RunConfig,
    methods: tuple[str, ...],
    *,
    strict: bool = False,
    initial: Mapping[str, np.ndarray] | None = None,
    origin: Origin | None = None,
    given: tuple[data.Source, Federation] | None = None,
    among: tuple[str, ...] | None = None,
) -> Experiment:
    """Load and split the data, and check every name and value, before anything is written.

    Args:
      config: a resolved config.
      methods: registered names.
      strict: turn warnings (of a batch larger than the smallest client or an unused flag, say) into errors.
      initial: the parameters that ``config.warm_start`` names, by path, as `export.read_parameters` reads them.
      origin: their origin, from `export.parameters_origin`.
      given: the data set and its split, where `load_federation` has loaded them.
      among: all methods that run with the config, where these are some of them: what another one uses is used.
    """
    if (config.warm_start is None) != (initial is None):
        raise ValueError("give the parameters that config.warm_start names, and no others")
    if len(set(methods)) != len(methods):
        raise JaxpflError(f"name each method once, got {', '.join(methods)}")
    # Checks that need no data; a model that the data choose is filled in afterwards.
    named = config if config.model is not None else dataclasses.replace(config, model=Settings.model)
    among = among or methods
    everyone = [spec_for(named, name, among) for name in among]
    check_settings(everyone, newcomers=config.unseen_clients != 0, strict=strict)
    specs = [spec for spec in everyone if spec.method.name in methods]
    if config.clients is not None:
        cohorts_of(specs[0], config.clients)
    source, federation = load_federation(config) if given is None else given
    federation, unseen, scaling = clients_of(config, source, federation)
    if scaling is not None and config.privacy.on:
        cause = "standardize = True" if config.standardize else "a table's features are standardised"
        warn(f"{cause}: {_NOT_PRIVATE}", strict=strict)
    federation = data.single(federation, strict)
    unseen = None if unseen is None else data.single(unseen, strict)
    if config.task is None and source.task != CLASSIFICATION:
        config = dataclasses.replace(config, task=source.task)
    check_federation(federation, unseen, config.task, strict=strict)
    if config.model is None:
        config = dataclasses.replace(config, model=model_for(source))
    if config.cohort is None:
        usual = preset(data_sets.origin(config), config.partition)["cohort"]
        config = dataclasses.replace(config, cohort=min(usual, federation.num_clients))
    filled = {name: getattr(config, name) for name in ("task", "model", "cohort")}
    classes = source.num_classes if source.task in (CLASSIFICATION, NEXT_TOKEN) else None
    specs = [dataclasses.replace(spec, **filled, num_classes=classes, warm_start=initial) for spec in specs]
    drawn = cohorts_of(specs[0], federation.num_clients)  # clients may have been dropped
    check_claim(specs[0], federation, strict=strict)
    clients, capacity = federation.num_clients, drawn.capacity
    resolve_plan(config.plan, cohort=capacity, num_clients=clients, model_bytes=1)  # refuses its devices
    data.check_batch_size(federation, config.batch_size, strict)
    task = task_of(specs[0], federation, unseen)
    work = work_of(specs[0], federation, unseen)
    work.batches(work.steps)  # refuses an unknown way to draw, and more of them than can be counted
    asking = next((spec for spec in specs if spec.method.graph), None)
    graph = None
    if asking is not None:
        if isinstance(config.graph, str) and config.graph.lower().endswith(".csv"):
            read = read_graph(Path(config.graph), np.asarray(federation.client_ids))
            asking = dataclasses.replace(asking, graph=read, neighbours=None)
        graph = graph_of(asking, federation, task, named=str(config.graph or "data"))
    runs = {spec.method.name: put_together(spec, federation, unseen, task, graph) for spec in specs}
    for run in runs.values():  # a method may refuse its options, the task, the participation, or the data
        algorithm = build(run.spec.method, task, dataclasses.replace(run.work, privacy=None), dict(run.spec.options))
        begin = partial(algorithm.server.init, hp=run.hp, ctx=server_context(drawn, 0))
        jax.eval_shape(begin, jax.random.key(0))
        make_groups(algorithm, np.asarray(federation.client_ids), devices=1)
        for part in (federation, unseen):
            if part is not None:
                algorithm.check_data(part)
    start = None if initial is None else checksum(dict(initial))
    caveats: tuple[str, ...] = ()
    if config.privacy.on and initial is not None:
        caveats = (caveat(origin, federation, unseen),)
        if caveats[0] != GIVEN_START:
            warn(f"warm_start = {config.warm_start}: {caveats[0]}", strict=strict)
    if config.privacy.on and config.patience is not None:
        caveats += (STOPPED,)
    names = source.class_names if task.kind != "regression" else None
    experiment = Experiment(config, methods, runs, federation, task, start, unseen, graph, scaling, names, caveats)
    if config.privacy.on or config.compress is not None:
        # Only tracing shows what a method uploads, and thus whether it can be private and compressed.
        for name in methods:
            experiment.simulation(name).bytes_per_client()
    return experiment


def _without_examples(federation: Federation) -> Federation:
    def emptied(split: ClientData) -> ClientData:
        return split.with_examples(*jax.tree.map(lambda a: np.empty((0, *a.shape[1:]), a.dtype), split.examples))

    ids, *splits = federation
    return Federation(ids, *map(emptied, splits))


def check_agreed(experiment: Experiment) -> None:
    """Refuse a run whose processes were given other settings, methods or data, or have other versions.

    Raises:
      JaxpflError: naming the first that differs.
    """
    config = to_json(experiment.config)
    config.pop("data_dir")  # each host has its own
    versions = {"jaxpfl": __version__, "jax": jax.__version__}
    processes.agree("the", config | {"methods": experiment.methods, **experiment.fingerprint(), **versions})
    for federation in (experiment.federation, experiment.unseen):
        if federation is not None:
            agree_on(federation, for_good=True)


def load_federation(
    config: RunConfig, source: Callable[[RunConfig], data.Source] = source_of
) -> tuple[data.Source, Federation]:
    """The data set of a resolved config, and its split into clients, unseen ones among them (but for test users); not
    standardised.

    Args:
      config: resolved.
      source: loads the data set, unless clients are saved with it.
    """
    stored = data_sets.opened(config)
    if stored is not None:
        return stored.source, stored.federation
    loaded = source(config)
    split = dataclasses.replace(part_of(Split, config), standardize=False)
    if config.unseen_clients == TEST_USERS:
        return loaded, data.federate(data.seen(loaded), **vars(dataclasses.replace(split, test_share=0.0)))
    if config.clients is not None:
        split = dataclasses.replace(split, clients=config.clients + config.clients_apart)
    return loaded, data.federate(loaded, **vars(split))


def clients_of(
    config: RunConfig, source: data.Source, federation: Federation
) -> tuple[Federation, Federation | None, data.Scaling | None]:
    """The trained clients, the unseen clients, and the scaling of all inputs if they are standardised.

    Args:
      config: resolved config.
      source, federation: data set and its clients, as `load_federation` returns them.
    """
    unseen = scaling = None
    if config.unseen_clients == TEST_USERS:
        split = dataclasses.replace(part_of(Split, config), clients=None, standardize=False)
        unseen = data.federate_unseen(source, **vars(split))
    elif config.clients_apart:
        federation, unseen = data.set_apart(federation, config.clients_apart, config.split_seed)
    if config.standardize or is_table(config):
        data.check_standardizable(source)
        scaling = data.scaling_of(federation)  # unseen clients do not affect the scaling
        federation = data.scaled(federation, scaling)
        unseen = None if unseen is None else data.scaled(unseen, scaling)
    return federation, unseen, scaling


def data_checksum(*federations: Federation | None) -> int:
    """CRC-32 of the clients with their examples; it does not depend on capacities."""
    given = [one for one in federations if one is not None]
    return checksum([(one.client_ids, [(split.flat(), split.size) for split in one.all_splits]) for one in given])


def has_checksum(stored: int, *federations: Federation | None) -> bool:
    """True if a stored checksum matches these data."""
    return stored == data_checksum(*federations)


GRAPH_HEADER = ("client", "neighbour")


def read_graph(path: Path, client_ids: np.ndarray) -> Graph:
    """Read a graph of clients; clients that the file does not name have no neighbours.

    Args:
      client_ids: ids of the clients in the order of the stack, [m].

    Raises:
      JaxpflError: if the file cannot be read, or a line does not hold the ids of two different clients.
    """
    cells, _ = csv_text.rows(path)
    if cells.shape[1] > 1 and not any(cell.lstrip("-").isdecimal() for cell in cells.iloc[0]):
        cells = cells.iloc[1:]
    place = {str(client): row for row, client in enumerate(client_ids.tolist())}
    pairs = []
    for line, row in zip(cells.index, cells.to_numpy().tolist(), strict=True):
        if len(row) != 2 or row[0] == row[1] or not place.keys() >= set(row):
            raise JaxpflError(
                f"{path} line {line}: needs the ids of two different clients of the data, got {shown(','.join(row))}"
            )
        pairs.append([place[cell] for cell in row])
    return graphs.from_edges(pairs, len(client_ids))


def write_graph(path: Path, graph: Graph, client_ids: np.ndarray) -> None:
    """Write a graph in the format that `read_graph` reads."""
    with files.whole(path) as file:
        writer = csv.writer(file)
        writer.writerow(GRAPH_HEADER)
        writer.writerows(zip(client_ids[graph.first].tolist(), client_ids[graph.second].tolist(), strict=True))


class Origin(NamedTuple):
    """Origin of given parameters: the checksum of their training data, and whether they are private."""

    data: int
    private: bool


def caveat(origin: Origin | None, *federations: Federation | None) -> str:
    """Caveat of a run's claim due to its initial parameters, for these data."""
    if origin is None or not has_checksum(origin.data, *federations):
        return GIVEN_START
    return SPENT_BEFORE if origin.private else SAME_USERS


class Protection(NamedTuple):
    """A mechanism and its guarantee; the guarantee is None if nothing can be claimed, for example without noise."""

    mechanism: Mechanism | SiloMechanism
    statement: Statement | None


def protection_of(run: Assembled, caveats: tuple[str, ...] = ()) -> Protection | None:
    """Mechanism and claim that protect a method's uploads, or the examples of its silos; None without privacy.

    Args:
      run: run with one noise multiplier.
      caveats: weaknesses of the claim.

    Raises:
      JaxpflError: if no accountant covers the run.
    """
    if run.mechanism is None:
        return None
    released, asked = run.released(1), run.spec.privacy  # one for all seeds
    assert released is not None
    plan = released[0]
    if plan is None:
        return Protection(run.mechanism, None)
    assert isinstance(asked, PrivacyConfig)
    assert asked.delta is not None
    statement = plan.statement(asked.delta, asked.accountant)
    return Protection(run.mechanism, statement._replace(noise_seed=asked.noise_seed, caveats=caveats))


def require(value: Any) -> Any:
    """A field that `resolve` has filled in."""
    assert value is not None, "the config is not resolved"
    return value

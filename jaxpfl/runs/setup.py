"""Preparation of an experiment from its config: data, task, methods, and privacy claims.

The data are identified by their checksum. A graph of clients is read from a CSV file with one edge (two client ids) on
each line; a header and repeated edges are allowed. Initial parameters given by the user have an `Origin`, on which the
privacy claims depend.
"""

from __future__ import annotations

import csv
import dataclasses
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxpfl import __version__, data
from jaxpfl.algorithms import Method
from jaxpfl.core.settings import part_of
from jaxpfl.core.trees import checksum, num_bytes
from jaxpfl.core.types import ClientData, Federation, Names
from jaxpfl.data import Split
from jaxpfl.data.sources import csv_text
from jaxpfl.engine import Simulation, programs
from jaxpfl.engine.build import Assembled, build, cohorts_of, graph_of, put_together, work_of
from jaxpfl.engine.cohort import make_groups
from jaxpfl.engine.evaluate import HEADLINES, Headline, constant_scores
from jaxpfl.engine.execution_plan import resolve as resolve_plan
from jaxpfl.engine.execution_plan import tuning_of
from jaxpfl.engine.placement import agree_on
from jaxpfl.engine.spec import Settings, check_claim, check_federation, check_settings
from jaxpfl.engine.state import server_context
from jaxpfl.engine.tasks import task_of
from jaxpfl.models import Task
from jaxpfl.models.base import CLASSIFICATION, NEXT_TOKEN
from jaxpfl.privacy import Mechanism, PrivacyConfig, SiloMechanism, Statement
from jaxpfl.privacy.statement import GIVEN_START, SAME_USERS, SPENT_BEFORE, STOPPED
from jaxpfl.runs import data_sets
from jaxpfl.runs.config import ORDERS, TEST_USERS, RunConfig, spec_for, to_json
from jaxpfl.runs.data_sets import is_table, model_for, preset, source_of
from jaxpfl.similarity import graphs
from jaxpfl.similarity.graphs import Graph
from jaxpfl.support import files, processes
from jaxpfl.support.errors import JaxpflError, shown, warn

_NOT_PRIVATE = "of all training examples affect every client's inputs, and the privacy claim does not cover them"
NOISE_MULTIPLIER = "privacy.noise_multiplier"
"""Name of the noise multiplier among a private method's hyper-parameters."""
NOISE = 2
"""Version of the random streams of private runs' noise.

A run is resumed only with the version with which it was started, because its noise could otherwise repeat the noise of
another run."""


class Experiment(NamedTuple):
    """A resolved config with its data, model and methods.

    Attributes:
      config: resolved config.
      methods: names of the methods.
      runs: method -> its run, ready to be simulated.
      federation: clients that take part in training.
      task: model, loss and metrics.
      start: checksum of the initial parameters; None if the user gave none.
      unseen: clients that do not take part in training; None if there are none.
      graph: graph of the clients; None if no method needs it.
      scaling: scaling of all inputs; None if they are not standardized.
      class_names: names of the classes, as in `Source.class_names`.
      columns: table columns from which the features come, as in `Source.columns`, with the replacements for missing
        values.
      caveats: limitations of the experiment's privacy claims.
      constant: constant prediction and its scores, as `constant_scores` returns them.
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
    columns: data.TableColumns | None = None
    caveats: tuple[str, ...] = ()
    constant: tuple[Any, np.ndarray] | None = None

    @property
    def client_names(self) -> Names | None:
        """Names of the trained clients, as in `Federation.client_names`."""
        return self.federation.client_names

    @property
    def headline(self) -> Headline:
        """Main metric, by which reports compare methods and settings are selected."""
        name, task = self.task.headline, self.task
        return HEADLINES.get(name, Headline(name, task.lower, percent=False))

    def simulation(self, name: str) -> Simulation:
        """Return the simulation of one method."""
        return dataclasses.replace(self.runs[name], task=self.task).simulation()

    def described(self) -> Experiment:
        """Return the experiment without the examples; the clients and their numbers of examples are kept."""
        federation, unseen = _without_examples(self.federation), self.unseen and _without_examples(self.unseen)
        runs = {name: dataclasses.replace(run, federation=federation, unseen=unseen) for name, run in self.runs.items()}
        return self._replace(federation=federation, unseen=unseen, runs=runs)

    @property
    def tuning(self) -> str:
        """Value of ``plan.tuning`` after the automatic choice; ``auto`` if no choice is made, for example on a CPU."""
        plan, first = self.config.plan, next(iter(self.runs.values()))
        model_bytes = num_bytes(programs.shapes(self.task.init, jax.random.key(0)))
        found = tuning_of(plan, jax.default_backend(), model_bytes, first.client_steps)
        return plan.tuning if plan.tuning != "auto" or found is None else found[0]

    def with_tuning(self, tuning: str) -> Experiment:
        """Return the experiment with another value of ``plan.tuning``."""
        plan = dataclasses.replace(self.config.plan, tuning=tuning)
        runs = {
            name: dataclasses.replace(run, spec=dataclasses.replace(run.spec, plan=plan))
            for name, run in self.runs.items()
        }
        return self._replace(config=dataclasses.replace(self.config, plan=plan), runs=runs)

    def all_hyper(self, name: str) -> dict[str, float]:
        """Return the hyper-parameters of one method by name, with the noise multiplier if the method is private."""
        run = self.runs[name]
        hyper = {field: float(value) for field, value in vars(run.hp).items()}
        if run.mechanism is not None:  # recorded, because noise calibrated to epsilon depends on the rounds
            hyper[NOISE_MULTIPLIER] = float(np.asarray(run.mechanism.noise_multiplier))
        return hyper

    def fingerprint(self) -> dict[str, Any]:
        """Return the values, in addition to the config, that determine the results.

        These are all hyper-parameters, checksums of the data, the initial parameters and the graph, and the versions of
        the random streams.
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
    own: Mapping[str, Method] = MappingProxyType({}),
) -> Experiment:
    """Load and split the data, check every name and value, and prepare the methods. Nothing is written.

    Args:
      config: resolved config.
      methods: names of the methods.
      strict: whether warnings (for example about an unused flag) become errors.
      initial: parameters that ``config.warm_start`` names, by path, as `export.read_parameters` returns them.
      origin: origin of these parameters, as `export.parameters_origin` returns it.
      given: data set and federation, if `load_federation` has already been called.
      among: names of all methods that run with the config, if ``methods`` are only some of them. A setting counts as
        unused only if none of these methods uses it.
      own: the caller's own methods by name. They are used instead of registered methods of the same names.

    Raises:
      JaxpflError: if a name is unknown, a value is out of range, or a setting is incompatible with the data or a
        method.
    """
    if (config.warm_start is None) != (initial is None):
        raise ValueError("initial must be given if and only if config.warm_start is set")
    if len(set(methods)) != len(methods):
        raise JaxpflError(f"list each method once, got {', '.join(methods)}")
    # Checks that need no data come first. A model that depends on the data is filled in later.
    named = config if config.model is not None else dataclasses.replace(config, model=Settings.model)
    among = among or methods
    everyone = [spec_for(named, own.get(name, name), among) for name in among]
    check_settings(everyone, newcomers=config.unseen_clients != 0, strict=strict)
    specs = [spec for spec in everyone if spec.method.name in methods]
    if config.clients is not None:
        cohorts_of(specs[0], config.clients)
    source, federation = load_federation(config) if given is None else given
    federation, unseen, scaling, columns = clients_of(config, source, federation)
    if scaling is not None and config.privacy.on:
        cause = "standardize = True" if config.standardize else "a table's features are standardized"
        imputed = " and the values that replace missing ones" if columns is not None and columns.gaps else ""
        warn(f"{cause}: the means and deviations{imputed} {_NOT_PRIVATE}", strict=strict)
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
    drawn = cohorts_of(specs[0], federation.num_clients)  # checked again, because loading may have dropped clients
    check_claim(specs[0], federation, strict=strict)
    clients, capacity = federation.num_clients, drawn.capacity
    resolve_plan(config.plan, cohort=capacity, num_clients=clients, model_bytes=1)  # raises for unusable devices
    data.check_batch_size(federation, config.batch_size, strict)
    task = task_of(specs[0], federation, unseen)
    work = work_of(specs[0], federation, unseen)
    work.batches(work.steps)  # raises for an unknown order of the examples, and for more batches than int32 can count
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
    constant = constant_scores(federation, task.kind, task.headline)
    experiment = Experiment(
        config, methods, runs, federation, task, start, unseen, graph, scaling, names, columns, caveats, constant
    )
    if config.privacy.on or config.compress is not None:
        # Only tracing reveals what a method uploads, and thus whether its uploads can be private or compressed.
        for name in methods:
            experiment.simulation(name).bytes_per_client()
    return experiment


def _without_examples(federation: Federation) -> Federation:
    def emptied(split: ClientData) -> ClientData:
        examples = jax.tree.map(lambda a: np.empty((0, *a.shape[1:]), a.dtype), split.examples)
        return dataclasses.replace(split, examples=examples)

    train, validation, test = map(emptied, federation.all_splits)
    return federation._replace(train=train, validation=validation, test=test)


def check_agreed(experiment: Experiment) -> None:
    """Check that all processes of a run have the same settings, methods, data and versions.

    Raises:
      JaxpflError: if something differs; the message names the first difference.
    """
    config = to_json(experiment.config)
    config.pop("data_dir")  # hosts may store the data in different folders
    versions = {"jaxpfl": __version__, "jax": jax.__version__}
    processes.agree("the", config | {"methods": experiment.methods, **experiment.fingerprint(), **versions})
    for federation in (experiment.federation, experiment.unseen):
        if federation is not None:
            agree_on(federation, for_good=True)


def load_federation(
    config: RunConfig, source: Callable[[RunConfig], data.Source] = source_of
) -> tuple[data.Source, Federation]:
    """Load the data set of a config and split it among clients; the inputs are not standardized.

    The clients include the unseen clients, unless these are the users of the official test set.

    Args:
      config: resolved config.
      source: function that loads the data set; not called if the config names a saved federation.
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
) -> tuple[Federation, Federation | None, data.Scaling | None, data.TableColumns | None]:
    """Separate the unseen clients from the trained clients, and replace missing values of a table.

    The inputs are standardized if ``standardize`` is set or the data set is a table.

    Args:
      config: resolved config.
      source, federation: data set and its clients, as `load_federation` returns them.

    Returns:
      The trained clients, the unseen clients (None if there are none), the scaling of all inputs (None if they are
      not standardized), and the columns of the table with the replacements for missing values.
    """
    unseen, columns, scaling = None, source.columns, federation.preparation.scaling
    if config.unseen_clients == TEST_USERS:
        split = dataclasses.replace(part_of(Split, config), clients=None, standardize=False)
        unseen = data.federate_unseen(source, **vars(split))
    elif config.clients_apart:
        federation, unseen = data.set_apart(federation, config.clients_apart, config.split_seed)
    if scaling is not None:  # `federate` or `scaled` in Python has filled and scaled the inputs
        if config.standardize:
            raise JaxpflError(f"the inputs of {config.data} are already standardized: leave out standardize")
        return federation, unseen, scaling, columns
    if columns is not None:
        columns = data.fills_of(federation, columns)
        columns = columns if unseen is None else data.own_fills(unseen, columns)
        federation = data.filled(federation, columns)
        unseen = None if unseen is None else data.filled(unseen, columns)
    if config.standardize or is_table(config):
        data.check_standardizable(source)
        scaling = data.scaling_of(federation)  # unseen clients do not affect the scaling
        federation = data.scaled(federation, scaling)
        unseen = None if unseen is None else data.scaled(unseen, scaling)
    return federation, unseen, scaling, columns


def data_checksum(*federations: Federation | None) -> int:
    """Return the CRC-32 of the clients and their examples; padding does not affect it."""
    given = [one for one in federations if one is not None]
    return checksum([(one.client_ids, [(split.flat(), split.size) for split in one.all_splits]) for one in given])


def has_checksum(stored: int, *federations: Federation | None) -> bool:
    """Return whether a stored checksum is the checksum of these clients."""
    return stored == data_checksum(*federations)


GRAPH_HEADER = ("client", "neighbour")


def read_graph(path: Path, client_ids: np.ndarray) -> Graph:
    """Read a graph of clients; clients that the file does not name have no neighbors.

    Args:
      path: CSV file with the ids of two clients on each line.
      client_ids: ids of the m clients, in the federation's order.

    Raises:
      JaxpflError: if the file cannot be read, or a line does not consist of the ids of two different clients.
    """
    cells, _ = csv_text.rows(path)
    if cells.shape[1] > 1 and not any(cell.lstrip("-").isdecimal() for cell in cells.iloc[0]):
        cells = cells.iloc[1:]
    place = {str(client): row for row, client in enumerate(client_ids.tolist())}
    pairs = []
    for line, row in zip(cells.index, cells.to_numpy().tolist(), strict=True):
        if len(row) != 2 or row[0] == row[1] or not place.keys() >= set(row):
            raise JaxpflError(
                f"{path} line {line} must contain the ids of two different clients, got {shown(','.join(row))}"
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
    """Origin of initial parameters: the checksum of their training data, and whether training was private."""

    data: int
    private: bool


def caveat(origin: Origin | None, *federations: Federation | None) -> str:
    """Return the limitation of a run's privacy claim that is due to its initial parameters."""
    if origin is None or not has_checksum(origin.data, *federations):
        return GIVEN_START
    return SPENT_BEFORE if origin.private else SAME_USERS


class Protection(NamedTuple):
    """A privacy mechanism and its guarantee, which is None if nothing can be claimed (for example without noise)."""

    mechanism: Mechanism | SiloMechanism
    statement: Statement | None


def protection_of(run: Assembled, caveats: tuple[str, ...] = ()) -> Protection:
    """Return the mechanism and guarantee of a private method.

    The mechanism protects either the clients' uploads (user level) or the examples of each client (a silo).

    Args:
      run: run of a private method, with a single noise multiplier.
      caveats: limitations of the privacy claim.

    Raises:
      JaxpflError: if no accountant supports the run.
    """
    assert run.mechanism is not None
    released, asked = run.released(1), run.spec.privacy  # all seeds have the same privacy plan
    assert released is not None
    plan = released[0]
    if plan is None:
        return Protection(run.mechanism, None)
    assert isinstance(asked, PrivacyConfig)
    assert asked.delta is not None
    statement = plan.statement(asked.delta, asked.accountant)
    return Protection(run.mechanism, statement._replace(noise_seed=asked.noise_seed, caveats=caveats))


def require(value: Any) -> Any:
    """Return a config field after asserting that `resolve` has filled it in."""
    assert value is not None, "the config is not resolved"
    return value

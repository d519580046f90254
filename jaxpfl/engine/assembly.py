"""Assembly of a `Simulation` from a `RunSpec` and its data, shared by `fit` and every command."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np

from jaxpfl.algorithms import LocalWork
from jaxpfl.algorithms.parts import augmentation, schedules
from jaxpfl.algorithms.parts.hyper import rates, replace
from jaxpfl.algorithms.parts.server_optimizer import check_rate
from jaxpfl.core.participation import Participation, availability
from jaxpfl.core.types import Federation
from jaxpfl.data import single
from jaxpfl.data.stack import listed
from jaxpfl.engine import accounted, tasks
from jaxpfl.engine.assemble import build, draw_cohorts, layers_of, make_simulation, make_task, weighting_under
from jaxpfl.engine.client_graph import NEIGHBOURS, graph_for
from jaxpfl.engine.guarded import mechanism_for
from jaxpfl.engine.simulation import Simulation
from jaxpfl.engine.spec import RunSpec
from jaxpfl.engine.stopping import check_patience
from jaxpfl.engine.unused import unused
from jaxpfl.models import Task
from jaxpfl.models.base import NEXT_TOKEN, in_bfloat16, start_from
from jaxpfl.models.modules import Given
from jaxpfl.privacy import Mechanism, PrivacyConfig, PrivacyPlan, SiloMechanism
from jaxpfl.privacy.claim import check_delta, planned
from jaxpfl.similarity.graphs import Graph
from jaxpfl.support.errors import JaxpflError, shown, warn
from jaxpfl.uploads import compression, robust


@dataclasses.dataclass(frozen=True, eq=False)
class Assembled:
    """A run with its data: all inputs of its simulation.

    Attributes:
      spec: the description of the run.
      task: model, loss and metrics.
      federation: the clients that are trained.
      unseen: the clients that arrive at the end, if any.
      hp: the method's hyper-parameters; leaves [] or [S].
      cohorts: the draw of the cohorts.
      mechanism: clipping and noise, calibrated; None where nothing is private, or users are and nothing is uploaded.
      work: the local work, with the mechanism of uploads and the graph of the clients.
      attackers: the clients that attack, [m] bool; None where nobody does. Under an attack on labels the federation
        has theirs.
    """

    spec: RunSpec
    task: Task
    federation: Federation
    unseen: Federation | None
    hp: Any
    cohorts: Participation
    mechanism: Mechanism | SiloMechanism | None
    work: LocalWork
    attackers: np.ndarray | None = None

    def simulation(self) -> Simulation:
        """The compiled programs.

        Raises:
          JaxpflError: if the method refuses the run.
        """
        spec = self.spec
        attack = spec.adversary.attack
        simulation = make_simulation(
            spec.method,
            self.task,
            self.work,
            self.federation,
            self.cohorts,
            self.hp,
            options=dict(spec.options),
            compressor=None if spec.coding.compress is None else compression.resolve(spec.coding.compress),
            aggregator=robust.resolve(spec.aggregation.aggregate),
            attack=None if attack is None else robust.attack_of(attack),
            attackers=self.attackers,
            availability=availability(**vars(spec.availability)),
            plan=spec.plan,
            unseen=self.unseen,
            adapt_rounds=spec.newcomers.adapt_rounds,
            runs=len(spec.seeds),
            silos=self.mechanism if isinstance(self.mechanism, SiloMechanism) else None,
        )
        simulation.attackers = self.attackers
        return simulation

    def released(self, runs: int) -> tuple[PrivacyPlan | SiloMechanism | None, ...] | None:
        """Privacy plans of so many runs, [S] (None for one without noise); None where nothing is private.

        Raises:
          JaxpflError: for a run that cannot be accounted, and mechanism settings that are not one for each run.
        """
        spec = self.spec
        if self.mechanism is None:
            return None
        if isinstance(self.mechanism, SiloMechanism):
            return (self.mechanism if self.mechanism.noise_multiplier else None,) * runs
        told = (spec.method, self.hp, dict(spec.options), self.mechanism, self.cohorts, self.work)
        compressed = spec.coding.compress is not None
        return accounted.plans(*told, rounds=spec.training.rounds, runs=runs, compressed=compressed)


def simulation_of(spec: RunSpec, federation: Federation, unseen: Federation | None = None) -> Simulation:
    """The compiled programs of a run.

    Raises:
      JaxpflError: as `assemble`.
    """
    return assemble(spec, federation, unseen).simulation()


def assemble(
    spec: RunSpec, federation: Federation, unseen: Federation | None = None, *, strict: bool = False
) -> Assembled:
    """A run with its data, everything checked.

    Args:
      spec: the run.
      federation: the clients that are trained.
      unseen: clients that are never trained, if any.
      strict: turn warnings into errors.

    Raises:
      JaxpflError: for settings that the data do not allow, and unknown names.
    """
    check_settings([spec], newcomers=unseen is not None, strict=strict)
    federation = single(federation, strict)
    unseen = None if unseen is None else single(unseen, strict)
    check_federation(federation, unseen, spec.training.task, strict=strict)
    task = task_of(spec, federation, unseen)
    graph = graph_of(spec, federation, task)
    return put_together(spec, federation, unseen, task, graph)


def check_settings(specs: list[RunSpec], *, newcomers: bool, strict: bool = False) -> None:
    """Warn of settings that change nothing, unusual rates and asynchronous rounds of all; ``strict`` refuses them.

    Args:
      specs: of the methods that run with the same settings.
      newcomers: whether there are unseen clients.
      strict: turn warnings into errors.

    Raises:
      JaxpflError: for hyper-parameters outside their range, and unknown names.
    """
    server_rates = [np.max(getattr(hyper_of(spec), "server_lr", 0.0)) for spec in specs]
    check_rate(specs[0].aggregation.server_optimizer, max(server_rates), strict=strict)
    for spec in specs:
        if spec.method.asynchronous and spec.cohorts.cohort is None:
            warn(
                f"{spec.method.name}: rounds of all clients wait for all, as synchronous ones do: give a cohort",
                strict=strict,
            )
        names, own = rates(spec.method.hyper), spec.hyper
        others = [name for name in names if name not in own]
        if spec.work.lr is None and np.ndim(own.get("lr", 0)) and others:
            at = ", ".join(f"{name} = {np.asarray(getattr(spec.method.hyper, name)):g}" for name in others)
            warn(
                f"hyper sweeps lr alone, and {spec.method.name} has other rates, which stay at {at}: fit(lr=) moves "
                "them all",
                strict=strict,
            )
        _check_seeds(spec, strict=strict)
    if idle := unused(specs, newcomers=newcomers):
        warn("; ".join(idle), strict=strict)


def _check_seeds(spec: RunSpec, *, strict: bool) -> None:
    """Warn of runs that differ in their seeds and in a value at once; ``strict`` refuses them."""
    found = vars(hyper_of(spec)) | vars(spec.availability) | (vars(spec.privacy) if spec.privacy else {})
    lists = {name: np.asarray(value).tolist() for name, value in found.items() if np.ndim(value) == 1}
    swept = {name: values for name, values in lists.items() if len(values) == len(spec.seeds) and len(set(values)) > 1}
    seeds: dict[tuple[float, ...], list[int]] = {}
    for run, seed in zip(zip(*swept.values(), strict=True), spec.seeds, strict=False):
        seeds.setdefault(run, []).append(seed)
    if len({tuple(sorted(own)) for own in seeds.values()}) > 1:
        name, values = next(iter(swept.items()))
        warn(
            f"{name} = {shown(values)} differs between runs whose seeds {shown(list(spec.seeds))} differ too, which "
            f"mixes the two effects: give every value the same seeds, such as seeds={[spec.seeds[0]] * len(values)}",
            strict=strict,
        )


def check_federation(
    federation: Federation, unseen: Federation | None, task: str | Task | None, *, strict: bool = False
) -> None:
    """Warn of data that cannot be scored, or are doubtful; ``strict`` refuses them.

    Raises:
      JaxpflError: for unseen clients whose inputs are not like those of the trained ones.
    """
    if unseen is not None and federation.input_shape != unseen.input_shape:
        here, there = federation.input_shape, unseen.input_shape
        raise JaxpflError(f"unseen clients' inputs must be of shape {here}, as the federation's, got {there}")
    untested = np.asarray(federation.test.size) == 0
    if unseen is not None and untested.all() and np.asarray(unseen.test.size).any():
        warn("no trained client has test examples: unseen clients alone are scored", strict=strict)
    elif untested.all():
        warn("no client has test examples: every score will be NaN", strict=strict)
    elif untested.any():
        ids = listed(np.asarray(federation.client_ids)[untested])
        warn(
            f"{untested.sum()} of {len(untested)} clients have no test examples (client {ids}): scores are of the "
            "other clients",
            strict=strict,
        )


def check_claim(spec: RunSpec, federation: Federation, *, strict: bool = False) -> None:
    """Warn of a meaningless claim: publishing all data of one random client has a delta of 1 / clients, and publishing
    one random example of a silo one of 1 / examples."""
    delta = spec.privacy.delta if isinstance(spec.privacy, PrivacyConfig) else None
    if spec.guards_examples:
        largest = int(np.max(np.asarray(federation.train.size), initial=1))
        if delta is not None and 1 / largest <= delta < 1:
            warn(
                f"privacy.delta = {delta:g} is not below 1 / examples = {1 / largest:g} of the largest client: such a "
                "claim holds even where an example of each, drawn at random, is published",
                strict=strict,
            )
        return
    if delta is not None:
        check_delta(delta, federation.num_clients, name="privacy.delta", strict=strict)


def task_of(spec: RunSpec, federation: Federation, unseen: Federation | None = None) -> Task:
    """The model with loss and metrics, starting from given parameters if any.

    Raises:
      JaxpflError: for labels beyond the classes or not those of the task, a loss that is not the task's, a model that
        cannot read such inputs, and parameters that do not fit.
    """
    kind = tasks.kind_of(spec, federation)
    given, outputs = spec.training.task, tasks.outputs_of(kind, spec, federation, unseen)
    model = given.model if isinstance(given, Task) else spec.training.model
    task = make_task(model, federation, outputs, unseen=unseen, every=kind == NEXT_TOKEN)
    if isinstance(given, Task):
        if given.input_shape != task.input_shape:
            raise JaxpflError(f"the task is for inputs {given.input_shape}, the data have {task.input_shape}")
        task = given._replace(model=task.model, input_dtype=task.input_dtype)
    if not isinstance(model, str):
        tasks.check_outputs(task, kind, outputs, federation.train.examples.y)
    task = tasks.on_model(kind, spec, task)
    if not isinstance(model, str) and spec.plan.convolutions != "plain":
        slow = [f"{layer.name} ({layer.what}): {layer.why_not}" for layer in layers_of(task) if layer.why_not]
        if slow:
            warn(f"slow layers of the model, run as they are instead of as products: {'; '.join(slow)}")
    if spec.plan.precision == "bfloat16":
        task = in_bfloat16(task)
    init = task.model.init
    if isinstance(init, Given) and len(set(spec.seeds)) > 1 and spec.warm_start is None:
        warn(
            f"every seed starts from the parameters of the given {init.name}: a function that makes such a module, in "
            "from_nnx or from_equinox, draws them for each seed"
        )
    return task if spec.warm_start is None else start_from(task, spec.warm_start)


def work_of(spec: RunSpec, federation: Federation, unseen: Federation | None = None) -> LocalWork:
    """The local work of all clients, without mechanism and graph."""
    sizes = [np.asarray(part.train.size) for part in (federation, unseen) if part is not None]
    work = LocalWork(
        np.concatenate(sizes),
        spec.work.local_steps,
        spec.work.batch_size,
        spec.work.draw,
        optimizer=spec.work.client_optimizer,
        server_optimizer=spec.aggregation.server_optimizer,
        weighting=weighting_under(spec.is_private, spec.aggregation.weighting, alike=is_robust(spec)),
        unseen=0 if unseen is None else unseen.num_clients,
        schedule=schedules.of(spec.work.lr_schedule, spec.training.rounds),
        clip=spec.work.clip_gradients,
        keeps_optimizer=spec.work.keep_optimizer,
        augment=None if spec.work.augment is None else augmentation.parse(spec.work.augment),
    )
    return work if spec.work.local_epochs is None else work.in_epochs(spec.work.local_epochs)


def is_robust(spec: RunSpec) -> bool:
    """True if uploads are aggregated by anything but the mean."""
    return robust.resolve(spec.aggregation.aggregate).rule is not None


def with_attackers(spec: RunSpec, federation: Federation, task: Task) -> tuple[np.ndarray | None, Federation]:
    """The clients that attack, [m] bool, and the data that all train on; None, and the same data, without an attack.

    Raises:
      JaxpflError: for a share of the clients that is nobody or everybody, and flipped labels that are not classes.
    """
    adversary = spec.adversary
    if adversary.attack is None:
        return None, federation
    chosen = robust.drawn(np.asarray(federation.client_ids), adversary.attackers, adversary.attack_seed)
    if robust.attack_of(adversary.attack).change is not None:
        return chosen, federation
    if not (task.has_classes or task.kind in _OF_TWO):
        raise JaxpflError(f"attack = {adversary.attack} flips labels that are classes: the task is {task.kind!r}")
    return chosen, robust.poisoned(federation, chosen, task.num_classes if task.has_classes else 2)


_OF_TWO = ("binary", "multilabel", "ranking")
"""Tasks whose labels are zeros and ones."""


def graph_of(spec: RunSpec, federation: Federation, task: Task, *, named: str | None = None) -> Graph | None:
    """Graph of the clients that the method needs; None if it needs none.

    Args:
      spec: the run.
      federation: the clients that are trained.
      task: as `task_of`.
      named: the name of a given graph in messages, such as that of its file.

    Raises:
      JaxpflError: for a graph without edges, and as `graph_for`.
    """
    given, near = spec.neighbourhood.graph, spec.neighbourhood.neighbours or NEIGHBOURS
    graph = graph_for(spec.method, given, federation, task, work_of(spec, federation), neighbours=near)
    if graph is not None and not graph.edges:  # its states have no rows, which no checkpoint holds
        space = given if isinstance(given, str) else "given" if given is not None else "data"
        raise JaxpflError(f"graph = {named or space} has no edges: {spec.method.name} needs neighbours")
    return graph


def cohorts_of(spec: RunSpec, num_clients: int) -> Participation:
    """The draw of the cohorts.

    Raises:
      JaxpflError: as `draw_cohorts`.
    """
    cohorts, rdp = spec.cohorts, isinstance(spec.privacy, PrivacyConfig) and spec.privacy.accountant == "rdp"
    draw = cohorts.cohort, cohorts.participation, cohorts.cohort_cap, cohorts.cycle
    banded = spec.is_private and getattr(spec.privacy, "noise", None) == "banded"
    return draw_cohorts(num_clients, *draw, private=spec.is_private, cuts=not rdp, turns=banded)


def hyper_of(spec: RunSpec) -> Any:
    """The method's hyper-parameters: its defaults, then the rates, then those given by name; checked.

    Raises:
      JaxpflError: for a name that the method does not have, and a value outside its range.
    """
    method, lr, server_lr = spec.method, spec.work.lr, spec.aggregation.server_lr
    given = {} if lr is None else dict.fromkeys(rates(method.hyper), lr)
    if server_lr is not None and hasattr(method.hyper, "server_lr"):
        given["server_lr"] = server_lr
    return replace(method.name, method.hyper, given | dict(spec.hyper))


def put_together(
    spec: RunSpec, federation: Federation, unseen: Federation | None, task: Task, graph: Graph | None
) -> Assembled:
    """A run whose shared parts (task and graph) are given.

    Args:
      spec: the run.
      federation: the clients that are trained.
      unseen: clients that are never trained, if any.
      task: as `task_of`.
      graph: as `graph_of`.

    Raises:
      JaxpflError: as `assemble`.
    """
    check_patience(spec, federation, task.kind)
    hp, cohorts = hyper_of(spec), cohorts_of(spec, federation.num_clients)
    attackers, federation = with_attackers(spec, federation, task)
    if spec.method.uploads and not spec.method.pooled:
        robust.resolve(spec.aggregation.aggregate).check(math.floor(cohorts.expected_cohort))
    mechanism = spec.privacy if spec.method.uploads else None
    work = dataclasses.replace(work_of(spec, federation, unseen), graph=graph if spec.method.graph else None)
    if work.augment is not None:
        augmentation.check(work.augment, task)
    if spec.guards_examples:
        if task.statistics is not None:
            raise JaxpflError(
                "privacy.unit = example clips the gradient of each example, and batch normalisation mixes those of a "
                "batch: use GroupNorm"
            )
        if unseen is not None:
            raise JaxpflError(
                "unseen clients train on their own examples in rounds that no claim counts: leave them out with "
                "privacy.unit = example"
            )
        told = (lambda: build(spec.method, task, work, dict(spec.options)), hp, federation, cohorts)
        silos = mechanism_for(spec, work.sizes, *told)
        return Assembled(spec, task, federation, unseen, hp, cohorts, silos, work, attackers)
    if isinstance(mechanism, PrivacyConfig):
        steps, optimizer = work.steps, spec.work.client_optimizer
        told = accounted.of_round(spec.method, hp, dict(spec.options), steps=steps, optimizer=optimizer)
        told |= {"rounds": spec.training.rounds, "compressed": spec.coding.compress is not None}
        mechanism = mechanism.mechanism(cohorts, told)
    if mechanism is not None:
        if np.any(mechanism.noise_multiplier):
            _check_rates(spec, hp, work)
        mechanism = planned(mechanism, spec.training.rounds, cohorts.cycle)
    work = dataclasses.replace(work, privacy=mechanism)
    return Assembled(spec, task, federation, unseen, hp, cohorts, mechanism, work, attackers)


def _check_rates(spec: RunSpec, hp: Any, work: LocalWork) -> None:
    """Refuse private work in epochs at rates that depend on the size of the largest client, in every client's upload.

    Raises:
      JaxpflError: with the remedy.
    """
    names = ["anneal"] if work.schedule is not None else ["lr_decay", "anneal"]
    falling = [name for name in names if np.any(np.asarray(getattr(hp, name, 1.0)) != 1)]
    if work.epochs is not None and falling:
        others = "lr_schedule or local_steps" if falling[0] == "lr_decay" else "local_steps"
        raise JaxpflError(
            f"local_epochs = {work.epochs}: {spec.method.name}.{falling[0]} counts the steps of the client with the "
            f"most examples, which every upload would show: with privacy give {falling[0]} = 1, {others}"
        )

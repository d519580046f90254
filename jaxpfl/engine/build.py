"""Construction of simulations for `fit` and all commands, with checks of a run's settings against its data."""

from __future__ import annotations

import dataclasses
import inspect
import math
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from jaxpfl import algorithms
from jaxpfl.algorithms import LocalWork, Method
from jaxpfl.algorithms.parts import augmentation, optimizers, schedules
from jaxpfl.algorithms.parts.augmentation import mixed_label_task
from jaxpfl.core import exclusions
from jaxpfl.core import participation as participations
from jaxpfl.core.participation import RELIABLE, Availability, Participation
from jaxpfl.core.protocol import Algorithm, Reduction
from jaxpfl.core.settings import NUMBER, SWITCH, WHOLE, Kind, check_kind, instance_of
from jaxpfl.core.types import ClientData, Examples, Federation, Splits
from jaxpfl.data import single
from jaxpfl.engine import noise_keys
from jaxpfl.engine.client_graph import NEIGHBOURS, client_graph
from jaxpfl.engine.evaluate import example_weights
from jaxpfl.engine.guarded import mechanism_for
from jaxpfl.engine.simulation import Simulation
from jaxpfl.engine.spec import RunSpec, check_federation, check_settings
from jaxpfl.engine.state import check_values
from jaxpfl.engine.streamed.simulation import StreamedSimulation
from jaxpfl.engine.tasks import ZERO_OR_ONE, has_pairs, task_of
from jaxpfl.models import Task
from jaxpfl.models.base import NEXT_TOKEN
from jaxpfl.privacy import (
    Mechanism,
    PrivacyConfig,
    PrivacyPlan,
    SiloMechanism,
    plan_of,
    poisson_cap,
    privatize,
)
from jaxpfl.privacy.claim import planned
from jaxpfl.privacy.guarded import guard_examples
from jaxpfl.similarity.graphs import Graph
from jaxpfl.support import processes
from jaxpfl.support.errors import JaxpflError, OutOfMemoryError, unknown_name
from jaxpfl.uploads import compression, robust


def simulation_of(spec: RunSpec, federation: Federation, unseen: Federation | None = None) -> Simulation:
    """Build the simulation of a run.

    Args:
      spec: settings of the run.
      federation: clients that are trained.
      unseen: clients that are never trained, if any.

    Raises:
      JaxpflError: as in `assemble` and `Assembled.simulation`.
    """
    return assemble(spec, federation, unseen).simulation()


def assemble(spec: RunSpec, federation: Federation, unseen: Federation | None = None) -> Assembled:
    """Check a run's settings against its data, and collect the inputs of its simulation.

    Args:
      spec: settings of the run.
      federation: clients that are trained.
      unseen: clients that are never trained, if any.

    Raises:
      JaxpflError: if a setting is incompatible with the data, or if a name is unknown.
    """
    check_settings([spec], newcomers=unseen is not None)
    federation = single(federation)
    unseen = None if unseen is None else single(unseen)
    check_federation(federation, unseen, spec.task)
    task = task_of(spec, federation, unseen)
    graph = graph_of(spec, federation, task) if spec.method.graph else None
    return put_together(spec, federation, unseen, task, graph)


def assemble_shapes(
    spec: RunSpec, example: Examples, num_clients: int, sizes: tuple[int, int] = (1, 1), steps: int | None = None
) -> Assembled:
    """Collect the inputs of a run without its data, for a party that cannot see the clients' examples.

    `Assembled.algorithm` then returns the same algorithm as in a simulation, including the schedule, the privacy
    mechanism and the compressor.

    Args:
      spec: settings of the run; ``num_classes`` is required for classification.
      example: shapes of one example's input and label (`jax.ShapeDtypeStruct`).
      num_clients: number m of clients.
      sizes: numbers of training and validation examples of a client; the server's functions do not depend on them.
      steps: largest number of local steps of any client; by default, the number of steps of a client with ``sizes``
        examples.

    Raises:
      JaxpflError: as in `assemble`.
    """

    def stand_in(size: int) -> ClientData:
        x = np.broadcast_to(np.zeros((), example.x.dtype), (size, *example.x.shape))
        label = (np.arange(size) % 2).astype(example.y.dtype)  # labels 0 and 1, for a defined AUC
        y = np.broadcast_to(label.reshape(-1, *[1] * len(example.y.shape)), (size, *example.y.shape))
        one = ClientData.stacked(Examples(x, y), [size])
        return one.rows(np.zeros(num_clients, int))

    train, validation = map(stand_in, sizes)
    federation = Federation(np.arange(num_clients, dtype=np.int32), train, validation, stand_in(2))
    return put_together(spec, federation, None, task_of(spec, federation), None, steps)


def put_together(
    spec: RunSpec,
    federation: Federation,
    unseen: Federation | None,
    task: Task,
    graph: Graph | None,
    steps: int | None = None,
) -> Assembled:
    """Collect the inputs of a run's simulation, given a task and a graph that several runs can share.

    Args:
      spec: settings of the run.
      federation: clients that are trained.
      unseen: clients that are never trained, if any.
      task: result of `task_of`.
      graph: result of `graph_of`.
      steps: number of local steps of the client with the most examples; by default, computed from the federation.

    Raises:
      JaxpflError: if a setting is incompatible with the data, or if a name is unknown.
    """
    if spec.patience is not None:
        _check_patience(spec.patience, federation, task.kind)
    if not spec.guards_examples:  # only this unit of privacy uses persons
        federation = federation._replace(train=federation.train.without_persons())
        unseen = unseen and unseen._replace(train=unseen.train.without_persons())
    hp, cohorts = spec.hp, cohorts_of(spec, federation.num_clients)
    attackers = None
    if spec.attack is not None:
        attackers, federation = draw_attackers(spec, spec.attack, federation, task)
    if spec.is_robust and spec.method.uploads and not spec.method.pooled:
        robust.resolve(spec.aggregate).check(math.floor(cohorts.expected_cohort))
    mechanism = spec.privacy if spec.method.uploads else None
    work = dataclasses.replace(work_of(spec, federation, unseen), graph=graph if spec.method.graph else None)
    if steps is not None:
        work = dataclasses.replace(work, steps=steps)
    if work.augment is not None:
        augmentation.check(work.augment, task)
    if spec.guards_examples:
        if task.statistics is not None:
            raise JaxpflError(
                "privacy.unit = example does not support batch normalization, which mixes the examples of a batch: use "
                "GroupNorm"
            )
        if unseen is not None:
            raise JaxpflError(
                "privacy.unit = example does not support unseen clients: no privacy claim covers their adaptation"
            )
        told = (lambda: build(spec.method, task, work, spec.options), hp, federation, cohorts)
        silos = mechanism_for(spec, work.sizes, *told)
        return Assembled(spec, task, federation, unseen, hp, cohorts, silos, work, attackers, spec.availability)
    if isinstance(mechanism, PrivacyConfig):
        mechanism = mechanism.mechanism(cohorts, releases_of(spec, hp, work.steps))
    if mechanism is not None:
        if np.any(mechanism.noise_multiplier):
            _check_rates(spec, hp, work)
        mechanism = planned(mechanism, spec.rounds, cohorts.cycle)
    work = dataclasses.replace(work, privacy=mechanism)
    return Assembled(spec, task, federation, unseen, hp, cohorts, mechanism, work, attackers, spec.availability)


def _check_patience(patience: int, federation: Federation, kind: str) -> None:
    """Check that the validation examples define a score, which early stopping needs.

    Args:
      patience: number of evaluations without a better score after which the run stops.
      federation: clients of the run.
      kind: name of the run's task.

    Raises:
      JaxpflError: if no client has validation examples with a score; the message gives the remedy.
    """
    if not np.asarray(federation.validation.size).any():
        raise JaxpflError(
            f"patience = {patience} requires validation examples, but no client has any: set validation_share"
        )
    if kind == "ranking" and not has_pairs(federation.validation):
        raise JaxpflError(
            f"patience = {patience} requires a validation AUC, but no client has validation examples of both classes: "
            "increase validation_share"
        )
    if kind == NEXT_TOKEN and not example_weights(federation.validation, kind).any():
        raise JaxpflError(f"patience = {patience} requires validation labels, but all of them are -1 (no label)")


def _check_rates(spec: RunSpec, hp: Any, work: LocalWork) -> None:
    """Check that the learning rates of a private run do not depend on the size of the largest client.

    With local epochs, a rate that decays over the run depends on the number of steps that the client with the most
    examples takes. Every upload would then reveal this client's number of examples.

    Raises:
      JaxpflError: if a private run with ``local_epochs`` has a decaying rate; the message gives the remedy.
    """
    names = ["anneal"] if work.schedule is not None else ["lr_decay", "anneal"]
    falling = [name for name in names if np.any(np.asarray(getattr(hp, name, 1.0)) != 1)]
    if work.epochs is not None and falling:
        others = "lr_schedule or local_steps" if falling[0] == "lr_decay" else "local_steps"
        raise JaxpflError(
            f"with local_epochs = {work.epochs}, {spec.method.name}.{falling[0]} depends on the size of the largest "
            f"client, so private uploads would reveal this size: set {falling[0]} = 1, or use {others}"
        )


@dataclasses.dataclass(frozen=True, eq=False)
class Assembled:
    """All inputs of a run's simulation.

    Attributes:
      spec: settings of the run.
      task: model, loss and metrics.
      federation: clients that are trained. If the attack flips labels, the attackers' labels are already flipped.
      unseen: clients that are never trained, if any.
      hp: hyper-parameters of the method, leaves [] or [S].
      cohorts: sampling of the cohorts.
      mechanism: calibrated clipping and noise; None if the run is not private, or if users are protected and nothing is
        uploaded.
      work: local work, including the mechanism of the uploads and the graph of the clients.
      attackers: whether each client attacks, [m] bool; None without an attack.
      availability: dropout, stragglers and the time model.
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
    availability: Availability = RELIABLE

    @property
    def client_steps(self) -> float:
        """Predicted number of local steps of all clients in all rounds and runs."""
        runs = max(len(self.spec.seeds), *(np.size(value) for value in jax.tree.leaves(self.hp)), 1)
        cohort = 1 if self.spec.method.pooled else self.cohorts.expected_cohort
        return self.spec.rounds * runs * cohort * self.work.steps

    def simulation(self) -> Simulation:
        """Build the simulation.

        If the clients' data and states do not fit on the devices, they are stored on the host or on disk, unless the
        plan fixes their storage.

        Raises:
          JaxpflError: if the method does not support the run, or if no allowed storage has enough room.
        """
        algorithm, values = self.algorithm()
        plan, cpu, several = self.spec.plan, jax.default_backend() == "cpu", processes.several()
        of_run = (algorithm, self.task, self.federation, self.cohorts, values)
        more: dict[str, Any] = {
            "availability": self.availability,
            "unseen": self.unseen,
            "adapt_rounds": self.spec.adapt_rounds,
            "client_steps": self.client_steps,
        }
        # A pooled method has one client, which trains on the devices.
        home = "device" if algorithm.pooled else plan.clients_in
        if home in ("host", "disk") and several:
            raise JaxpflError(
                f"plan.clients_in = {home} supports one process only: with several, use plan.clients_in = device "
                "or auto"
            )
        if home != "auto":
            homes = (home,)
        else:  # CPU devices use the host's memory, so only the disk can have more room
            homes = ("device",) if several else ("device", "disk") if cpu else ("device", "host", "disk")
        refusals: list[JaxpflError] = []
        for where in homes:
            try:
                if where == "device":
                    simulation = Simulation(*of_run, **more, plan=plan)
                else:  # streaming supports one accelerator only
                    one = plan if cpu or home != "auto" else dataclasses.replace(plan, devices=1)
                    simulation = StreamedSimulation(*of_run, **more, plan=one, where=where)
                if home == "auto":
                    simulation.check_room(len(self.spec.seeds))
                simulation.attackers = self.attackers
                return simulation
            except JaxpflError as error:
                if where == "device" and not isinstance(error, OutOfMemoryError):
                    raise
                refusals.append(error)
        raise refusals[0]

    def algorithm(self) -> tuple[Algorithm, Any]:
        """Build the method's algorithm; return it with the hyper-parameters that its functions take.

        The algorithm is wrapped in the run's schedule, privacy mechanism, attack, robust aggregation and compressor, if
        the run has them.

        Raises:
          JaxpflError: if the method does not support the run.
        """
        spec, method = self.spec, self.spec.method
        work = self.work
        privacy, schedule = work.privacy, work.schedule
        work = dataclasses.replace(work, schedule=None)
        if _is_registered(method) and method.releases is None and work.step_noise is None:
            # `privatize` adds the mechanism below. If the method's functions captured the mechanism, each noise
            # multiplier would need its own program.
            work = dataclasses.replace(work, privacy=None)
        compressor = None if spec.compress is None else compression.resolve(spec.compress)
        attack = None if spec.attack is None or self.attackers is None else robust.attack_of(spec.attack)
        lies = attack is not None and attack.change is not None

        algorithm, values = build(method, self.task, work, spec.options), self.hp
        if work.keeps_optimizer:
            algorithm = optimizers.keeping(algorithm, self._one_client())
        if schedule is not None:
            algorithm, values = schedules.scheduled(algorithm, values, schedule)
        if isinstance(self.mechanism, SiloMechanism):
            algorithm = guard_examples(algorithm, method.name, self.mechanism)
        given = {
            "pooled data": algorithm.pooled and method.name,
            "privacy": privacy is not None,
            "compress": compressor is not None,
            "aggregate": spec.is_robust and spec.aggregate,
            "attack": lies and spec.attack,
        }
        exclusions.check(given)
        if privacy is not None and method.uploads:
            _check_private(method, algorithm, self.task, work, privacy)
            if method.releases is None:
                algorithm, values = privatize(algorithm, values, privacy, self._one_client())
        if lies and attack is not None and method.uploads:
            algorithm = robust.attacked(algorithm, attack, np.asarray(self.federation.client_ids)[self.attackers])
        if spec.is_robust and method.uploads:
            algorithm = robust.robust(algorithm, robust.resolve(spec.aggregate), method.name)
        if compressor is not None and method.uploads:
            exclusions.check({"privacy": privacy is not None, "feedback": compressor.feedback})
            feedback = None if privacy is None else False
            algorithm = compression.compressed(algorithm, compressor, self._one_client(), feedback=feedback)
        if algorithm.noise is not None:
            algorithm = noise_keys.add_method(algorithm, method, dict(spec.options), work, compressor)
        return algorithm, values

    def _one_client(self) -> Splits:
        """Shapes of one client's data, as its functions receive them.

        They are computed without tracing, because tracing would slow down every fit.
        """
        number = jax.ShapeDtypeStruct((), np.int32)

        def view(split: ClientData) -> ClientData:
            examples = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), split.examples)
            return dataclasses.replace(split, examples=examples, start=number, size=number)

        return Splits(*map(view, self.federation.splits))

    def released(self, runs: int) -> tuple[PrivacyPlan | SiloMechanism | None, ...] | None:
        """Privacy plan of each run, [S], or the run's mechanism if examples are protected.

        The entry of a run without noise is None. The result is None if the runs are not private.

        Raises:
          JaxpflError: if no accountant covers a run, or if a setting of the mechanism is a list whose length is not the
            number of runs.
        """
        mechanism = self.mechanism
        if mechanism is None:
            return None
        if isinstance(mechanism, SiloMechanism):
            return (mechanism if mechanism.noise_multiplier else None,) * runs
        round = releases_of(self.spec, self.hp, self.work.steps)

        def each(name: str) -> list[float]:
            values = getattr(mechanism, name)
            check_values(name, values, runs)
            return np.broadcast_to(np.asarray(values, float), runs).tolist()

        def plan(z: float, clip: float) -> PrivacyPlan | None:
            one = dataclasses.replace(mechanism, noise_multiplier=z, clipping_norm=clip)
            return None if z == 0 else plan_of(one, self.cohorts, **round)

        return tuple(map(plan, each("noise_multiplier"), each("clipping_norm")))


def _is_registered(method: Method) -> bool:
    """True if the method is in jaxpfl's own registry; only then is it known how its upload is computed."""
    return method is algorithms.METHODS.get(method.name)


def _check_private(method: Method, algorithm: Algorithm, task: Task, work: LocalWork, privacy: Mechanism) -> None:
    """Check that the privacy mechanism covers the method's uploads.

    Raises:
      JaxpflError: if the mechanism does not cover the uploads.
    """
    able = ", ".join(name for name, other in algorithms.METHODS.items() if other.step_noise)
    exclusions.check(
        {
            "privacy": True,
            "noise": privacy.noise,
            "steps without noise": not method.step_noise and f"{method.name}; methods that can: {able}",
            "running statistics": task.statistics is not None and not method.keeps_statistics and method.name,
        }
    )
    if privacy.step_noise is not None and algorithm.local_steps != work.steps:
        raise JaxpflError(
            f"{method.name}: Algorithm.local_steps is {algorithm.local_steps}, but noise in every step is "
            f"accounted for with local_steps = {work.steps}: build the algorithm with work.steps"
        )


def releases_of(spec: RunSpec, hp: Any, steps: int) -> dict[str, Any]:
    """Description of the noisy sums in one round, as arguments of privacy functions.

    `plan_of` and `PrivacyConfig.mechanism` take these arguments.

    Args:
      spec: settings of a run whose method uploads.
      hp: hyper-parameters of the method.
      steps: number tau of local steps.
    """
    method = spec.method
    # A step w - lr (gradient + (decay + prox) w) must not amplify noise of earlier steps: |1 - lr (decay + prox)| <= 1.
    pull = getattr(hp, "weight_decay", 0.0) + getattr(hp, "prox", 0.0)
    stretches = np.any(getattr(hp, "lr", 0.0) * pull > 2)
    return {
        "steps": steps,
        "scales": method.scales,
        "releases": 1 if method.releases is None else method.releases({**method.options, **spec.options}),
        "linear": _is_registered(method) and spec.client_optimizer == "sgd" and not stretches,
        "rounds": spec.rounds,
        "compressed": spec.compress is not None,
    }


def work_of(spec: RunSpec, federation: Federation, unseen: Federation | None = None) -> LocalWork:
    """Local work of all clients, without a privacy mechanism and without a graph."""
    sizes = [np.asarray(part.train.size) for part in (federation, unseen) if part is not None]
    work = LocalWork(
        np.concatenate(sizes),
        spec.local_steps,
        spec.batch_size,
        spec.draw,
        optimizer=spec.client_optimizer,
        server_optimizer=spec.server_optimizer,
        weighting=spec.weighting or ("uniform" if spec.is_private or spec.is_robust else "examples"),
        unseen=0 if unseen is None else unseen.num_clients,
        schedule=None if spec.lr_schedule == schedules.OWN else schedules.resolve(spec.lr_schedule, spec.rounds),
        clip=spec.clip_gradients,
        keeps_optimizer=spec.keep_optimizer,
        augment=None if spec.augment is None else augmentation.parse(spec.augment),
    )
    return work if spec.local_epochs is None else work.replace_epochs(spec.local_epochs)


def draw_attackers(spec: RunSpec, attack: str, federation: Federation, task: Task) -> tuple[np.ndarray, Federation]:
    """Draw the clients that attack; return their mask, [m] bool, and the federation after an attack on labels, if any.

    Raises:
      JaxpflError: if no client or every client would attack, or if the attack flips labels that are not classes.
    """
    chosen = robust.drawn(np.asarray(federation.client_ids), spec.attackers, spec.attack_seed)
    if robust.attack_of(attack).change is not None:
        return chosen, federation
    if not (task.has_classes or task.kind in ZERO_OR_ONE):
        raise JaxpflError(f"attack = {attack} flips class labels, but the task is {task.kind!r}")
    return chosen, robust.poisoned(federation, chosen, task.num_classes if task.has_classes else 2)


def graph_of(spec: RunSpec, federation: Federation, task: Task, *, named: str | None = None) -> Graph | None:
    """Graph whose nodes are the clients, if the method needs one: the user's graph, or a graph of nearest neighbors.

    The result is None if the method does not need a graph. By default (``graph="data"``), nearest neighbors are found
    without training, by comparing the distributions of the clients' inputs.

    Args:
      spec: settings of the run.
      federation: clients that are trained.
      task: result of `task_of`.
      named: name of a given graph in messages, such as the name of its file.

    Raises:
      JaxpflError: if the graph has no edges, if ``spec.neighbours`` exceeds the number of other clients, or as in
        `client_graph`.
    """
    if not spec.method.graph:
        return None
    space, graph = "given", spec.graph
    if not isinstance(graph, Graph):
        space, near, others = graph or "data", spec.neighbours or NEIGHBOURS, federation.num_clients - 1
        if spec.neighbours is not None and near > others:  # the default is allowed for any number of clients
            raise JaxpflError(f"neighbours must be at most {others} (the number of other clients), got {near}")
        graph = client_graph(space, federation, task, work_of(spec, federation), neighbours=near)
    if not graph.edges:  # states on edges would have no rows; a checkpoint cannot store them
        raise JaxpflError(f"graph = {named or space} has no edges: {spec.method.name} requires neighbors")
    return graph


def cohorts_of(spec: RunSpec, num_clients: int) -> Participation:
    """Sampling scheme of the cohorts (`participation.of`), with defaults that suit private uploads.

    If uploads are private and cohorts do not contain all clients, the default is Poisson sampling or, if the noise is
    banded, cyclic sampling. By default, a Poisson cohort is large enough for all drawn clients of a round with
    probability at least 1 - 1e-6. With the accountant rdp, which does not support truncated cohorts, it can contain
    every client.

    Raises:
      JaxpflError: as in `participation.of`.
    """
    cohort, kind, cap, cycle = spec.cohort, spec.participation, spec.cohort_cap, spec.cycle
    if kind is None and spec.is_private and cohort not in (None, num_clients):
        kind = "cyclic" if getattr(spec.privacy, "noise", None) == "banded" else "poisson"
    cuts = not (isinstance(spec.privacy, PrivacyConfig) and spec.privacy.accountant == "rdp")
    if kind == "poisson" and cap is None and cuts and cohort is not None and 0 < cohort <= num_clients:
        cap = poisson_cap(num_clients, cohort / num_clients)
    return participations.of(num_clients, cohort, kind, cap, cycle)


def build(method: Method, task: Task, work: LocalWork, options: Mapping[str, Any]) -> Any:
    """Build the method's algorithm.

    Args:
      method: method to build.
      task: model, loss and metrics.
      work: local work of the clients.
      options: static options of the method, by name.

    Raises:
      JaxpflError: if an option is unknown, has the wrong type, or has neither a value nor a default; if the method does
        not support the model's running statistics; if ``pooled`` or ``asynchronous`` differs between the method and its
        algorithm; if a server optimizer is set, but the server receives individual uploads instead of their sum; or as
        in the method's own builder.
    """
    known = method.options
    for name in known.keys() - options.keys():
        if known[name] is inspect.Parameter.empty:
            raise JaxpflError(f"{method.name} requires the option {name}: options={{{name!r}: ...}}")
    for name, value in options.items():
        if name not in known:
            raise unknown_name(f"option of {method.name}", name, known)
        if (kind := _KINDS.get(type(known[name]))) is not None:
            check_kind(f"{method.name}.{name}", value, kind)
    if task.statistics is not None and not method.statistics:
        able = ", ".join(name for name, other in algorithms.METHODS.items() if other.statistics)
        raise JaxpflError(
            f"{method.name} does not support models with running statistics (BatchNorm): use GroupNorm or one of {able}"
        )
    if work.augment is not None and work.augment.mixes:
        task = mixed_label_task(task)
    algorithm = method.build(task, work, **options)
    if algorithm.pooled != method.pooled:
        raise JaxpflError(f"{method.name}: Method.pooled = {method.pooled}, but Algorithm.pooled = {algorithm.pooled}")
    if method.asynchronous != (algorithm.in_flight is not None):
        raise JaxpflError(
            f"{method.name}: Method.asynchronous = {method.asynchronous}, but Algorithm.in_flight = "
            f"{algorithm.in_flight}"
        )
    apart = algorithm.reduction is Reduction.STACK and hasattr(method.hyper, "server_lr")
    if apart and work.server_optimizer != "sgd":
        raise JaxpflError(
            f"server_optimizer = {work.server_optimizer} has no effect, because {method.name} does not sum its "
            "clients' uploads (Reduction.STACK): leave it out"
        )
    return algorithm if algorithm.pooled else algorithm._replace(own_steps=work.own_steps)


_KINDS: Mapping[type, Kind] = {
    bool: SWITCH,
    int: WHOLE,
    float: NUMBER,
    str: instance_of("a string", str),
    tuple: instance_of("a list", tuple, list),
}
"""Kind of the allowed values of an option, by the type of the option's default."""

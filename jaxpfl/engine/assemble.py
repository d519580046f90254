"""Parts of a run: the task of a federation, the sampling of cohorts, and a method's compiled programs."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Iterator, Mapping
from numbers import Integral, Real
from typing import Any

import jax
import numpy as np

from jaxpfl import algorithms, models
from jaxpfl.algorithms import LocalWork, Method
from jaxpfl.algorithms.parts import descents, schedules
from jaxpfl.algorithms.parts.augmentation import of_mixed_labels
from jaxpfl.core import participation as participations
from jaxpfl.core.participation import RELIABLE, Availability, Participation
from jaxpfl.core.protocol import Algorithm, Reduction
from jaxpfl.core.types import Federation
from jaxpfl.engine import compiled, noise_keys
from jaxpfl.engine.client_bucket import Bucket, bucket_for, stores_padded, work_within
from jaxpfl.engine.coded import compress_uploads, one_client
from jaxpfl.engine.execution_plan import ExecutionPlan, stack_rows
from jaxpfl.engine.simulation import Simulation
from jaxpfl.engine.streamed.simulation import StreamedSimulation
from jaxpfl.models import Task, rewriting
from jaxpfl.models.rewriting import Layer
from jaxpfl.privacy import Refusal, SiloMechanism, poisson_cap, privatize
from jaxpfl.privacy.guarded import guard_examples
from jaxpfl.support import processes
from jaxpfl.support.errors import JaxpflError, OutOfMemoryError, shown, unknown_name
from jaxpfl.uploads.compression import Compressor
from jaxpfl.uploads.robust import Aggregator, Attack, attacked, robust


def make_task(
    model: Any, federation: Federation, num_classes: int, *, unseen: Federation | None = None, every: bool = False
) -> Task:
    """The classification task of a federation, for a registered model or one of the user's own.

    Args:
      model: a name, or the model.
      federation: the clients.
      num_classes: K.
      unseen: clients that are never trained, whose tokens the model must know too.
      every: a registered model predicts at each position of a sequence.

    Raises:
      JaxpflError: for a model that cannot read such inputs, tokens beyond its vocabulary among them.
    """
    shape = federation.input_shape
    built = models.build_model(model, num_classes, shape, every=every) if isinstance(model, str) else model
    dtype = federation.train.examples.x.dtype
    # Floats take jax's default type (float64 under x64); tokens keep theirs.
    task = models.classification(built, shape, num_classes, dtype if np.issubdtype(dtype, np.integer) else None)
    if task.model.vocabulary is not None:
        parts = [part for part in (federation, unseen) if part is not None]
        tokens = [split.flat().x for part in parts for split in part.all_splits]
        low, high = min(int(x.min(initial=0)) for x in tokens), max(int(x.max(initial=0)) for x in tokens)
        if low < 0 or high >= task.model.vocabulary:
            raise JaxpflError(
                f"the model reads tokens 0 .. {task.model.vocabulary - 1}, the data have {low if low < 0 else high}: "
                "give a model of a larger vocabulary, or the number of classes"
            )
    if isinstance(model, str) or all(layer.why_not for layer in layers_of(task)):
        return task
    exchanged = task.model._replace(apply=rewriting.Exchanged(task.model.apply))
    if exchanged.statistics is not None:
        observe = rewriting.Exchanged(exchanged.statistics.observe)
        exchanged = exchanged._replace(statistics=exchanged.statistics._replace(observe=observe))
    return task._replace(model=exchanged)


def layers_of(task: Task) -> tuple[Layer, ...]:
    """The convolutions and pools of a model of the user's own, with the reasons of those that must run plain."""
    model, apply = task.model, task.model.apply
    if isinstance(apply, rewriting.Exchanged):
        apply = apply.plain
    if task.statistics is not None:
        observe = task.statistics.observe
        observe = observe.plain if isinstance(observe, rewriting.Exchanged) else observe
        apply = model._replace(statistics=task.statistics._replace(observe=observe)).training
    key = jax.ShapeDtypeStruct((), jax.random.key(0).dtype)
    x = jax.ShapeDtypeStruct((1, *task.input_shape), jax.dtypes.canonicalize_dtype(task.input_dtype or float))
    given = apply, compiled.shapes(task.init, jax.random.key(0)), x, key
    return compiled.found(compiled.key_of("layers", *given), lambda: rewriting.layers(*given))


def make_simulation(
    method: Method,
    task: Task,
    work: LocalWork,
    federation: Federation,
    participation: Participation,
    hp: Any,
    *,
    options: dict[str, Any],
    compressor: Compressor | None = None,
    aggregator: Aggregator | None = None,
    attack: Attack | None = None,
    attackers: np.ndarray | None = None,
    availability: Availability = RELIABLE,
    plan: ExecutionPlan | None = None,
    unseen: Federation | None = None,
    adapt_rounds: int = 10,
    runs: int | None = None,
    silos: SiloMechanism | None = None,
) -> Simulation:
    """Programs of a method with its privacy mechanism, that of ``work`` for uploads or ``silos`` for examples.

    Clients that do not fit on the devices with the states of so many ``runs`` live elsewhere, if the plan leaves it
    open and the number is given. Uploads of the ``attackers``, [m] bool, are those of the attack; their labels are not
    touched here.
    """
    privacy, schedule = work.privacy, work.schedule
    work = dataclasses.replace(work, schedule=None)
    lies = attack is not None and attack.change is not None and attackers is not None
    lying = np.asarray(federation.client_ids)[attackers] if lies else None
    sturdy = aggregator is not None and aggregator.rule is not None
    ours = method is algorithms.METHODS.get(method.name)
    if ours and method.releases is None and work.step_noise is None:
        # It leaves privacy to `privatize`: held in its functions, every noise multiplier would be another program.
        work = dataclasses.replace(work, privacy=None)

    def wrapped(work: LocalWork, federation: Federation) -> tuple[Algorithm, Any]:
        """The algorithm with its mechanism and its compressor, and its hyper-parameters."""
        algorithm, values = build(method, task, work, options), hp
        if work.keeps_optimizer:
            algorithm = descents.keeping(algorithm, one_client(federation))
        if schedule is not None:
            algorithm, values = schedules.scheduled(algorithm, values, schedule)
        if silos is not None:
            algorithm = guard_examples(algorithm, method.name, silos)
        asked_for = {
            "make private": privacy is not None,
            "compress": compressor is not None,
            "aggregate robustly": sturdy,
            "attack": lies,
        }
        for what, asked in asked_for.items():
            if algorithm.pooled and asked:
                raise JaxpflError(f"{method.name} pools the data: there is no upload to {what}")
        if privacy is not None and method.uploads:
            if privacy.step_noise is not None and not method.step_noise:
                able = ", ".join(name for name, other in algorithms.METHODS.items() if other.step_noise)
                raise JaxpflError(f"{method.name} cannot add noise in every step; those that can: {able}")
            if privacy.step_noise is not None and algorithm.local_steps != work.steps:
                raise JaxpflError(
                    f"{method.name}: Algorithm.local_steps is {algorithm.local_steps}, and noise in every step is "
                    f"accounted for local_steps = {work.steps}: build it with the steps that it is given"
                )
            if task.statistics is not None and not method.keeps_statistics:
                raise JaxpflError(
                    f"{method.name} sends the model's running statistics (BatchNorm): noise of steps does not cover "
                    "them, and that of clipped updates drowns them: use GroupNorm, or fedbn, whose clients keep them"
                )
            if method.releases is None:
                algorithm, values = privatize(algorithm, values, privacy, one_client(federation))
        if lying is not None and attack is not None and method.uploads:
            algorithm = attacked(algorithm, attack, lying)
        if aggregator is not None and method.uploads:
            algorithm = robust(algorithm, aggregator, method.name)
        if compressor is not None and method.uploads:
            algorithm = compress_uploads(algorithm, compressor, federation, privacy)
        if algorithm.noise is not None:
            algorithm = noise_keys.of_method(algorithm, method, options, work, compressor)
        return algorithm, values

    algorithm, values = wrapped(work, federation)
    bucket = None
    plan = plan or ExecutionPlan()
    asked = plan.client_bucket != "none" and not algorithm.pooled
    if asked and not ours:
        bucket = Bucket.none(participation, "a method of one's own may depend on the number of clients")
    elif asked and silos is not None:
        bucket = Bucket.none(participation, "the noise of a silo depends on its number of examples")
    elif asked and work.graph is None:
        shapes = federation
        if compressor is not None or work.keeps_optimizer:  # their states are of the shapes of a client's examples
            shapes = stores_padded(federation, stack_rows(plan, federation.num_clients))
        of_any, values_of_any = wrapped(work_within(work), shapes)
        bucket = bucket_for(plan, of_any, participation, values_of_any)
        if bucket.pads:
            algorithm, values = of_any, values_of_any
    of_run = (algorithm, task, federation, participation, values)
    more: dict[str, Any] = {"availability": availability, "unseen": unseen, "adapt_rounds": adapt_rounds}
    # A pooled method has one client, which trains on the devices.
    home = "device" if algorithm.pooled else plan.clients_in
    if home in ("host", "disk"):
        if processes.several():
            raise JaxpflError(
                f"plan.clients_in = {home} is of one process: with several, each keeps its own clients on its devices "
                "(device or auto)"
            )
        return StreamedSimulation(*of_run, **more, plan=plan, where=home)
    try:
        simulation = Simulation(*of_run, **more, plan=plan, bucket=bucket)
        if home == "auto" and runs is not None:
            simulation.check_room(runs)
        return simulation
    except OutOfMemoryError as error:
        if home == "device" or runs is None or processes.several():
            raise
        full = error
    # A CPU's memory is the host's.
    for where in ("disk",) if jax.default_backend() == "cpu" else ("host", "disk"):
        try:
            # Of several accelerators one takes them.
            one = plan if jax.default_backend() == "cpu" else dataclasses.replace(plan, devices=1)
            simulation = StreamedSimulation(*of_run, **more, plan=one, where=where)
            simulation.check_room(runs)
            return simulation
        except JaxpflError:
            continue
    raise full


def draw_cohorts(
    num_clients: int,
    cohort: int | None,
    kind: str | None,
    cap: int | None,
    cycle: int | None = None,
    *,
    private: bool,
    cuts: bool = True,
    turns: bool = False,
) -> Participation:
    """Sampling of cohorts by name (`participation.of`); Poisson by default if the uploads are private, cyclic if their
    noise needs ``turns``.

    A Poisson cohort has by default enough slots for a round with probability at least 1 - 1e-6, or one for every
    client if the accountant cannot handle truncated cohorts (``cuts`` false).

    Raises:
      JaxpflError: as `participation.of`; under privacy, sampling with replacement with the reason.
    """
    if kind in ("replacement", "with-replacement") and private:
        raise Refusal.WITH_REPLACEMENT.error()
    if kind is None and private and cohort is not None and cohort != num_clients:
        kind = "cyclic" if turns else "poisson"
    if kind == "poisson" and cap is None and cuts and cohort is not None and 0 < cohort <= num_clients:
        cap = poisson_cap(num_clients, cohort / num_clients)
    return participations.of(num_clients, cohort, kind, cap, cycle)


def weighting_under(private: bool, weighting: str | None, *, alike: bool = False) -> str:
    """The clients' weighting in the mean, by default by examples, and uniform where the uploads are private or
    aggregated robustly.

    Raises:
      JaxpflError: for weights by examples under privacy.
    """
    if private and weighting == "examples":
        raise Refusal.WEIGHTED_MEAN.error()
    return weighting or ("uniform" if private or alike else "examples")


def build(method: Method, task: Task, work: LocalWork, options: dict[str, Any]) -> Any:
    """Build the method's algorithm.

    Raises:
      JaxpflError: for unknown static options, those of the wrong type and those without a default that are not given,
        a method and an algorithm of which one alone is pooled or asynchronous, a server optimizer that a method with a
        ``server_lr`` could not use, and as its builder.
    """
    known = method.options
    for name in known.keys() - options.keys():
        if known[name] is inspect.Parameter.empty:
            raise JaxpflError(f"{method.name} needs its option {name}, which has no default: options={{{name!r}: ...}}")
    for name, value in options.items():
        if name not in known:
            raise unknown_name(f"option of {method.name}", name, known)
        kind = type(known[name])
        if kind in _LIKE:
            allowed, words = _LIKE[kind]
            if not isinstance(value, allowed) or (isinstance(value, bool) and kind is not bool):
                raise JaxpflError(f"{method.name}.{name} must be {words}, got {shown(value)}")
    if task.statistics is not None and not method.statistics:
        able = ", ".join(name for name, other in algorithms.METHODS.items() if other.statistics)
        raise JaxpflError(
            f"{method.name} does not carry the model's running statistics (BatchNorm): use GroupNorm, or one of {able}"
        )
    if work.augment is not None and work.augment.mixes:
        task = of_mixed_labels(task)
    algorithm = method.build(task, work, **options)
    if algorithm.pooled != method.pooled:
        raise JaxpflError(f"{method.name}: Method.pooled is {method.pooled}, Algorithm.pooled is {algorithm.pooled}")
    if method.asynchronous != (algorithm.in_flight is not None):
        raise JaxpflError(
            f"{method.name}: Method.asynchronous is {method.asynchronous}, Algorithm.in_flight is {algorithm.in_flight}"
        )
    apart = algorithm.reduction is Reduction.STACK and hasattr(method.hyper, "server_lr")
    if apart and work.server_optimizer != "sgd":
        raise JaxpflError(
            f"{method.name} keeps its clients' uploads apart (Reduction.STACK): server_optimizer = "
            f"{work.server_optimizer} would change nothing"
        )
    return algorithm if algorithm.pooled else algorithm._replace(own_steps=work.own_steps)


_LIKE: Mapping[type, tuple[Any, str]] = {
    bool: (bool, "True or False"),
    int: (Integral, "a whole number"),
    float: (Real, "a number"),
    str: (str, "a text"),
    tuple: ((tuple, list), "a list"),
}
"""Type of an option's default -> types allowed instead, and their name."""


def milestones(start: int, rounds: int, *every: int) -> Iterator[int]:
    """The rounds in (start, rounds] that are a multiple of some ``every`` (0: none), and ``rounds`` itself, in order.

    Multiples are absolute, so a resumed run stops where the uninterrupted one does.

    Examples:
      >>> list(milestones(3, 10, 4))
      [4, 8, 10]
    """
    while start < rounds:
        start = min([rounds, *((start // n + 1) * n for n in every if n)])
        yield start

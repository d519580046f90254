"""Parts of a run: the task of a federation, the sampling of cohorts, and a method's compiled programs."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from numbers import Integral, Real
from typing import Any

import flax.linen as nn
import numpy as np

from jaxpfl import algorithms, models
from jaxpfl import participation as participations
from jaxpfl.algorithms import LocalWork, Method
from jaxpfl.compression import Compressor
from jaxpfl.engine import noise_stream
from jaxpfl.engine.client_bucket import Bucket, bucket_for, capacities_padded, work_within
from jaxpfl.engine.coded import compress_uploads
from jaxpfl.engine.execution_plan import ExecutionPlan
from jaxpfl.engine.pooled import PooledSimulation
from jaxpfl.engine.simulation import Simulation
from jaxpfl.errors import JaxpflError, unknown_name
from jaxpfl.models import Model, Task
from jaxpfl.participation import RELIABLE, Availability, Participation
from jaxpfl.privacy import Refusal, poisson_cap, privatize
from jaxpfl.protocol import Algorithm
from jaxpfl.types import Federation


def make_task(model: str | Model | nn.Module, federation: Federation, num_classes: int) -> Task:
    """The classification task of a federation, for a registered model or one of the user's own.

    Raises:
      JaxpflError: for a model that cannot read such inputs, tokens beyond its vocabulary among them.
    """
    shape = federation.input_shape
    built = models.build_model(model, num_classes, shape) if isinstance(model, str) else model
    dtype = federation.train.x.dtype
    # Floats take jax's default type (float64 under x64); tokens keep theirs.
    task = models.classification(built, shape, num_classes, dtype if np.issubdtype(dtype, np.integer) else None)
    if task.model.vocabulary is not None:
        splits = (federation.train, federation.validation, federation.test)
        low, high = (min(int(s.x.min(initial=0)) for s in splits), max(int(s.x.max(initial=0)) for s in splits))
        if low < 0 or high >= task.model.vocabulary:
            raise JaxpflError(
                f"the model reads tokens 0 .. {task.model.vocabulary - 1}, the data have {low if low < 0 else high}: "
                "give a model of a larger vocabulary, or the number of classes"
            )
    return task


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
    availability: Availability = RELIABLE,
    plan: ExecutionPlan | None = None,
    unseen: Federation | None = None,
    adapt_rounds: int = 10,
) -> Simulation:
    """Programs of a method with its privacy mechanism, or of the centralised reference, whose client never fails."""
    privacy = work.privacy
    if method.pooled:  # its one client holds the examples of those that are trained, not of unseen ones
        work = dataclasses.replace(work, sizes=np.asarray(federation.train.size), unseen=0)
    ours = method is algorithms.METHODS.get(method.name)
    if ours and method.releases is None and work.step_noise is None:
        # It leaves privacy to `privatize`: held in its functions, every noise multiplier would be another program.
        work = dataclasses.replace(work, privacy=None)

    def wrapped(work: LocalWork, federation: Federation) -> tuple[Algorithm, Any]:
        """The algorithm with its mechanism and its compressor, and its hyper-parameters."""
        algorithm, values = build(method, task, work, options), hp
        if privacy is not None and method.uploads:
            if method.pooled:
                raise JaxpflError(f"{method.name} pools the data: there is no upload to make private")
            if privacy.step_noise is not None and not method.step_noise:
                able = ", ".join(name for name, other in algorithms.METHODS.items() if other.step_noise)
                raise JaxpflError(f"{method.name} cannot add noise in every step; those that can: {able}")
            if method.releases is None:
                algorithm, values = privatize(algorithm, values, privacy)
        if compressor is not None and method.uploads:
            if method.pooled:
                raise JaxpflError(f"{method.name} pools the data: there is no upload to compress")
            algorithm = compress_uploads(algorithm, compressor, federation, privacy)
        if algorithm.noise is not None:
            algorithm = noise_stream.of_method(algorithm, method, options, work, compressor)
        return algorithm, values

    algorithm, values = wrapped(work, federation)
    if method.pooled:
        return PooledSimulation(algorithm, task, federation, values, plan=plan, unseen=unseen)
    bucket = None
    plan = plan or ExecutionPlan()
    asked = plan.client_bucket != "none"
    if asked and not ours:
        bucket = Bucket.none(participation, "a method of one's own may depend on the number of clients")
    elif asked and work.graph is None:
        shapes = federation if compressor is None else capacities_padded(federation)
        of_any, values_of_any = wrapped(work_within(work), shapes)
        bucket = bucket_for(plan, of_any, participation, values_of_any)
        if bucket.pads:
            algorithm, values = of_any, values_of_any
    return Simulation(
        algorithm,
        task,
        federation,
        participation,
        values,
        availability=availability,
        plan=plan,
        unseen=unseen,
        adapt_rounds=adapt_rounds,
        bucket=bucket,
    )


def draw_cohorts(
    num_clients: int, cohort: int | None, kind: str | None, cap: int | None, *, private: bool, cuts: bool = True
) -> Participation:
    """Sampling of cohorts by name (`participation.of`); Poisson by default if the uploads are private.

    A Poisson cohort has by default enough slots for a round with probability at least 1 - 1e-6, or one for every
    client if the accountant cannot handle truncated cohorts (``cuts`` false).

    Raises:
      JaxpflError: as `participation.of`; under privacy, sampling with replacement with the reason.
    """
    if kind in ("replacement", "with-replacement") and private:
        raise Refusal.WITH_REPLACEMENT.error()
    if kind is None and private and cohort is not None and cohort != num_clients:
        kind = "poisson"
    if kind == "poisson" and cap is None and cuts and cohort is not None and 0 < cohort <= num_clients:
        cap = poisson_cap(num_clients, cohort / num_clients)
    return participations.of(num_clients, cohort, kind, cap)


def weighting_under(private: bool, weighting: str | None) -> str:
    """The clients' weighting in the mean, by default by examples, and uniform where the uploads are private.

    Raises:
      JaxpflError: for weights by examples under privacy.
    """
    if private and weighting == "examples":
        raise Refusal.WEIGHTED_MEAN.error()
    return weighting or ("uniform" if private else "examples")


def build(method: Method, task: Task, work: LocalWork, options: dict[str, Any]) -> Any:
    """Build the method's algorithm.

    Raises:
      JaxpflError: for unknown static options and those of the wrong type, and as its builder.
    """
    known = method.options
    for name, value in options.items():
        if name not in known:
            raise unknown_name(f"option of {method.name}", name, known)
        kind = type(known[name])
        if kind in _LIKE:
            allowed, words = _LIKE[kind]
            if not isinstance(value, allowed) or (isinstance(value, bool) and kind is not bool):
                raise JaxpflError(f"{method.name}.{name} must be {words}, got {value!r}")
    return method.build(task, work, **options)


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

    >>> list(milestones(3, 10, 4))
    [4, 8, 10]
    """
    while start < rounds:
        start = min([rounds, *((start // n + 1) * n for n in every if n)])
        yield start

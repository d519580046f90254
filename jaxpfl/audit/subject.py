"""A method's private run for audits: the programs of the real run, with hooks to observe them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import wraps
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxpfl.algorithms import LocalWork, Method
from jaxpfl.core.participation import RELIABLE, Availability, Participation
from jaxpfl.core.protocol import ALL_STEPS, Algorithm, ClientContext, Message, Upload
from jaxpfl.core.types import Federation
from jaxpfl.engine import ExecutionPlan, Simulation, accounted
from jaxpfl.engine.assemble import build, make_simulation
from jaxpfl.engine.assembly import Assembled, work_of
from jaxpfl.engine.state import server_context
from jaxpfl.models import Task
from jaxpfl.privacy import Mechanism, PrivacyPlan, Refusal, SiloMechanism
from jaxpfl.support.errors import JaxpflError
from jaxpfl.uploads import compression
from jaxpfl.uploads.compression import Compressor

Change = Callable[[Algorithm, LocalWork], Algorithm]
"""Change of a method's algorithm by an audit, applied before the mechanism."""


@dataclass(frozen=True, eq=False)
class Subject:
    """A method with a mechanism and all other inputs of its run.

    Attributes:
      work: with the mechanism as its ``privacy``.
      mechanism: one noise multiplier, one clipping norm.
      rounds: R.
      options: those of the method's static options that are not at their defaults.
      plan: the execution plan; a call is one round, so that every release is read.
    """

    method: Method
    task: Task
    work: LocalWork
    federation: Federation
    participation: Participation
    hp: Any
    mechanism: Mechanism
    rounds: int
    options: dict[str, Any] = field(default_factory=dict)
    compressor: Compressor | None = None
    availability: Availability = RELIABLE
    plan: ExecutionPlan = field(default_factory=ExecutionPlan)

    @property
    def claim(self) -> PrivacyPlan:
        """Privacy plan by which the run is accounted.

        Raises:
          JaxpflError: for a method that uploads nothing, a mechanism without noise, and a run that cannot be accounted.
        """
        if not self.method.uploads:
            raise JaxpflError(f"{self.method.name} uploads nothing: there is no claim to audit")
        compressed = self.compressor is not None
        told = (self.method, self.hp, self.options, self.mechanism, self.participation, self.work)
        (plan,) = accounted.plans(*told, rounds=self.rounds, runs=1, compressed=compressed)
        if plan is None:
            raise Refusal.NO_NOISE.error()
        return plan

    def simulation(self, change: Change, availability: Availability | None = None) -> Simulation:
        """The programs of the run with its algorithm changed.

        Args:
          availability: in place of the run's.
        """

        @wraps(self.method.build)
        def changed(task: Task, work: LocalWork, **options: Any) -> Algorithm:
            return change(self.method.build(task, work, **options), work)

        return make_simulation(
            self.method._replace(build=changed),
            self.task,
            self.work,
            self.federation,
            self.participation,
            self.hp,
            options=self.options,
            compressor=self.compressor,
            availability=self.availability if availability is None else availability,
            plan=replace(self.plan, rounds_per_call=1),
        )

    def upload(self) -> Upload:
        """Shapes and types of a client's upload."""
        algorithm = build(self.method, self.task, self.work, self.options)
        client, key, zero = algorithm.clients[0], jax.random.key(0), jnp.int32(0)

        def one(hp: Any, federation: Federation) -> Upload:
            at_server = server_context(self.participation, zero)
            message = algorithm.server.broadcast(key, hp, at_server, algorithm.server.init(key, hp, at_server))
            splits, per_client = federation.splits.client(0), jax.tree.map(lambda a: a[0], message.per_client)
            received, ctx = Message(message.shared, per_client), ClientContext(zero, zero, zero, ALL_STEPS, key)
            state = client.init(key, hp, ctx, received)
            return client.update(key, hp, ctx, received, state, splits)[1]

        return jax.eval_shape(one, jax.tree.map(jnp.asarray, self.hp), self.federation)

    @property
    def ids(self) -> np.ndarray:
        """The clients' ids, [m]."""
        return np.asarray(self.federation.client_ids)

    @property
    def unit(self) -> float:
        """C of the first round (of a step, for noise in every step)."""
        return float(np.asarray(self.mechanism.clipping_norm))


def subject_of(run: Assembled, name: str) -> Subject:
    """Subject of a run that is put together.

    Args:
      run: run of one method.
      name: name of the method, for errors.

    Raises:
      JaxpflError: if it is not private, and as `Subject.claim`.
    """
    spec, mechanism = run.spec, run.mechanism
    if mechanism is None:
        what = "uploads nothing" if spec.is_private else "is not private: give --privacy.epsilon, or a noise multiplier"
        raise JaxpflError(f"{name} {what}")
    if isinstance(mechanism, SiloMechanism):
        raise JaxpflError("an audit is of users' uploads: there is none of privacy.unit = example")
    if mechanism.noise == "banded" or run.cohorts.cycle is not None:
        raise JaxpflError(
            "an audit assumes independent noise and cohorts: there is none of noise = banded or participation = cyclic"
        )
    subject = Subject(
        spec.method,
        run.task,
        replace(work_of(spec, run.federation), privacy=mechanism, graph=run.work.graph),
        run.federation,
        run.cohorts,
        run.hp,
        mechanism,
        spec.training.rounds,
        dict(spec.options),
        None if spec.coding.compress is None else compression.resolve(spec.coding.compress),
        spec.availability,
        spec.plan,
    )
    _ = subject.claim
    return subject

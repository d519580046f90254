"""Subject of an audit: a private run's own programs, changed so that the audit can read every release."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import wraps
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxpfl.algorithms import LocalWork
from jaxpfl.core import exclusions
from jaxpfl.core.participation import Availability, full
from jaxpfl.core.protocol import ALL_STEPS, Algorithm, ClientContext, Message, Reduced, Server, Stacked, Upload
from jaxpfl.core.randomness import Purpose, stream
from jaxpfl.core.types import Array, Federation, Key, PyTree
from jaxpfl.engine import RunState, Simulation
from jaxpfl.engine.build import Assembled, build, work_of
from jaxpfl.engine.state import server_context
from jaxpfl.models import Task
from jaxpfl.priors.gaussian_mixture import Mixture
from jaxpfl.privacy import Mechanism, PrivacyPlan, SiloMechanism
from jaxpfl.privacy.silos import Silo
from jaxpfl.support.errors import JaxpflError


class Seen(NamedTuple):
    """Server state of a recorded algorithm: the method's server state and the last round's release.

    Attributes:
      state: the method's server state.
      total: sum of the uploads after the mechanism's clipping and noise; for AdaMix, whose server adds the noise
        itself, the mean of the mixture that the server sends in the next round.
      weight: divisor of the sum, []; 1 for AdaMix.
    """

    state: PyTree
    total: PyTree
    weight: Array


class Round(NamedTuple):
    """Result of one round in S runs, on the host.

    Attributes:
      state: state of the runs after the round.
      history: metrics of the round, each [S].
      leaves: released total by name of the leaf, each a float64 array [S, entries].
      weight: divisor of the total, [S].
    """

    state: RunState
    history: dict[str, np.ndarray]
    leaves: dict[str, np.ndarray]
    weight: np.ndarray


def recorded(algorithm: Algorithm, upload: Upload) -> Algorithm:
    """Wrap an algorithm so that its server state contains the last release that the server received.

    Args:
      algorithm: algorithm to wrap.
      upload: shapes and types of a client's upload.

    Raises:
      JaxpflError: when a round is traced, if the uploads are not summed and the method is not AdaMix.
    """
    inner = algorithm.server
    nothing = jax.tree.map(lambda a: jnp.zeros(a.shape, jnp.result_type(float)), upload.total)

    def init(key, hp, ctx) -> Seen:
        return Seen(inner.init(key, hp, ctx), nothing, jnp.zeros(()))

    def update(key, hp, ctx, seen: Seen, reduced: Reduced | Stacked):
        state, metrics = inner.update(key, hp, ctx, seen.state, reduced)
        if isinstance(reduced, Stacked):
            shared = inner.broadcast(key, hp, ctx, state).shared
            if not isinstance(shared, Mixture):
                raise JaxpflError("an audit supports only adamix and methods that sum the uploads")
            return Seen(
                state, jax.tree.map(lambda mu: jnp.tensordot(shared.p, mu, 1), shared.mu), jnp.ones(())
            ), metrics
        # The model's dtype may be too narrow for the last digits of the noise.
        total = jax.tree.map(lambda a: a.astype(jnp.result_type(float)), reduced.total)
        (weight,) = jax.tree.leaves(reduced.weight)
        return Seen(state, total, jnp.asarray(weight, jnp.result_type(float))), metrics

    def broadcast(key, hp, ctx, seen: Seen):
        return inner.broadcast(key, hp, ctx, seen.state)

    return algorithm._replace(server=Server(init, broadcast, update))


def rounds(simulation: Simulation, state: RunState, count: int) -> Iterator[Round]:
    """Run ``count`` rounds and yield the result of each round. ``state`` is donated."""
    for _ in range(count):
        state, history = simulation.advance(state, 1)
        seen = only(Seen, state.server)
        yield Round(
            state,
            {name: np.asarray(values)[:, 0] for name, values in history.items()},
            leaf_vectors(seen.total, runs=True),
            np.asarray(seen.weight, np.float64),
        )


def leaf_vectors(tree: PyTree, *, runs: bool = False) -> dict[str, np.ndarray]:
    """Leaves by path, each as a float64 vector; if ``runs`` is true, each as an array [S, entries] for S runs."""
    return {
        jax.tree_util.keystr(path, simple=True, separator="/") or "upload": np.asarray(leaf, np.float64).reshape(
            *np.shape(leaf)[: int(runs)], -1
        )
        for path, leaf in jax.tree.leaves_with_path(tree)
    }


def only(kind: type, tree: PyTree) -> Any:
    """Find the only node of type ``kind`` in a tree."""
    nodes = jax.tree.leaves(tree, is_leaf=lambda node: isinstance(node, kind))
    (found,) = [node for node in nodes if isinstance(node, kind)]
    return found


def coin(batch_key: Key) -> Array:
    """Coin that decides whether a canary is included, [] bool: the last bit of its key for batches."""
    return jax.random.key_data(batch_key).ravel()[-1] % 2 == 1


def tosses(run_keys: Array, ids: np.ndarray) -> np.ndarray:
    """Coins of n canaries in each run, True if the canary is included, [S, n] bool."""
    each = jax.vmap(lambda key, i: coin(stream(key, Purpose.BATCHES, i)), (None, 0))
    return np.asarray(jax.vmap(each, (0, None))(run_keys, jnp.asarray(ids)))


Scores = Callable[[Sequence[int]], tuple[np.ndarray, dict[str, np.ndarray]]]
"""Function from the seeds of S runs to whether each has the canary, [S] bool, and to scores by name, each [S]."""
Change = Callable[[Algorithm, LocalWork], Algorithm]
"""Function by which an audit changes a method's algorithm, before the mechanism wraps it."""


@dataclass(frozen=True, eq=False)
class Subject:
    """Private run of one method, to be audited.

    Attributes:
      run: assembled run with private uploads, one noise multiplier and one clipping norm.
    """

    run: Assembled

    @property
    def mechanism(self) -> Mechanism:
        """Mechanism that clips the uploads and adds the noise."""
        assert isinstance(self.run.mechanism, Mechanism)
        return self.run.mechanism

    @property
    def claim(self) -> PrivacyPlan:
        """Privacy plan of the run, from which its epsilon is computed.

        Raises:
          JaxpflError: if the method uploads nothing, if the mechanism adds no noise, or if no accountant covers the
            run.
        """
        if not self.run.spec.method.uploads and self.silo is None:
            raise JaxpflError(f"{self.run.spec.method.name} uploads nothing and so has no privacy claim to audit")
        (plan,) = self.run.released(1) or (None,)
        if plan is None:
            raise JaxpflError(exclusions.NO_NOISE)
        return plan if isinstance(plan, PrivacyPlan) else plan.plan(self.silo or plan.silos[0])

    @property
    def silo(self) -> Silo | None:
        """Group of silos with about the largest epsilon; None if users are protected."""
        silos = self.run.mechanism
        if not isinstance(silos, SiloMechanism):
            return None
        # At equal epsilon, z / (q sqrt(number of mini-batches)) is nearly equal.
        return min(silos.silos, key=lambda silo: silo.noise_multiplier**2 / (silo.rate**2 * silos.plan(silo).rounds))

    def simulation(self, change: Change, availability: Availability | None = None) -> Simulation:
        """Build the run's simulation with a changed algorithm.

        Its compiled program runs one round per call, so that the audit can read the release of every round.

        Args:
          change: function that changes the algorithm.
          availability: availability of the clients; None keeps the run's availability.
        """

        spec = self.run.spec

        @wraps(spec.method.build)
        def changed(task: Task, work: LocalWork, **options: Any) -> Algorithm:
            return change(spec.method.build(task, work, **options), work)

        plan = replace(spec.plan, rounds_per_call=1)
        watched = replace(spec, method=spec.method._replace(build=changed), plan=plan)
        failures = self.run.availability if availability is None else availability
        return replace(self.run, spec=watched, availability=failures).simulation()

    def upload(self) -> Upload:
        """Shapes and types of a client's upload."""
        run = self.run
        algorithm = build(run.spec.method, run.task, run.work, run.spec.options)
        client, key, zero = algorithm.clients[0], jax.random.key(0), jnp.int32(0)

        def one(hp: Any, federation: Federation) -> Upload:
            at_server = server_context(run.cohorts, zero)
            message = algorithm.server.broadcast(key, hp, at_server, algorithm.server.init(key, hp, at_server))
            splits, per_client = federation.splits.client(0), jax.tree.map(lambda a: a[0], message.per_client)
            received, ctx = Message(message.shared, per_client), ClientContext(zero, zero, zero, ALL_STEPS, key)
            state = client.init(key, hp, ctx, received)
            return client.update(key, hp, ctx, received, state, splits)[1]

        return jax.eval_shape(one, jax.tree.map(jnp.asarray, run.hp), run.federation)

    @property
    def ids(self) -> np.ndarray:
        """Ids of the clients, [m]."""
        return np.asarray(self.run.federation.client_ids)

    @property
    def unit(self) -> float:
        """Clipping norm C in the first round; for noise in every step, the clipping norm of a step."""
        return float(np.asarray(self.mechanism.clipping_norm))


def subject_of(run: Assembled, name: str) -> Subject:
    """Prepare an assembled run for an audit.

    Args:
      run: run of one method.
      name: name of the method, for error messages.

    Raises:
      JaxpflError: if the run is not private or an audit does not support it, or under the conditions of
        `Subject.claim`.
    """
    spec, mechanism = run.spec, run.mechanism
    if mechanism is None:
        private = "is not private: set --privacy.epsilon or --privacy.noise-multiplier"
        raise JaxpflError(f"{name} {'uploads nothing and so has no release to audit' if spec.is_private else private}")
    silos = isinstance(mechanism, SiloMechanism)
    exclusions.check(
        {
            "an audit": True,
            "noise": None if silos else mechanism.noise,
            "participation": None if run.cohorts.cycle is None else "cyclic",
        }
    )
    if silos:
        if not np.asarray(run.federation.train.size).all():
            raise JaxpflError("an audit with unit = example requires training examples of every client")
        # The claim assumes that every silo takes part in every round.
        everyone = full(run.federation.num_clients)
        return Subject(replace(run, unseen=None, cohorts=everyone, availability=Availability()))
    work = replace(work_of(spec, run.federation), privacy=mechanism, graph=run.work.graph)
    subject = Subject(replace(run, work=work, unseen=None))
    _ = subject.claim
    return subject

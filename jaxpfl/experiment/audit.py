r"""An audit plays the game that a privacy claim is about, with the engine's own rounds, and says what was won.

One client, the canary, has data whose gradient is the same large vector c in every step. Of 2 K worlds, runs of one
program, it is so in K; in the others is what the claim's relation says: no such client (its upload is lost:
add-or-remove-one), a client whose data are zeros (zero-out), or one whose gradient is -c (replace-one). All others'
gradients are zero, which hides the canary least; but where all take part and one may be missing, they are -c, so that a
mean over those who are there moves by twice as much as one over a public number. The server starts at zero, so that its
last model says what its releases had in the direction of c in all: the score. `jaxpfl.privacy.audit` makes a lower
bound on eps of the scores; a bound above the claim refutes it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from jaxpfl.algorithms import METHODS, LocalWork
from jaxpfl.data import stack_clients
from jaxpfl.engine import ExecutionPlan, Simulation
from jaxpfl.errors import JaxpflError
from jaxpfl.models import Model, Task
from jaxpfl.participation import Participation
from jaxpfl.privacy import Mechanism, PrivateHyper, plan_of, privatize
from jaxpfl.privacy.audit import EpsilonBound, epsilon_lower_bound
from jaxpfl.privacy.events import Relation
from jaxpfl.protocol import Algorithm, Client, Server
from jaxpfl.types import Array, PyTree

DIMENSION = 8
_CANARY, _LENGTH = 0, 100.0
_WORLDS_AT_ONCE = 2000
_ABSENT: dict[Relation, float] = {"add-or-remove-one": math.nan, "zero-out": 0.0, "replace-one": -1.0}
"""The canary's gradient over c in the worlds without it; of NaN, nothing is uploaded."""


class Audit(NamedTuple):
    """What an audit found.

    Attributes:
      relation: of the claim.
      claimed: eps of the accountant at the audit's delta.
      bound: the lower bound, with its confidence and the largest that so many worlds could have shown.
      refuted: whether the bound is above the claim: then, up to the confidence, the claim is false.
      present, absent: the scores of the worlds with and without the canary's data, [K] each.
    """

    relation: Relation
    claimed: float
    bound: EpsilonBound
    refuted: bool
    present: np.ndarray
    absent: np.ndarray


Privatize = Callable[[Algorithm, Any, Mechanism], tuple[Algorithm, PrivateHyper]]


def audit(
    mechanism: Mechanism,
    participation: Participation,
    *,
    rounds: int,
    worlds: int = 4000,
    delta: float = 0.1,
    confidence: float = 0.95,
    steps: int = 1,
    seed: int = 0,
    plan: ExecutionPlan | None = None,
    behind: Privatize = privatize,
) -> Audit:
    """Audits FedAvg behind a mechanism.

    Args:
      mechanism, participation: of every round, as in a run; one noise multiplier.
      rounds: R.
      worlds: K of each kind.
      delta: at which claim and bound are compared. A claim holds at every delta, and at one of 0.01 ... 0.2 a few
        thousand worlds can say something of it.
      confidence: of the bound.
      steps: tau.
      seed: the worlds' seeds are ``seed, seed + 1, ...``.
      plan: how to execute; all worlds in one vectorised program by default.
      behind: what puts the mechanism before the algorithm. A test plants its faults here.

    Raises:
      JaxpflError: for a mechanism without noise, too few worlds, and what cannot be accounted.
    """
    if worlds < 4:
        raise JaxpflError(f"an audit needs at least 4 worlds of each kind, got {worlds}")
    claim = plan_of(mechanism, participation, rounds=rounds, steps=steps, scales=0)
    claimed = claim.epsilon(delta, claim.default_accountant)
    assert claim.relation is not None
    game = _Game(claim.relation, mechanism, participation, rounds, steps, plan, behind)
    present = game.play(1.0, range(seed, seed + worlds))
    absent = game.play(_ABSENT[claim.relation], range(seed + worlds, seed + 2 * worlds))
    bound = epsilon_lower_bound(present, absent, delta=delta, confidence=confidence)
    return Audit(claim.relation, claimed, bound, bound.epsilon > claimed, present, absent)


class _Game(NamedTuple):
    """What all worlds of an audit have in common; as `audit` has them."""

    relation: Relation
    mechanism: Mechanism
    participation: Participation
    rounds: int
    steps: int
    plan: ExecutionPlan | None
    behind: Privatize

    def play(self, canary: float, seeds: range) -> np.ndarray:
        """The scores, [worlds], where the canary's gradient is so many times c; NaN for no canary."""
        direction = np.ones(DIMENSION) / np.sqrt(DIMENSION)
        num_clients = self.participation.num_clients
        opposed = self.relation == "add-or-remove-one" and self.participation.everyone
        rows = np.broadcast_to(-_LENGTH * direction * opposed, (num_clients, 1, DIMENSION)).copy()
        rows[_CANARY] = _LENGTH * direction
        labels = np.zeros(1, int)
        federation = stack_clients([(x, labels) for x in rows], test=[(x, labels) for x in rows])
        # The loss -<w, x> has the gradient -x wherever w is.
        model = Model(lambda key, x: jnp.zeros(DIMENSION), lambda w, x, key=None, train=False: (x @ w)[:, None])

        def loss(products: Array, y: Array) -> Array:
            return -products[:, 0]

        task = Task(model, (DIMENSION,), 1, loss, {"loss": loss})
        work = LocalWork(np.ones(num_clients, int), self.steps, 1, weighting="uniform", privacy=self.mechanism)
        method = METHODS["fedavg"]
        world = _World(method.hyper.replace(lr=1.0, lr_decay=1.0, weight_decay=0.0), canary)
        private, hp = self.behind(_with_canary(method.build(task, work)), world, self.mechanism)
        plan = self.plan or ExecutionPlan(clients="vmap", runs="vmap", rounds_per_call=self.rounds)
        simulation = Simulation(_where_it_may_be_missing(private), task, federation, self.participation, hp, plan=plan)
        scores = []
        for start in range(seeds.start, seeds.stop, _WORLDS_AT_ONCE):
            some = range(start, min(start + _WORLDS_AT_ONCE, seeds.stop))
            state, _ = simulation.advance(simulation.init(some), self.rounds)
            scores.append(np.asarray(state.server.state, np.float64) @ direction)
        return np.concatenate(scores)


@struct.dataclass
class _World:
    """The method's hyper-parameters, and the canary's gradient over c: 1 with its data, 0 with zeros; NaN for none."""

    method: Any
    canary: Array | float


def _with_canary(algorithm: Algorithm) -> Algorithm:
    """The algorithm in a world of its own: the hyper-parameters say what the canary's data are."""
    (client,), server = algorithm.clients, algorithm.server

    def update(key, hp: _World, ctx, message, state, splits):
        times = jnp.where(ctx.client_id == _CANARY, jnp.nan_to_num(hp.canary), 1.0)
        splits = splits._replace(train=splits.train._replace(x=splits.train.x * times))
        return client.update(key, hp.method, ctx, message, state, splits)

    def of_method(function: Callable[..., PyTree]) -> Callable[..., PyTree]:
        return lambda key, hp, *rest: function(key, hp.method, *rest)

    return algorithm._replace(
        clients=(
            Client(
                init=of_method(client.init),
                update=update,
                personalize=of_method(client.personalize),
                predict=lambda hp, personal, x: client.predict(hp.method, personal, x),
            ),
        ),
        server=Server(of_method(server.init), of_method(server.broadcast), of_method(server.update)),
    )


def _where_it_may_be_missing(private: Algorithm) -> Algorithm:
    """The private algorithm in worlds where there may be no canary: its upload is then lost, as a client's that failed
    without a mechanism to look after it, and nobody counts it."""
    (client,) = private.clients

    def update(key, hp: PrivateHyper, ctx, message, state, splits):
        state, upload, metrics = client.update(key, hp, ctx, message, state, splits)
        missing = (ctx.client_id == _CANARY) & jnp.isnan(hp.method.canary)
        total = jax.tree.map(lambda a: jnp.where(missing, jnp.nan, a), upload.total)
        return state, upload._replace(total=total, failed=None), metrics

    return private._replace(clients=(client._replace(update=update),))

r"""An audit plays the game that a privacy claim is about, with the engine's own rounds, and says what was won.

One client, the canary, has data whose gradient is the same large vector c in every step; all others' gradients are
zero, which hides it least. Of 2 K worlds, runs of one program, the canary's data are there in K, and zeros in the
others. The server starts at zero, so that its last model says what its releases had in the direction of c in all: the
score. `jaxpfl.privacy.audit` makes a lower bound on eps of the scores; a bound above the claim refutes it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

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
from jaxpfl.protocol import Algorithm, Client, Server
from jaxpfl.types import Array, PyTree

DIMENSION = 8
_CANARY, _LENGTH = 0, 100.0
_WORLDS_AT_ONCE = 2000


class Audit(NamedTuple):
    """What an audit found.

    Attributes:
      claimed: eps of the accountant at the audit's delta.
      bound: the lower bound, with its confidence and the largest that so many worlds could have shown.
      refuted: whether the bound is above the claim: then, up to the confidence, the claim is false.
      present, absent: the scores of the worlds with and without the canary's data, [K] each.
    """

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
    accountant = "rdp" if participation.name == "uniform" else "pld"  # PLD has no event of a fixed size
    claimed = plan_of(mechanism, participation, rounds=rounds, steps=steps).epsilon(delta, accountant)
    scores = [
        play(mechanism, participation, kind, rounds=rounds, steps=steps, seeds=seeds, plan=plan, behind=behind)
        for kind, seeds in ((True, range(seed, seed + worlds)), (False, range(seed + worlds, seed + 2 * worlds)))
    ]
    bound = epsilon_lower_bound(*scores, delta=delta, confidence=confidence)
    return Audit(claimed, bound, bound.epsilon > claimed, *scores)


def play(
    mechanism: Mechanism,
    participation: Participation,
    present: bool,
    *,
    rounds: int,
    steps: int,
    seeds: range,
    plan: ExecutionPlan | None = None,
    behind: Privatize = privatize,
) -> np.ndarray:
    """The scores of some worlds with, or without, the canary's data, [worlds]."""
    direction = np.ones(DIMENSION) / np.sqrt(DIMENSION)
    num_clients = participation.num_clients
    rows = np.zeros((num_clients, 1, DIMENSION))
    rows[_CANARY] = _LENGTH * direction
    labels = np.zeros(1, int)
    federation = stack_clients([(x, labels) for x in rows], test=[(x, labels) for x in rows])
    # The loss -<w, x> has the gradient -x wherever w is.
    model = Model(lambda key, x: jnp.zeros(DIMENSION), lambda w, x, key=None, train=False: (x @ w)[:, None])

    def loss(products: Array, y: Array) -> Array:
        return -products[:, 0]

    task = Task(model, (DIMENSION,), 1, loss, {"loss": loss})
    work = LocalWork(np.ones(num_clients, int), steps, 1, weighting="uniform", step_noise=mechanism.step_noise)
    method = METHODS["fedavg"]
    rates = method.hyper.replace(lr=1.0, lr_decay=1.0, weight_decay=0.0)
    world = _World(rates, float(present))
    algorithm, hp = behind(_with_canary(method.build(task, work)), world, mechanism)
    plan = plan or ExecutionPlan(clients="vmap", runs="vmap", rounds_per_call=rounds)
    simulation = Simulation(algorithm, task, federation, participation, hp, plan=plan)
    scores = []
    for start in range(seeds.start, seeds.stop, _WORLDS_AT_ONCE):
        some = range(start, min(start + _WORLDS_AT_ONCE, seeds.stop))
        state, _ = simulation.advance(simulation.init(some), rounds)
        scores.append(np.asarray(state.server.state, np.float64) @ direction)
    return np.concatenate(scores)


@struct.dataclass
class _World:
    """The method's hyper-parameters, and whether the canary's data are there (1) or zeros (0)."""

    method: Any
    present: Array | float


def _with_canary(algorithm: Algorithm) -> Algorithm:
    """The algorithm in a world of its own: the hyper-parameters say whether the canary's data are there."""
    (client,), server = algorithm.clients, algorithm.server

    def update(key, hp: _World, ctx, message, state, splits):
        here = jnp.where(ctx.client_id == _CANARY, hp.present, 1.0)
        splits = splits._replace(train=splits.train._replace(x=splits.train.x * here))
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

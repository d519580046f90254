"""Simulation of centralised training: one client holds all examples, and every client evaluates the model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np

from jaxpfl import participation, trees
from jaxpfl.engine.client_bucket import Bucket
from jaxpfl.engine.evaluate import Part, Scores
from jaxpfl.engine.execution_plan import ExecutionPlan
from jaxpfl.engine.simulation import Simulation
from jaxpfl.engine.state import RunState
from jaxpfl.models import Task
from jaxpfl.protocol import Algorithm, Gradients, Upload
from jaxpfl.types import ClientData, Federation, PyTree


class PooledSimulation(Simulation):
    """Training on the union of all clients' training examples, with the global model evaluated on each client.

    States and histories are those of a federation of one client, scores those of the m clients. The training examples
    are held once, as one client's; the test and validation examples once, by client. The broadcast must be the whole
    model: none of the m clients has a state.
    """

    def __init__(
        self,
        algorithm: Algorithm,
        task: Task,
        federation: Federation,
        hp: PyTree,
        *,
        plan: ExecutionPlan | None = None,
        unseen: Federation | None = None,
    ):
        """Place the data and prepare the programs; see `Simulation`.

        Args:
          algorithm: the method, built for one client that holds all examples.
          task: model, loss and metrics.
          federation: the stacked data of m clients.
          hp: hyper-parameters; leaves [] for all runs, or [S], one value for each run.
          plan: execution plan. One client trains on one device; the plan's devices share the evaluation.
          unseen: new clients, evaluated by `evaluate_unseen`; their training examples are not pooled.
        """
        plan = plan or ExecutionPlan()
        one, everyone, why = participation.full(1), participation.full(federation.num_clients), "one client trains"
        plan_of_one = replace(plan, devices=1)
        held = Bucket.none(one, why) if plan.client_bucket != "none" else None
        super().__init__(algorithm, task, pool(federation), one, hp, plan=plan_of_one, bucket=held)
        idle = algorithm.clients[0]._replace(
            init=lambda key, hp, ctx, message: (),
            update=lambda key, hp, ctx, message, state, splits: (state, Upload((), ()), {}),
            gradients=Gradients(lambda steps, message: 0),
        )
        self._clients = Simulation(
            algorithm._replace(clients=(idle,)),
            task,
            federation._replace(train=nobodys(federation.train)),
            everyone,
            hp,
            plan=replace(plan, client_bucket="none"),
            unseen=unseen,
        )

    def compile(self, seeds: Sequence[int], *scores: Literal["test", "validation", "unseen"]) -> None:
        """Compile the programs before they are called; see `Simulation.compile`."""
        super().compile(seeds)
        for name in scores:
            self._clients._program(name, len(seeds))

    def shared_data(self) -> Federation | None:
        """None: the pooled examples are no other simulation's."""
        return None

    def evaluate(self, state: RunState, split: Part = "test") -> Scores:
        """Evaluate every client in every run: model -> metric -> [S, m]."""
        return self._clients.evaluate(self._served(state), split)

    def evaluate_unseen(self, state: RunState, rounds: int | None = None) -> Scores:
        """Evaluate the unseen clients on their test examples: model -> metric -> [S, u]; nothing adapts."""
        return self._clients.evaluate_unseen(self._served(state), rounds)

    def personal_models(self, state: RunState) -> PyTree:
        """Every client's model, which is the same for all: leaves [S, m, ...]."""
        return self._clients.personal_models(self._served(state))

    def bytes_per_client(self) -> tuple[int, int]:
        """Zeros: no parameters are exchanged, and the cost of collecting the examples is not counted."""
        return 0, 0

    def memory(self, runs: int = 1) -> dict[str, int]:
        """As in `Simulation`; the data are the pooled examples and those for evaluation."""
        held = super().memory(runs)
        return held | {"data": held["data"] + trees.num_bytes(self._clients.federations)}

    def _served(self, state: RunState) -> RunState:
        """State of the m clients under this model."""
        shapes = self._clients._state_shapes(state.round.shape[0])
        counts = jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), shapes.counts)
        return shapes._replace(server=state.server, counts=counts, round=state.round, key=state.key)


def pool(federation: Federation) -> Federation:
    """Pool all clients' training examples, in the order of their ids, into one client of id 0.

    The result does not depend on the order of the clients in the stack or on their padding.
    """
    order = np.argsort(np.asarray(federation.client_ids))
    place, example = np.nonzero(np.asarray(federation.train.mask)[order])
    client = order[place]
    x, y = jax.tree.map(lambda a: np.asarray(a)[client, example][None], (federation.train.x, federation.train.y))
    train = ClientData(x, y, np.ones((1, len(client)), bool))
    return Federation(np.zeros(1, np.int32), train, nobodys(train), nobodys(train))


def nobodys(data: ClientData) -> ClientData:
    """The same clients without examples."""
    return jax.tree.map(lambda a: np.asarray(a)[:, :0], data)

"""Parameters of a method's models after its last round, extracted from its states.

A server may hold control variates or optimizer state beside its model, and a client two models that it mixes. Which
parameters it predicts with is known to the prediction alone, so it is run once on a task whose model records the
parameters that it is called with.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxpfl.core.types import Array, Key, PyTree
from jaxpfl.models import Task
from jaxpfl.runs.setup import Experiment
from jaxpfl.runs.stored_run import StoredRun, last_state


class Stack(NamedTuple):
    """The models of a group of clients.

    Attributes:
      client_ids: [m].
      parameters: leaves [m, ...].
      of_model: true for parameters of the run's own model; false if a client predicts with another model or several,
        and ``parameters`` is the method's personalised model as it is.
    """

    client_ids: np.ndarray
    parameters: PyTree
    of_model: bool


class LastModels:
    """Models of a method of a finished run, restored for one seed."""

    def __init__(self, run: StoredRun, experiment: Experiment, method: str, seed: int):
        self._witness = Witness(experiment.task)
        watched = experiment._replace(task=self._witness.task)
        self._client_ids = np.asarray(experiment.federation.client_ids)
        self._simulation, self._state = last_state(run, watched, method, seed)
        self._hp = jax.tree.map(lambda a: a.reshape(-1)[0], self._simulation.hp)

    @property
    def round(self) -> int:
        """Number of finished rounds."""
        return int(self._state.round[0])

    def global_model(self) -> PyTree | None:
        """Parameters of the global model; None if the method has none, or one that consists of several."""
        predict = self._simulation.algorithm.server.predict_global
        if predict is None:
            return None
        return self._witness.parameters(predict, self._hp, jax.tree.map(lambda a: a[0], self._state.server))

    def personal_models(self) -> list[Stack]:
        """Clients' models after adaptation, one stack per group of clients."""
        algorithm = self._simulation.algorithm
        models = self._simulation.personal_models(self._state)
        count = len(algorithm.clients)
        if count == 1:
            return [self._stack(0, models, self._client_ids)]
        numbers = algorithm.group_of(self._client_ids, count)
        return [self._stack(i, group, self._client_ids[numbers == i]) for i, group in enumerate(models)]

    def _stack(self, group: int, models: PyTree, client_ids: np.ndarray) -> Stack:
        predict = self._simulation.algorithm.clients[group].predict
        models = jax.tree.map(lambda a: np.asarray(a)[0, : len(client_ids)], models)
        of_model, unchanged = True, True

        def parameters(personal: PyTree) -> PyTree:
            nonlocal of_model, unchanged
            found = self._witness.parameters(predict, self._hp, personal)
            of_model = found is not None
            unchanged = found is None or found is personal
            return personal if unchanged else found

        each = jax.vmap(parameters)
        jax.eval_shape(each, models)
        # Compiled, so that the prediction itself is not computed. Most methods' models need no copy.
        return Stack(client_ids, models if unchanged else jax.jit(each)(models), of_model)


class Witness:
    """Wrapper of a task that records the parameters with which an algorithm's prediction calls the model."""

    def __init__(self, task: Task):
        self._calls: list[tuple[PyTree, Array]] = []
        self._apply = task.model.apply
        self.task = task._replace(model=task.model._replace(apply=self._watched))

    def _watched(self, params: PyTree, x: Array, key: Key | None = None, train: bool = False) -> Array:
        logits = self._apply(params, x, key=key, train=train)
        self._calls.append((params, logits))
        return logits

    def parameters(self, predict: Callable[..., Array], *args: Any) -> PyTree | None:
        """Parameters with which ``predict(*args, x)`` is the model's own output; None if it is something else.

        A mixture of several models' outputs is an example.
        """
        self._calls.clear()
        logits = predict(*args, jnp.zeros((1, *self.task.input_shape), self.task.input_dtype))
        found = [params for params, output in self._calls if output is logits]
        self._calls.clear()
        return found[0] if found else None

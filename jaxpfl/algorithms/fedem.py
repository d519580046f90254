r"""FedEM: EM for clients whose data are mixtures of k shared distributions, with proportions that differ between
clients.

Each distribution l has a model theta_l, with loss ell. In a round, client i first computes the models' responsibilities
q for its examples s = 1 ... n_i, and its mixture proportions pi. It then trains a copy w_il of every model on
mini-batches B:

.. math::
   q_{is}(l) &\propto \pi_{il} \exp(-\ell(\theta_l; x_s, y_s)), \qquad
   \pi_{il} \leftarrow \tfrac1{n_i} \sum_s q_{is}(l) \\
   w_{il} &\leftarrow w_{il} - \eta\, \nabla \operatorname{mean}_{s \in B} q_{is}(l)\, \ell(w_{il}; x_s, y_s),
   \qquad \tau \text{ times from } \theta_l \\
   \theta_l &\leftarrow \theta_l + \frac{\sum_{i \in S} n_i (w_{il} - \theta_l)}{\sum_{i \in S} n_i}

where S is the cohort. The responsibilities are fixed during the steps. The proportions are initially uniform and stay
with the client, which predicts :math:`\sum_l \pi_{il}\, p_l(y \mid x)`.

Reference: Marfoq et al. 2021, "Federated Multi-Task Learning under a Mixture of Distributions",
https://arxiv.org/abs/2108.10252.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import struct

from jaxpfl.algorithms.parts import several_models
from jaxpfl.algorithms.parts.hyper import AveragingHyper, hyper
from jaxpfl.algorithms.parts.local_work import Batch, Descent, LocalWork, gradients, run_steps
from jaxpfl.algorithms.parts.servers import increment, mean_server, with_server_optimizer
from jaxpfl.core.protocol import Algorithm, Client, ClientContext, Message, Upload
from jaxpfl.core.types import Array, ClientData, Key, Metrics, PyTree, Scalar, Splits
from jaxpfl.data import passes
from jaxpfl.models import Task
from jaxpfl.support.errors import JaxpflError


@struct.dataclass
class FedEMHyper(AveragingHyper):
    """Hyper-parameters of FedEM; the learning rate is from Ozkara et al. 2023."""

    lr: Scalar = hyper(0.2, "learning rate of the local steps", positive=True, is_rate=True)


class Mixture(NamedTuple):
    """Personalized model: the models of the components (leaves [k, ...]), and their proportions ([k])."""

    components: PyTree
    proportions: Array


def fedem(task: Task, work: LocalWork, *, components: int = 2) -> Algorithm:
    """FedEM: k models that all clients train together, and that each client mixes with its own proportions.

    In each round, a client first computes the components' responsibilities for its examples, and its mixture
    proportions. It then takes local steps on every component, with the examples weighted by the responsibilities. The
    personalized model mixes the components' predictions with the client's proportions from its last round (uniform
    before the first round). There is no global model.

    Reference: Ozkara et al. 2022, section 4, FedEM.

    Args:
      task: a classification task, or a task whose loss is a negative log-likelihood, such as the squared loss. Every
        component is a copy of the task's model.
      work: the local work in a round.
      components: number k of components, at least 2 and at most the number of clients.

    Raises:
      JaxpflError: if the number of components is out of range; if the model's initialization does not depend on the
        random key; if a classification task has fewer than two classes; or if the task is not a classification and its
        loss is not a negative log-likelihood (see `Task.mixture`).
    """
    several_models.check("fedem", "components", components, task, work)
    if not task.has_classes and task.mixture is None:
        raise JaxpflError(
            f"fedem mixes densities, but the loss of the task {task.kind!r} is not a negative log-likelihood: use the "
            "squared or the poisson loss, or a binary or multilabel task"
        )
    if task.has_classes and task.num_classes < 2:
        raise JaxpflError(f"fedem mixes class probabilities: it requires at least 2 classes, got {task.num_classes}")

    def responsibilities(models: PyTree, proportions: Array, data: ClientData) -> Array:
        """Responsibilities q of the components for each example, [n, k]; arbitrary for padding."""

        def chunk_responsibilities(x: PyTree, y: Array, valid: Array) -> Array:
            return jax.nn.softmax(jnp.log(proportions) - several_models.losses(task, models, x, y).T, axis=-1)

        return passes.each(chunk_responsibilities, data)

    def step_with(optimizer: optax.GradientTransformation):
        def loss(models: PyTree, key: Key, batch: Batch) -> Array:
            x, q = batch.x

            def component_loss(params: PyTree, q: Array) -> Array:
                return batch.mean(q * task.loss(task.model.apply(params, x, key=key, train=True), batch.y))

            return jax.vmap(component_loss, in_axes=(0, 1))(models, q).sum()

        def step(key: Key, at: Descent, batch: Batch) -> tuple[Descent, Metrics]:
            value, gradient = jax.value_and_grad(loss)(at.params, key, batch)
            gradient = work.released(key, gradient)
            return jax.vmap(lambda at, g: at.step(optimizer, g))(at, gradient), {"train_loss": value}

        return step

    def update(
        key: Key, hp: FedEMHyper, ctx: ClientContext, message: Message, proportions: Array, splits: Splits
    ) -> tuple[Array, Upload, Metrics]:
        models, data = message.shared, splits.train
        q = responsibilities(models, proportions, data)
        new = jnp.where(data.mask[:, None], q, 0).sum(axis=0) / jnp.maximum(data.size, 1)
        optimizer = work.descent(hp.lr * hp.decay(ctx.round, work.steps), hp.weight_decay)
        start = jax.vmap(partial(Descent.start, optimizer))(models)
        # ``beside`` makes each mini-batch contain the responsibilities of its examples.
        end, metrics = run_steps(work, key, ctx, data, step_with(optimizer), start, metrics=("train_loss",), beside=q)
        return new, increment(end.params, models, work.weight(data)), metrics

    def predict(hp: FedEMHyper, mixture: Mixture, x: PyTree) -> Array:
        logits = jax.vmap(lambda params: task.model.apply(params, x))(mixture.components)
        if task.mixture is not None:
            return task.mixture(mixture.proportions, logits)
        weights = mixture.proportions[:, None, None]
        return jax.nn.logsumexp(jax.nn.log_softmax(logits), b=weights, axis=0)

    client = Client(
        init=lambda key, hp, ctx, message: jnp.full(components, 1 / components),
        update=update,
        personalize=lambda key, hp, ctx, message, proportions, splits: Mixture(message.shared, proportions),
        predict=predict,
        gradients=gradients(work.steps, each=components),
    )
    server = mean_server(lambda key: several_models.init(task, key, components))
    return with_server_optimizer(Algorithm((client,), server, work.steps), work.server_optimizer)

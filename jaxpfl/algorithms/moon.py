r"""MOON: model-contrastive learning of a global model.

Local training keeps the client's features close to the global model's features, and away from the features of the
client's own previous model. A client takes tau local steps from the global model w, on mini-batches B, to minimize

.. math:: \frac1{|B|} \sum_{(x, y) \in B} \Big[ \ell(x, y) - \mu \log
   \frac{e^{\cos(z, z_\text{glob}) / T}}{e^{\cos(z, z_\text{glob}) / T} + e^{\cos(z, z_\text{prev}) / T}} \Big]

Here mu and T are hyper-parameters, z are the features of x under the model in training, z_glob the features under w,
and z_prev the features under the client's model at the end of its last round. Before a client's first round, this
previous model is the global model of round 0. In round 0 the previous model thus equals w, and the two cosines are
equal. The server averages the models, weighted by the numbers of examples.

The features are the input of the head. The paper's networks compare the outputs of a two-layer projection before the
head; add this projection to the model to reproduce the paper.

The method performs poorly if clients need different models, because all clients share one model. The method also
performs poorly with small cohorts: a client's previous model is then old, and the contrastive term, which pushes
features away from the previous model's features, gives little guidance.

Reference: Li, He and Song 2021, "Model-Contrastive Federated Learning", https://arxiv.org/abs/2103.16257.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import struct

from jaxpfl.algorithms.parts.hyper import AveragingHyper, hyper
from jaxpfl.algorithms.parts.local_work import Batch, Descent, LocalWork, gradients, run_steps
from jaxpfl.algorithms.parts.servers import averaging_server, increment, with_server_optimizer
from jaxpfl.core.protocol import Algorithm, Client, ClientContext, Message, Upload
from jaxpfl.core.types import Array, Key, Metrics, PyTree, Scalar, Splits
from jaxpfl.models import Task
from jaxpfl.models.features import halves

_SHORTEST = 1e-8
"""Lower limit on the length of a feature vector, because zero has no direction."""


@struct.dataclass
class MoonHyper(AveragingHyper):
    """Hyper-parameters of MOON; the paper tries mu in {0.1, 1, 5, 10}."""

    mu: Scalar = hyper(1.0, "weight of the contrastive term", paper=5.0)
    temperature: Scalar = hyper(0.5, "T, temperature by which the cosine similarities are divided", positive=True)


def moon(task: Task, work: LocalWork) -> Algorithm:
    """MOON: FedAvg with a contrastive term that keeps a client's features close to the global model's features.

    The global model is w, which is also every client's personalized model. Clients keep the model from the end of their
    last round.

    Raises:
      JaxpflError: if the model has no head or no body.
    """
    parts = halves("moon", task)

    def update(
        key: Key, hp: MoonHyper, ctx: ClientContext, message: Message, previous: PyTree, splits: Splits
    ) -> tuple[PyTree, Upload, Metrics]:
        w = message.shared
        optimizer = work.descent(hp.lr * hp.decay(ctx.round, work.steps), hp.weight_decay)

        def objective(params: PyTree, key: Key, batch: Batch) -> tuple[Array, Metrics]:
            z, of_global, of_previous = (parts.features(one, batch.x, key, True) for one in (params, w, previous))
            loss = batch.mean(task.loss(parts.head(params, z), batch.y))
            # softplus(b - a) = -log(e^a / (e^a + e^b)), without overflow.
            contrast = jax.nn.softplus((_cosine(z, of_previous) - _cosine(z, of_global)) / hp.temperature)
            contrast = batch.mean(contrast)
            return loss + hp.mu * contrast, {"train_loss": loss, "contrast": contrast}

        def step(key: Key, at: Descent, batch: Batch) -> tuple[Descent, Metrics]:
            gradient, metrics = jax.grad(objective, has_aux=True)(at.params, key, batch)
            return at.step(optimizer, gradient), metrics

        start = Descent.start(optimizer, w)
        end, metrics = run_steps(work, key, ctx, splits.train, step, start, metrics=("train_loss", "contrast"))
        return end.params, increment(end.params, w, work.weight(splits.train)), metrics

    client = Client(
        init=lambda key, hp, ctx, message: message.shared,
        update=update,
        personalize=lambda key, hp, ctx, message, previous, splits: message.shared,
        predict=lambda hp, params, x: task.model.apply(params, x),
        gradients=gradients(work.steps),
    )
    return with_server_optimizer(Algorithm((client,), averaging_server(task), work.steps), work.server_optimizer)


def _cosine(a: Array, b: Array) -> Array:
    """Compute the cosines [b] of corresponding rows of two arrays of features [b, F]; zero if either row is zero."""
    product = (a * b).sum(axis=1)
    squares = (a**2).sum(axis=1), (b**2).sum(axis=1)
    # The limit is applied before the square root, whose derivative at zero is infinite.
    lengths = [jnp.sqrt(jnp.maximum(square, _SHORTEST**2)) for square in squares]
    return product / (lengths[0] * lengths[1])

r"""MOON: a global model whose clients keep their features near the global model's, and away from their own last ones.

From the global w a client takes tau steps on mini-batches B of

.. math:: \frac1{|B|} \sum_{(x, y) \in B} \Big[ \ell(x, y) - \mu \log
   \frac{e^{\cos(z, z_\text{glob}) / T}}{e^{\cos(z, z_\text{glob}) / T} + e^{\cos(z, z_\text{prev}) / T}} \Big]

where z are the features of x by the model that is trained, z_glob those by w and z_prev those by the client's model at
the end of its last round. Before its first round that is the global model of round 0: w itself, with equal
similarities, for the clients of round 0 alone. The server averages with the numbers of examples as weights.

The features are the input of the head; the paper's networks have two more layers there, a projection, to be added to
the model if wanted.

It does badly where clients differ in what is right for them: one model serves all. With small cohorts the last model of
a client is old, and every direction leads away from it.

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
"""Lengths of features below it count as it: a zero has no direction."""


@struct.dataclass
class MoonHyper(AveragingHyper):
    """Hyper-parameters of MOON; the paper searches mu in {0.1, 1, 5, 10}."""

    mu: Scalar = hyper(1.0, "weight of the contrastive term", paper=5.0)
    temperature: Scalar = hyper(0.5, "T, divides the cosines", positive=True)


def moon(task: Task, work: LocalWork) -> Algorithm:
    """MOON. Models: personalised w, the same for all; global w.

    Clients keep their last models.

    Raises:
      JaxpflError: for a model without a head or without a body.
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
            # -log of the share of the first of two exponentials.
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
    """Cosine of the angle between each two rows, [b, F], [b, F] -> [b]; zero where one of them is zero."""
    product = (a * b).sum(axis=1)
    squares = (a**2).sum(axis=1), (b**2).sum(axis=1)
    # Bounded below before the root, whose derivative at zero is infinite.
    lengths = [jnp.sqrt(jnp.maximum(square, _SHORTEST**2)) for square in squares]
    return product / (lengths[0] * lengths[1])

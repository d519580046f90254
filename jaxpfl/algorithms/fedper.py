r"""FedPer: clients share the body of the model, and each has a head of its own.

Client i starts its tau steps from (phi, h_i), the server's body and its own head, and trains both together:

.. math:: (\phi_i, h_i) \leftarrow (\phi_i, h_i) - \eta \nabla f_i(\phi_i, h_i), \qquad
   \phi \leftarrow \phi + \frac{\sum_{i \in S} n_i (\phi_i - \phi)}{\sum_{i \in S} n_i}

Reference: Arivazhagan et al. 2019, "Federated Learning with Personalization Layers".
"""

from __future__ import annotations

import jax.numpy as jnp
import optax

from jaxpfl import trees
from jaxpfl.algorithms.body_and_head import sharing_bodies, splitter
from jaxpfl.algorithms.hyper import AveragingHyper
from jaxpfl.algorithms.local_work import LocalWork, sgd
from jaxpfl.models import Task
from jaxpfl.protocol import Algorithm, ClientContext, Message, Upload
from jaxpfl.types import Key, Metrics, PyTree, Splits


def fedper(task: Task, work: LocalWork) -> Algorithm:
    """FedPer: tau SGD steps on body and head together; the mean of the bodies is weighted by training examples.

    Models: personalised, the server's body with the client's own head; no global model.

    Raises:
      JaxpflError: for a model without a head, or whose head is the whole model.
    """
    split = splitter("fedper", task)

    def update(
        key: Key, hp: AveragingHyper, ctx: ClientContext, message: Message, head: PyTree, splits: Splits
    ) -> tuple[PyTree, Upload, Metrics]:
        body = message.shared
        params, metrics = sgd(
            work,
            task,
            key,
            ctx,
            splits.train,
            trees.merge(head, body),
            rate=hp.lr * hp.decay(ctx.round, work.steps),
            weight_decay=hp.weight_decay,
        )
        new_head, new_body = split(params)
        weight = splits.train.size.astype(jnp.result_type(float))
        return new_head, Upload(optax.tree.scale(weight, optax.tree.sub(new_body, body)), weight), metrics

    return sharing_bodies(task, work, split, update, work.steps)

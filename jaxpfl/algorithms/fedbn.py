r"""FedBN: FedAvg of everything but the normalisation layers, whose parameters stay with the client.

Client i's model is (mu, nu_i): mu is shared, nu_i are the scales and biases of its normalisation layers. Both are
trained on its data, and only mu travels:

.. math:: \mu \leftarrow \mu + \frac{\sum_{i \in S} n_i (w_i - \mu)}{\sum_{i \in S} n_i}, \qquad
   (w_i, \nu_i) = \text{tau SGD steps from } (\mu, \nu_i)

The paper's layers are batch normalisation, of which the running statistics stay with the client too. There are none
here (`jaxpfl.models.normalisation` says why): group and layer normalisation are computed from the example itself, and
what is the client's own is the scale and bias of each channel.

Reference: Li et al. 2021, "FedBN: Federated Learning on Non-IID Features via Local Batch Normalization".
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import optax

from jaxpfl import trees
from jaxpfl.algorithms.hyper import AveragingHyper
from jaxpfl.algorithms.local_work import LocalWork, sgd
from jaxpfl.algorithms.server_optimizer import with_server_optimizer
from jaxpfl.errors import JaxpflError
from jaxpfl.models import Task
from jaxpfl.protocol import Algorithm, Client, ClientContext, Message, Reduced, Server, ServerContext, Upload
from jaxpfl.types import Key, Metrics, PyTree, Splits


def fedbn(task: Task, work: LocalWork) -> Algorithm:
    """FedBN. Models: personalised (mu, nu_i); no global model, since mu alone is none.

    A client that has never taken part has the normalisation parameters that the model starts with.
    """
    norm = task.model.norm or (lambda path: False)
    if not jax.tree.leaves(trees.split_by_path(jax.eval_shape(task.init, jax.random.key(0)), norm)[0]):
        raise JaxpflError(
            "fedbn keeps normalisation parameters with the clients, and this model names none: "
            "take one with normalisation layers, such as mlp-ln, cnn-gn or resnet"
        )

    def own_part(params: PyTree) -> PyTree:
        return trees.split_by_path(params, norm)[0]

    def shared_part(params: PyTree) -> PyTree:
        return trees.split_by_path(params, norm)[1]

    def update(
        key: Key, hp: AveragingHyper, ctx: ClientContext, message: Message, nu: PyTree, splits: Splits
    ) -> tuple[PyTree, Upload, Metrics]:
        mu = message.shared
        rate = hp.lr * hp.decay(ctx.round, work.steps)
        params, metrics = sgd(
            work, task, key, ctx, splits.train, trees.merge(nu, mu), rate=rate, weight_decay=hp.weight_decay
        )
        examples = splits.train.size.astype(jnp.result_type(float))
        change = optax.tree.sub(shared_part(params), mu)
        return own_part(params), Upload(optax.tree.scale(examples, change), examples), metrics

    def server_update(
        key: Key, hp: AveragingHyper, ctx: ServerContext, mu: PyTree, reduced: Reduced
    ) -> tuple[PyTree, Metrics]:
        return optax.apply_updates(mu, reduced.mean()), {}

    client = Client(
        init=lambda key, hp, ctx, message: own_part(task.init(key)),
        update=update,
        personalize=lambda key, hp, ctx, message, nu, splits: trees.merge(nu, message.shared),
        predict=lambda hp, params, x: task.model.apply(params, x),
    )
    server = Server(
        init=lambda key, hp, ctx: shared_part(task.init(key)),
        broadcast=lambda key, hp, ctx, mu: Message(mu),
        update=server_update,
    )
    return with_server_optimizer(Algorithm((client,), server, work.steps), work.server_optimizer)

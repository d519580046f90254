r"""IFCA: k cluster models; each client trains the model that has the smallest loss on the client's data.

Client i of the cohort S receives all models theta_j and chooses the cluster j_i with the smallest mean loss f_i over
its training examples. It takes tau local steps from this cluster's model; the result is w_i. The server averages within
each cluster:

.. math:: j_i = \arg\min_j f_i(\theta_j), \qquad
   \theta_j \leftarrow \theta_j + \frac{\sum_{i \in S: j_i = j} (w_i - \theta_j)}{|\{i \in S: j_i = j\}|}

The model of a cluster without clients does not change. This module implements the paper's model-averaging variant. Ties
are broken in favor of the first cluster. An upload has the size of k models; the changes of all models but the chosen
one are zero.

Reference: Ghosh et al. 2020, "An Efficient Framework for Clustered Federated Learning",
https://arxiv.org/abs/2006.04088.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import optax

from jaxpfl.algorithms.parts import several_models
from jaxpfl.algorithms.parts.hyper import AveragingHyper
from jaxpfl.algorithms.parts.local_work import LocalWork, gradients, sgd
from jaxpfl.algorithms.parts.servers import mean_server, trained_part, with_server_optimizer
from jaxpfl.core.protocol import Algorithm, Client, ClientContext, Message, Upload
from jaxpfl.core.types import Array, ClientData, Key, Metrics, PyTree, Splits
from jaxpfl.models import Task
from jaxpfl.support.errors import JaxpflError


def ifca(task: Task, work: LocalWork, *, clusters: int = 2) -> Algorithm:
    """IFCA: local steps on the cluster model with the smallest training loss, then a uniform mean in each cluster.

    The personalized model is the current cluster model with the smallest loss on the client's training examples. There
    is no global model.

    Args:
      task: any task; every cluster has its own copy of the model.
      work: the local work in a round. The server optimizer must be ``sgd``, because any other optimizer could change a
        cluster without clients.
      clusters: number k of clusters, at least 2 and at most the number of clients.

    Raises:
      JaxpflError: if the number of clusters is out of range, the model's initialization does not depend on the random
        key, or the server optimizer is not ``sgd``.
    """
    several_models.check("ifca", "clusters", clusters, task, work)
    if work.server_optimizer != "sgd":
        raise JaxpflError(
            f"ifca averages each cluster separately: server_optimizer must be sgd, got {work.server_optimizer}"
        )

    def cluster_of(models: PyTree, data: ClientData) -> Array:
        means = several_models.mean_losses(task, models, data)
        # argmin would return the position of a NaN.
        return jnp.argmin(jnp.where(jnp.isnan(means), jnp.inf, means))

    def update(
        key: Key, hp: AveragingHyper, ctx: ClientContext, message: Message, state: PyTree, splits: Splits
    ) -> tuple[PyTree, Upload, Metrics]:
        cluster = cluster_of(message.shared, splits.train)
        start = several_models.pick(message.shared, cluster)
        rate = hp.lr * hp.decay(ctx.round, work.steps)
        end, metrics = sgd(work, task, key, ctx, splits.train, start, rate=rate, weight_decay=hp.weight_decay)
        chosen = jax.nn.one_hot(cluster, clusters, dtype=jnp.result_type(float))
        change = optax.tree.sub(end, start)
        total = jax.tree.map(lambda leaf: jnp.multiply.outer(chosen.astype(leaf.dtype), leaf), change)
        return state, Upload(total, chosen), metrics

    client = Client(
        init=lambda key, hp, ctx, message: (),
        update=update,
        personalize=lambda key, hp, ctx, message, state, splits: several_models.pick(
            message.shared, cluster_of(message.shared, splits.train)
        ),
        predict=lambda hp, params, x: task.model.apply(params, x),
        cluster=lambda hp, message, state, splits: cluster_of(message.shared, splits.train),
        gradients=gradients(work.steps),
    )
    server = mean_server(lambda key: several_models.init(task, key, clusters))
    algorithm = Algorithm((client,), server, work.steps, increments=trained_part(task))
    return with_server_optimizer(algorithm, work.server_optimizer)

r"""FedBN: FedAvg of all parameters except the normalization layers' parameters, which stay with the client.

Client i's model is (mu, nu_i): mu is shared, and nu_i are the scales and biases of the client's normalization layers.
Both parts are trained on the client's n_i examples. The server averages only mu, over the clients of the cohort S:

.. math:: \mu \leftarrow \mu + \frac{\sum_{i \in S} n_i (w_i - \mu)}{\sum_{i \in S} n_i}, \qquad
   (w_i, \nu_i) = \text{tau SGD steps from } (\mu, \nu_i)

The paper uses batch normalization (``cnn-bn``, ``mlp-bn``, ``resnet-bn``, or ``flax.linen.BatchNorm``). The layers'
running means and variances also stay with the client: only its local steps update them, and they are never uploaded.
Group and layer normalization have no running statistics, so with these layers only scales and biases are personal.

The method performs poorly for new clients. A new client starts with the initial statistics, mean 0 and variance 1,
until it has adapted (``adapt_rounds``). The method also performs poorly with small batches, from which the statistics
are estimated inaccurately.

Reference: Li et al. 2021, "FedBN: Federated Learning on Non-IID Features via Local Batch Normalization",
https://arxiv.org/abs/2102.07623.
"""

from __future__ import annotations

import jax

from jaxpfl.algorithms.parts.local_work import LocalWork
from jaxpfl.algorithms.parts.split_models import keeping_own_part, trained_together
from jaxpfl.core import trees
from jaxpfl.core.protocol import Algorithm
from jaxpfl.core.types import PyTree
from jaxpfl.models import Task
from jaxpfl.support.errors import JaxpflError


def fedbn(task: Task, work: LocalWork) -> Algorithm:
    """FedBN: FedAvg in which each client keeps its own normalization layers.

    The personalized model consists of mu, the parameters that all clients share, and nu_i, the client's normalization
    layers. There is no global model, because mu lacks these layers.

    New clients start with the initial normalization parameters and statistics. If the model does not name its
    normalization layers, the layers with running statistics are personal.

    Raises:
      JaxpflError: if the model has no normalization parameters.
    """
    shapes = jax.eval_shape(task.init, jax.random.key(0))
    own = _own(task, shapes)

    def split(params: PyTree) -> tuple[PyTree, PyTree]:
        return trees.split_by_path(params, own)

    if not jax.tree.leaves(split(shapes)[0]):
        raise JaxpflError(
            "fedbn keeps normalization parameters on the clients, but this model declares none: use a model with "
            "normalization layers, such as mlp-ln, cnn-gn or resnet"
        )
    return keeping_own_part(task, work, split, trained_together(task, work, split), work.steps)


def _own(task: Task, shapes: PyTree) -> trees.PathPredicate:
    """Return a predicate that is true for the leaves that stay with the client: normalization parameters and running
    statistics.
    """
    norm, statistics = task.model.norm, task.statistics
    if statistics is None:
        return norm or (lambda path: False)
    paths = jax.tree.leaves_with_path(statistics.select(shapes))
    layers = {trees.names(path)[1:-1] for path, _ in paths}  # drop the collection's name, and the leaf's own name

    def own(path: tuple[str, ...]) -> bool:
        return statistics.selects(path) or (path[:-1] in layers if norm is None else norm(path))

    return own

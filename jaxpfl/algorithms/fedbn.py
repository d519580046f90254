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

from jaxpfl import trees
from jaxpfl.algorithms.parts.local_work import LocalWork
from jaxpfl.algorithms.parts.own_part import keeping_own_part, trained_together
from jaxpfl.errors import JaxpflError
from jaxpfl.models import Task
from jaxpfl.protocol import Algorithm
from jaxpfl.types import PyTree


def fedbn(task: Task, work: LocalWork) -> Algorithm:
    """FedBN. Models: personalised (mu, nu_i); no global model, since mu alone is none.

    A client that has never taken part has the normalisation parameters that the model starts with.
    """
    norm = task.model.norm or (lambda path: False)

    def split(params: PyTree) -> tuple[PyTree, PyTree]:
        return trees.split_by_path(params, norm)

    if not jax.tree.leaves(split(jax.eval_shape(task.init, jax.random.key(0)))[0]):
        raise JaxpflError(
            "fedbn keeps normalisation parameters with the clients, and this model names none: "
            "take one with normalisation layers, such as mlp-ln, cnn-gn or resnet"
        )
    return keeping_own_part(task, work, split, trained_together(task, work, split), work.steps)

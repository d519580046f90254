r"""kNN-Per: a global model by FedAvg, interpolated with the labels of a client's nearest training examples.

The global model w has the features f and the class probabilities p_w. A client remembers the features of its training
examples. Of the k that are nearest to x, N(x), each votes for its label:

.. math:: p_\text{near}(y \mid x) = \frac{\sum_{j \in N(x)} [y_j = y] K(x, x_j)}{\sum_{j \in N(x)} K(x, x_j)}, \qquad
   K(x, x_j) = e^{-\|f(x) - f(x_j)\|^2 / (s F)}

and it predicts :math:`\lambda_i \, p_\text{near} + (1 - \lambda_i) \, p_w`. The kernel is from the authors' code, F
being the number of features; the paper has the distance itself in the exponent. The client takes the lambda_i of 0,
.1, ..., 1 with the largest likelihood of its validation examples, or, without any, of its training examples, each
without its own vote.

It does badly where a client has few examples to remember, and where the global model's features do not separate its
classes: then lambda_i is zero, and it is FedAvg. The global model has seen the training examples, so that these make a
good lambda_i look smaller than it is: set validation examples apart. Whenever it is scored, each client compares all
of its examples with each other.

Reference: Marfoq et al. 2022, "Personalized Federated Learning through Local Memorization",
https://arxiv.org/abs/2111.09360.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import struct

from jaxpfl.algorithms.fedavg import fedavg
from jaxpfl.algorithms.parts import class_means
from jaxpfl.algorithms.parts.hyper import AveragingHyper, hyper
from jaxpfl.algorithms.parts.local_work import LocalWork
from jaxpfl.core.protocol import Algorithm, ClientContext, Message
from jaxpfl.core.types import Array, ClientData, Key, PyTree, Scalar, Splits
from jaxpfl.data import passes
from jaxpfl.models import Task
from jaxpfl.models.features import halves
from jaxpfl.support.errors import JaxpflError

GRID = tuple(i / 10 for i in range(11))
"""Values of lambda_i to choose from, as in the authors' code."""


@struct.dataclass
class KnnPerHyper(AveragingHyper):
    """Hyper-parameters of kNN-Per."""

    scale: Scalar = hyper(1.0, "s, length scale of the kernel of distances", positive=True)


class Memory(NamedTuple):
    """Remembered examples of a client: features [n, F], labels [n], and [n] bool, true for real ones."""

    features: Array
    labels: Array
    valid: Array


class Personal(NamedTuple):
    """Personalised model: the global one, the remembered examples, and lambda_i, []."""

    model: PyTree
    memory: Memory
    share: Array


def knn_per(task: Task, work: LocalWork, *, neighbours: int = 10) -> Algorithm:
    """kNN-Per. Models: personalised, the interpolation; global w, by FedAvg.

    Before adaptation lambda_i is zero. The personalised model of a client holds as many features as the largest client
    has training examples.

    Args:
      task: classification; its model names its head.
      work: the local work in a round.
      neighbours: k, the examples that vote; at least 1.

    Raises:
      JaxpflError: for a task without classes, a model without a head or without a body, or fewer neighbours.
    """
    class_means.refuse_other_tasks("knn-per", "lets examples vote for classes", task)
    if neighbours < 1:
        raise JaxpflError(f"knn-per.neighbours must be >= 1, got {neighbours}")
    parts = halves("knn-per", task)

    def remembered(params: PyTree, data: ClientData) -> tuple[Memory, Array]:
        """A client's examples, and their log-probabilities by the global model, [n, K]."""

        def chunk_memory(x: PyTree, y: Array, valid: Array) -> tuple[Array, Array, Array]:
            rows = parts.features(params, x)
            return rows, y, jax.nn.log_softmax(parts.head(params, rows))

        rows, y, logs = passes.each(chunk_memory, data)
        valid = data.mask
        return Memory(jnp.where(valid[:, None], rows, 0), jnp.where(valid, y, 0), valid), logs

    def votes(hp: KnnPerHyper, memory: Memory, rows: Array, own: Array | None = None) -> Array:
        """Probabilities of the classes by the nearest examples, [b, K]; zero if there are none.

        Args:
          own: [b], for each row the place in the memory that does not vote.
        """
        squares = _squared_distances(rows, memory.features) / (hp.scale * parts.width)
        votes = jnp.broadcast_to(memory.valid, squares.shape)
        if own is not None:
            votes &= own[:, None] != jnp.arange(len(memory.valid))
        near, places = jax.lax.top_k(jnp.where(votes, -squares, -jnp.inf), min(neighbours, len(memory.valid)))
        # Relative to the nearest one's, as all may underflow; the maximum, as a slice would make XLA sort all of them.
        nearest = near.max(axis=1, keepdims=True)
        kernel = jnp.exp(near - jnp.where(jnp.isfinite(nearest), nearest, 0))
        total = (jax.nn.one_hot(memory.labels[places], task.num_classes) * kernel[..., None]).sum(axis=1)
        return total / jnp.maximum(kernel.sum(axis=1, keepdims=True), 1)

    def chosen(hp: KnnPerHyper, memory: Memory, logs: Array, params: PyTree, splits: Splits) -> Array:
        """The lambda_i of the largest likelihood, []; the smallest of equal ones."""

        def likelihoods(near: Array, logs: Array, y: Array, valid: Array) -> Array:
            of_class = jax.nn.one_hot(y, task.num_classes)
            p_near, p_model = (near * of_class).sum(axis=1), (jnp.exp(logs) * of_class).sum(axis=1)
            shares = jnp.asarray(GRID)[:, None]
            mixed = jnp.log(shares * p_near + (1 - shares) * p_model)
            return jnp.where(valid, mixed, 0).sum(axis=1)

        places = jnp.arange(len(memory.valid))
        of_train = likelihoods(votes(hp, memory, memory.features, places), logs, memory.labels, memory.valid)
        if not splits.validation.capacity:
            return jnp.asarray(GRID)[jnp.argmax(of_train)]
        apart, apart_logs = remembered(params, splits.validation)
        of_apart = likelihoods(votes(hp, memory, apart.features), apart_logs, apart.labels, apart.valid)
        return jnp.asarray(GRID)[jnp.argmax(jnp.where(splits.validation.size > 0, of_apart, of_train))]

    def personalize(
        key: Key, hp: KnnPerHyper, ctx: ClientContext, message: Message, state: PyTree, splits: Splits
    ) -> Personal:
        memory, logs = remembered(message.shared, splits.train)
        share = chosen(hp, memory, logs, message.shared, splits)
        anybody = (splits.train.size > 0) & (jnp.asarray(ctx.step_limit) > 0)
        return Personal(message.shared, memory, jnp.where(anybody, share, 0))

    def predict(hp: KnnPerHyper, personal: Personal, x: PyTree) -> Array:
        rows = parts.features(personal.model, x)
        of_model = jax.nn.softmax(parts.head(personal.model, rows))
        mixed = personal.share * votes(hp, personal.memory, rows) + (1 - personal.share) * of_model
        # A class without a vote has no probability where lambda_i is 1: its logit stays finite.
        return jnp.log(jnp.maximum(mixed, jnp.finfo(mixed.dtype).tiny))

    algorithm = fedavg(task, work)
    (client,) = algorithm.clients
    return algorithm._replace(clients=(client._replace(personalize=personalize, predict=predict),))


def _squared_distances(a: Array, b: Array) -> Array:
    """Squared distances of rows, [p, F], [n, F] -> [p, n], not negative."""
    squares = (a**2).sum(axis=1)[:, None] + (b**2).sum(axis=1) - 2 * a @ b.T
    return jnp.maximum(squares, 0)

r"""kNN-Per: FedAvg's predictions, interpolated with the labels of a client's nearest training examples.

The global model w, trained by FedAvg, has the features f and the class probabilities p_w. A client stores the features
of its training examples. The k examples N(x) that are nearest to x vote for their labels:

.. math:: p_\text{near}(y \mid x) = \frac{\sum_{j \in N(x)} [y_j = y] K(x, x_j)}{\sum_{j \in N(x)} K(x, x_j)}, \qquad
   K(x, x_j) = e^{-\|f(x) - f(x_j)\|^2 / (s F)}

The client predicts :math:`\lambda_i \, p_\text{near} + (1 - \lambda_i) \, p_w`. The kernel, with its scale s and the
number F of features, is from the authors' code; the paper has the distance, not its square, in the exponent. The client
chooses lambda_i from 0, 0.1, ..., 1 to maximize the likelihood of its validation examples. A client without validation
examples uses its training examples; an example is then left out of its own neighbors.

The method gains little over FedAvg if a client has few examples, or if the global model's features do not separate the
client's classes. lambda_i is then usually close to zero; at zero, the method is FedAvg. A lambda_i chosen on training
examples is too small, because the global model was trained on these examples. Validation examples avoid this bias. In
each evaluation, every client computes the distances between all pairs of its examples.

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
"""Candidate values of lambda_i, as in the authors' code."""


@struct.dataclass
class KnnPerHyper(AveragingHyper):
    """Hyper-parameters of kNN-Per."""

    scale: Scalar = hyper(1.0, "s, length scale of the kernel of distances", positive=True)


class Memory(NamedTuple):
    """Stored examples of a client: features [n, F], labels [n], and a mask [n] bool, true for real examples."""

    features: Array
    labels: Array
    valid: Array


class Personal(NamedTuple):
    """Personalized model: the global model, the stored examples, and the weight lambda_i of the votes, []."""

    model: PyTree
    memory: Memory
    share: Array


def knn_per(task: Task, work: LocalWork, *, neighbours: int = 10) -> Algorithm:
    """kNN-Per: FedAvg, then predictions interpolated with the votes of a client's nearest training examples.

    The personalized model is the interpolation, in which the votes have the weight lambda_i. The global model is
    FedAvg's w.

    If a client may take no steps to adapt (a step limit of 0), lambda_i is zero. Each personalized model stores as many
    feature vectors as the largest client has training examples.

    Args:
      task: a classification task, whose model declares its head.
      work: the local work in a round.
      neighbours: number k of examples that vote, at least 1.

    Raises:
      JaxpflError: if the task has no classes, the model has no head or no body, or ``neighbours`` is below one.
    """
    class_means.refuse_other_tasks("knn-per", "lets examples vote for classes", task)
    if neighbours < 1:
        raise JaxpflError(f"knn-per.neighbours must be >= 1, got {neighbours}")
    parts = halves("knn-per", task)

    def remembered(params: PyTree, data: ClientData) -> tuple[Memory, Array]:
        """Return the features and labels that a client stores, and the global model's log-probabilities, [n, K]."""

        def chunk_memory(x: PyTree, y: Array, valid: Array) -> tuple[Array, Array, Array]:
            rows = parts.features(params, x)
            return rows, y, jax.nn.log_softmax(parts.head(params, rows))

        rows, y, logs = passes.each(chunk_memory, data)
        valid = data.mask
        return Memory(jnp.where(valid[:, None], rows, 0), jnp.where(valid, y, 0), valid), logs

    def votes(hp: KnnPerHyper, memory: Memory, rows: Array, own: Array | None = None) -> Array:
        """Class probabilities from the votes of the nearest examples, [b, K]; zero if no example may vote.

        Args:
          memory: the stored examples.
          rows: features of the b examples to classify, [b, F].
          own: for each of the b examples, the position of a stored example that must not vote, [b].
        """
        squares = _squared_distances(rows, memory.features) / (hp.scale * parts.width)
        votes = jnp.broadcast_to(memory.valid, squares.shape)
        if own is not None:
            votes &= own[:, None] != jnp.arange(len(memory.valid))
        near, places = jax.lax.top_k(jnp.where(votes, -squares, -jnp.inf), min(neighbours, len(memory.valid)))
        # Kernel values are divided by the nearest example's kernel value, because all values might underflow. ``max``
        # finds the nearest example; taking the first column would make XLA sort all distances.
        nearest = near.max(axis=1, keepdims=True)
        kernel = jnp.exp(near - jnp.where(jnp.isfinite(nearest), nearest, 0))
        total = (jax.nn.one_hot(memory.labels[places], task.num_classes) * kernel[..., None]).sum(axis=1)
        return total / jnp.maximum(kernel.sum(axis=1, keepdims=True), 1)

    def chosen(hp: KnnPerHyper, memory: Memory, logs: Array, params: PyTree, splits: Splits) -> Array:
        """Choose the lambda_i with the largest likelihood of held-out labels, []; in a tie, the smallest."""

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
        # If lambda_i is 1, a class without votes has probability zero. The limit keeps its logit finite.
        return jnp.log(jnp.maximum(mixed, jnp.finfo(mixed.dtype).tiny))

    algorithm = fedavg(task, work)
    (client,) = algorithm.clients
    return algorithm._replace(clients=(client._replace(personalize=personalize, predict=predict),))


def _squared_distances(a: Array, b: Array) -> Array:
    """Non-negative squared distances, [p, n], between the p rows of a, [p, F], and the n rows of b, [n, F]."""
    squares = (a**2).sum(axis=1)[:, None] + (b**2).sum(axis=1) - 2 * a @ b.T
    return jnp.maximum(squares, 0)

r"""FedProto: clients share the mean features of their classes, and no parameters.

Client i keeps a whole model with features f_i. The mean feature of its n_ic training examples of class c is its
prototype C_ic. The server keeps :math:`\bar C_c`, the mean of these prototypes over clients. A client takes tau local
steps on the objective

.. math:: \frac1{|B|} \sum_{(x, y) \in B} \Big[ \ell(x, y) + \lambda \frac{1}{F} \|f_i(x) - \bar C_y\|^2 \Big]

over mini-batches B, where the second term is zero for a class that has no prototype yet. The client then sends C_ic and
n_ic, and the server averages:

.. math:: C_{ic} = \frac{1}{n_{ic}} \sum_{y = c} f_i(x), \qquad
   \bar C_c \leftarrow \frac{\sum_{i \in S} n_{ic} C_{ic}}{\sum_{i \in S} n_{ic}}

A class without examples in the cohort S keeps its prototype. A client predicts the class whose prototype is nearest to
the features; its logits are the negative squared distances.

As in the authors' code, the distance is computed for each example and is a mean over the F features. The paper's
regularizer compares the mean feature of a class's examples instead. In addition to the weights n_ic, the paper's mean
has a factor 1 / |S|, which would shrink the prototypes. This implementation omits the factor.

Clients with the same architecture start from the same model, as in PFLlib. The authors' code initializes each client at
random on MNIST, where all clients take part in every round. With different initializations, a feature has a different
meaning in every model, and prototypes from few clients do not align the features. With 4 of 20 clients of MNIST in a
round, random initialization reduces the accuracy by 16 percentage points.

For the same reason the method performs poorly if architectures differ and cohorts are small. The method also performs
poorly if all clients have enough examples, because clients share nothing but prototypes. Computing the prototypes takes
a pass over all training examples. This pass costs more than a few small steps.

Reference: Tan et al. 2022, "FedProto: Federated Prototype Learning across Heterogeneous Clients",
https://arxiv.org/abs/2105.00243.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import struct

from jaxpfl.algorithms.parts import class_means
from jaxpfl.algorithms.parts.hyper import SgdHyper, hyper
from jaxpfl.algorithms.parts.local_work import Batch, Descent, LocalWork, gradients, run_steps
from jaxpfl.algorithms.parts.several_models import personal_tasks
from jaxpfl.core.protocol import Algorithm, Client, ClientContext, Message, Reduced, Server, ServerContext, Upload
from jaxpfl.core.types import Array, Key, Metrics, PyTree, Scalar, Splits
from jaxpfl.models import Task
from jaxpfl.models.features import Halves, halves
from jaxpfl.support.errors import JaxpflError, unknown_name

PREDICTIONS = ("prototypes", "own-classes", "head")


@struct.dataclass
class FedProtoHyper(SgdHyper):
    """Hyper-parameters of FedProto; lambda is 1 in the paper for MNIST and FEMNIST, and 0.1 for CIFAR-10."""

    lam: Scalar = hyper(1.0, "lambda, weight of the distance of features to their class's prototype")


class Prototypes(NamedTuple):
    """State of the server, sent to all clients: prototypes of K classes [K, F], and ``known`` [K], which is 1 for a
    class that has a prototype and 0 otherwise.
    """

    means: Array
    known: Array


class Personal(NamedTuple):
    """Personalized model: the client's own model, and the prototypes used for prediction."""

    model: PyTree
    prototypes: Prototypes


def fedproto(task: Task, work: LocalWork, *, architectures: str = "", predict: str = "prototypes") -> Algorithm:
    """FedProto: clients exchange only the mean features of their classes (prototypes), and no parameters.

    The personalized model computes features with the client's own model and predicts the class of the nearest
    prototype. There is no global model.

    A class without a prototype is never predicted: its logit is one less than the logit of the farthest prototype.
    Before the first round, no class has a prototype and all logits are equal.

    Args:
      task: a classification task, whose model declares its head.
      work: the local work in a round.
      architectures: names of the clients' models joined by "+", such as ``"same+mlp:32"``. The client with id i has the
        model at index i modulo the number of names; "same" is the task's model. All models must have the same number of
        features.
      predict: prediction rule: "prototypes" for the nearest prototype; "own-classes" for the nearest prototype among
        the classes of the client's training examples, as in the authors' code; "head" for the head of the client's own
        model.

    Raises:
      JaxpflError: if the task has no classes, ``architectures`` contains an unknown model name, a model has no head or
        no body, the models have different numbers of features, the prediction rule is unknown, or examples are mixed
        (mixup).
    """
    class_means.refuse_other_tasks("fedproto", "averages features by class", task)
    work.refuse_mixing("fedproto")
    if predict not in PREDICTIONS:
        raise unknown_name("fedproto.predict", predict, PREDICTIONS)
    tasks = personal_tasks(task, architectures)
    parts = [halves("fedproto", own) for own in tasks]
    widths = sorted({part.width for part in parts})
    if len(widths) > 1:
        numbers = " and ".join(map(str, widths))
        raise JaxpflError(f"fedproto requires models with the same number of features, got {numbers}")
    clients = tuple(_client(own, part, work, predict) for own, part in zip(tasks, parts, strict=True))

    def init(key: Key, hp: FedProtoHyper, ctx: ServerContext) -> Prototypes:
        return Prototypes(jnp.zeros((task.num_classes, widths[0])), jnp.zeros(task.num_classes))

    def update(
        key: Key, hp: FedProtoHyper, ctx: ServerContext, state: Prototypes, reduced: Reduced
    ) -> tuple[Prototypes, Metrics]:
        return Prototypes(state.means + reduced.mean(), jnp.where(reduced.weight > 0, 1, state.known)), {}

    server = Server(init=init, broadcast=lambda key, hp, ctx, state: Message(state), update=update)
    return Algorithm(clients, server, work.steps)


def _client(task: Task, parts: Halves, work: LocalWork, predicts: str) -> Client:
    def update(
        key: Key, hp: FedProtoHyper, ctx: ClientContext, message: Message, own: PyTree, splits: Splits
    ) -> tuple[PyTree, Upload, Metrics]:
        prototypes: Prototypes = message.shared
        optimizer = work.descent(hp.lr * hp.decay(ctx.round, work.steps), hp.weight_decay)

        def objective(params: PyTree, key: Key, batch: Batch) -> tuple[Array, Metrics]:
            rows = parts.features(params, batch.x, key, True)
            loss = batch.mean(task.loss(parts.head(params, rows), batch.y))
            distance = batch.mean(class_means.squared_distances(rows, batch.y, *prototypes))
            return loss + hp.lam * distance, {"train_loss": loss, "prototype_distance": distance}

        def step(key: Key, at: Descent, batch: Batch) -> tuple[Descent, Metrics]:
            gradient, metrics = jax.grad(objective, has_aux=True)(at.params, key, batch)
            return at.step(optimizer, gradient), metrics

        start, names = Descent.start(optimizer, own), ("train_loss", "prototype_distance")
        end, metrics = run_steps(work, key, ctx, splits.train, step, start, metrics=names)
        means, counts = class_means.client_means(
            lambda x: parts.features(end.params, x), task.num_classes, splits.train
        )
        weight = counts if work.weighting == "examples" else (counts > 0).astype(counts.dtype)
        return end.params, Upload(weight[:, None] * (means - prototypes.means), weight), metrics

    def personalize(
        key: Key, hp: FedProtoHyper, ctx: ClientContext, message: Message, own: PyTree, splits: Splits
    ) -> Personal:
        means, known = message.shared
        if predicts == "own-classes":
            known = known * (class_means.counts(task.num_classes, splits.train) > 0)
        return Personal(own, Prototypes(means, known))

    def predict(hp: FedProtoHyper, personal: Personal, x: PyTree) -> Array:
        if predicts == "head":
            return task.model.apply(personal.model, x)
        means, known = personal.prototypes.means, personal.prototypes.known > 0
        rows = parts.features(personal.model, x)
        distances = jnp.where(known, ((rows[:, None] - means) ** 2).sum(axis=-1), 0)
        return -jnp.where(known, distances, distances.max(axis=1, keepdims=True) + 1)

    return Client(
        init=lambda key, hp, ctx, message: task.init(key),
        update=update,
        personalize=personalize,
        predict=predict,
        gradients=gradients(work.steps),
    )

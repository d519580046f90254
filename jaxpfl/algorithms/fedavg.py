r"""FedAvg, FedAvg with fine-tuning (FedAvg+) and FedProx: a global model mu, the average of locally trained models.

Client i of the cohort S, with n_i training examples, trains w_i starting from mu. The server then computes

.. math:: \mu \leftarrow \mu + \frac{\sum_{i \in S} n_i (w_i - \mu)}{\sum_{i \in S} n_i}

FedProx averages uniformly. A server optimizer treats the negative mean model update as a gradient (`parts.servers`).

References: McMahan et al. 2017, "Communication-Efficient Learning of Deep Networks from Decentralized Data",
https://arxiv.org/abs/1602.05629; Li et al. 2020, "Federated Optimization in Heterogeneous Networks",
https://arxiv.org/abs/1812.06127.
"""

from __future__ import annotations

from flax import struct

from jaxpfl.algorithms.parts.hyper import AveragingHyper, SgdHyper, hyper
from jaxpfl.algorithms.parts.local_work import LocalWork, fine_tuned, fine_tuning, fine_tuning_steps, gradients, sgd
from jaxpfl.algorithms.parts.servers import averaging_server, increment, normalized, trained_part, with_server_optimizer
from jaxpfl.core.protocol import Algorithm, Client, ClientContext, Message, Upload
from jaxpfl.core.types import Key, Metrics, PyTree, Scalar, Splits
from jaxpfl.models import Task
from jaxpfl.support.errors import JaxpflError


@struct.dataclass
class FedProxHyper(AveragingHyper):
    """Hyper-parameters of FedProx."""

    prox: Scalar = hyper(0.1, "weight of the proximal term (prox/2) |w - mu|^2")


def fedavg(task: Task, work: LocalWork, *, fednova: bool = False) -> Algorithm:
    """FedAvg: local SGD steps from the global model, then the mean weighted by the numbers of training examples.

    The global model is mu, which is also every client's personalized model.

    Args:
      task: the task; any model is supported.
      work: the local work in a round.
      fednova: whether to normalize each update by the client's number of steps (`parts.servers.normalized`).

    Raises:
      JaxpflError: if ``fednova`` is set although the client optimizer is not plain SGD or the model has running
        statistics.

    Implements: Divi et al. 2021, equation (4).
    """
    algorithm = _averaging(task, work)
    return _fednova("fedavg", algorithm, task, work) if fednova else algorithm


def fedavg_ft(
    task: Task, work: LocalWork, *, fine_tune_steps: int = 60, fine_tune_epochs: int = 0, fednova: bool = False
) -> Algorithm:
    """FedAvg+: FedAvg, followed by ``fine_tune_steps`` SGD steps on each client, starting from the global model mu.

    Fine-tuning uses the learning rate of the last round. The personalized model is mu after fine-tuning. The global
    model is mu.

    Args:
      task: the task; any model is supported.
      work: the local work in a round.
      fine_tune_steps: number of local steps for personalization.
      fine_tune_epochs: number of passes over the client's own examples, used instead of ``fine_tune_steps`` if it is
        not 0.
      fednova: whether to normalize each update by the client's number of steps, as in `fedavg`.

    Raises:
      JaxpflError: if a number of steps or epochs is negative, or under the conditions of `fedavg`.
    """
    tuning = fine_tuning("fedavg-ft", work, fine_tune_steps, fine_tune_epochs)
    algorithm = _averaging(task, work, tuning=tuning)
    return _fednova("fedavg-ft", algorithm, task, work) if fednova else algorithm


def fedprox(task: Task, work: LocalWork) -> Algorithm:
    """FedProx: local steps on ``f_i(w) + (prox/2) |w - mu|^2`` with mu fixed in the round, then the uniform mean.

    Here f_i is the client's loss, and w is the model in training. The global model is mu, which is also every client's
    personalized model.
    """
    return _averaging(task, work, proximal=True)


def _fednova(method: str, algorithm: Algorithm, task: Task, work: LocalWork) -> Algorithm:
    if task.statistics is not None:
        raise JaxpflError(f"{method}.fednova does not support BatchNorm: use a model without running statistics")
    return normalized(method, algorithm, work)


def _averaging(task: Task, work: LocalWork, *, tuning: LocalWork | None = None, proximal: bool = False) -> Algorithm:
    def update(
        key: Key, hp: SgdHyper, ctx: ClientContext, message: Message, state: PyTree, splits: Splits
    ) -> tuple[PyTree, Upload, Metrics]:
        mu, rate = message.shared, hp.lr * hp.decay(ctx.round, work.steps)
        pull = {"anchor": mu, "prox": hp.prox} if isinstance(hp, FedProxHyper) else {}
        given = (work, task, key, ctx, splits.train)
        w, metrics = sgd(*given, mu, rate=rate, weight_decay=hp.weight_decay, uploaded=True, **pull)
        # FedAvg weights clients by their examples. FedProx is analyzed for the uniform mean.
        return state, increment(w, mu, None if proximal else work.weight(splits.train)), metrics

    def personalize(
        key: Key, hp: SgdHyper, ctx: ClientContext, message: Message, state: PyTree, splits: Splits
    ) -> PyTree:
        given = (tuning, task, key, hp, ctx, splits.train)
        return fine_tuned(*given, message.shared, work.steps)

    client = Client(
        init=lambda key, hp, ctx, message: (),
        update=update,
        personalize=personalize,
        predict=lambda hp, w, x: task.model.apply(w, x),
        gradients=gradients(work.steps, personalize=fine_tuning_steps(tuning)),
    )
    algorithm = Algorithm((client,), averaging_server(task), work.steps, increments=trained_part(task))
    return with_server_optimizer(algorithm, work.server_optimizer)

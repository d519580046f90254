r"""Ditto: a global model by FedAvg, and personal models that are regularized toward it.

A client takes tau local steps from w = mu, the global model, as in FedAvg. The client then takes s steps on its
personal model v_i with mu fixed:

.. math:: v_i \leftarrow v_i - \eta_v [ \nabla f_i(v_i) + \lambda (v_i - \mu) ]

Here f_i is the client's loss, lambda is the weight of the regularization, and eta_v is the learning rate of v_i. The
client uploads w - mu. The server's mean is weighted by the numbers of examples, as in FedAvg. v_i stays with the
client.

Reference: Li, Hu, Beirami and Smith 2021, "Ditto: Fair and Robust Federated Learning Through Personalization",
https://arxiv.org/abs/2012.04221.
"""

from __future__ import annotations

from flax import struct

from jaxpfl.algorithms.parts.hyper import AveragingHyper, hyper
from jaxpfl.algorithms.parts.local_work import LocalWork, sgd, steps_within
from jaxpfl.algorithms.parts.servers import averaging_server, increment, trained_part, with_server_optimizer
from jaxpfl.core.protocol import Algorithm, Client, ClientContext, Gradients, Message, Upload
from jaxpfl.core.types import Key, Metrics, PyTree, Scalar, Splits
from jaxpfl.models import Task
from jaxpfl.support.errors import JaxpflError


@struct.dataclass
class DittoHyper(AveragingHyper):
    """Hyper-parameters of Ditto; ``lr`` is the learning rate for w, the client's copy of the global model.

    In the paper's experiments, lambda (``lam``) is 0.05, 0.1 or 0.2, and sometimes as large as 2.
    """

    lam: Scalar = hyper(0.1, "weight of the penalty (lam/2) |v - mu|^2 on the personal model v")
    lr_personal: Scalar = hyper(0.1, "learning rate of the personal model", positive=True, is_rate=True)


def ditto(task: Task, work: LocalWork, *, personal_steps: int = 0) -> Algorithm:
    """Ditto: personal models that are regularized toward a global model, which is trained by FedAvg.

    The personalized model is the client's own v_i. The global model is FedAvg's mu.

    Args:
      task: the model and its loss.
      work: the local work in a round.
      personal_steps: number s of steps on v_i in a round; 0 for as many steps as on the copy of mu, on the same
        mini-batches.

    Raises:
      JaxpflError: if ``personal_steps`` is negative.
    """
    if personal_steps < 0:
        raise JaxpflError(f"ditto.personal_steps must be >= 0, got {personal_steps}")

    def update(
        key: Key, hp: DittoHyper, ctx: ClientContext, message: Message, v: PyTree, splits: Splits
    ) -> tuple[PyTree, Upload, Metrics]:
        mu, decay = message.shared, hp.decay(ctx.round, work.steps)
        given = (work, task, key, ctx, splits.train)
        w, _ = sgd(*given, mu, rate=hp.lr * decay, weight_decay=hp.weight_decay)
        pull = {"anchor": mu, "prox": hp.lam, "steps": personal_steps or None}
        v, metrics = sgd(*given, v, rate=hp.lr_personal * decay, weight_decay=hp.weight_decay, **pull)
        return v, increment(w, mu, work.weight(splits.train)), metrics

    client = Client(
        init=lambda key, hp, ctx, message: message.shared,
        update=update,
        personalize=lambda key, hp, ctx, message, v, splits: v,
        predict=lambda hp, v, x: task.model.apply(v, x),
        gradients=Gradients(
            lambda limit, message: steps_within(work.steps, limit) + steps_within(personal_steps or work.steps, limit)
        ),
    )
    algorithm = Algorithm((client,), averaging_server(task), work.steps, increments=trained_part(task))
    return with_server_optimizer(algorithm, work.server_optimizer)

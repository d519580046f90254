r"""MR-MTL: mean-regularised multi-task learning; every client's own model, drawn to the mean of the models.

Client i takes tau steps on its own w_i, with the server's mean :math:`\bar w` fixed in the round:

.. math:: w_i \leftarrow w_i - \eta [ \nabla f_i(w_i) + \lambda (w_i - \bar w) ], \qquad
   \bar w \leftarrow \frac{1}{|S|} \sum_{i \in S} w_i

From lambda = 0, local training, to large lambda, one model, it interpolates; there is one optimum between them, which
noise of differential privacy moves to larger lambda.

It does badly with small cohorts: the mean is then over few models, each from its own last round, whereas Ditto averages
models which all start in one place.

Reference: Liu, Hu, Wu and Smith 2022, "On Privacy and Personalization in Cross-Silo Federated Learning",
https://arxiv.org/abs/2206.07902.
"""

from __future__ import annotations

from flax import struct

from jaxpfl.algorithms.parts.hyper import AveragingHyper, hyper
from jaxpfl.algorithms.parts.local_work import LocalWork, gradients, sgd
from jaxpfl.algorithms.parts.servers import averaging_server, increment, trained_part, with_server_optimizer
from jaxpfl.core.protocol import Algorithm, Client, ClientContext, Message, Upload
from jaxpfl.core.types import Key, Metrics, PyTree, Scalar, Splits
from jaxpfl.models import Task


@struct.dataclass
class MRMTLHyper(AveragingHyper):
    """Hyper-parameters of MR-MTL; the paper searches lambda between 0.0001 and 10, by data set and noise."""

    lam: Scalar = hyper(0.1, "weight of (lam/2) |w - mean|^2")


def mr_mtl(task: Task, work: LocalWork) -> Algorithm:
    """MR-MTL. Models: personalised w_i, the client's own; global, the mean of the cohort's models.

    All models start as the server's; the mean is uniform.
    """

    def update(
        key: Key, hp: MRMTLHyper, ctx: ClientContext, message: Message, own: PyTree, splits: Splits
    ) -> tuple[PyTree, Upload, Metrics]:
        rate, pull = hp.lr * hp.decay(ctx.round, work.steps), {"anchor": message.shared, "prox": hp.lam}
        new, metrics = sgd(work, task, key, ctx, splits.train, own, rate=rate, weight_decay=hp.weight_decay, **pull)
        return new, increment(new, message.shared), metrics

    client = Client(
        init=lambda key, hp, ctx, message: message.shared,
        update=update,
        personalize=lambda key, hp, ctx, message, own, splits: own,
        predict=lambda hp, params, x: task.model.apply(params, x),
        gradients=gradients(work.steps),
    )
    algorithm = Algorithm((client,), averaging_server(task), work.steps, increments=trained_part(task))
    return with_server_optimizer(algorithm, work.server_optimizer)

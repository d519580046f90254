r"""MR-MTL, mean-regularized multi-task learning: personal models that are regularized toward their mean.

Client i, with loss f_i, takes tau local steps on its own model w_i. The server's mean :math:`\bar w` over the cohort S
is fixed during the round:

.. math:: w_i \leftarrow w_i - \eta [ \nabla f_i(w_i) + \lambda (w_i - \bar w) ], \qquad
   \bar w \leftarrow \frac{1}{|S|} \sum_{i \in S} w_i

The method interpolates between local training (lambda = 0) and a single model (large lambda). The best lambda lies
between these extremes, and is larger under the noise of differential privacy.

The method performs poorly with small cohorts. The mean is then over few models, each of which continues from the
client's own model of an earlier round. In Ditto, by contrast, all models in the mean start from the same global model.

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
    """Hyper-parameters of MR-MTL; the paper tries lambda between 0.0001 and 10, for each data set and noise level."""

    lam: Scalar = hyper(0.1, "weight of the penalty (lam/2) |w - mean|^2 on the personal model w")


def mr_mtl(task: Task, work: LocalWork) -> Algorithm:
    """MR-MTL: personal models that are regularized toward their mean.

    The personalized model is the client's own w_i. The global model is the uniform mean of the cohort's models. All
    personal models are initialized with the server's model.
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

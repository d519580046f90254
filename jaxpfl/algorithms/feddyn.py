r"""FedDyn: a global model trained with dynamic regularization, which makes local and global optima agree.

The server keeps the model theta and a vector h. Client k keeps a vector g_k. Both vectors start at zero. Client k takes
tau local steps from w = theta on its loss f_k with regularization. The result is w_k. The client then updates its
vector:

.. math::
   w &\leftarrow w - \eta [ \nabla f_k(w) - g_k + \alpha (w - \theta) ], \\
   g_k &\leftarrow g_k - \alpha (w_k - \theta)

The server averages uniformly over the cohort S of the m clients:

.. math:: h \leftarrow h - \frac{\alpha}{m} \sum_{k \in S} (w_k - \theta), \qquad
   \theta \leftarrow \frac{1}{|S|} \sum_{k \in S} w_k - \frac{h}{\alpha}

so h equals the mean of g_k over all m clients, unless a client drops out after it has updated g_k. At a fixed point
every g_k is the gradient of f_k at theta, and the mean of all g_k is zero.

PFLlib regularizes with :math:`\tfrac\alpha2 \|w - \theta\|`, the norm instead of its square. The gradient of the norm
has the same length, alpha / 2, at any distance from theta. The paper and this module use the squared norm. The server's
update is the same as in PFLlib.

The method performs poorly if a round's steps do not nearly minimize the regularized loss, for example because alpha is
small or the steps are few. The sum of past model updates, :math:`-h/\alpha`, then grows faster than the g_k that should
balance it.

Reference: Acar et al. 2021, "Federated Learning Based on Dynamic Regularization", https://arxiv.org/abs/2111.04263.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import optax
from flax import struct

from jaxpfl.algorithms.parts.hyper import SgdHyper, hyper
from jaxpfl.algorithms.parts.local_work import Batch, Descent, LocalWork, gradients, loss_gradient, run_steps
from jaxpfl.algorithms.parts.servers import increment, share_of_all
from jaxpfl.core import trees
from jaxpfl.core.protocol import Algorithm, Client, ClientContext, Message, Reduced, Server, ServerContext, Upload
from jaxpfl.core.types import Key, Metrics, PyTree, Scalar, Splits
from jaxpfl.models import Task


@struct.dataclass
class FedDynHyper(SgdHyper):
    """Hyper-parameters of FedDyn; the paper tries alpha in {0.1, 0.01, 0.001}, with several epochs in a round."""

    alpha: Scalar = hyper(0.1, "weight of (alpha/2) |w - theta|^2 on the local model w", positive=True, paper=0.01)


class Regularised(NamedTuple):
    """State of the server: the model theta, and the mean h of the clients' vectors."""

    model: PyTree
    h: PyTree


def feddyn(task: Task, work: LocalWork) -> Algorithm:
    """FedDyn: a global model trained with dynamic regularization, which makes local and global optima agree.

    Every client's personalized model is the global model theta.
    """
    loss = loss_gradient(task)

    def update(
        key: Key, hp: FedDynHyper, ctx: ClientContext, message: Message, own: PyTree, splits: Splits
    ) -> tuple[PyTree, Upload, Metrics]:
        theta = message.shared
        optimizer = work.descent(hp.lr * hp.decay(ctx.round, work.steps), hp.weight_decay)

        def step(key: Key, at: Descent, batch: Batch) -> tuple[Descent, Metrics]:
            value, gradient = loss(at.params, key, batch)
            pulled = jax.tree.map(lambda d, g, w, t: d - g + hp.alpha * (w - t), gradient, own, at.params, theta)
            return at.step(optimizer, pulled), {"train_loss": value}

        start = Descent.start(optimizer, theta)
        end, metrics = run_steps(work, key, ctx, splits.train, step, start, metrics=("train_loss",))
        upload = increment(end.params, theta)
        return jax.tree.map(lambda g, change: g - hp.alpha * change, own, upload.total), upload, metrics

    def server_init(key: Key, hp: FedDynHyper, ctx: ServerContext) -> Regularised:
        model = task.init(key)
        return Regularised(model, optax.tree.zeros_like(model))

    def server_update(
        key: Key, hp: FedDynHyper, ctx: ServerContext, state: Regularised, reduced: Reduced
    ) -> tuple[Regularised, Metrics]:
        mean = reduced.mean()
        h = optax.tree.add_scale(state.h, -hp.alpha * share_of_all(reduced, ctx), mean)
        model = jax.tree.map(lambda t, change, h: t + change - h / hp.alpha, state.model, mean, h)
        # Without any upload the state must not change, although -h / alpha would still move the model.
        return trees.where(reduced.contributors > 0, Regularised(model, h), state), {}

    client = Client(
        init=lambda key, hp, ctx, message: optax.tree.zeros_like(message.shared),
        update=update,
        personalize=lambda key, hp, ctx, message, own, splits: message.shared,
        predict=lambda hp, params, x: task.model.apply(params, x),
        gradients=gradients(work.steps),
    )
    server = Server(
        init=server_init,
        broadcast=lambda key, hp, ctx, state: Message(state.model),
        update=server_update,
        predict_global=lambda hp, state, x: task.model.apply(state.model, x),
    )
    return Algorithm((client,), server, work.steps)

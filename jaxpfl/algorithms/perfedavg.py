r"""Per-FedAvg: a global initialization from which one step adapts the model to a client (meta-learning).

Client i takes tau local steps from w = mu, the global model, on its loss f_i. Each step uses two mini-batches D and D':

.. math::
   \tilde w &= w - \alpha \nabla f_i(w; D), \\
   w &\leftarrow w - \beta \, (I - \alpha \nabla^2 f_i(w; D)) \, \nabla f_i(\tilde w; D')

with the inner rate alpha and the outer rate beta (``lr``). The product with the Hessian is computed exactly, by
differentiation through the inner step; the first-order variant, which is the default, omits it. The outer step starts
from w, not from the adapted point. The personalized model is mu after one inner step on the client's TRAINING data.
Weight decay is added only to the outer gradient.

Reference: Fallah, Mokhtari and Ozdaglar 2020, "Personalized Federated Learning with Theoretical Guarantees: A
Model-Agnostic Meta-Learning Approach", https://arxiv.org/abs/2002.07948.
"""

from __future__ import annotations

import jax
import optax
from flax import struct

from jaxpfl.algorithms.parts.hyper import AveragingHyper, hyper
from jaxpfl.algorithms.parts.local_work import Batch, Descent, LocalWork, batch_loss, gradients, run_steps, train
from jaxpfl.algorithms.parts.servers import averaging_server, increment, with_server_optimizer
from jaxpfl.core.protocol import Algorithm, Client, ClientContext, Message, Upload
from jaxpfl.core.types import Array, Key, Metrics, PyTree, Scalar, Splits
from jaxpfl.models import Task
from jaxpfl.support.errors import JaxpflError


@struct.dataclass
class PerFedAvgHyper(AveragingHyper):
    """Hyper-parameters of Per-FedAvg; ``lr`` is the outer rate beta of Ozkara et al. 2023.

    With that paper's alpha = 1e-3, the method is nearly FedAvg. The default alpha was the best on held-out examples of
    three data sets (``benchmarks/defaults.py``). With an alpha of 0.03 or more, a step on one mini-batch makes some
    clients' models diverge.

    Reference: Ozkara et al. 2023, appendix K.1.
    """

    lr: Scalar = hyper(0.075, "beta, learning rate of the outer steps", positive=True, is_rate=True)
    alpha: Scalar = hyper(0.01, "learning rate of the adaptation step; not decayed", is_step=True, paper=1e-3)


def perfedavg(task: Task, work: LocalWork, *, hessian: bool = False, adapt_steps: int = 1) -> Algorithm:
    """Per-FedAvg: a global initialization mu that is trained to adapt to a client in one step (meta-learning).

    The personalized model is mu after inner steps on the client's training data. The global model is mu without these
    steps.

    Args:
      task: the model and its loss.
      work: the local work in a round; the client optimizer takes the outer steps.
      hessian: whether to include the Hessian product; false for the first-order variant.
      adapt_steps: number of inner steps, each on a mini-batch, from mu to the personalized model.

    Raises:
      JaxpflError: if ``adapt_steps`` is negative.
    """
    if adapt_steps < 0:
        raise JaxpflError(f"perfedavg.adapt_steps must be >= 0, got {adapt_steps}")
    loss = batch_loss(task)

    def update(
        key: Key, hp: PerFedAvgHyper, ctx: ClientContext, message: Message, state: PyTree, splits: Splits
    ) -> tuple[PyTree, Upload, Metrics]:
        mu = message.shared
        optimizer = work.descent(hp.lr * hp.decay(ctx.round, work.steps), hp.weight_decay)

        def after_adapting(params: PyTree, key: Key, inner: Batch, outer: Batch) -> Array:
            inner_key, outer_key = jax.random.split(key)
            gradient = jax.grad(loss)(params, inner_key, inner)
            # The first-order variant treats the gradient as constant when it differentiates the adapted point.
            gradient = gradient if hessian else jax.lax.stop_gradient(gradient)
            adapted = jax.tree.map(lambda w, g: w - hp.alpha * g, params, gradient)
            return loss(adapted, outer_key, outer)

        def step(key: Key, at: Descent, inner: Batch, outer: Batch) -> tuple[Descent, Metrics]:
            value, gradient = jax.value_and_grad(after_adapting)(at.params, key, inner, outer)
            return at.step(optimizer, gradient), {"train_loss": value}

        start = Descent.start(optimizer, mu)
        end, metrics = run_steps(work, key, ctx, splits.train, step, start, metrics=("train_loss",), batches_each=2)
        return state, increment(end.params, mu), metrics

    def personalize(
        key: Key, hp: PerFedAvgHyper, ctx: ClientContext, message: Message, state: PyTree, splits: Splits
    ) -> PyTree:
        if adapt_steps == 0:
            return message.shared
        # Inner steps are plain gradient steps, as in training, even if the client optimizer is not SGD.
        optimizer = optax.sgd(hp.alpha)
        start = Descent.start(optimizer, message.shared)
        return train(work, task, key, ctx, splits.train, optimizer, start, steps=adapt_steps)[0].params

    client = Client(
        init=lambda key, hp, ctx, message: (),
        update=update,
        personalize=personalize,
        predict=lambda hp, w, x: task.model.apply(w, x),
        # Differentiating the inner gradient, for the Hessian product, costs two more gradients.
        gradients=gradients(work.steps, each=4 if hessian else 2, personalize=adapt_steps),
    )
    return with_server_optimizer(Algorithm((client,), averaging_server(task), work.steps), work.server_optimizer)

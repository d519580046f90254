r"""pFedMe: gradient descent on the Moreau envelopes of the clients' losses.

Client i, with loss f_i, starts a round from w = mu, the global model. On each of tau mini-batches, it takes K steps on
its personal model theta, and then one step on w:

.. math::
   \theta &\leftarrow \theta - \eta_\theta [ \nabla f_i(\theta) + \lambda (\theta - w) ] \quad (K \text{ times}), \\
   w &\leftarrow w - \eta \lambda (w - \theta)

Thus theta approximates the proximal point ``argmin f_i(theta) + (lambda/2) |theta - w|^2``, and lambda (w - theta) is
the gradient of the Moreau envelope of f_i. The K steps start from the previous mini-batch's theta or, on a round's
first mini-batch, from w. The server's update is
:math:`\mu \leftarrow (1 - \beta) \mu + \beta \operatorname{mean} w_i`, where the positive rate beta is ``server_lr``.
Weight decay is added only to the gradients of theta.

Reference: Dinh, Tran and Nguyen 2020, "Personalized Federated Learning with Moreau Envelopes",
https://arxiv.org/abs/2006.08848.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import struct

from jaxpfl.algorithms.parts.hyper import AveragingHyper, hyper
from jaxpfl.algorithms.parts.local_work import Batch, Descent, LocalWork, batch_loss, gradients, run_steps
from jaxpfl.algorithms.parts.servers import averaging_server, increment, with_server_optimizer
from jaxpfl.core.protocol import Algorithm, Client, ClientContext, Message, Upload
from jaxpfl.core.types import Array, Key, Metrics, PyTree, Scalar, Splits
from jaxpfl.models import Task
from jaxpfl.support.errors import JaxpflError


@struct.dataclass
class PFedMeHyper(AveragingHyper):
    """Hyper-parameters of pFedMe, with defaults from Ozkara et al. 2023; ``lr`` is eta_theta, the learning rate of
    theta, and ``server_lr`` is beta.

    Reference: Ozkara et al. 2023, appendix K.1.
    """

    lam: Scalar = hyper(0.5, "lambda, weight of the proximal term (lam/2) |theta - w|^2", positive=True)
    lr_global: Scalar = hyper(1.0, "eta, rate of the step eta lam (w - theta) of w", positive=True, is_rate=True)


def pfedme(task: Task, work: LocalWork, *, inner_steps: int = 3) -> Algorithm:
    """pFedMe: personal models regularized toward a global model, which is trained on the losses' Moreau envelopes.

    The personalized model is theta_i, the result of the client's last inner steps. The global model is mu.

    Args:
      task: the model and its loss.
      work: the local work in a round; the client optimizer takes the steps on theta, and its state is kept during the
        round.
      inner_steps: number K of steps on theta for each mini-batch.

    Raises:
      JaxpflError: if ``inner_steps`` is below one.
    """
    if inner_steps < 1:
        raise JaxpflError(f"pfedme.inner_steps must be >= 1, got {inner_steps}")
    loss = batch_loss(task)

    def update(
        key: Key, hp: PFedMeHyper, ctx: ClientContext, message: Message, state: PyTree, splits: Splits
    ) -> tuple[PyTree, Upload, Metrics]:
        mu, decay = message.shared, hp.decay(ctx.round, work.steps)
        optimizer = work.descent(hp.lr * decay, hp.weight_decay)

        def step(key: Key, carry: tuple[Descent, PyTree], batch: Batch) -> tuple[tuple[Descent, PyTree], Metrics]:
            theta, w = carry

            def inner(nth: Array, at: tuple[Descent, Array]) -> tuple[Descent, Array]:
                theta, _ = at
                value, gradient = jax.value_and_grad(loss)(theta.params, jax.random.fold_in(key, nth), batch)
                gradient = jax.tree.map(lambda g, t, a: g + hp.lam * (t - a), gradient, theta.params, w)
                return theta.step(optimizer, gradient), value

            theta, value = jax.lax.fori_loop(0, inner_steps, inner, (theta, jnp.zeros(())))
            w = jax.tree.map(lambda a, t: a - hp.lr_global * decay * hp.lam * (a - t), w, theta.params)
            return (theta, w), {"train_loss": value}

        start = (Descent.start(optimizer, mu), mu)
        (theta, w), metrics = run_steps(work, key, ctx, splits.train, step, start, metrics=("train_loss",))
        return theta.params, increment(w, mu), metrics

    client = Client(
        init=lambda key, hp, ctx, message: message.shared,
        update=update,
        personalize=lambda key, hp, ctx, message, theta, splits: theta,
        predict=lambda hp, theta, x: task.model.apply(theta, x),
        gradients=gradients(work.steps, each=inner_steps),
    )
    return with_server_optimizer(Algorithm((client,), averaging_server(task), work.steps), work.server_optimizer)

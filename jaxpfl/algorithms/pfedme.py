r"""pFedMe: personal models by Moreau envelopes; the global model steps towards where its proximal point lies.

Client i starts a round from w = mu. Of each of the tau mini-batches it makes K steps, and then one of w:

.. math::
   \theta &\leftarrow \theta - \eta_\theta [ \nabla f_i(\theta) + \lambda (\theta - w) ] \quad (K \text{ times}), \\
   w &\leftarrow w - \eta \lambda (w - \theta)

so that theta follows ``argmin f_i(theta) + (lambda/2) |theta - w|^2``, whose distance from w is the gradient of f_i's
envelope. The first of the K steps starts from the last theta of the mini-batch before, in a round's first from w. The
server's :math:`\mu \leftarrow (1 - \beta) \mu + \beta \operatorname{mean} w_i` is averaging at the rate beta:
``server_lr`` is beta. Zero, which would freeze the server, is outside its range.

Weight decay is added to theta's gradients; w's step, which is no gradient of the data's, has none.

Reference: Dinh, Tran and Nguyen 2020, "Personalized Federated Learning with Moreau Envelopes".
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import struct

from jaxpfl.algorithms.parts.averaging import averaging_server, increment
from jaxpfl.algorithms.parts.hyper import AveragingHyper, hyper
from jaxpfl.algorithms.parts.local_work import Batch, Descent, LocalWork, batch_loss, gradients, run_steps
from jaxpfl.algorithms.parts.server_optimizer import with_server_optimizer
from jaxpfl.errors import JaxpflError
from jaxpfl.models import Task
from jaxpfl.protocol import Algorithm, Client, ClientContext, Message, Upload
from jaxpfl.types import Array, Key, Metrics, PyTree, Scalar, Splits


@struct.dataclass
class PFedMeHyper(AveragingHyper):
    """pFedMe's hyper-parameters, with the defaults of Ozkara et al. 2023; ``lr`` is the rate of theta's steps and
    ``server_lr`` is beta.

    Reference: Ozkara et al. 2023, appendix K.1.
    """

    lam: Scalar = hyper(0.5, "lambda, weight of the proximal term (lam/2) |theta - w|^2", positive=True)
    lr_global: Scalar = hyper(0.2, "eta, rate of w's step eta lam (w - theta)", positive=True, is_rate=True)


def pfedme(task: Task, work: LocalWork, *, inner_steps: int = 3) -> Algorithm:
    """pFedMe. Models: personalised theta_i, the client's last inner solution; global mu.

    Args:
      task: the model and its loss.
      work: the local work in a round; the clients' optimiser makes theta's steps, and remembers within the round.
      inner_steps: K, steps of theta on each mini-batch.
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

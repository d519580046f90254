r"""QuPeD: personal models (quantized on request) that are distilled from the global model, which is trained jointly.

A client starts a round with its personal model theta and the received global model mu. Each of the tau local steps
makes two updates, in this order:

.. math::
   \theta^+ &= \theta - \eta_1 \nabla_\theta [ CE(\theta) + \lambda_p KL(p_\mu \,\|\, p_\theta) ], \\
   \mu^+ &= \mu - \eta_3 \nabla_\mu [ CE(\mu) + \lambda_p KL(p_\mu \,\|\, p_{\theta^+}) ]

where CE is the cross-entropy, and p_mu and p_theta are the models' class probabilities on the mini-batch. Both updates
decrease the same divergence KL, weighted by lambda_p. The server averages mu uniformly. Ozkara et al. 2023 compare
AdaPeD with this method in full precision.

With ``bits`` = b, predictions in training and evaluation use quantized parameters Q(theta). Each parameter array x
becomes

.. math:: Q(x) = s \operatorname{round}(x / s), \qquad s = \max |x| / (2^{b-1} - 1)

The steps update x itself with the gradient at Q(theta) (straight-through estimator). The paper learns the quantization
values by proximal steps instead. In both versions, mu and the uploads keep full precision.

Reference: Ozkara, Singh, Data and Diggavi 2021, "QuPeD: Quantized Personalization via Distillation with Applications to
Federated Learning", https://arxiv.org/abs/2107.13892.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import struct

from jaxpfl.algorithms.parts.hyper import AveragingHyper, hyper
from jaxpfl.algorithms.parts.local_work import Batch, Descent, LocalWork, gradients, run_steps
from jaxpfl.algorithms.parts.servers import averaging_server, increment, with_server_optimizer
from jaxpfl.algorithms.parts.several_models import personal_tasks
from jaxpfl.core.protocol import Algorithm, Client, ClientContext, Message, Upload
from jaxpfl.core.types import Array, Key, Metrics, PyTree, Scalar, Splits
from jaxpfl.models import Task
from jaxpfl.priors import distillation
from jaxpfl.support.errors import JaxpflError


@struct.dataclass
class QuPeDHyper(AveragingHyper):
    """Hyper-parameters of QuPeD, with defaults from Ozkara et al. 2023; ``lr`` is the paper's eta_1, the learning rate
    of theta.

    Reference: Ozkara et al. 2023, appendix K.1.
    """

    lr_global: Scalar = hyper(0.1, "eta_3, learning rate of the copy of the global model", positive=True, is_rate=True)
    lam: Scalar = hyper(0.25, "lambda_p, weight of the divergence between the two models")


def quantize(params: PyTree, bits: int) -> PyTree:
    """Round each array x to the 2^bits - 1 multiples of ``max |x| / (2^(bits - 1) - 1)``; zeros stay zero."""
    levels = 2 ** (bits - 1) - 1

    def rounded(x: Array) -> Array:
        scale = jnp.abs(x).max() / levels
        return scale * jnp.round(x / jnp.where(scale > 0, scale, 1))

    return jax.tree.map(rounded, params)


def quped(task: Task, work: LocalWork, *, bits: int = 0, architectures: str = "") -> Algorithm:
    """QuPeD: personal models, optionally quantized, and an averaged global model, trained by mutual distillation.

    The personalized model is the client's own theta_i, quantized if ``bits`` is set. The global model is mu, the
    average of the clients' copies.

    Args:
      task: task; mu has the architecture of its model, and so does theta if ``architectures`` is empty.
      work: the local work in a round; theta and mu have separate optimizer states.
      bits: number of bits per parameter of the personalized models, 2 to 16; 0 for full precision.
      architectures: the clients' models, as in `adaped`.

    Raises:
      JaxpflError: if ``bits`` is out of range, the task defines no distance between predictions, or ``architectures``
        contains an unknown model name.
    """
    if bits and not 2 <= bits <= 16:
        raise JaxpflError(f"quped.bits must be 0 or between 2 and 16, got {bits}")
    distillation.check_task("quped", task)
    clients = tuple(_client(task, own_task, work, bits) for own_task in personal_tasks(task, architectures))
    return with_server_optimizer(Algorithm(clients, averaging_server(task), work.steps), work.server_optimizer)


def _client(task: Task, own_task: Task, work: LocalWork, bits: int) -> Client:
    """Make the client that trains theta, a model of ``own_task``, and mu, a model of ``task``."""
    own_apply = own_task.model.apply
    divergence = distillation.divergence_of(task)

    def deployed(theta: PyTree) -> PyTree:
        return quantize(theta, bits) if bits else theta

    def objective(batch: Batch, student: Array, teacher: Array, own: Array, lam: Scalar) -> tuple[Array, Array]:
        """Return two values: a model's loss plus the weighted divergence, and the loss alone. ``own`` are the model's
        logits.
        """
        loss = batch.mean(task.loss(own, batch.y))
        return loss + lam * batch.mean(divergence(teacher, student, batch.y)), loss

    def update(
        key: Key, hp: QuPeDHyper, ctx: ClientContext, message: Message, theta: PyTree, splits: Splits
    ) -> tuple[PyTree, Upload, Metrics]:
        decay = hp.decay(ctx.round, work.steps)
        of_theta, of_mu = (work.descent(rate * decay, hp.weight_decay) for rate in (hp.lr, hp.lr_global))

        def step(key: Key, carry: tuple[Descent, Descent], batch: Batch) -> tuple[tuple[Descent, Descent], Metrics]:
            theta, mu = carry

            def own_forward(params: PyTree) -> Array:
                return own_apply(params, batch.x, key=key, train=True)

            # Straight-through estimator: the gradient at the quantized parameters is used as theta's gradient.
            student, pull_theta = jax.vjp(own_forward, deployed(theta.params))
            teacher, pull_mu = jax.vjp(lambda params: task.model.apply(params, batch.x, key=key, train=True), mu.params)
            d_student, loss = jax.grad(lambda a: objective(batch, a, teacher, a, hp.lam), has_aux=True)(student)
            theta = theta.step(of_theta, pull_theta(d_student)[0])
            student = own_forward(deployed(theta.params))
            d_teacher, _ = jax.grad(lambda b: objective(batch, student, b, b, hp.lam), has_aux=True)(teacher)
            return (theta, mu.step(of_mu, pull_mu(d_teacher)[0])), {"train_loss": loss}

        start = (Descent.start(of_theta, theta), Descent.start(of_mu, message.shared))
        (new, mu), metrics = run_steps(work, key, ctx, splits.train, step, start, metrics=("train_loss",))
        return new.params, increment(mu.params, message.shared), metrics

    return Client(
        init=lambda key, hp, ctx, message: message.shared if own_task is task else own_task.init(key),
        update=update,
        personalize=lambda key, hp, ctx, message, theta, splits: deployed(theta),
        predict=lambda hp, theta, x: own_apply(theta, x),
        gradients=gradients(work.steps, each=2),
    )

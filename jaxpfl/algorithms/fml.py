r"""Federated mutual learning: mutual distillation of a personal model and a local copy of the global model.

A client starts a round with its personal model theta and the received global model mu. Each of the tau local steps
updates both models from their values before the step:

.. math::
   \theta &\leftarrow \theta - \eta \nabla_\theta [ \alpha CE(\theta) + (1 - \alpha) KL(p_\mu \,\|\, p_\theta) ], \\
   \mu &\leftarrow \mu - \eta_\mu \nabla_\mu [ \beta CE(\mu) + (1 - \beta) KL(p_\theta \,\|\, p_\mu) ]

Here p_mu and p_theta are the models' class probabilities on the mini-batch before the step, and alpha and beta are the
weights of the cross-entropy CE. In each KL, the first model is the teacher and receives no gradient. The server
averages the copies of mu uniformly. Only predictions are compared, so theta may have a different architecture from mu.

Reference: Shen et al. 2020, "Federated Mutual Learning", https://arxiv.org/abs/2006.16765.
"""

from __future__ import annotations

import jax
from flax import struct

from jaxpfl.algorithms.parts.hyper import AveragingHyper, hyper
from jaxpfl.algorithms.parts.local_work import Batch, Descent, LocalWork, gradients, run_steps
from jaxpfl.algorithms.parts.servers import averaging_server, increment, with_server_optimizer
from jaxpfl.algorithms.parts.several_models import personal_tasks
from jaxpfl.core.protocol import Algorithm, Client, ClientContext, Message, Upload
from jaxpfl.core.types import Array, Key, Metrics, PyTree, Scalar, Splits
from jaxpfl.models import Task
from jaxpfl.priors import distillation


@struct.dataclass
class FMLHyper(AveragingHyper):
    """Hyper-parameters of FML; ``lr`` is the learning rate of theta, the personal model.

    With alpha = beta = 0.25, as in Ozkara et al. 2023, distillation dominates. The defaults were the best on held-out
    examples of three data sets (``benchmarks/defaults.py``).

    Reference: Ozkara et al. 2023, appendix K.1.
    """

    lr_global: Scalar = hyper(0.1, "learning rate of the copy of the global model", positive=True, is_rate=True)
    alpha: Scalar = hyper(0.9, "weight of the data's loss in the personal model's objective", high=1.0, paper=0.25)
    beta: Scalar = hyper(0.9, "weight of the data's loss in the global model's objective", high=1.0, paper=0.25)


def fml(task: Task, work: LocalWork, *, architectures: str = "") -> Algorithm:
    """Federated mutual learning (FML): distillation between a personal model and an averaged global model.

    The personalized model is the client's own theta_i. The global model is mu, the average of the clients' copies.

    Args:
      task: task; mu has the architecture of its model, and so does theta if ``architectures`` is empty.
      work: the local work in a round; theta and mu have separate optimizer states.
      architectures: the clients' models, as in `adaped`.

    Raises:
      JaxpflError: if the task defines no distance between predictions, or ``architectures`` contains an unknown model
        name.
    """
    distillation.check_task("fml", task)
    clients = tuple(_client(task, own_task, work) for own_task in personal_tasks(task, architectures))
    return with_server_optimizer(Algorithm(clients, averaging_server(task), work.steps), work.server_optimizer)


def _client(task: Task, own_task: Task, work: LocalWork) -> Client:
    """Make the client that trains theta, a model of ``own_task``, and mu, a model of ``task``."""
    own_apply = own_task.model.apply
    divergence = distillation.divergence_of(task)

    def objective(student: Array, teacher: Array, batch: Batch, share: Scalar) -> tuple[Array, Array]:
        loss = batch.mean(task.loss(student, batch.y))
        pull = batch.mean(divergence(jax.lax.stop_gradient(teacher), student, batch.y))
        return share * loss + (1 - share) * pull, loss

    def update(
        key: Key, hp: FMLHyper, ctx: ClientContext, message: Message, theta: PyTree, splits: Splits
    ) -> tuple[PyTree, Upload, Metrics]:
        decay = hp.decay(ctx.round, work.steps)
        of_theta, of_mu = (work.descent(rate * decay, hp.weight_decay) for rate in (hp.lr, hp.lr_global))

        def step(key: Key, carry: tuple[Descent, Descent], batch: Batch) -> tuple[tuple[Descent, Descent], Metrics]:
            theta, mu = carry
            own, pull_theta = jax.vjp(lambda params: own_apply(params, batch.x, key=key, train=True), theta.params)
            common, pull_mu = jax.vjp(lambda params: task.model.apply(params, batch.x, key=key, train=True), mu.params)
            d_own, loss = jax.grad(objective, has_aux=True)(own, common, batch, hp.alpha)
            d_common, _ = jax.grad(objective, has_aux=True)(common, own, batch, hp.beta)
            carry = (theta.step(of_theta, pull_theta(d_own)[0]), mu.step(of_mu, pull_mu(d_common)[0]))
            return carry, {"train_loss": loss}

        start = (Descent.start(of_theta, theta), Descent.start(of_mu, message.shared))
        (new, mu), metrics = run_steps(work, key, ctx, splits.train, step, start, metrics=("train_loss",))
        return new.params, increment(mu.params, message.shared), metrics

    return Client(
        init=lambda key, hp, ctx, message: message.shared if own_task is task else own_task.init(key),
        update=update,
        personalize=lambda key, hp, ctx, message, theta, splits: theta,
        predict=lambda hp, theta, x: own_apply(theta, x),
        gradients=gradients(work.steps, each=2),
    )

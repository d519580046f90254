r"""AdaPeD: adaptive personalisation by distillation (Ozkara et al. 2023, Algorithm 2).

Client i minimises over its personal model theta_i, and all clients jointly over the global model mu and the scale psi,

.. math:: f_i(\theta_i) + \tfrac12 \log(2\psi) + \frac{f^{KD}(\theta_i, \mu)}{2 \psi}

with CE the cross-entropy and f^KD the mean Kullback-Leibler divergence between the two models' predictions. A large psi
means heterogeneous clients and weak regularisation of theta. Each local step, in this order:

.. math::
   \theta^+ &= \theta - \eta_1 \nabla_\theta [ CE(\theta) + f^{KD}(\theta, \mu) / (2\psi) ] \\
   \mu^+ &= \mu - \eta_2 \nabla_\mu f^{KD}(\theta^+, \mu) / (2\psi) \\
   \psi^+ &= \max(\psi - \eta_3 [ 1/(2\psi) - c f^{KD}(\theta^+, \mu^+) / (2\psi^2) ], \psi_{floor})

Weight decay is added to the gradients of theta and mu. Sampled clients start from the server's (mu, psi), keep their
own theta, and the server averages their (mu, psi) uniformly. The constant c is 5 in the paper's appendix; 1 is the
derivative itself. The main text's floor of psi is 0.5.

With unsampled clients' iterations (Algorithm 7), a client outside the cohort continues with the first of the three
steps and the last (mu, psi) that it received (initially those of round 0), for at most ``idle_rounds`` rounds in a row.
It uploads nothing. Only the logits of mu and theta are compared, so theta may have another architecture.

Another client optimizer takes its own steps on theta and mu, with an optimizer state for each; the step of psi is
unchanged. A server optimizer acts on mu only: psi is averaged, so that it stays above the floor.

Under the noise of differential privacy mu may mislead theta, while psi, itself noisy and slow to rise, does not remove
the distillation term. With ``gate``, a client weighs that term by how well mu predicts its own labels, at no privacy
cost as theta is not uploaded: a mu no better than a uniform guess does not teach. The gate is not in the paper.

With noise in every step (`StepNoise`), the gradients of mu and of psi are clipped and noised one after the other, as in
the paper, or jointly; the latter takes psi's gradient at mu before its step, as both are released at once.

Reference: Ozkara et al. 2023, "A Statistical Framework for Personalized Federated Learning and Estimation",
https://openreview.net/forum?id=FUiDMCr_W4o.
"""

from __future__ import annotations

import math
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import struct

from jaxpfl.algorithms.parts.architectures import personal_tasks
from jaxpfl.algorithms.parts.averaging import increment
from jaxpfl.algorithms.parts.hyper import AveragingHyper, hyper
from jaxpfl.algorithms.parts.local_work import Batch, Descent, LocalWork, gradients, run_steps, taken
from jaxpfl.algorithms.parts.server_optimizer import with_server_optimizer
from jaxpfl.errors import JaxpflError
from jaxpfl.models import Task
from jaxpfl.priors import distillation
from jaxpfl.priors.distillation import Shared
from jaxpfl.protocol import Algorithm, Client, ClientContext, Message, Reduced, Server, ServerContext, Upload
from jaxpfl.types import Array, Key, Metrics, PyTree, Scalar, Splits


@struct.dataclass
class AdaPeDHyper(AveragingHyper):
    """AdaPeD's hyper-parameters; ``lr`` is the paper's eta_1.

    Reference: Ozkara et al. 2023, appendix K.1.
    """

    lr_global: Scalar = hyper(0.1, "eta_2, learning rate of the global model", positive=True, is_rate=True)
    lr_psi: Scalar = hyper(0.05, "eta_3, learning rate of psi; not decayed")
    psi_init: Scalar = hyper(3.5, "psi in round 0", positive=True)
    psi_floor: Scalar = hyper(0.5, "least psi", positive=True)
    c: Scalar = hyper(5.0, "factor on the divergence in psi's step", positive=True)


class Remembering(NamedTuple):
    """State of a client with idle rounds: its model, and the last (mu, psi) that it received."""

    theta: PyTree
    received: Shared


def adaped(
    task: Task,
    work: LocalWork,
    *,
    idle_rounds: int = 0,
    architectures: str = "",
    gate: bool = False,
) -> Algorithm:
    """Adaptive personalisation by distillation. Models: personalised theta_i, the client's own; global mu, distilled.

    Implements: Ozkara et al. 2023, equation (11); Ozkara et al. 2023, Algorithm 7.

    Args:
      task: its model is mu's, and theta's unless ``architectures`` says otherwise.
      work: the local work in a round.
      idle_rounds: the most rounds in a row that a client outside the cohort trains alone (Algorithm 7); 0 for none.
        Clients then also hold a copy of mu, and a round costs the steps of all m clients.
      architectures: names of the clients' models joined by "+", such as ``"same+mlp:32"``, dealt to the clients in turn
        by their ids; "same" is the task's model. Clients with it start from mu, others from their own initialisation.
      gate: multiplies the distillation term of theta by ``max(1 - CE(mu) / log K, 0)`` on the batch, K the number of
        classes: zero where mu predicts no better than a uniform guess.

    Raises:
      JaxpflError: for a negative ``idle_rounds``, unknown models, and a gate where there are no classes.
    """
    if idle_rounds < 0:
        raise JaxpflError(f"adaped.idle_rounds must be >= 0, got {idle_rounds}")

    if gate and task.num_classes < 2:
        raise JaxpflError(
            f"adaped.gate compares with a guess among classes: at least 2 are needed, got {task.num_classes}"
        )
    own_tasks = personal_tasks(task, architectures)
    clients = tuple(_client(task, own_task, work, idles=idle_rounds > 0, gate=gate) for own_task in own_tasks)
    algorithm = Algorithm(clients, _server(task), work.steps, idle_cap=idle_rounds)
    return with_server_optimizer(algorithm, work.server_optimizer, acts_on=Shared(mu=True, psi=False))


def _client(task: Task, own_task: Task, work: LocalWork, *, idles: bool, gate: bool) -> Client:
    """Client with theta a model of ``own_task``, and mu one of ``task``."""
    own_apply = own_task.model.apply

    def kd(batch: Batch, teacher: Array, student: Array) -> Array:
        return batch.mean(distillation.divergence(teacher, student))

    def personal_objective(batch: Batch, teacher: Array, psi: Array, student: Array) -> tuple[Array, Array]:
        loss = batch.mean(task.loss(student, batch.y))
        pull = kd(batch, teacher, student) / (2 * psi)
        if gate:
            # Of a uniform guess the loss is log K.
            pull *= jnp.maximum(1 - batch.mean(task.loss(teacher, batch.y)) / math.log(task.num_classes), 0)
        return loss + pull, loss

    def descend_theta(
        optimizer: optax.GradientTransformation, key: Key, theta: Descent, batch: Batch, teacher: Array, psi: Array
    ) -> tuple[Descent, Array]:
        """One step of theta on its data and the teacher's logits, and the loss on the data."""
        student, pull_theta = jax.vjp(lambda params: own_apply(params, batch.x, key=key, train=True), theta.params)
        d_student, loss = jax.grad(partial(personal_objective, batch, teacher, psi), has_aux=True)(student)
        return theta.step(optimizer, pull_theta(d_student)[0]), loss

    def step_with(of_theta: optax.GradientTransformation, of_mu: optax.GradientTransformation, hp: AdaPeDHyper):
        def step(
            key: Key, carry: tuple[Descent, Descent, Array], batch: Batch
        ) -> tuple[tuple[Descent, Descent, Array], Metrics]:
            theta, mu, psi = carry

            def forward(params: PyTree) -> Array:
                return task.model.apply(params, batch.x, key=key, train=True)

            # Three gradients share their forward passes: theta and mu once each, then theta+, then mu+. The gradient
            # of mu at theta+ reuses mu's own pass. (XLA merges the repeated passes of three jax.grad calls as well,
            # to the same program on a CPU; here nothing depends on its doing so.)
            teacher, pull_mu = jax.vjp(forward, mu.params)
            theta, loss = descend_theta(of_theta, key, theta, batch, teacher, psi)
            student = own_apply(theta.params, batch.x, key=key, train=True)

            d_teacher = jax.grad(lambda b: kd(batch, b, student) / (2 * psi))(teacher)
            h = pull_mu(d_teacher)[0]
            if work.step_noise is not None and work.step_noise.joint:
                f = kd(batch, teacher, student)
                h, k = work.released(key, (h, distillation.scale_gradient(psi, f, hp.c)))
                mu = mu.step(of_mu, h)
            else:
                mu = mu.step(of_mu, work.released(key, h))
                f = kd(batch, forward(mu.params), student)
                k = distillation.scale_gradient(psi, f, hp.c)
                k = k if work.step_noise is None else work.step_noise.of_scale(key, k)
            psi = jnp.maximum(psi - hp.lr_psi * k, hp.psi_floor)
            return (theta, mu, psi), {"train_loss": loss, "divergence": f}

        return step

    def update(
        key: Key, hp: AdaPeDHyper, ctx: ClientContext, message: Message, state: PyTree, splits: Splits
    ) -> tuple[PyTree, Upload, Metrics]:
        decay = hp.decay(ctx.round, work.steps)
        of_theta, of_mu = (work.descent(rate * decay, hp.weight_decay) for rate in (hp.lr, hp.lr_global))
        received: Shared = message.shared
        carry = (Descent.start(of_theta, theta_of(state)), Descent.start(of_mu, received.mu), received.psi)
        step = step_with(of_theta, of_mu, hp)
        (theta, mu, psi), metrics = run_steps(
            work, key, ctx, splits.train, step, carry, metrics=("train_loss", "divergence")
        )
        return state_of(theta.params, received), increment(Shared(mu.params, psi), received), metrics

    def idle(
        key: Key, hp: AdaPeDHyper, ctx: ClientContext, state: Remembering, splits: Splits
    ) -> tuple[Remembering, Metrics]:
        of_theta = work.descent(hp.lr * hp.decay(ctx.round, work.steps), hp.weight_decay)
        mu, psi = state.received

        def step(key: Key, theta: Descent, batch: Batch) -> tuple[Descent, Metrics]:
            teacher = task.model.apply(mu, batch.x, key=key, train=True)
            theta, loss = descend_theta(of_theta, key, theta, batch, teacher, psi)
            return theta, {"train_loss": loss}

        start = Descent.start(of_theta, state.theta)
        theta, metrics = run_steps(work, key, ctx, splits.train, step, start, metrics=("train_loss",))
        return state._replace(theta=theta.params), metrics

    def init(key: Key, hp: AdaPeDHyper, ctx: ClientContext, message: Message) -> PyTree:
        received: Shared = message.shared
        return state_of(received.mu if own_task is task else own_task.init(key), received)

    def theta_of(state: PyTree) -> PyTree:
        return state.theta if idles else state

    def state_of(theta: PyTree, received: Shared) -> PyTree:
        return Remembering(theta, received) if idles else theta

    return Client(
        init=init,
        update=update,
        personalize=lambda key, hp, ctx, message, state, splits: theta_of(state),
        predict=lambda hp, theta, x: own_apply(theta, x),
        idle=idle if idles else None,
        gradients=gradients(work.steps, each=2)._replace(idle=lambda limit: taken(work.steps, limit)),
    )


def _server(task: Task) -> Server:
    def server_init(key: Key, hp: AdaPeDHyper, ctx: ServerContext) -> Shared:
        return Shared(task.init(key), jnp.asarray(hp.psi_init, jnp.result_type(float)))

    def server_update(
        key: Key, hp: AdaPeDHyper, ctx: ServerContext, state: Shared, reduced: Reduced
    ) -> tuple[Shared, Metrics]:
        change: Shared = reduced.mean()
        # A mean of values above the floor is above it; one with the noise of a private sum may not be.
        psi = jnp.maximum(state.psi + change.psi, hp.psi_floor)
        state = Shared(optax.apply_updates(state.mu, change.mu), psi)
        return state, {"psi": state.psi}

    return Server(
        init=server_init,
        broadcast=lambda key, hp, ctx, state: Message(state),
        update=server_update,
        predict_global=lambda hp, state, x: task.model.apply(state.mu, x),
    )

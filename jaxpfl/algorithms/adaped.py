r"""AdaPeD: adaptive personalisation through distillation (Ozkara et al. 2023, Algorithm 2).

Client i minimises over its personal model theta, and all clients together over the global mu and the scale psi,

.. math:: f_i(\theta_i) + \tfrac12 \log(2\psi) + \frac{f^{KD}(\theta_i, \mu)}{2 \psi}

A large psi means clients that differ: theta is then left to its own data. Each local step, in this order:

.. math::
   \theta^+ &= \theta - \eta_1 \nabla_\theta [ CE(\theta) + f^{KD}(\theta, \mu) / (2\psi) ] \\
   \mu^+ &= \mu - \eta_2 \nabla_\mu f^{KD}(\theta^+, \mu) / (2\psi) \\
   \psi^+ &= \max(\psi - \eta_3 [ 1/(2\psi) - c f^{KD}(\theta^+, \mu^+) / (2\psi^2) ], \psi_{floor})

Weight decay is added to the gradients of theta and mu. Sampled clients start from the server's (mu, psi), keep their
own theta, and the server averages their (mu, psi) uniformly. c = 5 is the constant of the paper's appendix; 1 is the
plain derivative. The main text's floor is 0.5.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import struct

from jaxpfl.algorithms.hyper import SgdHyper, hyper
from jaxpfl.algorithms.local_work import Batch, LocalWork, descend, run_steps
from jaxpfl.models import Task
from jaxpfl.priors import distillation
from jaxpfl.protocol import Algorithm, Client, ClientContext, Message, Reduced, Server, ServerContext, Upload
from jaxpfl.types import Array, Key, Metrics, PyTree, Scalar, Splits


@struct.dataclass
class AdaPeDHyper(SgdHyper):
    """AdaPeD's hyper-parameters; ``lr`` is the paper's eta_1."""

    lr_global: Scalar = hyper(0.1, "eta_2, learning rate of the global model", positive=True, is_rate=True)
    lr_psi: Scalar = hyper(0.05, "eta_3, learning rate of psi; not decayed")
    psi_init: Scalar = hyper(3.5, "psi in round 0", positive=True)
    psi_floor: Scalar = hyper(0.5, "least psi", positive=True)
    c: Scalar = hyper(5.0, "factor on the divergence in psi's step", positive=True)


class Shared(NamedTuple):
    """What the server keeps and sends: the global model's parameters, and psi, []."""

    mu: PyTree
    psi: Array


def adaped(task: Task, work: LocalWork) -> Algorithm:
    """AdaPeD (Algorithm 2). Models: personalised theta_i, the client's own; global mu, trained by distillation only."""

    def step_from(rates: tuple[Scalar, Scalar], hp: AdaPeDHyper):
        eta1, eta2 = rates

        def step(
            key: Key, carry: tuple[PyTree, PyTree, Array], batch: Batch
        ) -> tuple[tuple[PyTree, PyTree, Array], Metrics]:
            theta, mu, psi = carry

            def forward(params: PyTree) -> Array:
                return task.model.apply(params, batch.x, key=key, train=True)

            def kd(teacher: Array, student: Array) -> Array:
                return batch.mean(distillation.divergence(teacher, student))

            def personal_objective(student: Array) -> tuple[Array, Array]:
                loss = batch.mean(task.loss(student, batch.y))
                return loss + kd(teacher, student) / (2 * psi), loss

            # Three gradients share their forward passes: theta and mu once each, then theta+, then mu+. The gradient
            # of mu at theta+ reuses mu's own pass. (XLA merges the repeated passes of three jax.grad calls as well,
            # to the same program on a CPU; here nothing depends on its doing so.)
            student, pull_theta = jax.vjp(forward, theta)
            teacher, pull_mu = jax.vjp(forward, mu)
            d_student, loss = jax.grad(personal_objective, has_aux=True)(student)
            theta = descend(theta, pull_theta(d_student)[0], eta1, hp.weight_decay)

            student = forward(theta)
            d_teacher = jax.grad(lambda b: kd(b, student) / (2 * psi))(teacher)
            mu = descend(mu, pull_mu(d_teacher)[0], eta2, hp.weight_decay)

            f = kd(forward(mu), student)
            psi = jnp.maximum(psi - hp.lr_psi * distillation.scale_gradient(psi, f, hp.c), hp.psi_floor)
            return (theta, mu, psi), {"train_loss": loss, "divergence": f}

        return step

    def update(
        key: Key, hp: AdaPeDHyper, ctx: ClientContext, message: Message, theta: PyTree, splits: Splits
    ) -> tuple[PyTree, Upload, Metrics]:
        decay = hp.decay(ctx.round, work.steps)
        step = step_from((hp.lr * decay, hp.lr_global * decay), hp)
        received: Shared = message.shared
        carry = (theta, received.mu, received.psi)
        (theta, mu, psi), metrics = run_steps(
            work, key, ctx, splits.train, step, carry, metrics=("train_loss", "divergence")
        )
        change = optax.tree.sub(Shared(mu, psi), received)
        return theta, Upload(change, jnp.ones(())), metrics

    def server_init(key: Key, hp: AdaPeDHyper, ctx: ServerContext) -> Shared:
        return Shared(task.init(key), jnp.asarray(hp.psi_init, jnp.result_type(float)))

    def server_update(
        key: Key, hp: AdaPeDHyper, ctx: ServerContext, state: Shared, reduced: Reduced
    ) -> tuple[Shared, Metrics]:
        change: Shared = reduced.mean()
        state = Shared(optax.apply_updates(state.mu, change.mu), state.psi + change.psi)
        return state, {"psi": state.psi}

    client = Client(
        init=lambda key, hp, ctx, message: message.shared.mu,
        update=update,
        personalize=lambda key, hp, ctx, message, theta, splits: theta,
        predict=lambda hp, theta, x: task.model.apply(theta, x),
    )
    server = Server(
        init=server_init,
        broadcast=lambda key, hp, ctx, state: Message(state),
        update=server_update,
        predict_global=lambda hp, state, x: task.model.apply(state.mu, x),
    )
    return Algorithm((client,), server, work.steps)

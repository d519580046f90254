"""Local steps and server for mutual distillation between a personal model theta and a global model mu.

The methods `adaped` and `adaped_plus` use these steps. The distillation term in the loss has the weight 1 / (2 psi),
where the scale psi is learned. In `adaped`, the loss terms have the paper's weights; `adaped_plus` has options for
other weights.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import struct

from jaxpfl.algorithms.parts.hyper import AveragingHyper, hyper
from jaxpfl.algorithms.parts.local_work import Batch, Descent, LocalWork, Step, run_steps
from jaxpfl.core.protocol import ClientContext, Message, Reduced, Server, ServerContext
from jaxpfl.core.types import Array, ClientData, Key, Metrics, PyTree, Scalar
from jaxpfl.models import Task
from jaxpfl.priors import distillation
from jaxpfl.priors.distillation import Shared
from jaxpfl.support.errors import JaxpflError


@struct.dataclass
class AdaPeDHyper(AveragingHyper):
    """Hyper-parameters of AdaPeD; ``lr`` is the paper's eta_1, the learning rate of theta.

    Reference: Ozkara et al. 2023, appendix K.1.
    """

    lr_global: Scalar = hyper(0.1, "eta_2, learning rate of the global model", positive=True, is_rate=True)
    lr_psi: Scalar = hyper(0.05, "eta_3, learning rate of psi; not decayed", is_step=True)
    psi_init: Scalar = hyper(3.5, "initial psi, the clients' spread; larger values distill less", positive=True)
    psi_floor: Scalar = hyper(0.5, "smallest psi", positive=True)
    c: Scalar = hyper(5.0, "factor on the divergence in psi's step", positive=True)


Weigh = Callable[[Array], Array]
"""Function from psi to a factor [] by which theta's whole gradient is multiplied."""

TeacherLoss = Callable[[Batch, Array, Array, Array], Array]
"""Objective of mu in a step: function ``(batch, logits of mu, logits of theta, psi) -> []``."""


class Distilled(NamedTuple):
    """Mutual distillation steps on a personal model theta and a global model mu, on a client's mini-batches.

    Attributes:
      task: task with the model of mu.
      own_task: task with the model of theta.
      work: the local work in a round.
      gate: whether to multiply the distillation term of theta by ``max(1 - CE(mu) / log K, 0)`` on the batch, with K
        classes. The factor is zero if mu predicts no better than a uniform guess.
      weigh: function from psi to a factor by which theta's whole gradient is multiplied; None for 1.
    """

    task: Task
    own_task: Task
    work: LocalWork
    gate: bool = False
    weigh: Weigh | None = None

    def kd(self, batch: Batch, teacher: Array, student: Array) -> Array:
        """Mean divergence f between the predictions of teacher and student, computed from their logits, []."""
        return batch.mean(distillation.divergence_of(self.task)(teacher, student, batch.y))

    def kd_pull(self, batch: Batch, teacher: Array, student: Array, psi: Array) -> Array:
        """Distillation term ``f / (2 psi)`` with the divergence f, []. In AdaPeD, it is the whole objective of mu."""
        return self.kd(batch, teacher, student) / (2 * psi)

    def descend_theta(
        self,
        optimizer: optax.GradientTransformation,
        key: Key,
        theta: Descent,
        batch: Batch,
        teacher: Array,
        psi: Array,
    ) -> tuple[Descent, Array]:
        """Take one step on theta, given the teacher's logits on the batch; return theta and the loss on the batch."""
        apply = self.own_task.model.apply
        student, pull_theta = jax.vjp(lambda params: apply(params, batch.x, key=key, train=True), theta.params)
        d_student, loss = jax.grad(partial(self._personal_objective, batch, teacher, psi), has_aux=True)(student)
        if self.weigh is not None:
            d_student *= self.weigh(psi)
        return theta.step(optimizer, pull_theta(d_student)[0]), loss

    def _personal_objective(self, batch: Batch, teacher: Array, psi: Array, student: Array) -> tuple[Array, Array]:
        loss = batch.mean(self.task.loss(student, batch.y))
        pull = self.kd_pull(batch, teacher, student, psi)
        if self.gate:
            # The cross-entropy of a uniform guess is log K.
            pull *= jnp.maximum(1 - batch.mean(self.task.loss(teacher, batch.y)) / math.log(self.task.num_classes), 0)
        return loss + pull, loss

    def step(
        self,
        of_theta: optax.GradientTransformation,
        of_mu: optax.GradientTransformation,
        hp: AdaPeDHyper,
        teacher_loss: TeacherLoss,
        seen: Callable[[Array], Array] = lambda psi: psi,
    ) -> Step:
        """Return the local-step function, which updates theta, then mu given the new theta, then the scale psi.

        The update of psi uses the new theta and the new mu. If noise is added to the gradients of mu and psi jointly
        (``step_noise.joint``), it uses the old mu.

        Args:
          of_theta, of_mu: optimizers of theta and mu.
          hp: hyper-parameters, which give the constant c, the rate eta_3 and the floor for the step on psi.
          teacher_loss: objective of mu.
          seen: function from psi to the scale used in the updates of theta and mu; the update of psi uses psi itself.
        """
        work = self.work

        def step(
            key: Key, carry: tuple[Descent, Descent, Array], batch: Batch
        ) -> tuple[tuple[Descent, Descent, Array], Metrics]:
            theta, mu, psi = carry

            def forward(params: PyTree) -> Array:
                return self.task.model.apply(params, batch.x, key=key, train=True)

            # The three gradients share forward passes: one pass for each of theta, mu, theta+ and mu+. The gradient of
            # mu at theta+ reuses the pass of mu. (With three calls of jax.grad, XLA on a CPU would merge the repeated
            # passes into the same program, but this code does not rely on that.)
            teacher, pull_mu = jax.vjp(forward, mu.params)
            theta, loss = self.descend_theta(of_theta, key, theta, batch, teacher, seen(psi))
            student = self.own_task.model.apply(theta.params, batch.x, key=key, train=True)

            d_teacher = jax.grad(lambda b: teacher_loss(batch, b, student, seen(psi)))(teacher)
            h = pull_mu(d_teacher)[0]
            if work.step_noise is not None and work.step_noise.joint:
                f = self.kd(batch, teacher, student)
                h, k = work.released(key, (h, distillation.scale_gradient(psi, f, hp.c)))
                mu = mu.step(of_mu, h)
            else:
                mu = mu.step(of_mu, work.released(key, h))
                f = self.kd(batch, forward(mu.params), student)
                k = distillation.scale_gradient(psi, f, hp.c)
                k = k if work.step_noise is None else work.step_noise.release_scale(key, k)
            psi = jnp.maximum(psi - hp.lr_psi * k, hp.psi_floor)
            return (theta, mu, psi), {"train_loss": loss, "divergence": f}

        return step

    def alone(
        self,
        key: Key,
        hp: AdaPeDHyper,
        ctx: ClientContext,
        data: ClientData,
        theta: PyTree,
        gamma: Shared,
        *,
        rate: Scalar,
        steps: int | None = None,
        seen: Callable[[Array], Array] = lambda psi: psi,
        estimates: bool = False,
    ) -> tuple[PyTree, Metrics]:
        """Train theta for several steps with mu fixed.

        Args:
          key, hp, ctx, data: arguments of the client's functions and of `run_steps`.
          theta: the parameters before the first step.
          gamma: `Shared` with mu, which stays fixed, and the initial psi.
          rate: the learning rate eta_1 after decay.
          steps: number of steps on theta; None for the number of local steps in a round.
          seen: function from psi to the scale used in the updates of theta, as in `step`.
          estimates: whether each step on theta is followed by a step on psi; otherwise psi is fixed.

        Returns:
          The parameters after the last step, and the metrics.
        """
        of_theta = self.work.descent(rate, hp.weight_decay)

        def step(key: Key, carry: tuple[Descent, Array], batch: Batch) -> tuple[tuple[Descent, Array], Metrics]:
            theta, psi = carry
            teacher = self.task.model.apply(gamma.mu, batch.x, key=key, train=True)
            theta, loss = self.descend_theta(of_theta, key, theta, batch, teacher, seen(psi))
            if estimates:
                student = self.own_task.model.apply(theta.params, batch.x, key=key, train=True)
                k = distillation.scale_gradient(psi, self.kd(batch, teacher, student), hp.c)
                psi = jnp.maximum(psi - hp.lr_psi * k, hp.psi_floor)
            return (theta, psi), {"train_loss": loss}

        start = (Descent.start(of_theta, theta), gamma.psi)
        (end, _), metrics = run_steps(self.work, key, ctx, data, step, start, metrics=("train_loss",), steps=steps)
        return end.params, metrics


def check_options(method: str, task: Task, idle_rounds: int, gate: bool) -> None:
    """Check the options that AdaPeD and AdaPeD-plus share.

    Raises:
      JaxpflError: if ``idle_rounds`` is negative, the task defines no distance between predictions, or ``gate`` is set
        for a task with fewer than two classes.
    """
    if idle_rounds < 0:
        raise JaxpflError(f"{method}.idle_rounds must be >= 0, got {idle_rounds}")
    distillation.check_task(method, task)
    if gate and not (task.has_classes and task.num_classes >= 2):
        found = task.num_classes if task.has_classes else f"the task {task.kind!r}"
        raise JaxpflError(f"{method}.gate requires a task with at least 2 classes, got {found}")


def shared_server(task: Task) -> Server:
    """Make the server with state `Shared`, which averages the cohort's global models mu and scales psi."""

    def server_init(key: Key, hp: AdaPeDHyper, ctx: ServerContext) -> Shared:
        return Shared(task.init(key), jnp.asarray(hp.psi_init, jnp.result_type(float)))

    def server_update(
        key: Key, hp: AdaPeDHyper, ctx: ServerContext, state: Shared, reduced: Reduced
    ) -> tuple[Shared, Metrics]:
        change: Shared = reduced.mean()
        # The mean of values above the floor is above the floor, but the noise of a private sum can lower it.
        psi = jnp.maximum(state.psi + change.psi, hp.psi_floor)
        state = Shared(optax.apply_updates(state.mu, change.mu), psi)
        return state, {"psi": state.psi}

    return Server(
        init=server_init,
        broadcast=lambda key, hp, ctx, state: Message(state),
        update=server_update,
        predict_global=lambda hp, state, x: task.model.apply(state.mu, x),
    )

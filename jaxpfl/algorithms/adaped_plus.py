r"""AdaPeD-plus: AdaPeD whose global model learns from labels, and whose personal models are made from it.

A variant of `adaped`, with each of its ingredients an option; the paper has none of them. In the notation of `adaped`
(theta_i personal, mu global, CE the cross-entropy, f the mean Kullback-Leibler divergence of theta's predictions from
mu's), each local step of a client in the cohort is, in this order,

.. math::
   \theta^+ &= \theta - \eta_1 a \nabla_\theta [ CE(\theta) + g f(\theta, \mu) / (2\tilde\psi) ] \\
   \mu^+ &= \mu - \eta_2 \nabla_\mu [ \kappa CE(\mu) + \delta f(\theta^+, \mu) / (2\tilde\psi) ] \\
   \psi^+ &= \max(\psi - \eta_3 [ 1/(2\psi) - c f(\theta^+, \mu^+) / (2\psi^2) ], \psi_{floor})

with the scale that the steps see :math:`\tilde\psi = \psi \cdot anneal^{epoch}`, the gate g and the factor a below. The
server averages mu and psi, weighted by examples. Distillation alone (kappa = 0, delta = 1, as in AdaPeD) starves mu:
it learns labels from personal models only, each of which saw one client's examples. With kappa = 1, delta = 0, the
defaults, mu is FedAvg's.

By default a client keeps no model (``keep=False``): in its rounds theta is mu, so that the divergence vanishes and the
step moves mu alone: one gradient instead of two. Its personal model is made when it is needed: from theta = mu,
``fine_tune_steps`` of the first step beside the resting mu, at eta_1 of the last round. That is fine-tuned FedAvg
regularised towards the global model's predictions, or, in the terms of the paper, a descent on the posterior of theta_i
under AdaPeD's prior with mu estimated beforehand. With ``keep=True``, theta_i stays with the client and is trained in
every round, as in AdaPeD.

Ingredients, all of them options: kappa and delta (``ce_global``, ``kd_global``); a kept theta that starts from the mu
of the client's first round in a cohort, not of round 0 (``start``); fine-tuning at the end; psi that starts high or low
(``psi_init``), is annealed, or is each client's own (``own_psi``); weights 1 and 1/(2 psi) that sum to one, so that a
small psi does not raise the effective rate (``normalize``); the gate; iterations of unsampled clients. With
``keep=True``, ``start="init"``, ``fine_tune_steps=0``, kappa = 0 and delta = 1 it is AdaPeD with weights by examples.

Weak points: the distillation term of fine-tuning gained nothing where it was measured
(``docs/records/adaped-plus.md``); without it, at a large psi, this is FedAvg fine-tuned at a rate of its own. As there,
a client's model takes all its personal steps whenever it is needed. Clients that share no mu (permuted labels, say) are
better served by models of their own (`local`, `ifca`), as both theta's start and its regulariser are then wrong; the
gate removes the second. Every client has mu's architecture.

Reference: Ozkara et al. 2023, "A Statistical Framework for Personalized Federated Learning and Estimation",
https://openreview.net/forum?id=FUiDMCr_W4o, of which this is a variant.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import struct

from jaxpfl.algorithms.parts.distilled import AdaPeDHyper, Distilled, check_options, shared_server
from jaxpfl.algorithms.parts.hyper import hyper
from jaxpfl.algorithms.parts.local_work import (
    Batch,
    Descent,
    LocalWork,
    batch_loss,
    gradients,
    run_steps,
    steps_within,
)
from jaxpfl.algorithms.parts.servers import increment, with_server_optimizer
from jaxpfl.core import trees
from jaxpfl.core.protocol import Algorithm, Client, ClientContext, Message, Upload
from jaxpfl.core.types import Array, Key, Metrics, PyTree, Scalar, Splits
from jaxpfl.models import Task
from jaxpfl.priors.distillation import Shared
from jaxpfl.support.errors import JaxpflError, unknown_name

STARTS = ("mu", "init")


@struct.dataclass
class AdaPeDPlusHyper(AdaPeDHyper):
    """Hyper-parameters of AdaPeD-plus; ``lr`` is eta_1, of theta, also in fine-tuning."""

    psi_init: Scalar = hyper(1.0, "psi in round 0; large for little distillation", positive=True, paper=3.5)
    c: Scalar = hyper(1.0, "factor on the divergence in psi's step", positive=True, paper=5.0)
    ce_global: Scalar = hyper(1.0, "kappa, weight of the cross-entropy in mu's step", paper=0.0)
    kd_global: Scalar = hyper(0.0, "delta, weight of the distillation term in mu's step", paper=1.0)
    anneal: Scalar = hyper(1.0, "factor on the psi that theta and mu see, each epoch of the decay", positive=True)


class Kept(NamedTuple):
    """State of a client that keeps its model.

    Attributes:
      theta: its model.
      psi: its scale after its last round, [].
      met: its rounds in a cohort so far, [] int32.
      received: the last (mu, psi) that it received; () without idle rounds.
    """

    theta: PyTree
    psi: Array
    met: Array
    received: PyTree


def adaped_plus(
    task: Task,
    work: LocalWork,
    *,
    keep: bool = False,
    fine_tune_steps: int = 60,
    start: str = "mu",
    own_psi: bool = False,
    normalize: bool = False,
    gate: bool = False,
    idle_rounds: int = 0,
) -> Algorithm:
    """AdaPeD-plus. Models: personalised theta_i, mu after the client's own steps or the client's own; global mu.

    Args:
      task: the model and its loss.
      work: the local work in a round.
      keep: theta_i stays with the client and is trained in every round, at two gradients a step.
      fine_tune_steps: theta's steps whenever a personal model is needed, from mu or from the kept theta; 0 for none.
      start: initial value of a kept theta: ``"mu"`` of the client's first round in a cohort, or ``"init"``, mu of
        round 0.
      own_psi: each client estimates its own psi: from the server's at first, then from its last one, and on in
        fine-tuning. The server's is the mean of those. Without, clients start from the server's, and it rests in
        fine-tuning; where no theta is kept, it then stays at ``psi_init``.
      normalize: multiplies theta's gradient by a = 2 psi / (1 + 2 psi).
      gate: multiplies the distillation term of theta by ``g = max(1 - CE(mu) / log K, 0)`` on the batch, K the number
        of classes.
      idle_rounds: the most rounds in a row that a client outside the cohort trains a kept theta alone (Algorithm 7).

    Raises:
      JaxpflError: for negative numbers, an unknown start, options of a kept theta where none is kept, and a gate where
        there are no classes.
    """
    check_options("adaped-plus", task, idle_rounds, gate)
    if fine_tune_steps < 0:
        raise JaxpflError(f"adaped-plus.fine_tune_steps must be >= 0, got {fine_tune_steps}")
    if start not in STARTS:
        raise unknown_name("adaped-plus.start", start, STARTS)
    if not keep and (start != "mu" or idle_rounds):
        given = f"idle_rounds={idle_rounds}" if idle_rounds else f"start={start}"
        raise JaxpflError(f"adaped-plus.{given} needs keep=True: otherwise clients keep no theta")
    plus = _Plus(Distilled(task, task, work, gate, _normalized if normalize else None), fine_tune_steps, own_psi)
    client = _keeping(plus, at_first=start == "mu", idles=idle_rounds > 0) if keep else _tuned(plus)
    algorithm = Algorithm((client,), shared_server(task), work.steps, idle_cap=idle_rounds)
    return with_server_optimizer(algorithm, work.server_optimizer, acts_on=Shared(mu=True, psi=False))


class _Plus(NamedTuple):
    """Steps and options that both kinds of clients have."""

    steps: Distilled
    fine_tune_steps: int
    own_psi: bool

    def seen(self, hp: AdaPeDPlusHyper, ctx: ClientContext) -> Callable[[Array], Array]:
        """``psi -> psi anneal^epoch``."""
        epochs = jnp.floor(ctx.round * self.steps.work.steps / hp.decay_every + 1e-4)
        return lambda psi: psi * hp.anneal**epochs

    def tuned(
        self, key: Key, hp: AdaPeDPlusHyper, ctx: ClientContext, splits: Splits, theta: PyTree, gamma: Shared
    ) -> PyTree:
        """The personal model: theta after fine-tuning beside (mu, psi)."""
        if not self.fine_tune_steps:
            return theta
        ctx = ctx._replace(round=jnp.maximum(ctx.round - 1, 0))  # the last one
        given, seen = (key, hp, ctx, splits.train, theta, gamma), self.seen(hp, ctx)
        rate = hp.lr * hp.decay(ctx.round, self.steps.work.steps)
        return self.steps.alone(*given, rate=rate, steps=self.fine_tune_steps, seen=seen, estimates=self.own_psi)[0]


def _normalized(psi: Array) -> Array:
    """Factor that makes the weights 1 and 1/(2 psi) sum to one."""
    return 2 * psi / (1 + 2 * psi)


def _tuned(plus: _Plus) -> Client:
    """Client without a model of its own between rounds."""
    work, task = plus.steps.work, plus.steps.task
    loss = batch_loss(task)

    def update(
        key: Key, hp: AdaPeDPlusHyper, ctx: ClientContext, message: Message, state: PyTree, splits: Splits
    ) -> tuple[PyTree, Upload, Metrics]:
        received: Shared = message.shared
        of_mu = work.descent(hp.lr_global * hp.decay(ctx.round, work.steps), hp.weight_decay)

        def step(key: Key, mu: Descent, batch: Batch) -> tuple[Descent, Metrics]:
            value, gradient = jax.value_and_grad(loss)(mu.params, key, batch)
            return mu.step(of_mu, optax.tree.scale(hp.ce_global, gradient)), {"train_loss": value}

        start = Descent.start(of_mu, received.mu)
        mu, metrics = run_steps(work, key, ctx, splits.train, step, start, metrics=("train_loss",))
        return state, increment(received._replace(mu=mu.params), received, work.weight(splits.train)), metrics

    return Client(
        init=lambda key, hp, ctx, message: (),
        update=update,
        personalize=lambda key, hp, ctx, message, state, splits: plus.tuned(
            key, hp, ctx, splits, message.shared.mu, message.shared
        ),
        predict=lambda hp, theta, x: task.model.apply(theta, x),
        gradients=gradients(work.steps, personalize=plus.fine_tune_steps),
    )


def _keeping(plus: _Plus, *, at_first: bool, idles: bool) -> Client:
    """Client that keeps its theta; ``at_first``, it starts from the mu of the first round in a cohort."""
    steps = plus.steps
    work, task = steps.work, steps.task

    def start_values(state: Kept, received: Shared) -> tuple[PyTree, Array]:
        """Model and scale that a client goes on from."""
        theta = trees.where(state.met > 0, state.theta, received.mu) if at_first else state.theta
        psi = jnp.where(state.met > 0, state.psi, received.psi) if plus.own_psi else received.psi
        return theta, psi

    def update(
        key: Key, hp: AdaPeDPlusHyper, ctx: ClientContext, message: Message, state: Kept, splits: Splits
    ) -> tuple[Kept, Upload, Metrics]:
        decay = hp.decay(ctx.round, work.steps)
        of_theta, of_mu = (work.descent(rate * decay, hp.weight_decay) for rate in (hp.lr, hp.lr_global))
        received: Shared = message.shared
        theta, psi = start_values(state, received)

        def teacher_loss(batch: Batch, teacher: Array, student: Array, psi: Array) -> Array:
            own = batch.mean(task.loss(teacher, batch.y))
            return hp.ce_global * own + hp.kd_global * steps.kd_pull(batch, teacher, student, psi)

        carry = (Descent.start(of_theta, theta), Descent.start(of_mu, received.mu), psi)
        step = steps.step(of_theta, of_mu, hp, teacher_loss, plus.seen(hp, ctx))
        (new, mu, psi), metrics = run_steps(
            work, key, ctx, splits.train, step, carry, metrics=("train_loss", "divergence")
        )
        state = Kept(new.params, psi, state.met + 1, received if idles else ())
        return state, increment(Shared(mu.params, psi), received, work.weight(splits.train)), metrics

    def personalize(
        key: Key, hp: AdaPeDPlusHyper, ctx: ClientContext, message: Message, state: Kept, splits: Splits
    ) -> PyTree:
        received: Shared = message.shared
        theta, psi = start_values(state, received)
        return plus.tuned(key, hp, ctx, splits, theta, received._replace(psi=psi))

    def idle(key: Key, hp: AdaPeDPlusHyper, ctx: ClientContext, state: Kept, splits: Splits) -> tuple[Kept, Metrics]:
        rate = hp.lr * hp.decay(ctx.round, work.steps)
        received: Shared = state.received
        _, psi = start_values(state, received)
        given = (key, hp, ctx, splits.train, state.theta, received._replace(psi=psi))
        theta, metrics = steps.alone(*given, rate=rate, seen=plus.seen(hp, ctx))
        return state._replace(theta=theta), metrics

    def init(key: Key, hp: AdaPeDPlusHyper, ctx: ClientContext, message: Message) -> Kept:
        received: Shared = message.shared
        return Kept(received.mu, received.psi, jnp.int32(0), received if idles else ())

    return Client(
        init=init,
        update=update,
        personalize=personalize,
        predict=lambda hp, theta, x: task.model.apply(theta, x),
        idle=idle if idles else None,
        gradients=gradients(work.steps, each=2, personalize=plus.fine_tune_steps)._replace(
            idle=lambda limit: steps_within(work.steps, limit)
        ),
    )

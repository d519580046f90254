r"""AdaPeD-plus: a variant of AdaPeD with a global model trained on labels, from which personal models are fine-tuned.

All changes to `adaped` are options, and none of them is in the paper. As in `adaped`, theta_i is the personal model, mu
is the global model, CE is the cross-entropy, and f is the mean Kullback-Leibler divergence of theta's predictions from
mu's predictions. Each local step of a client in the cohort makes three updates, in this order:

.. math::
   \theta^+ &= \theta - \eta_1 a \nabla_\theta [ CE(\theta) + g f(\theta, \mu) / (2\tilde\psi) ] \\
   \mu^+ &= \mu - \eta_2 \nabla_\mu [ \kappa CE(\mu) + \delta f(\theta^+, \mu) / (2\tilde\psi) ] \\
   \psi^+ &= \max(\psi - \eta_3 [ 1/(2\psi) - c f(\theta^+, \mu^+) / (2\psi^2) ], \psi_{floor})

The scale in the first two updates is :math:`\tilde\psi = \psi \cdot anneal^{e}`, where the hyper-parameter ``anneal``
is 1 by default, and e counts the periods of ``decay_every`` local steps that have passed. The factor g is 1 unless the
option ``gate`` is set, and a is 1 unless ``normalize`` is set. The learning rates eta and the constant c are as in
`adaped`. The server averages mu and psi, weighted by the numbers of examples. With distillation alone (kappa = 0, delta
= 1, as in AdaPeD), mu learns labels only from personal models, each of which was trained on a single client's examples.
With the defaults kappa = 1 and delta = 0, mu is the global model of FedAvg.

By default a client keeps no model (``keep=False``). During its rounds theta equals mu, so the divergence is zero, and a
step changes only mu and needs one gradient instead of two. The personal model is computed when it is needed: starting
from theta = mu, the client makes the update of theta ``fine_tune_steps`` times. In these updates mu is fixed, and eta_1
has its value from the last round. The method is then fine-tuned FedAvg, regularized toward the global model's
predictions. In the paper's terms, fine-tuning is gradient descent on the negative log posterior of theta_i under
AdaPeD's prior, with mu estimated beforehand. With ``keep=True``, theta_i stays with the client and is trained in every
round, as in AdaPeD.

The options are

- the weights kappa and delta of the two terms in mu's loss (``ce_global``, ``kd_global``);
- starting a kept theta from the mu of the client's first round in a cohort instead of the mu of round 0 (``start``);
- fine-tuning before a prediction (``fine_tune_steps``);
- another initial psi (``psi_init``), annealing of psi (``anneal``), and a psi that each client estimates (``own_psi``);
- dividing theta's loss by 1 + 1/(2 psi), the sum of the weights of CE and f, so that a small psi does not raise the
  effective learning rate (``normalize``);
- the gate (``gate``), and training outside the cohort (``idle_rounds``).

The method is AdaPeD if ``keep=True``, ``start="init"``, ``fine_tune_steps=0``, kappa = 0 and delta = 1, and if
``psi_init`` and c have AdaPeD's values. The only remaining difference is that the server's mean is weighted by the
numbers of examples.

The distillation term in fine-tuning had no benefit in the measured cases (``docs/records/adaped-plus.md``). Without
this term, or with a large psi, the method is FedAvg fine-tuned with a separate learning rate. As in fine-tuned FedAvg,
all fine-tuning steps are taken again whenever the personal model is needed. If no single mu suits all clients (for
example, because their labels are permuted), theta starts from a wrong model and is regularized toward this model.
`local` and `ifca` are then better choices. The gate would remove the regularization, but not the wrong start. All
clients have the architecture of mu.

Reference: Ozkara et al. 2023, "A Statistical Framework for Personalized Federated Learning and Estimation",
https://openreview.net/forum?id=FUiDMCr_W4o (for AdaPeD).
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
    """Hyper-parameters of AdaPeD-plus; ``lr`` is eta_1, the learning rate of theta, also in fine-tuning."""

    psi_init: Scalar = hyper(1.0, "initial psi, the clients' spread; large psi distills less", positive=True, paper=3.5)
    c: Scalar = hyper(1.0, "factor on the divergence in psi's step", positive=True, paper=5.0)
    ce_global: Scalar = hyper(1.0, "kappa, weight of the cross-entropy in the global model's steps", paper=0.0)
    kd_global: Scalar = hyper(0.0, "delta, weight of the distillation term in the global model's steps", paper=1.0)
    anneal: Scalar = hyper(
        1.0, "factor on psi in both models' steps, after each decay_every local steps", positive=True
    )


class Kept(NamedTuple):
    """State of a client that keeps its model.

    Attributes:
      theta: the client's model.
      psi: the client's scale at the end of its last round, [].
      met: number of the client's rounds in a cohort so far, [] int32.
      received: the last (mu, psi) that the client received; () if clients do not train outside the cohort.
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
    """AdaPeD-plus: AdaPeD with a global model mu trained on labels, and personal models fine-tuned from mu.

    The personalized model theta_i is fine-tuned from mu or, with ``keep``, from the model that the client keeps. The
    global model is mu. The distillation terms in the losses have the weight 1 / (2 psi), with a scale psi.

    Args:
      task: the model and its loss.
      work: the local work in a round.
      keep: whether theta_i stays with the client and is trained in every round, with two gradients per step.
      fine_tune_steps: number of steps on theta whenever a personal model is needed, starting from mu or from the kept
        theta; 0 for no fine-tuning.
      start: initial value of a kept theta: ``"mu"`` for mu in the client's first round in a cohort, or ``"init"`` for
        mu in round 0.
      own_psi: whether each client estimates its own psi. With ``keep``, a client then starts its first round from the
        server's psi, which is the mean over clients, and later rounds from its own last value. Fine-tuning updates psi
        too. If ``own_psi`` is false, clients start every round from the server's psi, and fine-tuning does not change
        psi. Without ``keep``, the server's psi stays at ``psi_init`` in both cases.
      normalize: whether to multiply theta's gradient by a = 2 psi / (1 + 2 psi).
      gate: whether to multiply the distillation term of theta by ``g = max(1 - CE(mu) / log K, 0)`` on the batch, with
        K classes.
      idle_rounds: largest number of consecutive rounds in which a client outside the cohort trains a kept theta alone.

    Raises:
      JaxpflError: if a number is negative, the start is unknown, ``start`` or ``idle_rounds`` is set without ``keep``,
        the task defines no distance between predictions, or ``gate`` is set for a task with fewer than two classes.
    """
    check_options("adaped-plus", task, idle_rounds, gate)
    if fine_tune_steps < 0:
        raise JaxpflError(f"adaped-plus.fine_tune_steps must be >= 0, got {fine_tune_steps}")
    if start not in STARTS:
        raise unknown_name("adaped-plus.start", start, STARTS)
    if not keep and (start != "mu" or idle_rounds):
        given = f"idle_rounds={idle_rounds}" if idle_rounds else f"start={start}"
        raise JaxpflError(f"adaped-plus.{given} requires keep=True, so that clients keep their model theta")
    plus = _Plus(Distilled(task, task, work, gate, _normalized if normalize else None), fine_tune_steps, own_psi)
    client = _keeping(plus, at_first=start == "mu", idles=idle_rounds > 0) if keep else _tuned(plus)
    algorithm = Algorithm((client,), shared_server(task), work.steps, idle_cap=idle_rounds)
    return with_server_optimizer(algorithm, work.server_optimizer, acts_on=Shared(mu=True, psi=False))


class _Plus(NamedTuple):
    """Steps and options that are the same for clients with and without a kept theta."""

    steps: Distilled
    fine_tune_steps: int
    own_psi: bool

    def seen(self, hp: AdaPeDPlusHyper, ctx: ClientContext) -> Callable[[Array], Array]:
        """Return the function ``psi -> psi anneal^e`` for the current round (e as in the module's docstring)."""
        epochs = jnp.floor(ctx.round * self.steps.work.steps / hp.decay_every + 1e-4)
        return lambda psi: psi * hp.anneal**epochs

    def tuned(
        self, key: Key, hp: AdaPeDPlusHyper, ctx: ClientContext, splits: Splits, theta: PyTree, gamma: Shared
    ) -> PyTree:
        """Fine-tune theta with the mu of ``gamma`` fixed, and return the personal model."""
        if not self.fine_tune_steps:
            return theta
        ctx = ctx._replace(round=jnp.maximum(ctx.round - 1, 0))  # rates and annealing of the last finished round
        given, seen = (key, hp, ctx, splits.train, theta, gamma), self.seen(hp, ctx)
        rate = hp.lr * hp.decay(ctx.round, self.steps.work.steps)
        return self.steps.alone(*given, rate=rate, steps=self.fine_tune_steps, seen=seen, estimates=self.own_psi)[0]


def _normalized(psi: Array) -> Array:
    """Factor ``2 psi / (1 + 2 psi)``, which makes the loss weights 1 and 1/(2 psi) sum to one."""
    return 2 * psi / (1 + 2 * psi)


def _tuned(plus: _Plus) -> Client:
    """Make a client that keeps no model between rounds."""
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
    """Make a client that keeps its theta between rounds.

    Args:
      plus: steps and options of the method.
      at_first: whether theta starts from the mu that the client receives in its first round in a cohort; otherwise
        theta starts from the initial mu.
      idles: whether the client also trains in rounds in which it does not take part.
    """
    steps = plus.steps
    work, task = steps.work, steps.task

    def start_values(state: Kept, received: Shared) -> tuple[PyTree, Array]:
        """Return the model and the scale psi from which a client starts its steps."""
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

r"""AdaPeD: adaptive personalization by distillation (Ozkara et al. 2023, Algorithm 2).

The objective of client i is

.. math:: f_i(\theta_i) + \tfrac12 \log(2\psi) + \frac{f^{KD}(\theta_i, \mu)}{2 \psi}

where f_i is the client's cross-entropy CE, and f^KD is the mean Kullback-Leibler divergence between the predictions of
theta_i and mu. The client minimizes over its personal model theta_i, and all clients jointly minimize over the global
model mu and the scale psi. A large psi means that the clients are heterogeneous and theta is weakly regularized. Each
local step makes three updates, in this order:

.. math::
   \theta^+ &= \theta - \eta_1 \nabla_\theta [ CE(\theta) + f^{KD}(\theta, \mu) / (2\psi) ] \\
   \mu^+ &= \mu - \eta_2 \nabla_\mu f^{KD}(\theta^+, \mu) / (2\psi) \\
   \psi^+ &= \max(\psi - \eta_3 [ 1/(2\psi) - c f^{KD}(\theta^+, \mu^+) / (2\psi^2) ], \psi_{floor})

The learning rates of theta, mu and psi are eta_1, eta_2 and eta_3. Weight decay is added to the gradients of theta and
mu. The clients of a cohort keep their own theta and start from the server's (mu, psi). The server averages their (mu,
psi) uniformly. The constant c is 5 in the paper's appendix; with c = 1, the step on psi uses the exact derivative of
the objective. In the paper's main text, the floor of psi is 0.5.

Clients outside the cohort can also train (Algorithm 7), for at most ``idle_rounds`` rounds in a row. Such a client
updates only theta, uses the last (mu, psi) that it received, and uploads nothing. Before its first round in a cohort,
it uses the initial (mu, psi). Only the logits of mu and theta are compared, so theta may have a different architecture
from mu.

If the client optimizer is not plain SGD, the optimizer takes the steps on theta and mu, with a separate state for each.
psi is still updated by the formula above. A server optimizer changes mu only. psi is always averaged, and therefore
stays above its floor.

Under the noise of differential privacy, distillation from mu may harm theta: psi rises slowly under this noise, so the
distillation term is not weakened enough. With ``gate``, a client weights this term by how well mu predicts the client's
own labels, and ignores mu if mu is no better than a uniform guess. The gate has no privacy cost, because theta is not
uploaded. The gate is not in the paper.

With noise in every step (`StepNoise`), the gradients with respect to mu and psi are clipped and noised one after the
other, as in the paper, or jointly. In the joint version, noise is added to both gradients at once. psi's gradient is
therefore evaluated at the mu before the step.

Reference: Ozkara et al. 2023, "A Statistical Framework for Personalized Federated Learning and Estimation",
https://openreview.net/forum?id=FUiDMCr_W4o.
"""

from __future__ import annotations

from typing import NamedTuple

from jaxpfl.algorithms.parts.distilled import AdaPeDHyper, Distilled, check_options, shared_server
from jaxpfl.algorithms.parts.local_work import Descent, LocalWork, gradients, run_steps, steps_within
from jaxpfl.algorithms.parts.servers import increment, with_server_optimizer
from jaxpfl.algorithms.parts.several_models import personal_tasks
from jaxpfl.core.protocol import Algorithm, Client, ClientContext, Message, Upload
from jaxpfl.core.types import Key, Metrics, PyTree, Splits
from jaxpfl.models import Task
from jaxpfl.priors.distillation import Shared


class Remembering(NamedTuple):
    """State of a client that trains outside the cohort: its model theta, and the last (mu, psi) that it received."""

    theta: PyTree
    received: Shared


def adaped(
    task: Task, work: LocalWork, *, idle_rounds: int = 0, architectures: str = "", gate: bool = False
) -> Algorithm:
    """AdaPeD: adaptive personalization by distillation, with a distillation weight that is learned.

    Each client keeps its own model theta_i, which is its personalized model. The global model mu is distilled from the
    personal models.

    Implements: Ozkara et al. 2023, equation (11); Ozkara et al. 2023, Algorithm 7.

    Args:
      task: task; mu has the architecture of its model, and so does theta if ``architectures`` is empty.
      work: the local work in a round.
      idle_rounds: largest number of consecutive rounds in which a client outside the cohort trains alone (Algorithm 7);
        0 for none. If positive, clients also keep a copy of (mu, psi), and as many as all m clients may take steps in a
        round.
      architectures: names of the clients' models joined by "+", such as ``"same+mlp:32"``. The client with id i has the
        model at index i modulo the number of names; "same" is the task's model. Clients with the task's model start
        from mu. Clients with another architecture start from a random model, the same for all clients with this
        architecture.
      gate: whether to multiply the distillation term of theta by ``max(1 - CE(mu) / log K, 0)`` on the batch, with K
        classes. The factor is zero if mu predicts no better than a uniform guess.

    Raises:
      JaxpflError: if ``idle_rounds`` is negative, ``architectures`` contains an unknown model name, the task defines no
        distance between predictions, or ``gate`` is set for a task with fewer than two classes.
    """
    check_options("adaped", task, idle_rounds, gate)
    own_tasks = personal_tasks(task, architectures)
    clients = tuple(_client(Distilled(task, own, work, gate), idles=idle_rounds > 0) for own in own_tasks)
    algorithm = Algorithm(clients, shared_server(task), work.steps, idle_cap=idle_rounds)
    return with_server_optimizer(algorithm, work.server_optimizer, acts_on=Shared(mu=True, psi=False))


def _client(steps: Distilled, *, idles: bool) -> Client:
    task, own_task, work = steps.task, steps.own_task, steps.work

    def update(
        key: Key, hp: AdaPeDHyper, ctx: ClientContext, message: Message, state: PyTree, splits: Splits
    ) -> tuple[PyTree, Upload, Metrics]:
        decay = hp.decay(ctx.round, work.steps)
        of_theta, of_mu = (work.descent(rate * decay, hp.weight_decay) for rate in (hp.lr, hp.lr_global))
        received: Shared = message.shared
        carry = (Descent.start(of_theta, theta_of(state)), Descent.start(of_mu, received.mu), received.psi)
        step = steps.step(of_theta, of_mu, hp, steps.kd_pull)
        (theta, mu, psi), metrics = run_steps(
            work, key, ctx, splits.train, step, carry, metrics=("train_loss", "divergence")
        )
        return state_of(theta.params, received), increment(Shared(mu.params, psi), received), metrics

    def idle(
        key: Key, hp: AdaPeDHyper, ctx: ClientContext, state: Remembering, splits: Splits
    ) -> tuple[Remembering, Metrics]:
        rate = hp.lr * hp.decay(ctx.round, work.steps)
        theta, metrics = steps.alone(key, hp, ctx, splits.train, state.theta, state.received, rate=rate)
        return state._replace(theta=theta), metrics

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
        predict=lambda hp, theta, x: own_task.model.apply(theta, x),
        idle=idle if idles else None,
        gradients=gradients(work.steps, each=2)._replace(idle=lambda limit: steps_within(work.steps, limit)),
    )

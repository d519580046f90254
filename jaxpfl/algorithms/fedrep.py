r"""FedRep: a shared body and personal heads; in each round, a client trains first the head and then the body.

Client i of the cohort S, with loss f_i, starts from the server's body phi and its own head h_i. It takes all steps on
the head before the steps on phi:

.. math:: h_i \leftarrow h_i - \eta \nabla_h f_i(\phi, h_i), \quad\text{then}\quad
   \phi_i \leftarrow \phi_i - \eta \nabla_\phi f_i(\phi_i, h_i), \qquad
   \phi \leftarrow \phi + \frac1{|S|} \sum_{i \in S} (\phi_i - \phi)

Reference: Collins et al. 2021, "Exploiting Shared Representations for Personalized Federated Learning",
https://arxiv.org/abs/2102.07078.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import struct

from jaxpfl.algorithms.parts.hyper import AveragingHyper, hyper
from jaxpfl.algorithms.parts.local_work import Batch, Descent, LocalWork, run_steps
from jaxpfl.algorithms.parts.servers import increment
from jaxpfl.algorithms.parts.split_models import head_and_body, keeping_own_part
from jaxpfl.core import trees
from jaxpfl.core.protocol import Algorithm, ClientContext, Message, Upload
from jaxpfl.core.types import Array, Key, Metrics, PyTree, Scalar, Splits
from jaxpfl.models import Task
from jaxpfl.support.errors import JaxpflError


@struct.dataclass
class FedRepHyper(AveragingHyper):
    """Hyper-parameters of FedRep.

    Head and body are each trained for half of the steps, and the default learning rate is twice as large as FedAvg's.
    This learning rate was the best on held-out examples of three data sets (``benchmarks/defaults.py``).
    """

    lr: Scalar = hyper(0.2, "learning rate of the local steps", positive=True, is_rate=True, paper=0.1)


def fedrep(task: Task, work: LocalWork, *, head_steps: int = 0, body_steps: int = 0) -> Algorithm:
    """FedRep: a shared body and personal heads; in each round, local steps on the head and then on the body.

    The steps of a round use one sequence of batches, first for the head and then for the body. The server averages the
    bodies uniformly. The personalized model is the server's body with the client's own head. There is no global model.

    Args:
      task: task whose model is split into body and head.
      work: the local work in a round.
      head_steps: number of steps on the head; 0 for ``tau - body_steps``, where tau is the number of local steps in a
        round.
      body_steps: number of steps on the body; 0 for ``tau - head_steps``. If ``head_steps`` and ``body_steps`` are 0,
        half of the tau steps (rounded down) train the head. If neither is 0, a round has ``head_steps + body_steps``
        steps, independently of tau. With local work in epochs, each client divides its own number of steps in the same
        proportion.

    Raises:
      JaxpflError: if the model has no head or no body, or if head or body would have no step.
    """
    split = head_and_body("fedrep", task)
    of_head = head_steps or (work.steps - body_steps if body_steps else work.steps // 2)
    of_body = body_steps or work.steps - of_head
    if min(of_head, of_body) < 1:
        raise JaxpflError(
            f"fedrep requires at least one step on the head and one on the body, got {of_head} and {of_body}"
        )
    total = of_head + of_body if work.epochs is None else work.steps
    # With work in epochs, each client's own number of steps is divided. tau is then the largest client's number of
    # steps, so dividing tau would make a client's result depend on the other clients.
    share, whole = (of_head, of_head + of_body) if head_steps or body_steps else (1, 2)

    def update(
        key: Key, hp: FedRepHyper, ctx: ClientContext, message: Message, head: PyTree, splits: Splits
    ) -> tuple[PyTree, Upload, Metrics]:
        optimizer = work.descent(hp.lr * hp.decay(ctx.round, total), hp.weight_decay)
        own = work.own_steps
        first = of_head if own is None else own.steps(splits.train.size) * share // whole

        def step(key: Key, carry: tuple[Array, Descent, Descent], batch: Batch) -> tuple[PyTree, Metrics]:
            t, head, body = carry

            def loss(head: PyTree, body: PyTree) -> Array:
                logits = task.model.apply(trees.merge(head, body), batch.x, key=key, train=True)
                return batch.mean(task.loss(logits, batch.y))

            def step_head(head: Descent, body: Descent) -> tuple[Descent, Descent, Array]:
                value, gradient = jax.value_and_grad(loss)(head.params, body.params)
                return head.step(optimizer, gradient), body, value

            def step_body(head: Descent, body: Descent) -> tuple[Descent, Descent, Array]:
                value, gradient = jax.value_and_grad(loss, argnums=1)(head.params, body.params)
                return head, body.step(optimizer, gradient), value

            # The step counter t is the same for all clients, so that a step on the head computes no gradient of the
            # body. With work in epochs, however, clients reach their first step on the body at different t.
            head, body, value = jax.lax.cond(t < first, step_head, step_body, head, body)
            return (t + 1, head, body), {"train_loss": value}

        start = (jnp.int32(0), Descent.start(optimizer, head), Descent.start(optimizer, message.shared))
        steps = None if total == work.steps else total
        (_, new_head, body), metrics = run_steps(
            work, key, ctx, splits.train, step, start, metrics=("train_loss",), steps=steps
        )
        return new_head.params, increment(body.params, message.shared), metrics

    return keeping_own_part(task, work, split, update, total)

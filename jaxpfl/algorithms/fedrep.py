r"""FedRep: a shared representation and personal heads, trained in turn: first the head, then the body.

Client i starts from the server's body phi and its own head h_i, and takes the head's steps before the body's:

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

    Head and body take half of the steps each: the default rate is twice the other methods' default, and the best on
    held-out examples of three data sets (``benchmarks/defaults.py``).
    """

    lr: Scalar = hyper(0.2, "learning rate of the local steps", positive=True, is_rate=True, paper=0.1)


def fedrep(task: Task, work: LocalWork, *, head_steps: int = 0, body_steps: int = 0) -> Algorithm:
    """FedRep: local steps on the head, then on the body; the mean of the bodies is uniform.

    The batches of a round are one sequence: the body's follow the head's.
    Models: personalised, the server's body with the client's own head; no global model.

    Args:
      task: its model is split into body and head.
      work: the local work in a round.
      head_steps: steps on the head; 0 for the rest of tau after ``body_steps``.
      body_steps: steps on the body; 0 for the rest of tau after ``head_steps``. Where both are 0, the head takes half
        of tau, rounded down. Where neither is, a round has ``head_steps + body_steps`` steps, whatever tau. Of work
        in epochs, a client's own steps are shared between them in the same proportion.

    Raises:
      JaxpflError: for a model without a head or without a body, or without a step on either.
    """
    split = head_and_body("fedrep", task)
    of_head = head_steps or (work.steps - body_steps if body_steps else work.steps // 2)
    of_body = body_steps or work.steps - of_head
    if min(of_head, of_body) < 1:
        raise JaxpflError(
            f"fedrep needs at least one step on the head and one on the body, got {of_head} and {of_body}"
        )
    total = of_head + of_body
    # A client's own half: a share of tau, rounded, would depend on the client with the most steps.
    share, whole = (of_head, total) if head_steps or body_steps else (1, 2)

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

            # The counter is the same for all clients, so a step on the head costs no gradient of the body; of work in
            # epochs, clients turn to the body at steps of their own.
            head, body, value = jax.lax.cond(t < first, step_head, step_body, head, body)
            return (t + 1, head, body), {"train_loss": value}

        start = (jnp.int32(0), Descent.start(optimizer, head), Descent.start(optimizer, message.shared))
        steps = None if total == work.steps else total
        (_, new_head, body), metrics = run_steps(
            work, key, ctx, splits.train, step, start, metrics=("train_loss",), steps=steps
        )
        return new_head.params, increment(body.params, message.shared), metrics

    return keeping_own_part(task, work, split, update, total)

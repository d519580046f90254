r"""APFL: personalized models whose parameters are mixtures of a local model's and the global model's parameters.

A client keeps its local model v and the mixture weight alpha, and starts a round from w = mu, the global model. Let
:math:`\bar v = \alpha v + (1 - \alpha) w` with the values of v, alpha and w before a step, and let f_i be the client's
loss. Each of the tau local steps is

.. math::
   w &\leftarrow w - \eta \nabla f_i(w), \\
   v &\leftarrow v - \eta_v \nabla_v f_i(\bar v) = v - \eta_v \alpha \nabla f_i(\bar v), \\
   \alpha &\leftarrow \Pi_{[0, 1]}( \alpha - \eta_\alpha \langle v - w, \nabla f_i(\bar v) \rangle )

on one mini-batch, with learning rates eta, eta_v and eta_alpha; the projection Pi limits alpha to [0, 1]. The server
averages w uniformly. The personalized model is one model with mixed parameters, alpha v + (1 - alpha) mu; predictions
are not mixed. The paper has a single learning rate for w, v and alpha, and its experiments update alpha once in a
round. Weight decay is added to the gradients of w and v.

In training, v is mixed with the client's own w. If clients differ much, mu is far from this w, and the mixture of v
with mu can be worse than v alone or than local training. With ``--set apfl.keep_w=true``, a client keeps the w that it
uploaded last, and the personalized model is the mixture of v and this w, as in PFLlib's evaluation.

Reference: Deng, Kamani and Mahdavi 2020, "Adaptive Personalized Federated Learning",
https://arxiv.org/abs/2003.13461.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import struct

from jaxpfl.algorithms.parts.hyper import AveragingHyper, hyper
from jaxpfl.algorithms.parts.local_work import Batch, Descent, LocalWork, gradients, loss_gradient, run_steps
from jaxpfl.algorithms.parts.servers import averaging_server, increment, with_server_optimizer
from jaxpfl.core import trees
from jaxpfl.core.protocol import Algorithm, Client, ClientContext, Message, Upload
from jaxpfl.core.types import Array, Key, Metrics, PyTree, Scalar, Splits
from jaxpfl.models import Task


@struct.dataclass
class APFLHyper(AveragingHyper):
    """Hyper-parameters of APFL; ``lr`` is the learning rate for w, a client's copy of the global model."""

    alpha_init: Scalar = hyper(0.5, "initial alpha, the weight of the client's own model in the mixture", high=1.0)
    lr_personal: Scalar = hyper(0.1, "learning rate of the client's own model v", positive=True, is_rate=True)
    lr_alpha: Scalar = hyper(0.1, "learning rate of alpha; decays as lr does", positive=True, is_rate=True)


class Own(NamedTuple):
    """State of a client.

    Attributes:
      v: the client's local model.
      alpha: the mixture weight of v, [].
      w: a pair: the client's copy of the global model at the end of the last round in which it took part, and a flag,
        [], that is 0 before the client's first round and 1 afterwards. If clients do not keep this copy, w is ().
    """

    v: PyTree
    alpha: Array
    w: tuple[PyTree, Array] | tuple[()] = ()


def mixture(alpha: Scalar, v: PyTree, w: PyTree) -> PyTree:
    """Mixture ``alpha v + (1 - alpha) w``."""
    return jax.tree.map(lambda a, b: alpha * a + (1 - alpha) * b, v, w)


def apfl(task: Task, work: LocalWork, *, adapt_alpha: bool = True, keep_w: bool = False) -> Algorithm:
    """APFL: adaptive personalized FL, which mixes each client's local model with the averaged global model.

    The personalized model is ``alpha_i v_i + (1 - alpha_i) mu``, where v_i is the client's local model and alpha_i its
    mixture weight. The global model mu is the average of the clients' trained copies w of mu.

    Args:
      task: the model and its loss.
      work: the local work in a round; the client optimizer takes the steps on w and v, but not on alpha.
      adapt_alpha: whether alpha is learned; otherwise it stays at ``alpha_init``.
      keep_w: whether clients keep w at the end of a round and mix v with this w, instead of mu, in the personalized
        model. A client that has not yet taken part uses mu.
    """
    loss = loss_gradient(task)

    def init(key: Key, hp: APFLHyper, ctx: ClientContext, message: Message) -> Own:
        mu = message.shared
        return Own(mu, jnp.asarray(hp.alpha_init, jnp.result_type(float)), (mu, jnp.zeros(())) if keep_w else ())

    def update(
        key: Key, hp: APFLHyper, ctx: ClientContext, message: Message, own: Own, splits: Splits
    ) -> tuple[Own, Upload, Metrics]:
        mu, decay = message.shared, hp.decay(ctx.round, work.steps)
        of_w, of_v = (work.descent(rate * decay, hp.weight_decay) for rate in (hp.lr, hp.lr_personal))

        def step(
            key: Key, carry: tuple[Descent, Descent, Array], batch: Batch
        ) -> tuple[tuple[Descent, Descent, Array], Metrics]:
            w, v, alpha = carry
            _, gradient = loss(w.params, key, batch)
            value, mixed = loss(mixture(alpha, v.params, w.params), key, batch)
            of_alpha = optax.tree.vdot(optax.tree.sub(v.params, w.params), mixed)
            w, v = w.step(of_w, gradient), v.step(of_v, optax.tree.scale(alpha, mixed))
            if adapt_alpha:
                alpha = jnp.clip(alpha - hp.lr_alpha * decay * of_alpha, 0, 1)
            return (w, v, alpha), {"train_loss": value, "alpha": alpha}

        start = (Descent.start(of_w, mu), Descent.start(of_v, own.v), own.alpha)
        (w, v, alpha), metrics = run_steps(work, key, ctx, splits.train, step, start, metrics=("train_loss", "alpha"))
        return Own(v.params, alpha, (w.params, jnp.ones(())) if keep_w else ()), increment(w.params, mu), metrics

    def personalize(key: Key, hp: APFLHyper, ctx: ClientContext, message: Message, own: Own, splits: Splits) -> PyTree:
        w = message.shared
        if own.w:
            last, exists = own.w
            w = trees.where(exists > 0, last, w)
        return mixture(own.alpha, own.v, w)

    client = Client(
        init=init,
        update=update,
        personalize=personalize,
        predict=lambda hp, mixed, x: task.model.apply(mixed, x),
        gradients=gradients(work.steps, each=2),
    )
    return with_server_optimizer(Algorithm((client,), averaging_server(task), work.steps), work.server_optimizer)

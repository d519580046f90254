r"""FedBuff: FedAvg in asynchronous rounds, whose server steps whenever its buffer holds K uploads.

M clients are at work at once, each from the model that it received when it began; a round ends when the next K of them
have uploaded, and as many others begin from the new model (`engine.in_flight`, for whose clock there is a time model).
Client i, during whose work :math:`\tau_i` rounds have ended, trains :math:`w_i` from the model
:math:`\mu_{t - \tau_i}` of the round in which it began; then

.. math:: \mu_{t+1} = \mu_t + \frac{\sum_i n_i\, s(\tau_i) (w_i - \mu_{t - \tau_i})}{\sum_i n_i}, \qquad
   s(\tau) = (1 + \tau)^{-a}

over the K clients: the weights of staleness shorten the step, and are not divided out. The paper's mean is uniform
(``weighting``). A server optimizer takes minus the mean for a gradient.

It does badly where fast clients are unlike slow ones: they arrive more often, and it is their data that the model fits;
and where M is many times K, as updates are then of models long gone. Without a time model everybody takes as long, and
nothing is gained.

Reference: Nguyen et al. 2022, "Federated Learning with Buffered Asynchronous Aggregation",
https://arxiv.org/abs/2106.06639, Algorithm 1; its experiments have a = 1/2 and K = 10.
"""

from __future__ import annotations

import jax.numpy as jnp
import optax
from flax import struct

from jaxpfl.algorithms.fedavg import fedavg
from jaxpfl.algorithms.parts.hyper import AveragingHyper, hyper
from jaxpfl.algorithms.parts.local_work import LocalWork
from jaxpfl.core.protocol import Algorithm, Client, ClientContext, Message, Upload, wrapped_client
from jaxpfl.core.types import Key, Metrics, PyTree, Scalar, Splits
from jaxpfl.models import Task


@struct.dataclass
class FedBuffHyper(AveragingHyper):
    """Hyper-parameters of FedBuff."""

    staleness: Scalar = hyper(0.5, "a in the weight (1 + rounds of delay)^-a; 0 weighs all uploads alike")


def fedbuff(task: Task, work: LocalWork, *, in_flight: int = 0) -> Algorithm:
    """FedBuff: rounds of the next K clients that arrive, K being the cohort, their updates weighted by staleness.

    ``staleness`` among the metrics is the mean over the round's clients.
    Models: personalised mu (there is no other); global mu.

    Args:
      task: any model.
      work: the local work of a client that begins.
      in_flight: M, clients at work at once, at least the cohort; 0 for twice as many, at most all.
    """
    algorithm = fedavg(task, work)
    return algorithm._replace(clients=tuple(map(_weighted, algorithm.clients)), in_flight=in_flight)


def _weighted(inner: Client) -> Client:
    def update(
        key: Key, hp: FedBuffHyper, ctx: ClientContext, message: Message, state: PyTree, splits: Splits
    ) -> tuple[PyTree, Upload, Metrics]:
        state, upload, metrics = inner.update(key, hp, ctx, message, state, splits)
        late = jnp.asarray(ctx.staleness, jnp.result_type(float))
        total = optax.tree.scale((1 + late) ** -hp.staleness, upload.total)
        return state, upload._replace(total=total), metrics | {"staleness": late}

    return wrapped_client(inner, update=update)

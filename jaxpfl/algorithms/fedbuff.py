r"""FedBuff: FedAvg in asynchronous rounds, where the server takes a step whenever its buffer holds K uploads.

M clients train concurrently, each from the model that it received when it started. A round ends when K of these clients
have uploaded. Then K idle clients begin to train from the new model. The time model determines when each client uploads
(`engine.in_flight`).

Suppose that :math:`\tau_i` rounds ended while client i was training. The client has then trained :math:`w_i` from the
model :math:`\mu_{t - \tau_i}`, and the server's step is

.. math:: \mu_{t+1} = \mu_t + \frac{\sum_i n_i\, s(\tau_i) (w_i - \mu_{t - \tau_i})}{\sum_i n_i}, \qquad
   s(\tau) = (1 + \tau)^{-a}

with sums over the K clients, numbers of examples n_i, and the exponent a (the hyper-parameter ``staleness``). The
staleness weights s are not normalized, so they shorten the step. The paper's mean is uniform, as with the setting
``weighting="uniform"``. A server optimizer treats the negative mean as a gradient.

The method performs poorly if the data of fast and slow clients differ: fast clients upload more often, and the model
fits their data. The method also performs poorly if M is many times K, because clients then train from old models.
Without a time model all clients take the same time, and asynchronous rounds have no advantage.

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

    staleness: Scalar = hyper(0.5, "a in the weight (1 + rounds of delay)^-a; 0 gives all uploads the same weight")


def fedbuff(task: Task, work: LocalWork, *, in_flight: int = 0) -> Algorithm:
    """FedBuff: asynchronous FedAvg, where a round averages the next K uploads that arrive, weighted by staleness.

    K is the cohort size. The metric ``staleness`` is the mean staleness of the round's uploads. The global model is mu,
    which is also every client's personalized model.

    Args:
      task: the task; any model is supported.
      work: the local work of a client between its download and its upload.
      in_flight: number M of clients that train concurrently, at least the cohort size; 0 for the smaller of twice the
        cohort size and the number of clients.
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

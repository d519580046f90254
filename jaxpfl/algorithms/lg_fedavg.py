r"""LG-FedAvg: a personal representation for each client, and a shared head.

LG-FedAvg is FedPer with body and head exchanged. Client i of the cohort S, with loss f_i and n_i training examples,
starts its tau local steps from its own body phi_i and the server's head h:

.. math:: (\phi_i, h_i) \leftarrow (\phi_i, h_i) - \eta \nabla f_i(\phi_i, h_i), \qquad
   h \leftarrow h + \frac{\sum_{i \in S} n_i (h_i - h)}{\sum_{i \in S} n_i}

The paper starts the method from models that FedAvg has trained (``warm_start``), and allows bodies with different
architectures. Here all bodies have the same initial parameters, as in the authors' code.

The method performs poorly if clients have few examples, because each client trains most of the model alone. The bodies
drift apart, so the server averages heads that were trained on different features.

Reference: Liang et al. 2020, "Think Locally, Act Globally: Federated Learning with Local and Global Representations",
https://arxiv.org/abs/2001.01523.
"""

from __future__ import annotations

from jaxpfl.algorithms.parts.local_work import LocalWork
from jaxpfl.algorithms.parts.split_models import head_and_body, keeping_own_part, trained_together
from jaxpfl.core.protocol import Algorithm
from jaxpfl.core.types import PyTree
from jaxpfl.models import Task


def lg_fedavg(task: Task, work: LocalWork) -> Algorithm:
    """LG-FedAvg: local SGD steps on body and head together, then a mean of the heads weighted by numbers of examples.

    The personalized model is the client's own body with the server's head. There is no global model.

    Raises:
      JaxpflError: if the model has no head or no body.
    """
    by_head = head_and_body("lg-fedavg", task)

    def split(params: PyTree) -> tuple[PyTree, PyTree]:
        head, body = by_head(params)
        return body, head

    return keeping_own_part(task, work, split, trained_together(task, work, split), work.steps)

r"""LG-FedAvg: a representation of each client's own, and a shared head.

FedPer with the parts exchanged. Client i starts its tau steps from its own body phi_i and the server's head h:

.. math:: (\phi_i, h_i) \leftarrow (\phi_i, h_i) - \eta \nabla f_i(\phi_i, h_i), \qquad
   h \leftarrow h + \frac{\sum_{i \in S} n_i (h_i - h)}{\sum_{i \in S} n_i}

The paper starts it from the models of FedAvg (``warm_start``), and its clients' bodies may be of other architectures.
All bodies start alike, as in the authors' code.

It does badly where clients have few examples, as nobody helps them with most of the model: the heads that are averaged
read features of bodies that drift apart.

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
    """LG-FedAvg: tau SGD steps on body and head together, then the mean of the heads, weighted by examples.

    Models: personalised, the client's own body with the server's head; no global model.

    Raises:
      JaxpflError: for a model without a head or without a body.
    """
    by_head = head_and_body("lg-fedavg", task)

    def split(params: PyTree) -> tuple[PyTree, PyTree]:
        head, body = by_head(params)
        return body, head

    return keeping_own_part(task, work, split, trained_together(task, work, split), work.steps)

r"""FedPer: a shared body of the model, and a personal head for each client.

Client i of the cohort S, with loss f_i and n_i training examples, starts its tau local steps from the server's body phi
and its own head h_i, and trains both parts together:

.. math:: (\phi_i, h_i) \leftarrow (\phi_i, h_i) - \eta \nabla f_i(\phi_i, h_i), \qquad
   \phi \leftarrow \phi + \frac{\sum_{i \in S} n_i (\phi_i - \phi)}{\sum_{i \in S} n_i}

Reference: Arivazhagan et al. 2019, "Federated Learning with Personalization Layers",
https://arxiv.org/abs/1912.00818.
"""

from __future__ import annotations

from jaxpfl.algorithms.parts.local_work import LocalWork
from jaxpfl.algorithms.parts.split_models import head_and_body, keeping_own_part, trained_together
from jaxpfl.core.protocol import Algorithm
from jaxpfl.models import Task


def fedper(task: Task, work: LocalWork) -> Algorithm:
    """FedPer: local SGD steps on body and head together, then a mean of the bodies weighted by numbers of examples.

    The personalized model is the server's body with the client's own head. There is no global model.

    Raises:
      JaxpflError: if the model has no head or no body.
    """
    split = head_and_body("fedper", task)
    return keeping_own_part(task, work, split, trained_together(task, work, split), work.steps)

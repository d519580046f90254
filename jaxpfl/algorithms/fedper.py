r"""FedPer: clients share the body of the model, and each has a head of its own.

Client i starts its tau steps from (phi, h_i), the server's body and its own head, and trains both together:

.. math:: (\phi_i, h_i) \leftarrow (\phi_i, h_i) - \eta \nabla f_i(\phi_i, h_i), \qquad
   \phi \leftarrow \phi + \frac{\sum_{i \in S} n_i (\phi_i - \phi)}{\sum_{i \in S} n_i}

Reference: Arivazhagan et al. 2019, "Federated Learning with Personalization Layers".
"""

from __future__ import annotations

from jaxpfl.algorithms.parts.local_work import LocalWork
from jaxpfl.algorithms.parts.own_part import head_and_body, keeping_own_part, trained_together
from jaxpfl.models import Task
from jaxpfl.protocol import Algorithm


def fedper(task: Task, work: LocalWork) -> Algorithm:
    """FedPer: tau SGD steps on body and head together; the mean of the bodies is weighted by training examples.

    Models: personalised, the server's body with the client's own head; no global model.

    Raises:
      JaxpflError: for a model without a head, or whose head is the whole model.
    """
    split = head_and_body("fedper", task)
    return keeping_own_part(task, work, split, trained_together(task, work, split), work.steps)

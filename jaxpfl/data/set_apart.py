"""New clients: clients set apart from a federation, which arrive after training."""

from __future__ import annotations

import numpy as np

from jaxpfl.core.types import Federation
from jaxpfl.data import portable
from jaxpfl.data.dealt import chosen
from jaxpfl.data.federate import SplitPurpose, split_rng
from jaxpfl.support.errors import JaxpflError


def set_apart(federation: Federation, unseen: int, split_seed: int = 0) -> tuple[Federation, Federation]:
    """Split a federation's clients into those that are trained and ``unseen`` new ones, drawn uniformly.

    Args:
      federation: the stacked data of m clients.
      unseen: clients to set apart, at least 1 and fewer than m.
      split_seed: at least 0.

    Returns:
      The trained and the unseen clients, with their ids and in their order.

    Raises:
      JaxpflError: if no client would be unseen, or none trained.
    """
    clients = federation.num_clients
    if not 1 <= unseen < clients:
        raise JaxpflError(f"unseen clients must be at least 1 and fewer than all {clients}, got {unseen}")
    scores = portable.uniform(split_rng(split_seed, SplitPurpose.UNSEEN), clients)
    apart = np.zeros(clients, bool)
    apart[np.argsort(scores, kind="stable")[:unseen]] = True
    return chosen(federation, ~apart), chosen(federation, apart)

"""Clients that are never trained: set apart from a federation, to arrive after training."""

from __future__ import annotations

import jax
import numpy as np

from jaxpfl.data import portable
from jaxpfl.data.federate import SplitPurpose, split_rng
from jaxpfl.errors import JaxpflError
from jaxpfl.types import Federation


def set_apart(federation: Federation, unseen: int, split_seed: int = 0) -> tuple[Federation, Federation]:
    """Splits a federation's clients into those that are trained and ``unseen`` ones, drawn uniformly.

    Args:
      federation: the stacked data of m clients.
      unseen: clients to set apart, at least 1 and fewer than m.
      split_seed: at least 0.

    Returns:
      The trained and the unseen clients; they keep their ids and their order.

    Raises:
      JaxpflError: where nobody would be unseen, or nobody trained.
    """
    clients = federation.num_clients
    if not 1 <= unseen < clients:
        raise JaxpflError(f"unseen clients must be at least 1 and fewer than all {clients}, got {unseen}")
    scores = portable.uniform(split_rng(split_seed, SplitPurpose.UNSEEN), clients)
    apart = np.zeros(clients, bool)
    apart[np.argsort(scores, kind="stable")[:unseen]] = True
    trained, rest = (jax.tree.map(lambda a, rows=rows: np.asarray(a)[rows], federation) for rows in (~apart, apart))
    return trained, rest

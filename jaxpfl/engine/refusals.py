"""Reasons why a method's clients need a stack of all of them, one row each; for plans that have another stack."""

from __future__ import annotations

import jax

from jaxpfl.core.protocol import Algorithm, Reduction
from jaxpfl.core.types import PyTree


def of_stack(algorithm: Algorithm) -> str:
    """Reason that shows in the algorithm itself; empty if there is none."""
    return of_slots(algorithm) or of_uploads(algorithm)


def of_slots(algorithm: Algorithm) -> str:
    """Reason why a cohort's clients cannot be a stack of their own; empty if there is none."""
    if len(algorithm.clients) > 1:
        return "its clients are in groups"
    if algorithm.in_flight is not None:
        return "its rounds are asynchronous"
    return ""


def of_uploads(algorithm: Algorithm) -> str:
    """Reason that shows in the uploads, each of which names its client's row; empty if there is none."""
    return "its server sees single uploads" if algorithm.reduction is Reduction.STACK else ""


def of_messages(per_client: PyTree) -> str:
    """Reason that shows in the messages to single clients (or their shapes); empty if there are no such messages."""
    return "its server sends each client its own message" if jax.tree.leaves(per_client) else ""

"""Who takes part in a round. Semantics, not speed: another choice is another result.

A `Participation` draws the cohort as sorted rows of the stack, [capacity] int32; an empty slot carries the row m.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxpfl.errors import JaxpflError
from jaxpfl.randomness import client_scores
from jaxpfl.types import Array, Key


class Participation(NamedTuple):
    """A way to draw the cohort.

    Attributes:
      name: what config files and reports call it.
      num_clients: m.
      capacity: slots of the cohort, static.
      expected_cohort: the expected number of clients in a round (public).
      everyone: static; true when the cohort is always all m clients in order (the engine then needs no gather).
      sample: ``(key, client_ids [m]) -> rows [capacity] int32``, sorted, m where empty.
    """

    name: str
    num_clients: int
    capacity: int
    expected_cohort: float
    everyone: bool
    sample: Callable[[Key, Array], Array]


def full(num_clients: int) -> Participation:
    """Every client in every round."""
    _check(num_clients, num_clients)

    def sample(key: Key, client_ids: Array) -> Array:
        del key, client_ids
        return jnp.arange(num_clients, dtype=jnp.int32)

    return Participation("full", num_clients, num_clients, float(num_clients), True, sample)


def uniform(num_clients: int, cohort: int) -> Participation:
    """K of m clients, uniformly without replacement: the K largest of m independent uniform scores."""
    _check(num_clients, cohort)

    def sample(key: Key, client_ids: Array) -> Array:
        _, rows = jax.lax.top_k(client_scores(key, client_ids), cohort)
        return jnp.sort(rows.astype(jnp.int32))

    return Participation("uniform", num_clients, cohort, float(cohort), False, sample)


def of(num_clients: int, cohort: int | None) -> Participation:
    """Full participation when ``cohort`` is None or m, otherwise uniform of that many."""
    if cohort is None or cohort == num_clients:
        return full(num_clients)
    return uniform(num_clients, cohort)


def _check(num_clients: int, cohort: int) -> None:
    if num_clients < 1:
        raise JaxpflError(f"clients must be at least 1, got {num_clients}")
    if not 1 <= cohort <= num_clients:
        raise JaxpflError(f"cohort must be between 1 and the number of clients ({num_clients}), got {cohort}")

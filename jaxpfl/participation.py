"""Who takes part in a round, and who fails in it. Semantics, not speed: another choice is another result.

A `Participation` draws the cohort as sorted rows of the stack, [capacity] int32; an empty slot carries the row m. An
`Availability` says who of it takes fewer local steps, and whose upload is lost.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxpfl.errors import JaxpflError
from jaxpfl.protocol import ALL_STEPS
from jaxpfl.randomness import Purpose, client_scores, stream
from jaxpfl.types import Array, Key, Scalar


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


class Availability(NamedTuple):
    """What may go wrong with clients of the cohort. Draws are independent, and a client's do not depend on the others.

    Attributes:
      dropout: the probability that a client that has done its work uploads nothing. It keeps its own new state.
      stragglers: the probability that a client takes fewer steps: a number uniform on 1 ... tau, as in Li et al. 2020
        ("Federated Optimization in Heterogeneous Networks", systems heterogeneity).
      same_stragglers: draw who is slow, and how slow, once for the whole run; else anew in each round.
    """

    dropout: float = 0.0
    stragglers: float = 0.0
    same_stragglers: bool = False

    def local_steps(self, run_key: Key, round: Array, client_id: Array, steps: int) -> Scalar:
        """The most steps that a client takes in a round; `ALL_STEPS` (static) where nobody is slow."""
        if not self.stragglers:
            return ALL_STEPS
        key = stream(run_key, Purpose.STRAGGLERS, client_id)
        if not self.same_stragglers:
            key = jax.random.fold_in(key, round)
        slow, share = jax.random.uniform(key, (2,), jnp.float32)
        some = 1 + jnp.minimum((share * steps).astype(jnp.int32), steps - 1)
        return jnp.where(slow < self.stragglers, some, steps)

    def drops_out(self, run_key: Key, round: Array, client_id: Array) -> Array:
        """Whether a client's upload of a round is lost, [] bool."""
        if not self.dropout:
            return jnp.array(False)
        key = stream(run_key, Purpose.DROPOUT, round, client_id)
        return jax.random.uniform(key, (), jnp.float32) < self.dropout


RELIABLE = Availability()
"""Nobody fails."""


def availability(dropout: float = 0.0, stragglers: float = 0.0, *, same_stragglers: bool = False) -> Availability:
    """An `Availability`, checked.

    Raises:
      JaxpflError: for a dropout outside [0, 1), or a share of stragglers outside [0, 1].
    """
    if not 0 <= dropout < 1:
        raise JaxpflError(f"dropout must be >= 0 and < 1, got {dropout}")
    if not 0 <= stragglers <= 1:
        raise JaxpflError(f"stragglers must be >= 0 and <= 1, got {stragglers}")
    if same_stragglers and not stragglers:
        raise JaxpflError("same_stragglers needs stragglers > 0")
    return Availability(float(dropout), float(stragglers), same_stragglers)


def _check(num_clients: int, cohort: int) -> None:
    if num_clients < 1:
        raise JaxpflError(f"clients must be at least 1, got {num_clients}")
    if not 1 <= cohort <= num_clients:
        raise JaxpflError(f"cohort must be between 1 and the number of clients ({num_clients}), got {cohort}")

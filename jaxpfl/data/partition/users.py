"""The natural partition: clients are the users who produced the examples."""

from __future__ import annotations

import numpy as np

from jaxpfl.data.partition.classes import Indices
from jaxpfl.support.errors import JaxpflError


def choose_users(users: np.ndarray, m: int | None, g: int, rng: np.random.Generator) -> np.ndarray:
    """Users of each client: disjoint groups of g.

    Args:
      users: [U] distinct users.
      m: clients; as many as there are groups of g unless given. Surplus users, chosen at random, are left out.
      g: users of each client.
      rng: the generator.

    Returns:
      [m, g], users ascending in each row. If every user is a client of its own, they are in order.

    Raises:
      JaxpflError: if g is below 1, or m * g exceeds the number of users.
    """
    if g < 1:
        raise JaxpflError(f"users per client must be at least 1, got {g}")
    if len(users) < g:
        raise JaxpflError(f"users per client must be at most the {len(users)} users there are, got {g}")
    m = len(users) // g if m is None else m
    if m < 1:
        raise JaxpflError(f"the number of clients must be at least 1, got {m}")
    if m * g > len(users):
        raise JaxpflError(
            f"{m} clients of {g} users need {m * g} users, but there are {len(users)}: use at most {len(users) // g}"
        )
    if g == 1 and m == len(users):
        return np.sort(users)[:, None]
    return np.sort(rng.permutation(np.sort(users))[: m * g].reshape(m, g), axis=1)


def examples_of(users: np.ndarray, groups: np.ndarray) -> list[Indices]:
    """Indices of each client's examples.

    Args:
      users: [N] user of each example.
      groups: [m, g] users of each client, possibly without examples.
    """
    order = np.argsort(users, kind="stable")
    known, starts = np.unique(users[order], return_index=True)
    own = dict(zip(known.tolist(), np.split(order, starts[1:]), strict=True))
    nothing = np.zeros(0, np.int64)
    return [np.sort(np.concatenate([own.get(user, nothing) for user in group])) for group in groups.tolist()]

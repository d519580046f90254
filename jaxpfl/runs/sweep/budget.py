"""Equal budgets of gradient steps: a method that evaluates more gradients in a round runs fewer rounds.

The reference is rounds x local_steps, the steps of a client that takes one gradient in each. Schedules of rates by the
round stay as they are.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from jaxpfl import algorithms, models
from jaxpfl.algorithms import LocalWork
from jaxpfl.core.protocol import Algorithm
from jaxpfl.engine.build import build
from jaxpfl.runs.config import RunConfig, resolve, spec_for
from jaxpfl.similarity.graphs import from_edges
from jaxpfl.support.errors import JaxpflError


def rounds_of(config: RunConfig, method: str, among: tuple[str, ...], share: float | None = None) -> int:
    """Rounds in which a method takes as many gradients as rounds x local_steps, rounded down, and at least one.

    A client's mean number of gradients is then that of the reference to within one round's, whatever the
    participation. A client that also trains outside the cohort (``idle``) is counted with the expected number of such
    rounds between two participations.

    Args:
      config: of the run; not resolved.
      method: its name.
      among: all methods of the config.
      share: of the clients that are in a cohort, if not cohort / clients.

    Raises:
      JaxpflError: for a method that does not count its gradients, or draws their number, one that trains outside the
        cohort where the number of clients is not known, and, of work in epochs, one with gradients of a number of its
        own beside those of the local steps.
    """
    full = resolve(config)
    assert full.rounds is not None
    return max(1, int(full.rounds * full.local_steps / gradients_of(config, method, among, share) + 1e-9))


def gradients_of(config: RunConfig, method: str, among: tuple[str, ...], share: float | None = None) -> float:
    """Gradients of a client for each of its rounds in the cohort, those of the expected rounds outside it included.

    Args:
      config, method, among, share: as in `rounds_of`.

    Raises:
      JaxpflError: as `rounds_of`.
    """
    full = resolve(config)
    steps = full.local_steps
    options = spec_for(full, method, among).options
    in_cohort, outside, cap = _gradients(method, steps, tuple(sorted(options.items())))
    if full.local_epochs is not None and _gradients(method, 10 * steps, tuple(sorted(options.items())))[0] != (
        10 * in_cohort
    ):
        raise JaxpflError(
            f"budget = steps with local_epochs needs gradients in proportion to the steps, not {method}'s"
        )
    if not outside:
        return in_cohort
    if share is None:
        if full.clients is None or full.cohort is None:
            raise JaxpflError(f"budget = steps needs clients and cohort: {method} also trains outside the cohort")
        share = min(1.0, full.cohort / full.clients)
    rests = 1 - share
    return in_cohort + outside * sum(rests**j for j in range(1, cap + 1))


@functools.lru_cache(maxsize=256)
def _gradients(method: str, steps: int, options: tuple[tuple[str, object], ...]) -> tuple[int, int, int]:
    """Gradients of a client's round in the cohort and of one outside it, and the most of the latter in a row."""
    algorithm = _built(method, steps, options)
    if not algorithm.counts_gradients:
        raise JaxpflError(f"budget = steps needs the number of gradients, which {method} does not count")
    try:
        said = [client.gradients for client in algorithm.clients if client.gradients is not None]
        # The count of a method that draws it is in the server's message, and there is none here.
        nothing: Any = None
        counts = [(int(one.update(steps, nothing)), int(one.idle(steps)) if one.idle else 0) for one in said]
    except AttributeError:
        raise JaxpflError(f"budget = steps needs a fixed number of gradients in a round; {method} draws it") from None
    in_cohort, outside = (max(column) for column in zip(*counts, strict=True))
    return in_cohort, outside if algorithm.idle_cap else 0, algorithm.idle_cap


def _built(method: str, steps: int, options: tuple[tuple[str, object], ...]) -> Algorithm:
    """The method for a small task: the number of its gradients does not depend on the data.

    The clients are many, as some options are at most their number.
    """
    shape, clients = (4,), 1000
    task = models.classification(models.build_model("mlp-ln", 2, shape), shape, 2, None)
    ring = from_edges([(i, (i + 1) % clients) for i in range(clients)], clients)
    work = LocalWork(np.full(clients, 8), steps, 4, graph=ring)
    return build(algorithms.get(method), task, work, dict(options))

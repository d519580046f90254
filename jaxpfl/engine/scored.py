"""Clients that a simulation scores: those that it trains, or those whose examples a pooled method merges into one."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from jaxpfl.core.protocol import Algorithm
from jaxpfl.core.types import Federation
from jaxpfl.engine.execution_plan import Resolved
from jaxpfl.engine.groups import Group, make_groups
from jaxpfl.engine.placement import Placement, balanced, place, put
from jaxpfl.engine.state import RunState


class Scored(NamedTuple):
    """Clients that are scored, on their devices.

    Attributes:
      federations: their data, for each group.
      groups: the groups.
      placement: of the data, and of states while they are read.
    """

    federations: tuple[Federation, ...]
    groups: tuple[Group, ...]
    placement: Placement


def of_pooled(algorithm: Algorithm, federation: Federation, scoring: Resolved) -> Scored:
    """The m clients of a pooled method, without their training examples, which the trained client has.

    They share the devices of the plan as other methods' clients do; the trained client's state is on each of these.
    """
    given = federation.num_clients, scoring.devices, scoring.even
    placement = place(*given, model_shards=scoring.model_shards)
    placement = placement._replace(state=RunState._make([placement.everywhere] * len(RunState._fields)))
    scored = federation._replace(train=federation.train.emptied())
    groups = balanced(make_groups(algorithm, np.asarray(federation.client_ids), scoring.devices), (scored,), placement)
    return Scored((put(scored, placement, groups[0]),), groups, placement)

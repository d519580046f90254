r"""Nearest cells of the map to a given federation.

The distance is Euclidean. One unit is a factor of 4 in clients, 3 in examples, 4 in participation, 4 in gradient steps
or 4 in epsilon, or .25 in the square root of the label skew (the distance between iid clients and clients with five of
ten classes is 1.3). A change by one unit is meant to matter about equally in every feature. A linear model and a model
with layers have distance 1. Federations whose clients differ in another way (in label proportions, as clusters that
name the classes differently, or as users) have distance 2. The units are a judgement, not a measurement.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .atlas import Place
from .skew import Measures

FAR = 1.5
"""Distance beyond which the nearest cell counts as far."""
_FACTORS = {"clients": 4.0, "examples": 3.0, "participation": 4.0, "steps": 4.0, "epsilon": 4.0}
_SKEW, _MODEL, _KIND = 0.25, 1.0, 2.0
_MARGIN = 0.5  # margin outside the map's range above which there is a remark
_UNEQUAL = 3.0
"""Ratio of largest to smallest client above which there is a remark; the map's writers have 32 to 92 examples."""
_KINDS = {"clusters": "clusters of clients that name classes differently", "natural": "users"}


@dataclass(frozen=True)
class Asked:
    """The given federation.

    Attributes:
      measures: measures of the federation's split.
      partition: partition of the split.
      participation: fraction of the clients in a round.
      model: registered name.
      steps: gradient steps of a client; None if undecided.
      epsilon: epsilon of the run; None without privacy.
      clusters: number of client clusters, if known.
      sizes: smallest and largest number of labeled examples of a client, if known.
    """

    measures: Measures
    partition: str
    participation: float
    model: str
    steps: int | None = None
    epsilon: float | None = None
    clusters: int | None = None
    sizes: tuple[int, int] | None = None


@dataclass(frozen=True)
class Near:
    """A cell with its distance.

    Attributes:
      place: cell.
      distance: distance from the federation.
      parts: distance along each feature.
    """

    place: Place
    distance: float
    parts: Mapping[str, float]


def nearest(asked: Asked, places: Sequence[Place], count: int = 3) -> list[Near]:
    """Return the nearest cells, nearest first; a private federation is compared with private cells only."""
    found = [_near(asked, place) for place in _eligible(asked, places)]
    return sorted(found, key=lambda near: near.distance)[:count]


def beyond(asked: Asked, places: Sequence[Place]) -> list[str]:
    """Return descriptions of the features for which the federation is outside the range of the cells."""
    of_cells = [_numbers_of(place) for place in _eligible(asked, places)]
    said = []
    for name, value in _numbers(asked).items():
        own = [one[name] for one in of_cells if one.get(name) is not None]
        if value is None or not own:
            continue
        low, high = min(own), max(own)
        outside = max(_apart(name, value, low) if value < low else 0, _apart(name, value, high) if value > high else 0)
        if outside > _MARGIN:
            said.append(
                f"{name} {value:g}, where the map has {f'only {low:g}' if low == high else f'{low:g} to {high:g}'}"
            )
    kinds = {_kind(place.partition) for place in _eligible(asked, places)}
    if _kind(asked.partition) not in kinds:
        said.append(f"no such cell has {_KINDS.get(asked.partition, 'clients that differ in their labels')}")
    if asked.sizes is not None:
        low, high = asked.sizes
        if high > _UNEQUAL * max(low, 1):
            said.append(
                f"unequal clients, of {low} to {high} labeled examples, but the map's differ by a factor of at "
                f"most {_UNEQUAL:g}: the distance is computed for the median"
            )
    return said


def _eligible(asked: Asked, places: Sequence[Place]) -> list[Place]:
    return [place for place in places if (place.epsilon is None) == (asked.epsilon is None)]


def _near(asked: Asked, place: Place) -> Near:
    ours, theirs = _numbers(asked), _numbers_of(place)
    parts = {name: _apart(name, a, b) for name, a in ours.items() if a is not None and (b := theirs[name]) is not None}
    parts["model"] = 0.0 if (asked.model == "linear") == (place.model == "linear") else _MODEL
    parts["kind"] = 0.0 if _kind(asked.partition) == _kind(place.partition) else _KIND
    return Near(place, math.hypot(*parts.values()), parts)


def _apart(name: str, ours: float, theirs: float) -> float:
    if name == "skew":
        return abs(math.sqrt(ours) - math.sqrt(theirs)) / _SKEW
    return abs(math.log(ours / theirs)) / math.log(_FACTORS[name])


def _numbers(asked: Asked) -> dict[str, Any]:
    own = asked.measures
    return _named(own, asked.participation, asked.steps, asked.epsilon)


def _numbers_of(place: Place) -> dict[str, Any]:
    return _named(place.measures, place.share, place.steps, place.epsilon)


def _named(measured: Measures, share: float, steps: int | None, epsilon: float | None) -> dict[str, Any]:
    numbers = {"clients": measured.clients, "examples": measured.examples, "skew": measured.skew}
    return numbers | {"participation": share, "steps": steps, "epsilon": epsilon}


def _kind(partition: str) -> str:
    return partition if partition in _KINDS else "labels"

"""The measured map: scores of each cell (a federation and a budget) by method and split, in a file of the package."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from jaxpfl.runs.records import Value
from jaxpfl.support import files
from jaxpfl.support.errors import JaxpflError

from .skew import Measures

FILE = "map.json"
COMMITTED = Path(__file__).parent / FILE
"""The map that comes with the package."""


@dataclass(frozen=True)
class Scores:
    """Scores of a method in a cell, with the setting that it chose by validation.

    Attributes:
      settings: chosen values, by axis.
      set: static options, METHOD.name=value.
      tries: number of settings that were tried.
      rounds: number of rounds of each run.
      validation, test: mean accuracy over clients on each split, [S], as fractions.
      reference: whether the method is only a reference, and not a contender.
    """

    settings: Mapping[str, Value]
    set: tuple[str, ...]
    tries: int
    rounds: int
    validation: tuple[float, ...]
    test: tuple[float, ...]
    reference: bool = False


@dataclass(frozen=True)
class Place:
    """A measured cell.

    Attributes:
      name: name of the `Cell`.
      data, model, heterogeneity, share, steps, epsilon, varies: fields of the cell.
      partition: partition of the cell's split.
      measures: measures of the cell's first split.
      methods: scores by method; a method is left out if none of its settings could be trained.
      failed: methods that are left out -> reason.
    """

    name: str
    data: str
    model: str
    heterogeneity: str
    partition: str
    share: float
    steps: int
    epsilon: float | None
    varies: tuple[str, ...]
    measures: Measures
    methods: Mapping[str, Scores]
    failed: Mapping[str, str]

    @property
    def contenders(self) -> list[str]:
        """Scores of the methods that are not references."""
        return [name for name, own in self.methods.items() if not own.reference]


@dataclass(frozen=True)
class Atlas:
    """All measured cells.

    Attributes:
      quick: whether the run was scaled down.
      command: command that reproduces the map.
      minutes: elapsed time of all programs, including compilation.
      versions: versions of the packages, and the machine.
      splits: number of split seeds.
      places: measured cells, in the order of the declaration.
    """

    quick: bool
    command: str
    minutes: float
    versions: Mapping[str, Any]
    splits: int
    places: tuple[Place, ...]

    def to_json(self) -> dict[str, Any]:
        """Return the map as JSON values."""
        return asdict(self)


def read(path: Path = COMMITTED) -> Atlas:
    """Read the map in a file.

    Raises:
      JaxpflError: if the file contains no map.
    """
    stored = files.read_checksummed(path, "jaxpfl winners run makes it again")
    try:
        values: dict[str, Any] = {**stored, "places": tuple(_place(one) for one in stored["places"])}
        found = Atlas(**values)
        _check(found)
    except (KeyError, TypeError, ValueError, AttributeError):
        raise JaxpflError(f"{path} holds no map of jaxpfl winners: remove it, and run it again") from None
    return found


def _check(found: Atlas) -> None:
    """Raise ValueError for a map without cells, a cell without contenders, or a wrong number of scores."""
    for place in found.places:
        if not place.contenders:
            raise ValueError(place.name)
        if any(len(own.test) != found.splits for own in place.methods.values()):
            raise ValueError(place.name)
    if not found.places:
        raise ValueError("places")


def _place(stored: dict[str, Any]) -> Place:
    methods = {name: _scores(one) for name, one in stored["methods"].items()}
    measured = Measures(**stored["measures"])
    return Place(**(stored | {"varies": tuple(stored["varies"]), "measures": measured, "methods": methods}))


def _scores(stored: dict[str, Any]) -> Scores:
    validation, test = (tuple(float(one) for one in stored[name]) for name in ("validation", "test"))
    if not all(0 <= share <= 1 for share in (*validation, *test)) or len(validation) != len(test):
        raise ValueError
    return Scores(**(stored | {"set": tuple(stored["set"]), "validation": validation, "test": test}))

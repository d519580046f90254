"""Options of a study that also takes the user's own clients from a CSV file."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal, TypeAlias

from jaxpfl.studies.own_data.client_csv import CsvLayout
from jaxpfl.studies.study import Options, Results, refuse_given
from jaxpfl.support.errors import JaxpflError

Intervals: TypeAlias = Literal["learned", "clients", "plug-in"]

LEVEL = 0.95
"""Level of intervals, unless another is asked for."""


@dataclass(frozen=True)
class OwnFile(CsvLayout, Options):
    """A CSV file of clients instead of simulated ones."""

    csv: Path | None = None
    """Clients of your own, by the names of its columns: --client, and --value or --values."""

    def refuse_without_file(self) -> None:
        """Refuse a layout without a file.

        Raises:
          JaxpflError: the first of the layout's fields that is not at its default.
        """
        names = [field.name for field in fields(CsvLayout)]
        refuse_given(self, names, "says how --csv is to be read, and there is none")


@dataclass(frozen=True)
class OwnClients(OwnFile):
    """A CSV file of clients, whose estimates have intervals."""

    level: float = LEVEL
    """Level of the intervals of clients of your own."""

    def refuse_without_file(self) -> None:
        """Refuse a layout or a level without a file.

        Raises:
          JaxpflError: the first of the fields that is not at its default.
        """
        super().refuse_without_file()
        if self.level != LEVEL:
            raise JaxpflError(f"level is of the intervals of --csv, and there is none, got {self.level}")


def own_or_simulated(name: str, simulated: Callable[[Any], Results]) -> Callable[[Any, OwnFile], Results]:
    """Results of a study on the clients of a file where its options name one, else on simulated clients.

    Args:
      name: of the study, and of its module in `own_data`.
      simulated: ``settings -> Results``.
    """

    def results(given: Any, options: OwnFile) -> Results:
        if options.csv is not None:
            own = importlib.import_module(f"jaxpfl.studies.own_data.{name}")
            return own.results(options.csv, given, options)
        options.refuse_without_file()
        return simulated(given)

    return results

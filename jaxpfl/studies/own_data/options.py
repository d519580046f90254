"""Options of a study that also takes the user's own clients from a CSV file."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path

from jaxpfl.errors import JaxpflError
from jaxpfl.studies.own_data.csv_columns import CsvLayout
from jaxpfl.studies.settings import refuse_given
from jaxpfl.studies.study import Options

LEVEL = 0.95
"""Level of intervals, unless another is asked for."""


@dataclass(frozen=True)
class OwnFile(CsvLayout, Options):
    """A CSV file of clients instead of simulated ones."""

    csv: Path | None = None
    """Clients of your own: one row per client, or per sample; the reading of the file is reported."""

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

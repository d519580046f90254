"""The definition and the progress of any sweep folder, of runs or of a study."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from jaxpfl.support import files
from jaxpfl.runs.records import Record
from jaxpfl.runs.sweep import definition as definitions
from jaxpfl.runs.sweep import estimate
from jaxpfl.runs.sweep.definition import FILE, Definition
from jaxpfl.runs.sweep.estimate import StudyDefinition, StudySweep
from jaxpfl.runs.sweep.sweep import Sweep


def read(folder: Path) -> Definition | StudyDefinition:
    """Definition in a sweep folder.

    Raises:
      JaxpflError: for a folder without one, and one that was changed by hand to what no sweep is.
    """
    path = folder / FILE
    stored = files.read_json(path) if path.exists() else None
    if isinstance(stored, dict) and "study" in stored:
        return estimate.from_stored(stored, path)
    return definitions.read(folder)


def progress(folder: Path, definition: Definition | StudyDefinition, records: Sequence[Record]) -> tuple[int, int]:
    """Numbers of runs that are recorded, and of all, as the sweep counts them."""
    if isinstance(definition, Definition):
        return Sweep(folder, definition).progress(records)
    return StudySweep(folder, definition).progress(records)

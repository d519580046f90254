"""Problems of a sweep: the data and splits on which its settings are compared.

Settings are compared on the same clients only. Where a field of the data or the split is an axis (``clients``,
``data``, ``split_seed``), its values are problems, and each method has a best setting for each of them: the best of all
would be that of the easiest problem.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence

from jaxpfl.runs.config import DataConfig
from jaxpfl.runs.records import Record, Value
from jaxpfl.runs.sweep.order import setting_key
from jaxpfl.runs.sweep.selection import Choice, select

Problem = tuple[dict[str, Value], list[Record], dict[str, Choice]]
"""Settings that name a problem, its records, and the choice of each method on it."""

DATA_FIELDS = frozenset(field.name for field in dataclasses.fields(DataConfig))
"""Names of the fields that make the data and their split."""


def problem_axes(names: Iterable[str]) -> tuple[str, ...]:
    """The axes that change the data or their split."""
    return tuple(name for name in names if name in DATA_FIELDS)


def problem_of(settings: Mapping[str, Value]) -> dict[str, Value]:
    """The part of a setting that names its problem."""
    return {name: settings[name] for name in problem_axes(settings)}


def select_each(records: Sequence[Record], seeds: Iterable[int]) -> list[Problem]:
    """Select on each problem alone, problems in the order of the records.

    Raises:
      JaxpflError: as `select`.
    """
    seeds = list(seeds)
    found: dict[str, list[Record]] = {}
    for record in records:
        found.setdefault(setting_key(problem_of(record.settings)), []).append(record)
    return [(problem_of(own[0].settings), own, select(own, seeds)) for own in found.values()]

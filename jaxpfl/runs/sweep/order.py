"""Order of a sweep's records: that of the grid, in which ties are decided and tables are written."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence

from jaxpfl.runs.records import Record, Value


def setting_key(settings: Mapping[str, Value]) -> str:
    """Name of a setting by its content, in any order; 1, 1.0 and True are three values, as in `records.run_id`."""
    return json.dumps(dict(sorted(settings.items())))


def in_grid_order(
    records: Iterable[Record], methods: Sequence[str] = (), axes: Mapping[str, Sequence[Value]] | None = None
) -> list[Record]:
    """The records by method, then by their values on the axes, the first axis slowest, then by seed.

    Journals of several workers hold them in the order in which they ended.

    Args:
      records: of the sweep.
      methods: in their order; others come after them as they appear.
      axes: the values on each axis, in their order; other axes and other values come after them as they appear.
    """
    records, axes = list(records), axes or {}
    names = list(dict.fromkeys([*axes, *(name for one in records for name in one.settings)]))
    method_places = _places([*methods, *(one.method for one in records)])
    places = {
        name: _places([*axes.get(name, ()), *(one.settings[name] for one in records if name in one.settings)])
        for name in names
    }

    def place(one: Record) -> tuple[int, ...]:
        known = (places[name][json.dumps(one.settings[name])] if name in one.settings else -1 for name in names)
        return (method_places[json.dumps(one.method)], *known, one.seed)

    return sorted(records, key=place)


def by_setting(records: Iterable[Record]) -> dict[tuple[str, str], list[Record]]:
    """The records of each method and setting, in the order of their first ones."""
    found: dict[tuple[str, str], list[Record]] = {}
    for one in records:
        found.setdefault((one.method, setting_key(one.settings)), []).append(one)
    return found


def _places(values: Sequence[Value]) -> dict[str, int]:
    return {text: place for place, text in enumerate(dict.fromkeys(map(json.dumps, values)))}

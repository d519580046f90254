"""Rows of estimation studies: each setting has one run of the study, whose series are stored."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from jaxpfl import __version__
from jaxpfl.core.trees import checksum
from jaxpfl.data.sources.base import data_directory
from jaxpfl.studies import registry
from jaxpfl.studies.study import Results
from jaxpfl.support import files
from jaxpfl.support.errors import JaxpflError, unknown_name

from . import whole
from .compare import Row, row, spread
from .declared import Estimate, Estimation, slug
from .way import Interrupted, Way


def settings_of(case: Estimation, *, quick: bool = False, data_dir: str | None = None) -> Any:
    """Return the checked settings of a case's study.

    Raises:
      JaxpflError: if the study does not accept the declared settings.
    """
    kind = registry.get(case.study).settings
    names = [field.name for field in dataclasses.fields(kind)]
    values = dict(case.settings)
    if quick:
        values |= case.quick
        if case.repetitions is not None:
            values["repetitions"] = case.repetitions
    folder = str(data_directory(data_dir))
    values = {name: value.format(data=folder) if isinstance(value, str) else value for name, value in values.items()}
    if "data_dir" in names:
        values["data_dir"] = data_dir
    for name in values:
        if name not in names:
            raise unknown_name(f"setting of the study {case.study}", name, names)
    settings = kind(**values)
    settings.check()
    return settings


def measure(case: Estimation, way: Way) -> list[Row]:
    """Run a case's study unless it has been run, and return its rows.

    Raises:
      Interrupted: if the run was stopped.
      JaxpflError: if data are missing, or differ from the stored run's data.
    """
    path = way.folder / "runs" / f"{slug(case.setting)}.json"
    settings = settings_of(case, quick=way.quick, data_dir=way.data_dir)
    asked = _plain(settings)
    found = _stored(path) if path.exists() else None
    if found is not None and found.get("settings") != asked:
        raise JaxpflError(f"{path} was written with different settings: choose another --output")
    kind = registry.get(case.study)
    read = None if kind.reads is None else kind.reads(settings)
    data = None if read is None or read.arrays is None else checksum(read.arrays)
    if found is not None and found["data"] != data:
        raise JaxpflError(f"{path} was written for different data: choose another --output")
    if found is None:
        if way.stopped():
            raise Interrupted
        way.reporter.start(case.setting, 1, 1)
        began = time.perf_counter()
        way.saves(False)  # all repetitions are one program
        values = values_of(kind.run(settings, read=read))
        way.saves(True)
        found = {"settings": asked, "data": data, "values": values}
        found |= {"seconds": time.perf_counter() - began, "jaxpfl": __version__}
        files.write_checksummed(path, found)
    way.reporter.finish(1)
    rows = [_row(case, estimate, found["values"], quick=way.quick) for estimate in case.estimates]
    if way.quick or read is None or read.arrays is None:
        return rows
    return whole.marked(rows, whole.part(getattr(settings, "data", case.study), len(max(read.arrays, key=np.size))))


def _stored(path: Path) -> dict[str, Any]:
    """Return the values of a study that `measure` stored; values that are not finite are null in the file."""
    found = files.read_checksummed(path)
    found["values"] = {name: [math.nan if x is None else x for x in own] for name, own in found["values"].items()}
    return found


def _plain(settings: Any) -> Any:
    """Return the settings as JSON values, without the folder of the data."""
    values = {name: value for name, value in vars(settings).items() if name != "data_dir"}
    return files.jsonable(values)


def values_of(results: Results) -> dict[str, list[float]]:
    """Return a study's numbers by name: series over repetitions, errors of folds, and single numbers."""
    found = _numbers({name: value for name, value in results.json.items() if name not in ("settings", "folds")})
    found |= {name: list(map(float, own)) for name, own in results.json.get("folds", {}).items()}
    for name, values in results.series.items():
        if values.ndim == 1:
            found[name] = np.asarray(values, float).tolist()
    return found


def _numbers(value: Any, name: str = "") -> dict[str, list[float]]:
    value = files.jsonable(value)
    if isinstance(value, bool) or value is None or isinstance(value, str):
        return {}
    if isinstance(value, int | float):
        return {name: [float(value)]}
    if isinstance(value, list):
        parts: Mapping[str, Any] = {f"{name}[{i}]": own for i, own in enumerate(value)}
    else:
        parts = {f"{name}.{key}" if name else str(key): own for key, own in value.items() if key != "curve"}
    found: dict[str, list[float]] = {}
    for own, part in parts.items():
        found |= _numbers(part, own)
    return found


def _row(case: Estimation, estimate: Estimate, values: Mapping[str, list[float]], *, quick: bool) -> Row:
    own = _series(values, estimate.of)
    if estimate.against is not None:
        of = _series(values, estimate.against)
        own = [_gain(mine, other) for mine, other in zip(own, of, strict=True)]
    ours, std = spread(own)
    notes = [quick_note(case)] if quick else [estimate.note, case.note]
    if bad := sum(not math.isfinite(value) for value in own):
        notes.append(f"no value: {bad} of {len(own)} repetitions are not finite")
    setting = ", ".join(text for text in (case.setting, estimate.setting) if text)
    return row(estimate.label, setting, ours, std, estimate.printed, notes, comparable=not quick)


def _gain(error: float, of: float) -> float:
    """Return the percentage of an error that is avoided; NaN if the error is zero."""
    return 100 * (1 - error / of) if of else math.nan


def quick_note(case: Estimation) -> str:
    """Return the note on a quick run."""
    changed = dict(case.quick) | ({} if case.repetitions is None else {"repetitions": case.repetitions})
    how = ", ".join(f"{name} {value}" for name, value in changed.items())
    return f"scaled-down quick run ({how}): not comparable with the paper"


def _series(values: Mapping[str, list[float]], name: str) -> list[float]:
    if name not in values:
        raise unknown_name("series of the study", name, values)
    return values[name]

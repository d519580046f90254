"""Readers of the user's own clients and tables: several labels, and columns beside the summaries."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from fuzz_target import Target, of_file, whole
from reader_targets import of

from jaxpfl.data.sources import csv_text, tables
from jaxpfl.studies import normal_means

BESIDE = (
    b"client,estimate,se,x,g,w\na,1.5,0.2,1,north,1\nb,-2,0.5,0,south,2\nc,0.25,1e-3,2.5,north,0\nd,1,1,3,south,4\n"
)
LABELS = (
    b"city,area,warm,large\nBern,81.5,1,1\nZug,64.0,0,1\nBern,70,1,0\nZug,50,0,0\n",
    b"city,area,warm,large\nBern,81.5,21.5,1e3\nZug,64.0,18,2\nBern,70,19,3\nZug,50,20,4\n",
)

COMPILING = 100.0
"""Seconds of CPU for a fit of other options or clients than before, most of which go to compiling its programs."""


def beside(path: Path) -> Any:
    """Summaries with a covariate, groups and weights."""
    found = normal_means.read(csv_text.read(path), ("x",), groups="g", weights="w")
    m = len(found.names)
    assert found.covariates.shape == (m, 1)
    assert np.isfinite(found.covariates).all()
    assert found.groups is not None
    assert found.weights is not None
    assert len(found.groups) == len(found.weights) == m
    assert all(found.groups)
    assert np.isfinite(found.weights).all()
    assert (found.weights >= 0).all()
    return found


def labels(path: Path) -> Any:
    """A table of several columns of labels."""
    found = tables.load_table("csv:a", path, tables.TableOptions("warm,large", "city"))
    assert found.y_train.shape == (len(found.x_train), 2)
    assert found.task in ("multilabel", "regression")
    if found.task == "multilabel":
        assert set(np.unique(found.y_train)) <= {0, 1}
        return found
    return whole(found)


def fitted(path: Path) -> Any:
    """Estimates of normal means, with what is beside the summaries used in turn."""
    options = normal_means.NormalMeansOptions(csv=path)
    which = len(path.read_bytes()) % 3
    options = replace(options, covariates=("x",) if which == 0 else ())
    options = replace(options, groups="g" if which == 1 else None, weights="w" if which == 2 else None)
    return _told(normal_means.own_results(path, normal_means.NormalMeansSettings(), options))


def _told(found: Any) -> Any:
    """Results whose tables can be made, of numbers in range."""
    found.tables()
    told = found.json.get("estimated", found.json)
    assert all(np.isfinite(one) for one in told.values() if isinstance(one, float)), told
    return found


def warm(content: bytes, read: Callable[[Path], Any]) -> Callable[[Path], None]:
    """A good file that is read before memory is limited: what it needs is loaded then."""

    def begin(folder: Path) -> None:
        path = folder / "warm.csv"
        path.write_bytes(content)
        read(path)

    return begin


OWN: dict[str, Target] = {
    "columns beside summaries": of_file(of(BESIDE), beside, "a.csv", text=True),
    "several labels": of_file(of(*LABELS), labels, "a.csv", text=True),
    "normal means": of_file(
        of(BESIDE), fitted, "a.csv", text=True, begin=warm(BESIDE, fitted), share=0.01, slowest=COMPILING
    ),
}

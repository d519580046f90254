"""School: exam scores of 15,362 pupils of 139 London schools, a regression from 28 features; the schools are the users.

``school/school.mat`` in the data directory is the file of the multi-task literature: a MATLAB 5 file with a cell for
each school in ``X`` (pupils x 28) and in ``Y`` (pupils x 1, scores of 1 to 70).

Reference: Zhou, Chen and Ye 2011, "MALSAR: Multi-tAsk Learning via StructurAl Regularization"; used under privacy by
Liu et al. 2022, https://arxiv.org/abs/2206.07902.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from jaxpfl.data.sources.base import Entry, Source, check_finite, entry, where_to_put_it
from jaxpfl.data.sources.matlab import read_cells
from jaxpfl.support.errors import JaxpflError

SCHOOL = "school"
_FILE = "school.mat"
_DESCRIPTION = "exam scores of pupils, a regression; the schools are the users"


def load_school(root: Path) -> Source:
    """Load the data set from the data directory.

    Raises:
      JaxpflError: for a missing or damaged file, and one of another format.
    """
    path = _path(root)
    x, y = read_cells(path, ("X", "Y")).values()
    if not x:
        raise JaxpflError(f"{path}: X has no schools")
    if len(x) != len(y):
        raise JaxpflError(f"{path}: X has {len(x)} schools, Y has {len(y)}")
    for i, (inputs, scores) in enumerate(zip(x, y, strict=True)):
        if inputs.ndim != 2 or inputs.shape[1:] != x[0].shape[1:] or len(inputs) != scores.size:
            raise JaxpflError(
                f"{path}: school {i} has X of shape {inputs.shape} and Y of shape {scores.shape}: every school needs "
                f"[pupils, {x[0].shape[-1]}] and [pupils, 1]"
            )
    features = np.concatenate(x).astype(np.float32)
    scores = np.concatenate([own.reshape(-1) for own in y]).astype(np.float32)
    check_finite(features, f"{path}: X")
    check_finite(scores, f"{path}: Y")
    users = np.repeat(np.arange(len(x), dtype=np.int32), [len(inputs) for inputs in x])
    names = np.arange(len(x))
    description = f"{len(scores)} pupils of {len(x)} schools, {features.shape[1]} features"
    return Source(SCHOOL, features, scores, None, None, 1, description, users, user_names=names, task="regression")


def school_entry(root: Path) -> Entry:
    """The line of the data set in the list of all."""

    def describe() -> str:
        _path(root)
        return _DESCRIPTION

    return entry(SCHOOL, describe)


def _path(root: Path) -> Path:
    path = root / SCHOOL / _FILE
    if not path.is_file():
        raise JaxpflError(f"{path} is missing: {where_to_put_it()}")
    return path

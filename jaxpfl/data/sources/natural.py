"""Data sets with natural clients: MNIST by writer, and exam scores by school.

The writers of MNIST's digits were recovered by QMNIST (Yadav and Bottou 2019, "Cold Case: The Lost MNIST Digits"). The
writers of the test set are not in the training set. `unseen` returns these writers as new clients, and the partition
"natural" splits each training writer's digits by ``test_share``.

The data set ``school`` contains the exam scores of 15,362 pupils of 139 London schools, for a regression on 28
features. ``school/school.mat`` is the file used in the literature on multi-task learning: a MATLAB 5 file with one cell
per school in ``X`` (pupils x 28) and in ``Y`` (pupils x 1, scores of 1 to 70). References: Zhou, Chen and Ye 2011,
"MALSAR: Multi-tAsk Learning via StructurAl Regularization"; Liu et al. 2022, who use the data under differential
privacy, https://arxiv.org/abs/2206.07902.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from jaxpfl.data.labels import check_finite
from jaxpfl.data.sources.base import Source, where_to_put_it
from jaxpfl.data.sources.matlab import read_cells
from jaxpfl.data.sources.npz import load_npz
from jaxpfl.support.errors import JaxpflError

WRITERS = "mnist-writers"
_WRITERS_FILE = "mnist_by_writer.npz"
_WRITERS_NOTE = "MNIST by its writers, each a natural client"


def load_writers(root: Path, *, in_files: bool = False) -> Source:
    """Load ``mnist-writers``, with inputs in memory-mapped files if ``in_files``.

    Raises:
      JaxpflError: if the file is missing (the message says where to put it) or damaged.
    """
    return load_npz(WRITERS, _writers_file(root), _WRITERS_NOTE, in_files=in_files)


def describe_writers(name: str, root: Path) -> str:
    """Describe the data set, after locating its file without reading it."""
    return f"{_WRITERS_NOTE}: {_writers_file(root)}"


def _writers_file(root: Path) -> Path:
    places = [root / "writers" / _WRITERS_FILE, root / WRITERS / _WRITERS_FILE, root / _WRITERS_FILE]
    found = next((place for place in places if place.is_file()), None)
    if found is None:
        raise JaxpflError(f"file {places[0]} of data set {WRITERS!r} not found: {where_to_put_it()}")
    return found


SCHOOL = "school"
_SCHOOL_FILE = "school.mat"
_SCHOOL_NOTE = "exam scores of pupils, a regression; the schools are the users"


def load_school(root: Path) -> Source:
    """Load the school data from the data directory.

    Raises:
      JaxpflError: if the file is missing, damaged, or in another format.
    """
    path = _school_file(root)
    x, y = read_cells(path, ("X", "Y")).values()
    if not x:
        raise JaxpflError(f"{path}: X has no schools")
    if len(x) != len(y):
        raise JaxpflError(f"{path}: X has {len(x)} schools, but Y has {len(y)}")
    for i, (inputs, scores) in enumerate(zip(x, y, strict=True)):
        if inputs.ndim != 2 or inputs.shape[1:] != x[0].shape[1:] or len(inputs) != scores.size:
            raise JaxpflError(
                f"{path}: school {i} has X of shape {inputs.shape} and Y of shape {scores.shape}: they must be "
                f"[pupils, {x[0].shape[-1]}] and [pupils, 1]"
            )
    features = np.concatenate(x).astype(np.float32)
    scores = np.concatenate([own.reshape(-1) for own in y]).astype(np.float32)
    check_finite(features, f"{path}: X")
    check_finite(scores, f"{path}: Y")
    users = np.repeat(np.arange(len(x), dtype=np.int32), [len(inputs) for inputs in x])
    description = f"{len(scores)} pupils of {len(x)} schools, {features.shape[1]} features"
    return Source(SCHOOL, features, scores, None, None, 1, description, users, task="regression")


def describe_school(name: str, root: Path) -> str:
    """Describe the data set, after locating its file without reading it."""
    return f"{_SCHOOL_NOTE}: {_school_file(root)}"


def _school_file(root: Path) -> Path:
    path = root / SCHOOL / _SCHOOL_FILE
    if not path.is_file():
        raise JaxpflError(f"{path} is missing: {where_to_put_it()}")
    return path

"""Common parts of the data tests: the real data's folder, toy sources, and the examples of each client."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from jaxpfl.core.types import Federation
from jaxpfl.data import Source

IRC = {"indptr": np.array([0, 2, 2, 3]), "indices": np.array([0, 2, 1]), "counts": np.array([4, 1, 7])}
IRC["vocab"] = np.array(["a", "b", "c"])
"""Token counts of three users, the second without any."""


def real(name: str, *parts: str) -> str:
    """The folder of the real data, or a skip that says what is missing."""
    root = os.environ.get("JAXPFL_DATA_DIR")
    if not root or not Path(root, *parts).exists():
        pytest.skip(f"{name} is not at hand: JAXPFL_DATA_DIR is unset or holds no {'/'.join(parts)}")
    return root


def source_of(
    labels: np.ndarray,
    test: np.ndarray | None = None,
    *,
    users: np.ndarray | None = None,
    users_test: np.ndarray | None = None,
    superclasses: np.ndarray | None = None,
) -> Source:
    """A source whose inputs are the examples' own places, so that a federation shows who holds what."""

    def places(y: np.ndarray | None) -> np.ndarray | None:
        return None if y is None else np.arange(len(y), dtype=np.float32)[:, None]

    largest = max(int(y.max()) for y in (labels, test) if y is not None)
    classes = largest + 1 if superclasses is None else len(superclasses)
    return Source(
        *("toy", places(labels), labels, places(test), test, classes, "toy"),
        users_train=users,
        users_test=users_test,
        superclasses=superclasses,
    )


def places(federation: Federation, split: str) -> list[np.ndarray]:
    """The places that each client holds of a `source_of`."""
    data = getattr(federation, split)
    return [x[mask, 0].astype(int) for x, mask in zip(data.x, data.mask, strict=True)]


def check_partition(parts: list[np.ndarray], n: int) -> None:
    """Disjoint, and everything used."""
    np.testing.assert_array_equal(np.sort(np.concatenate(parts)), np.arange(n))

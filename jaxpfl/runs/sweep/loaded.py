"""Data that groups of a sweep share, loaded once for those that follow each other."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Generic, TypeVar

import jax
import numpy as np

from jaxpfl import data
from jaxpfl.core.trees import checksum
from jaxpfl.core.types import Federation
from jaxpfl.runs import data_sets
from jaxpfl.runs.config import RunConfig
from jaxpfl.runs.setup import load_federation
from jaxpfl.runs.sweep.problems import DATA_FIELDS

_T = TypeVar("_T")


class Last(Generic[_T]):
    """The last value that was made, kept for as long as the same is asked for."""

    def __init__(self) -> None:
        self._kept: tuple[Any, _T] | None = None

    def of(self, key: Any, make: Callable[[], _T]) -> _T:
        """The value of a key, made unless it is the last one's."""
        if self._kept is None or self._kept[0] != key:
            self._kept = None  # not two of them at a time
            self._kept = key, make()
        return self._kept[1]

    def clear(self) -> None:
        """Keep nothing."""
        self._kept = None


class Data:
    """The last data set and the split of the last group, kept for the next with the same."""

    def __init__(self) -> None:
        self._source: Last[data.Source] = Last()
        self._checksum: Last[int] = Last()
        self._split: Last[tuple[data.Source, Federation]] = Last()

    def of(self, config: RunConfig) -> tuple[data.Source, Federation]:
        """The data set of a resolved config and its split."""
        return self._split.of(_fields(config, DATA_FIELDS), lambda: load_federation(config, self.source))

    def source(self, config: RunConfig) -> data.Source:
        """The data set of a config."""

        def load() -> data.Source:
            self._split.clear()  # which holds the data set before
            self._checksum.clear()
            return data_sets.source_of(config)

        return self._source.of(_fields(config, data_sets.FIELDS), load)

    def checksum(self, config: RunConfig) -> int:
        """Checksum of the data set of a config."""
        if data_sets.is_stored(config.data):
            return data_sets.checksum(config.data, config.data_dir)
        loaded = self.source(config)
        return self._checksum.of(_fields(config, data_sets.FIELDS), lambda: checksum(_arrays(loaded)))


def _fields(config: RunConfig, names: Iterable[str]) -> dict[str, Any]:
    return {name: getattr(config, name) for name in names}


def _arrays(loaded: data.Source) -> list[np.ndarray]:
    return [leaf for leaf in jax.tree.leaves(tuple(loaded)) if isinstance(leaf, np.ndarray)]

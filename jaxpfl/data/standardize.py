"""Standardization of features by the mean and standard deviation of the clients' training examples.

Both are computed over the training examples of all clients of a federation together, as by a party that sees all of
them, and are not private: every client's inputs depend on all clients' examples. New clients are scaled by the same
numbers, not by their own.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxpfl.data.sources.base import Source
from jaxpfl.errors import JaxpflError
from jaxpfl.types import ClientData, Federation

_ENTRIES = 2**23
"""Number of entries copied at once."""


class Scaling(NamedTuple):
    """Mean and standard deviation (1 if constant) of each feature, float64: an array or a tree like one input."""

    mean: Any
    deviation: Any


def scaling_of(federation: Federation) -> Scaling:
    """Scaling of a federation, from its clients' training examples.

    Raises:
      JaxpflError: if no client has training examples.
    """
    if not np.asarray(federation.train.mask).any():
        raise JaxpflError("no client has training examples to standardize by")
    found = jax.tree.map(lambda leaf: _moments(np.asarray(leaf), np.asarray(federation.train.mask)), federation.train.x)
    is_pair = lambda node: isinstance(node, Scaling)  # noqa: E731
    return Scaling(
        jax.tree.map(lambda pair: pair.mean, found, is_leaf=is_pair),
        jax.tree.map(lambda pair: pair.deviation, found, is_leaf=is_pair),
    )


def scaled(federation: Federation, scaling: Scaling) -> Federation:
    """The federation with inputs ``(x - mean) / deviation``, float32; padding stays zero.

    Example::

        trained, unseen = jaxpfl.set_apart(federation, 10)
        scaling = scaling_of(trained)
        trained, unseen = scaled(trained, scaling), scaled(unseen, scaling)
    """

    def of_split(split: ClientData) -> ClientData:
        real = np.asarray(split.mask)

        def of_leaf(leaf: Any, mean: np.ndarray, deviation: np.ndarray) -> np.ndarray:
            new = ((np.asarray(leaf) - mean) / deviation).astype(np.float32)
            return np.where(real.reshape(*real.shape, *[1] * (new.ndim - 2)), new, np.float32(0))

        return split._replace(x=jax.tree.map(of_leaf, split.x, scaling.mean, scaling.deviation))

    splits = (federation.train, federation.validation, federation.test)
    return Federation(federation.client_ids, *map(of_split, splits))


def check_standardizable(source: Source) -> None:
    """Refuse inputs other than features.

    Raises:
      JaxpflError.
    """
    if source.inputs == "pixels":
        raise JaxpflError(
            f"standardize is for features: {source.name} holds pixels, which are standardized when loaded"
        )
    if source.inputs == "tokens":
        raise JaxpflError(f"standardize is for features: {source.name} holds tokens")


def _moments(x: np.ndarray, mask: np.ndarray) -> Scaling:
    """Mean and deviation of inputs [m, n, ...] over the real examples, in two passes."""
    count = mask.sum()
    mean = sum(part.sum(axis=0, dtype=np.float64) for part in in_parts(x, mask)) / count
    variance = sum(np.square(part - mean).sum(axis=0) for part in in_parts(x, mask)) / count
    deviation = np.sqrt(variance)
    # In float32, rounding gives even a constant a small deviation.
    constant = deviation <= np.finfo(np.float32).eps * np.abs(mean)
    return Scaling(np.asarray(mean), np.where(constant, 1.0, deviation))


def in_parts(x: np.ndarray, mask: np.ndarray) -> Iterator[np.ndarray]:
    """Iterate over the real examples [k, ...] of a few clients at a time, from inputs [m, n, ...]."""
    step = max(1, _ENTRIES // max(1, x[0].size))
    for start in range(0, len(x), step):
        yield x[start : start + step][mask[start : start + step]]

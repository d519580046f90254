"""Standardization of features to mean 0 and standard deviation 1.

Mean and standard deviation are computed over the pooled training examples of all clients of a federation, as if one
party saw all examples. The mean and the deviation are not private: every client's standardized inputs depend on all
clients' examples. New clients are scaled with the same mean and deviation, and not with statistics of their own data.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxpfl.core.types import ClientData, Federation
from jaxpfl.data.labels import moments
from jaxpfl.data.sources.base import Source
from jaxpfl.data.sources.table_columns import Column, TableColumns
from jaxpfl.support import host_memory
from jaxpfl.support.errors import JaxpflError, shown


class Scaling(NamedTuple):
    """Mean and standard deviation of each feature in float64, each with the tree structure and shape of one input.

    The deviation of a constant feature is 1.
    """

    mean: Any
    deviation: Any


def scaling_of(federation: Federation) -> Scaling:
    """Compute the scaling of a federation from its clients' training examples.

    Raises:
      JaxpflError: if no client has training examples.
    """
    examples = federation.train.flat()
    if not len(examples.y):
        raise JaxpflError("standardize requires training examples, but no client has any")
    pairs = map(_scaling, jax.tree.leaves(examples.x))
    return Scaling(*(jax.tree.unflatten(jax.tree.structure(examples.x), part) for part in zip(*pairs, strict=True)))


def scaled(federation: Federation, scaling: Scaling) -> Federation:
    """Return the federation with inputs ``(x - mean) / deviation`` in float32; inputs in files go to new files.

    Example::

        trained, unseen = jaxpfl.set_apart(federation, 10)
        scaling = scaling_of(trained)
        trained, unseen = scaled(trained, scaling), scaled(unseen, scaling)
    """

    def scale_split(split: ClientData) -> ClientData:
        def scale_leaf(leaf: Any, mean: np.ndarray, deviation: np.ndarray) -> np.ndarray:
            return host_memory.converted(np.asarray(leaf), np.float32, lambda part: (part - mean) / deviation)

        return split.with_examples(x=jax.tree.map(scale_leaf, split.examples.x, scaling.mean, scaling.deviation))

    train, validation, test = map(scale_split, federation.all_splits)
    known = federation.preparation
    prepared = None if known is None else dataclasses.replace(known, scaling=scaling)
    return federation._replace(train=train, validation=validation, test=test, preparation=prepared)


def fills_of(federation: Federation, columns: TableColumns) -> TableColumns:
    """Compute replacements for missing values from the clients' training rows.

    A missing number is replaced by the median, and a missing string by the most frequent string. Like the scaling,
    these values are not private.

    Raises:
      JaxpflError: if no training row has a value in one of the columns.
    """
    x = federation.train.flat().x
    if columns.gaps and x.shape[1:] != (len(columns.feature_names),):
        raise JaxpflError(f"inputs {list(x.shape[1:])} are not the table's features: set Source.columns to None")
    for column, place in columns.gaps:
        if x[:, place.stop - 1].all():
            lacks = f"column {shown(column.name)} has no value in any training row"
            raise JaxpflError(f"{lacks}: leave it out with --ignore {column.name}")
    return own_fills(federation, columns.filled([_fill(column, x[:, place]) for column, place in columns.gaps]))


def own_fills(federation: Federation, columns: TableColumns) -> TableColumns:
    """If ``columns.per_client`` is true, compute replacements from each client's own training rows too.

    For a column in which a client has no value, the client gets the replacement computed from all clients' rows.
    """
    if not columns.per_client:
        return columns
    fills = dict(columns.client_fills or {})
    for client, rows in _rows(federation, federation.train.examples.x, federation.train):
        fills[client] = tuple(_fill(column, rows[:, place]) for column, place in columns.gaps)
    return columns._replace(client_fills=fills)


def filled(federation: Federation, columns: TableColumns) -> Federation:
    """Replace missing values, which each column's last feature indicates, by the values in ``columns``."""

    def fill_split(split: ClientData) -> ClientData:
        x = np.asarray(split.examples.x)
        made = host_memory.converted(x, x.dtype, lambda part: part)
        for client, rows in _rows(federation, made, split):
            for column, place in columns.of_client(client).gaps:
                rows[rows[:, place.stop - 1] == 1, place.start : place.stop - 1] = column.fill_features
        return split.with_examples(x=made)

    if not columns.gaps:
        return federation
    train, validation, test = map(fill_split, federation.all_splits)
    return federation._replace(train=train, validation=validation, test=test)


def _rows(federation: Federation, x: np.ndarray, split: ClientData) -> Iterator[tuple[int, np.ndarray]]:
    """Iterate over the clients; yield each client's id and its rows of ``x``, the inputs of a split."""
    for client, start, size in zip(federation.client_ids, split.start, split.size, strict=True):
        yield int(client), x[start : start + size]


def _fill(column: Column, x: np.ndarray) -> float | str:
    """Return the median or the most frequent level of a column, given its d features in N rows, [N, d].

    If all values are missing, return ``column.fill``.
    """
    known = x[x[:, -1] == 0, :-1]
    if not len(known):
        assert column.fill is not None
        return column.fill
    return column.levels[int(known.sum(axis=0).argmax())] if column.levels else float(np.median(known))


def check_standardizable(source: Source) -> None:
    """Check that a source's inputs are features.

    Raises:
      JaxpflError: if the inputs are pixels or tokens.
    """
    if source.inputs == "pixels":
        raise JaxpflError(
            f"standardize applies to features: {source.name} contains pixels, which are standardized when loaded"
        )
    if source.inputs == "tokens":
        raise JaxpflError(f"standardize applies to features: {source.name} contains tokens")


def _scaling(x: np.ndarray) -> Scaling:
    """Compute the scaling of N inputs [N, ...]."""
    mean, deviation = moments(x)
    # By rounding, even a constant feature can have a small deviation.
    constant = deviation <= np.finfo(np.float32 if x.dtype == np.float32 else np.float64).eps * np.abs(mean)
    return Scaling(mean, np.where(constant, 1.0, deviation))

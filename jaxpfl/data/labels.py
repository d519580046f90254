"""Types of labels (classes, or real numbers and vectors of other tasks), and inputs that single precision holds."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from jaxpfl.core.types import NO_LABEL, ClientData
from jaxpfl.support import host_memory
from jaxpfl.support.errors import JaxpflError, warn

_LARGEST = 2**31 - 1
_ENTRIES = 2**20


def are_classes(y: Any) -> bool:
    """True for labels that may be classes: integers [N]."""
    return y.ndim == 1 and np.issubdtype(y.dtype, np.integer)


def labelled_tokens(data: ClientData) -> np.ndarray:
    """Each client's number of positions with a label, [m] int64, of labels [n, T]."""
    sizes = np.asarray(data.size, np.int64)
    labelled = (data.flat().y != NO_LABEL).sum(axis=1)
    upto, ends = np.append(0, np.cumsum(labelled, dtype=np.int64)), np.cumsum(sizes)
    return upto[ends] - upto[ends - sizes]


def checked_labels(y: Any, whose: str) -> np.ndarray:
    """Labels [n] or [n, d] as int32, or as float32 where they are real numbers.

    Args:
      y: numbers.
      whose: a name for messages.

    Raises:
      JaxpflError: for another type or shape, integers below 0 (in [n, d]: below -1) or beyond 32 bits, and NaN or
        infinite labels, naming the first example.

    Examples:
      >>> checked_labels(np.array([0.5, np.nan]), "client 3, train")
      Traceback (most recent call last):
      jaxpfl.support.errors.JaxpflError: client 3, train: the label of example 1 is nan
    """
    y = np.asarray(y)
    if y.ndim not in (1, 2) or 0 in y.shape[1:]:
        raise JaxpflError(f"{whose}: labels must be [n], or [n, d] for several each, got shape {y.shape}")
    if np.issubdtype(y.dtype, np.floating):
        if y.dtype.itemsize > 4 and (lost := lost_digits(y)) is not None:
            warn(f"{whose}: of the labels {lost}: subtract an offset from them")
        with np.errstate(over="ignore"):  # values that overflow float32 become infinite, and are refused
            y = y.astype(np.float32, copy=False)
        passed = 0
        for part in host_memory.in_parts(y, _ENTRIES):
            finite = np.isfinite(part).reshape(len(part), -1).all(axis=1)
            if not finite.all():
                first = int(np.argmin(finite))
                found = part.reshape(len(part), -1)[first]
                wrong = found[~np.isfinite(found)][0]
                raise JaxpflError(f"{whose}: the label of example {passed + first} is {wrong}")
            passed += len(part)
        return y
    if not np.issubdtype(y.dtype, np.integer):
        raise JaxpflError(
            f"{whose}: labels must be integers >= 0, got {y.dtype}: classes are integers, labels of a regression floats"
        )
    least = 0 if y.ndim == 1 else -1  # a position without a label, of sequences
    if len(y) and (y.min() < least or y.max() > _LARGEST):
        wrong = int(y[(y < least) | (y > _LARGEST)][0])
        hint = "; labels of a regression are floats" if wrong < 0 else ""
        raise JaxpflError(f"{whose}: labels must be integers >= {least} (and below 2**31), got {wrong}{hint}")
    return y.astype(np.int32, copy=False)


def class_names(*labels: np.ndarray) -> np.ndarray:
    """The distinct labels of classes, [K], ascending; label i of a run stands for the i-th.

    Args:
      labels: whole numbers [N] of each split.
    """
    found = np.zeros(0, labels[0].dtype)
    for part in (part for y in labels for part in host_memory.in_parts(y, _ENTRIES)):
        found = np.union1d(found, part)
    return found


def unlike_numbers(names: np.ndarray) -> np.ndarray | None:
    """The names of classes, whole numbers as integers; None if they are 0 .. K - 1."""
    if names.dtype.kind == "f" and (names == np.round(names)).all():
        names = names.astype(np.int64)
    return None if np.array_equal(names, np.arange(len(names))) else names


def renumbered(y: np.ndarray, names: np.ndarray, whose: object) -> np.ndarray:
    """The place of each label among the names, [N] int32.

    Raises:
      JaxpflError: for a label that is not among them.
    """
    places = np.searchsorted(names, y).clip(max=len(names) - 1)
    if (names[places] != y).any():
        raise JaxpflError(f"{whose}: label {y[names[places] != y][0]:g} is not among the training labels")
    return places.astype(np.int32)


def task_for(y: np.ndarray) -> str:
    """The task that labels are of unless one is named: classes, several labels 0 or 1, or real numbers."""
    if are_classes(y):
        return "classification"
    if np.issubdtype(y.dtype, np.integer) and len(y) and y.min() >= 0 and y.max() <= 1:
        return "multilabel"
    return "regression"


_FAR = 1e4


class Lost(NamedTuple):
    """A feature (by its place in a flattened input) that float32 holds fewer distinct values of, and both numbers."""

    feature: int
    before: int
    after: int

    def __str__(self) -> str:
        return f"{self.before} distinct values become {self.after} in single precision"


def lost_digits(x: np.ndarray) -> Lost | None:
    """The first feature of inputs [N, ...] of which single precision loses values; None if it is fine enough for all.

    Only features far from zero for their spread are counted, such as times since 1970; the others lose no digit that
    standardization, or a model, would notice.
    """
    if x.dtype.itemsize < 4 or x.dtype == np.float32 or not x.size:
        return None
    flat = x.reshape(len(x), -1)
    with np.errstate(all="ignore"):  # what is not finite is refused by `check_finite`
        mean = sum(part.sum(axis=0, dtype=np.float64) for part in host_memory.in_parts(flat)) / len(x)
        spread = np.sqrt(sum(np.square(part - mean).sum(axis=0) for part in host_memory.in_parts(flat)) / len(x))
        for feature in np.flatnonzero(np.abs(mean) > _FAR * spread):
            values = np.unique(flat[:, feature])
            after = len(np.unique(values.astype(np.float32)))
            if after < len(values):
                return Lost(int(feature), len(values), after)
    return None


def narrowed(x: np.ndarray, *, wide: bool | None = None) -> np.ndarray:
    """Inputs as float32, or as float64 where float32 loses digits, which standardization may save.

    Args:
      x: numbers [N, ...].
      wide: keep float64, as for inputs that lose digits; as the inputs need unless given.
    """
    wide = lost_digits(x) is not None if wide is None else wide
    made = host_memory.empty(x.shape, np.float64 if wide else np.float32, like=x)
    with np.errstate(over="ignore"):  # values that overflow float32 become infinite, and are refused
        for old, new in zip(host_memory.in_parts(x), host_memory.in_parts(made), strict=True):
            new[...] = old
    return made

"""Checks of labels (classes, real numbers or vectors), and of inputs that lose digits in single precision.

N is the number of examples, d the number of labels of an example, and T the number of positions of a sequence.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxpfl.core.types import NO_LABEL, ClientData, Federation
from jaxpfl.support import host_memory
from jaxpfl.support.errors import JaxpflError, warn

_LARGEST = 2**31 - 1
_ENTRIES = 2**20


def are_classes(y: Any) -> bool:
    """Return True if labels can be classes: integers [N]."""
    return y.ndim == 1 and np.issubdtype(y.dtype, np.integer)


def labelled_tokens(data: ClientData) -> np.ndarray:
    """Count each client's positions that have a label, [m] int64, for labels [n, T]."""
    sizes = np.asarray(data.size, np.int64)
    labelled = (data.flat().y != NO_LABEL).sum(axis=1)
    upto, ends = np.append(0, np.cumsum(labelled, dtype=np.int64)), np.cumsum(sizes)
    return upto[ends] - upto[ends - sizes]


def checked_labels(y: Any, whose: str) -> np.ndarray:
    """Return labels [n] or [n, d] as int32, or as float32 if they are real numbers.

    Args:
      y: labels to check.
      whose: name of the labels' owner, such as a client, for error messages.

    Raises:
      JaxpflError: if labels have an unsupported dtype or shape; if an integer is below 0 (below -1 for labels [n, d])
        or above 2**31 - 1; or if a label is NaN or infinite.
    """
    y = np.asarray(y)
    if y.ndim not in (1, 2) or 0 in y.shape[1:]:
        raise JaxpflError(f"{whose}: labels must have shape [n], or [n, d] for d labels per example, got {y.shape}")
    if np.issubdtype(y.dtype, np.floating):
        if y.dtype.itemsize > 4 and (lost := digit_loss(y)) is not None:
            warn(f"{whose}, labels: {lost}; subtract an offset from them")
        check_finite(y, whose, "the label")
        return y.astype(np.float32, copy=False)
    if not np.issubdtype(y.dtype, np.integer):
        raise JaxpflError(f"{whose}: labels must be integers >= 0, or floats for regression, got {y.dtype}")
    least = 0 if y.ndim == 1 else -1  # -1 marks a position of a sequence without a label
    if len(y) and (y.min() < least or y.max() > _LARGEST):
        wrong = int(y[(y < least) | (y > _LARGEST)][0])
        hint = "; for regression, use floats" if wrong < 0 else ""
        raise JaxpflError(f"{whose}: labels must be integers >= {least} (and below 2**31), got {wrong}{hint}")
    return y.astype(np.int32, copy=False)


def check_finite(x: Any, whose: str, what: str = "an input") -> None:
    """Check that inputs or labels [N, ...] are finite numbers within the range of float32.

    Raises:
      JaxpflError: if a number is NaN, infinite or out of range; the message gives the index of the first such example.

    Examples:
      >>> check_finite(np.array([[0.0], [np.nan]]), "client 3")
      Traceback (most recent call last):
      jaxpfl.support.errors.JaxpflError: client 3: an input of example 1 is NaN, infinite or beyond float32's range
    """
    for leaf in jax.tree.leaves(x):
        passed = 0
        for part in host_memory.iterate(leaf, _ENTRIES) if np.issubdtype(leaf.dtype, np.floating) else ():
            with np.errstate(over="ignore"):  # values too large for float32 become infinite, and are refused below
                finite = np.isfinite(part.astype(np.float32, copy=False))
            if not finite.all():
                first = passed + int(np.argmin(finite.reshape(len(part), -1).all(axis=1)))
                raise JaxpflError(f"{whose}: {what} of example {first} is NaN, infinite or beyond float32's range")
            passed += len(part)


def number_classes(labels: dict[str, np.ndarray]) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Number the classes in the sorted order of their labels.

    Args:
      labels: split -> labels, [N].

    Returns:
      A pair: split -> the class number of each label, [N] int32; and the distinct labels in order, [K].
    """
    names = np.zeros(0, next(iter(labels.values())).dtype)
    for part in (part for y in labels.values() for part in host_memory.iterate(y, _ENTRIES)):
        names = np.union1d(names, part)
    return {split: np.searchsorted(names, y).astype(np.int32) for split, y in labels.items()}, names


def unlike_numbers(names: np.ndarray) -> np.ndarray | None:
    """Return the class names, with integral floats converted to integers, or None if the names are just 0 .. K - 1."""
    if names.dtype.kind == "f" and (names == np.round(names)).all():
        names = names.astype(np.int64)
    return None if np.array_equal(names, np.arange(len(names))) else names


def task_for(y: np.ndarray) -> str:
    """Default task for labels: "classification", "multilabel" (several labels, each 0 or 1) or "regression"."""
    if are_classes(y):
        return "classification"
    if np.issubdtype(y.dtype, np.integer) and len(y) and y.min() >= 0 and y.max() <= 1:
        return "multilabel"
    return "regression"


_FAR = 1e4


class DigitLoss(NamedTuple):
    """A feature whose distinct values become equal in float32.

    Attributes:
      feature: index of the feature in a flattened input.
      before: number of distinct values.
      after: number of distinct values in float32.
    """

    feature: int
    before: int
    after: int

    def __str__(self) -> str:
        return f"{self.before} distinct values become {self.after} in single precision"


def digit_loss(x: np.ndarray) -> DigitLoss | None:
    """Return the first feature of inputs [N, ...] that loses values in single precision, or None.

    Only features whose mean is large compared to their spread, such as times since 1970, are checked. In other
    features, rounding to float32 affects neither standardization nor a model.
    """
    if x.dtype.itemsize < 4 or x.dtype == np.float32 or not x.size:
        return None
    flat = x.reshape(len(x), -1)
    with np.errstate(all="ignore"):  # `check_finite` refuses numbers that are not finite
        mean, spread = moments(flat)
        for feature in np.flatnonzero(np.abs(mean) > _FAR * spread):
            values = np.unique(flat[:, feature])
            after = len(np.unique(values.astype(np.float32)))
            if after < len(values):
                return DigitLoss(int(feature), len(values), after)
    return None


def moments(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Mean and standard deviation of each feature of inputs [N, ...], in two passes in float64."""
    mean = sum(part.sum(axis=0, dtype=np.float64) for part in host_memory.iterate(x)) / len(x)
    variance = sum(np.square(part - mean).sum(axis=0) for part in host_memory.iterate(x)) / len(x)
    return np.asarray(mean), np.sqrt(variance)


def narrowed(x: np.ndarray, *, wide: bool | None = None) -> np.ndarray:
    """Convert inputs to float32, or to float64 if rounding to float32 before standardization would lose information.

    Args:
      x: inputs [N, ...] that pass `check_finite`.
      wide: whether to return float64; by default, True if `digit_loss` finds a feature that would lose digits because
        its mean is large relative to its spread.
    """
    if x.dtype == np.float32:
        return x
    wide = digit_loss(x) is not None if wide is None else wide
    return host_memory.converted(x, np.float64 if wide else np.float32, lambda part: part)


def single(federation: Federation, strict: bool = False) -> Federation:
    """Convert a federation's float64 inputs to float32, and warn if this loses digits.

    Nothing changes if JAX computes in double precision, or if all inputs are float32 already.

    Raises:
      JaxpflError: if digits would be lost and ``strict`` is true.
    """
    leaves = [leaf for split in federation.all_splits for leaf in jax.tree.leaves(split.examples.x)]
    if jnp.result_type(float) == np.float64 or all(leaf.dtype == np.float32 for leaf in leaves):
        return federation
    for leaf in jax.tree.leaves(federation.train.examples.x):
        if isinstance(leaf, np.ndarray) and (lost := digit_loss(leaf)) is not None:
            warn(
                f"feature {lost.feature}: {lost}; use --standardize or federate(standardize=True) to subtract the mean "
                "first",
                strict=strict,
            )

    def narrow(leaf: Any) -> Any:
        return narrowed(leaf, wide=False) if leaf.dtype == np.float64 and isinstance(leaf, np.ndarray) else leaf

    train, validation, test = (
        split.with_examples(x=jax.tree.map(narrow, split.examples.x)) for split in federation.all_splits
    )
    return federation._replace(train=train, validation=validation, test=test)

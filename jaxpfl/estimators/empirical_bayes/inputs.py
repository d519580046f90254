"""Conversion of inputs from lists, arrays and data frames to numbers, and of results to data frames.

Masked arrays with a masked entry are refused, because NumPy's conversion would ignore the mask. Columns of data frames
are matched by the labels in their index. If two columns have the same labels in a different order, the second is
reordered like the first. Different labels are refused, because matching by position would pair numbers of different
clients. Results keep the labels.
"""

from __future__ import annotations

import sys
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from jaxpfl.core import checks
from jaxpfl.core.types import Array, Scalar
from jaxpfl.support.errors import JaxpflError, shown


def numbers(name: str, value: Any, what: str = "one for each client") -> Any:
    """Convert a value to numbers in double precision; traced values are returned unchanged.

    Args:
      name: name of the argument, for the message.
      value: array, list, or column of a data frame.
      what: description of the expected numbers, for the message.

    Raises:
      JaxpflError: if values are not numbers, or an entry is masked.
    """
    if isinstance(value, Tracer):
        return value
    refuse_masked(name, value)
    try:
        return np.asarray(value, np.float64)
    except (TypeError, ValueError):
        raise JaxpflError(f"{name} must be numbers, {what}, got {shown(value)}") from None


def refuse_masked(name: str, value: Any) -> None:
    """Check that an array has no masked entry.

    Raises:
      JaxpflError: if there is a masked entry; the message gives the index of the first one.
    """
    if isinstance(value, np.ma.MaskedArray) and np.ma.getmaskarray(value).any():
        place = np.argwhere(np.ma.getmaskarray(value))[0].tolist()
        at = place[0] if len(place) == 1 else place
        raise JaxpflError(f"{name} must not be masked, got a masked entry at {at}: remove masked entries")


def is_frame(value: Any) -> bool:
    """Return whether a value is a pandas series or data frame, without importing pandas."""
    pandas = sys.modules.get("pandas")
    return pandas is not None and isinstance(value, pandas.Series | pandas.DataFrame)


def aligned(**given: Any) -> tuple[Any, ...]:
    """Return the values of all arguments. Columns of data frames are reordered to have the same index as the first one.

    Args:
      **given: arguments by name; values that are not columns of data frames are returned unchanged.

    Raises:
      JaxpflError: if two indexes have different labels, or repeated labels in a different order.
    """
    framed = [name for name, value in given.items() if is_frame(value)]
    for name in framed[1:]:
        first, own = given[framed[0]].index, given[name].index
        if own.equals(first) or len(own) != len(first):  # different lengths are refused later, by the checks of shapes
            continue
        pair = f"{framed[0]} and {name}"
        if not (own.is_unique and first.is_unique):
            raise JaxpflError(f"the indexes of {pair} differ and have repeated labels: sort the rows, or pass arrays")
        lacking = first.difference(own)
        if len(lacking):
            raise JaxpflError(
                f"the indexes of {pair} must contain the same clients, but {shown(lacking[0])} is only in {framed[0]}"
            )
        given[name] = given[name].reindex(first)
    return tuple(given.values())


def places(name: str, value: Any, number: int | None, m: int, rows: str) -> tuple[Any, Any]:
    """Return an index into the sorted distinct names for each row, [m], and these names.

    Args:
      name: name of the argument.
      value: the rows' names, [m], which may be numbers. If ``number`` is given, they must be indices in
        0 ... number - 1; the result is then these indices, and None instead of the distinct names.
      number: number of distinct names; required for traced values.
      m: number of rows.
      rows: name for the rows in messages, in the plural.

    Raises:
      JaxpflError: if ``value`` does not have m rows; if it contains neither numbers in this range nor names; or if
        ``number`` is required but missing.
    """
    if number is not None:
        checks.count(f"{name}s", number)
    one = rows.removesuffix("s")
    if isinstance(value, Tracer):
        if number is None:
            raise JaxpflError(f"{name}s, the number of {name}s, must be given under jit and vmap")
        if value.shape != (m,):
            raise JaxpflError(f"{name} must have one entry for each of the {m} {rows}, got shape {value.shape}")
        return value.astype(jnp.int32), None
    refuse_masked(name, value)
    given = np.asarray(value)
    if given.shape != (m,):
        raise JaxpflError(f"{name} must have one entry for each of the {m} {rows}, got shape {given.shape}")
    if given.dtype.kind == "O":
        if any(of is None or of != of for of in given):
            raise JaxpflError(f"{name} must be a number or a name for each {one}, got None or NaN")
        given = given.astype(str)
    elif given.dtype.kind == "f" and not np.isfinite(given).all():
        at = int(np.argmin(np.isfinite(given)))
        raise JaxpflError(f"{name} must be a number or a name, got {given[at]} for {one} {at}")
    if number is None:
        names, index = np.unique(given, return_inverse=True)
        return index.astype(np.int32), names
    bad = ~np.isin(given, np.arange(number))
    if bad.any():
        at = int(np.argmax(bad))
        raise JaxpflError(f"{name} must be from 0 to {number - 1}, got {shown(given[at].item())} for {one} {at}")
    return given.astype(np.int32), None


def shares(weights: Any, m: int, least: int) -> Array:
    """Clients' weights scaled to sum to one, [m], in JAX's floating-point type.

    Args:
      weights: nonnegative numbers in any unit, [m]; None for equal weights.
      m: number of clients.
      least: smallest allowed number of clients with a positive weight.

    Raises:
      JaxpflError: if weights are not nonnegative numbers, or too few clients have a positive weight.
    """
    kind = jnp.result_type(float)
    if weights is None:
        return jnp.full(m, 1 / m, kind)
    given = numbers("weights", weights)
    if given.shape != (m,):
        raise JaxpflError(f"weights must have one number for each of the {m} clients, got shape {given.shape}")
    if isinstance(given, Tracer):
        return jnp.asarray(given, kind) / given.sum()
    bad = ~(np.isfinite(given) & (given >= 0))
    if bad.any():
        at = int(np.argmax(bad))
        raise JaxpflError(f"weights must be finite and at least 0, got {given[at]} for client {at}")
    some = int((given > 0).sum())
    if some < least:
        raise JaxpflError(f"at least {least} client{'s' * (least > 1)} must have weights > 0, got {some}")
    return jnp.asarray(given / given.max() / (given / given.max()).sum(), kind)


def inside(name: str, value: Scalar) -> None:
    """Check that a probability is in (0, 1). A traced value is not checked.

    Raises:
      JaxpflError: if the probability is outside (0, 1); the message gives the argument's name and value.
    """
    if not isinstance(value, Tracer):
        for one in np.ravel(np.asarray(value)):
            checks.probability(name, one)


def level_within(value: Scalar, kind: Any = None) -> None:
    """Check that an interval's level is in (0, 1), and not so close to 1 that rounding spoils it. Skip traced levels.

    Args:
      value: one or several levels.
      kind: floating-point type in which quantiles are computed; by default JAX's default type.

    Raises:
      JaxpflError: if a level is outside (0, 1), or the probability (1 - level) / 2 of a tail is smaller than 16 machine
        epsilons of ``kind``.
    """
    inside("level", value)
    if isinstance(value, Tracer):
        return
    kind = np.dtype(jnp.result_type(float) if kind is None else kind)
    most = 1 - 32 * float(np.finfo(kind).eps)
    for one in np.ravel(np.asarray(value)):
        if one > most:
            raise JaxpflError(f"level must be at most 1 - {1 - most:.2g} (the largest allowed in {kind}), got {one}")


@jax.tree_util.register_static
class Labels:
    """Labels of the clients, as a static pytree node that passes through JAX transformations."""

    def __init__(self, index: Any) -> None:
        self.index = index

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Labels) and np.array_equal(np.asarray(self.index), np.asarray(other.index))

    def __hash__(self) -> int:
        return hash(len(self.index))


def labels_of(*given: Any) -> Labels | None:
    """Labels of the first argument that is a column of a data frame; None without such an argument."""
    return next((Labels(value.index) for value in given if is_frame(value)), None)


def frame(
    answer: NamedTuple,
    m: int,
    level: float | None,
    *,
    leave: tuple[str, ...] = (),
) -> Any:
    """Collect the per-client fields of a result in a pandas frame with a row per client.

    Args:
      answer: result whose fields include arrays [m] or [m, K] for any K, and perhaps ``labels``. If a level is given,
        the result must have a method ``interval``.
      m: number of clients.
      level: level of the interval, whose endpoints become the columns ``low`` and ``high``; None for no interval.
      leave: names of fields to leave out, although they have m rows.

    Raises:
      JaxpflError: if the level is outside (0, 1).
    """
    import pandas

    labels = getattr(answer, "labels", None)
    given = {name: of for name, of in answer._asdict().items() if name not in (*leave, "labels")}
    if level is not None:
        ends: Any = answer
        given["low"], given["high"] = ends.interval(level)
    columns: dict[str, np.ndarray] = {}
    for name, of in given.items():
        shape = getattr(of, "shape", ())
        if shape == (m,):
            columns[name] = np.asarray(of)
        elif len(shape) == 2 and shape[0] == m:
            columns |= {f"{name}_{k}": np.asarray(of[:, k]) for k in range(shape[1])}
    return pandas.DataFrame(columns, index=None if labels is None else labels.index)

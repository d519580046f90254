"""Answers as pandas frames, a row for each client under the label that it had in the columns given."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxpfl.estimators.inputs import is_frame
from jaxpfl.support.errors import JaxpflError


@jax.tree_util.register_static
class Labels:
    """An index of clients, which transformations carry along unchanged; equal to another one of the same labels."""

    def __init__(self, index: Any) -> None:
        self.index = index

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Labels) and np.array_equal(np.asarray(self.index), np.asarray(other.index))

    def __hash__(self) -> int:
        return hash(len(self.index))

    def __repr__(self) -> str:
        return f"Labels({len(self.index)})"


def labels_of(*given: Any) -> Labels | None:
    """Labels of the first column of a frame among some arguments; None without one."""
    return next((Labels(value.index) for value in given if is_frame(value)), None)


def frame(
    answer: NamedTuple,
    m: int,
    level: float | None,
    *,
    leave: tuple[str, ...] = (),
    more: Mapping[str, Any] = MappingProxyType({}),
) -> Any:
    """All that an answer says of single clients, as a frame.

    Args:
      answer: with arrays of clients, [m] or [m, K], for fields, and perhaps with ``labels``; has ``interval`` where a
        level is given.
      m: number of clients.
      level: of the interval, whose ends are the columns ``low`` and ``high``; None for none.
      leave: fields that are no columns though they have m rows.
      more: further columns, [m] or [m, K], by name.

    Raises:
      JaxpflError: for a level outside (0, 1), and without pandas.
    """
    try:
        import pandas
    except ImportError as error:
        raise JaxpflError("to_frame needs pandas: pip install pandas") from error
    labels = getattr(answer, "labels", None)
    given = {name: of for name, of in answer._asdict().items() if name not in (*leave, "labels")} | dict(more)
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

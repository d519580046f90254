"""Digits of inputs that single precision loses."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from jaxpfl.support import mapped

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
        mean = sum(part.sum(axis=0, dtype=np.float64) for part in mapped.in_parts(flat)) / len(x)
        spread = np.sqrt(sum(np.square(part - mean).sum(axis=0) for part in mapped.in_parts(flat)) / len(x))
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
    made = mapped.empty(x.shape, np.float64 if wide else np.float32, like=x)
    with np.errstate(over="ignore"):  # values that overflow float32 become infinite, and are refused
        for old, new in zip(mapped.in_parts(x), mapped.in_parts(made), strict=True):
            new[...] = old
    return made

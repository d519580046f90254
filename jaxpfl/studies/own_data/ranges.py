"""Files whose numbers leave nothing to learn, or cannot be squared."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from jaxpfl.errors import JaxpflError

_LEAST, _MOST = 1e-70, 1e70
"""Sizes whose fourth powers, which tests of variances take, stay in double precision."""


def check_squares(path: Path, columns: list[str], samples: list[np.ndarray]) -> None:
    """Refuses columns whose squares, in double precision, would overflow or vanish.

    Args:
      path: of the file.
      columns: their names, [d].
      samples: of every client, [n_i, d] or [n_i].

    Raises:
      JaxpflError: the column, its largest number, and the range.
    """
    for column, values in zip(columns, _by_column(samples), strict=True):
        largest = float(np.abs(values).max())
        if largest and not _LEAST <= largest <= _MOST:
            raise JaxpflError(
                f"{path}: {column} must be of a size between {_LEAST:g} and {_MOST:g}, got {largest:g}: take another "
                "unit, squares of these cannot be computed"
            )


def alike(columns: list[str], samples: list[np.ndarray]) -> list[str]:
    """A line for each column whose numbers are all the same."""
    of_file = len(columns) == 1
    return [
        f"every sample of the file is {values[0]:g}" if of_file else f"every sample's {column} is {values[0]:g}"
        for column, values in zip(columns, _by_column(samples), strict=True)
        if not np.ptp(values)
    ]


def _by_column(samples: list[np.ndarray]) -> np.ndarray:
    """[d, N]."""
    return np.concatenate([own.reshape(len(own), -1) for own in samples]).T

"""Checks of a file's numbers: constant columns, and numbers that cannot be squared."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from jaxpfl.errors import JaxpflError, printable

_LEAST, _MOST = 1e-70, 1e70
"""Range of magnitudes whose fourth powers, used in tests of variances, fit in double precision."""


def check_squares(path: Path, columns: list[str], samples: list[np.ndarray]) -> None:
    """Refuse columns whose squares would overflow or underflow in double precision.

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
                f"{path}: {printable(column)} must be of a size between {_LEAST:g} and {_MOST:g}, got {largest:g}: "
                "take another unit, squares of these cannot be computed"
            )


def alike(columns: list[str], samples: list[np.ndarray]) -> list[str]:
    """A line for each column of equal numbers."""
    of_file = len(columns) == 1
    return [
        f"every sample of the file is {values[0]:g}"
        if of_file
        else f"every sample's {printable(column)} is {values[0]:g}"
        for column, values in zip(columns, _by_column(samples), strict=True)
        if not np.ptp(values)
    ]


def _by_column(samples: list[np.ndarray]) -> np.ndarray:
    """Samples of all clients by column, [d, N]."""
    return np.concatenate([own.reshape(len(own), -1) for own in samples]).T

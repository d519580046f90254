"""Single arrays in ``.npy`` form, whose headers are checked against what there is before anything is allocated."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import IO, Literal, NamedTuple

import numpy as np

from jaxpfl.data.sources.base import one_line
from jaxpfl.support.errors import JaxpflError
from jaxpfl.support.files import opened


class Header(NamedTuple):
    """Shape and dtype of an archive's array, known before it is read."""

    shape: tuple[int, ...]
    dtype: np.dtype

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def holds_integers(self) -> bool:
        return self.dtype.kind in "iu"


def header_of(member: IO[bytes], name: str, size: int) -> Header:
    """The header of an array in a file of that many bytes, all of which it must fill.

    Raises:
      Exception: of any kind, for a damaged one.
    """
    version = np.lib.format.read_magic(member)
    read = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
    if version not in read:
        raise ValueError(f"{name} has format {version}, of structured arrays")
    shape, _, dtype = read[version](member)
    header = Header(shape, dtype)
    if dtype.hasobject:
        raise ValueError(f"{name} holds Python objects")
    if member.tell() + header.nbytes != size or min(shape, default=0) < 0:
        raise ValueError(f"{name} has {size - member.tell()} bytes, {header.nbytes} of its shape {shape}")
    return header


def read_npy(path: Path, *, mode: Literal["r", "r+"] | None = None) -> np.ndarray:
    """The array of a plain ``.npy`` file, whose header must fit the file's size before anything is allocated.

    Args:
      path: the file.
      mode: map it into memory in that mode, instead of reading it; an empty array is read.

    Raises:
      OSError: if the file is missing or cannot be read.
      JaxpflError: if it is damaged.
    """
    with opened(path) as file:
        try:
            header = header_of(file, path.name, os.fstat(file.fileno()).st_size)
            if mode is None or not header.nbytes:
                file.seek(0)
                return np.lib.format.read_array(file, allow_pickle=False)
        except Exception as error:  # NumPy's parser of headers raises nearly anything
            raise JaxpflError(f"{path} is missing or damaged: {one_line(error)}") from error
    return np.load(path, mmap_mode=mode, allow_pickle=False)

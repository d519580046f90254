"""Reader for cell arrays of numbers in MATLAB 5 files (``.mat``; version 7 writes the same format).

SciPy's reader crashes the process on some damaged files, and creates objects that are not needed here. This reader
compares every length with the number of remaining bytes before reading, and creates only arrays of numbers.

Reference: MathWorks, "MAT-File Format", https://www.mathworks.com/help/pdf_doc/matlab/matfile_format.pdf
"""

from __future__ import annotations

import math
import zlib
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np

from jaxpfl.support.errors import JaxpflError, printable
from jaxpfl.support.files import check_fits, contents

_HEADER = 128
_ORDERS: dict[str, Literal["little", "big"]] = {"<": "little", ">": "big"}
_MATRIX, _COMPRESSED, _NAME = 14, 15, 1
_NUMBERS = {1: "i1", 2: "u1", 3: "i2", 4: "u2", 5: "i4", 6: "u4", 7: "f4", 9: "f8", 12: "i8", 13: "u8"}
"""NumPy dtypes of the numbers in a file, by type code."""
_CELL = 1
_CLASSES = {6: "f8", 7: "f4", 8: "i1", 9: "u1", 10: "i2", 11: "u2", 12: "i4", 13: "u4", 14: "i8", 15: "u8"}
"""NumPy dtypes of arrays, by class code; a file may store their numbers in smaller types."""
_COMPLEX = 0x08
_MOST_DIMENSIONS = 8
_MOST_INFLATED = 1032  # largest ratio of inflated to compressed bytes in zlib


class _Matrix(NamedTuple):
    kind: int
    flags: int
    shape: tuple[int, ...]
    name: str
    rest: _Elements


class _Elements:
    """Bytes that contain a sequence of data elements (units of the file format), which are read in order."""

    def __init__(self, content: memoryview, order: str):
        self.content, self.order, self.at = content, order, 0

    def next(self) -> tuple[int, memoryview]:
        """Read the type and bytes of the next element.

        Raises:
          ValueError: if the element ends after the last byte.
        """
        small = self._number(self.at)
        if small >> 16:  # a small element: 16 bits each for type and length, then up to four bytes of data
            kind, length, start, end = small & 0xFFFF, small >> 16, self.at + 4, self.at + 8
            if length > 4:
                raise ValueError(f"a small element of {length} bytes, expected at most 4")
        else:
            kind, length, start = small, self._number(self.at + 4), self.at + 8
            end = start + length if kind == _COMPRESSED else start + -(-length // 8) * 8
        if start + length > len(self.content):
            raise ValueError(f"an element of {length} bytes, of which only {len(self.content) - start} are present")
        self.at = end
        return kind, self.content[start : start + length]

    def numbers(self) -> np.ndarray:
        """Read the next element as an array of numbers, [n].

        Raises:
          ValueError: if the element is not an array of numbers.
        """
        kind, content = self.next()
        if kind not in _NUMBERS:
            raise ValueError(f"an element of type {kind}, expected numbers")
        return np.frombuffer(content, f"{self.order}{_NUMBERS[kind]}")

    def matrix(self) -> _Matrix:
        """Read the header of the next element, which must be a matrix; the content is not read yet.

        Raises:
          ValueError: if the element is not a matrix.
        """
        kind, content = self.next()
        if kind != _MATRIX:
            raise ValueError(f"an element of type {kind}, expected a matrix")
        inner = _Elements(content, self.order)
        flags, shape, name = inner.numbers(), inner.numbers(), inner.numbers()
        if len(flags) != 2 or not 2 <= len(shape) <= _MOST_DIMENSIONS or min(map(int, shape)) < 0:
            raise ValueError(f"a matrix of shape {tuple(shape.tolist()[:_MOST_DIMENSIONS])}")
        word = int(flags[0])
        return _Matrix(word & 0xFF, word >> 8, tuple(shape.tolist()), name.tobytes().decode("latin-1"), inner)

    def _number(self, at: int) -> int:
        if at + 4 > len(self.content):
            raise ValueError("the file ends early")
        return int.from_bytes(self.content[at : at + 4], _ORDERS[self.order])


def read_cells(path: Path, wanted: tuple[str, ...]) -> dict[str, list[np.ndarray]]:
    """Read the ``wanted`` cell arrays of numbers by name, each as a list of arrays in the file's order (by columns).

    Raises:
      JaxpflError: if the file cannot be read or is not a MATLAB 5 file, if a name is missing or occurs twice, or if a
        variable is not a cell array of real numbers.
    """
    content = contents(path, 2)
    order = {b"IM": "<", b"MI": ">"}.get(content[126:_HEADER])
    if order is None:
        raise JaxpflError(f"{path} is not a MATLAB 5 file: its header lacks the byte-order mark")
    found: dict[str, list[np.ndarray]] = {}
    elements = _Elements(memoryview(content)[_HEADER:], order)
    try:
        while elements.at < len(elements.content):
            matrix = _top(elements, path, order)
            if matrix.name in found:
                raise ValueError(f"it contains {matrix.name} twice")
            if matrix.name in wanted:
                found[matrix.name] = _cells(matrix)
    except (ValueError, zlib.error) as error:
        raise JaxpflError(f"{path} is damaged or not a MATLAB 5 file: {printable(str(error))}") from error
    for name in wanted:
        if name not in found:
            raise JaxpflError(f"{path} has no cell array {name}")
    return {name: found[name] for name in wanted}


def _top(elements: _Elements, path: Path, order: str) -> _Matrix:
    """Read the next matrix of the file, inflated if it is compressed."""
    before = elements.at
    kind, content = elements.next()
    if kind != _COMPRESSED:
        elements.at = before
        return elements.matrix()
    inflating = zlib.decompressobj()
    head = inflating.decompress(content, 8)
    if len(head) < 8:
        raise ValueError("a compressed element ends early")
    length = int.from_bytes(head[4:], _ORDERS[order])
    if length > _MOST_INFLATED * len(content):
        raise ValueError(f"a compressed element of {len(content)} bytes that claims to contain {length}")
    check_fits(path, 2 * length)
    inner = head + inflating.decompress(inflating.unconsumed_tail, length + 8) if length else head
    return _Elements(memoryview(inner), order).matrix()


def _cells(matrix: _Matrix) -> list[np.ndarray]:
    """Read the arrays in a cell array."""
    if matrix.kind != _CELL:
        raise ValueError(f"{matrix.name} must be a cell array")
    cells = []
    for i in range(math.prod(matrix.shape)):  # a huge shape is safe: reading stops at the last byte
        cell = matrix.rest.matrix()
        if cell.kind not in _CLASSES or cell.flags & _COMPLEX:
            raise ValueError(f"{matrix.name} of cell {i} must be real numbers")
        numbers = cell.rest.numbers()
        if len(numbers) != math.prod(cell.shape):
            raise ValueError(f"{matrix.name} of cell {i} has {len(numbers)} numbers for a shape {cell.shape}")
        cells.append(numbers.astype(_CLASSES[cell.kind]).reshape(cell.shape, order="F"))
    return cells

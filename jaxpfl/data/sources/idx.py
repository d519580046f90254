"""The IDX format of MNIST and its kin: a big-endian header, then raw numbers.

Header: two zero bytes, a type code (0x08: unsigned byte), the number of dimensions, then one 32-bit size
each. Reference: http://yann.lecun.com/exdb/mnist (section "FILE FORMATS").
"""

from __future__ import annotations

import gzip
import math
import zlib
from pathlib import Path
from typing import IO, cast

import numpy as np

from jaxpfl.errors import JaxpflError
from jaxpfl.files import check_fits

_TYPES = {
    0x08: "unsigned byte",
    0x09: "signed byte",
    0x0B: "short",
    0x0C: "int",
    0x0D: "float",
    0x0E: "double",
}
_MOST_INFLATED = 1032  # times its length that deflate can make of a stream
_MOST_TOO_LONG = 2**20  # bytes behind the end that are counted: a small gzip stream may hold any number


def read_idx(path: str | Path, ndim: int) -> np.ndarray:
    """Read an IDX file of unsigned bytes, gzip-compressed or not (detected by content, not by name).

    Args:
      path: the file.
      ndim: the number of dimensions it must have: 3 for images, 1 for labels.

    Returns:
      uint8 array of the header's shape.

    Raises:
      JaxpflError: for a missing file, damaged gzip, a wrong magic number, element type or number of dimensions,
        and truncated or over-long data; the line has the file, what was found and what is expected.
    """
    path = Path(path)
    try:
        file, most = _opened(path)
        with file:
            shape = _shape(path, file.read(4 + 4 * ndim), ndim)
            expected = math.prod(shape)
            check_fits(path, min(expected, most))
            content = file.read(min(expected, most))
            rest = len(file.read(_MOST_TOO_LONG)) if len(content) == expected else 0
    except EOFError as error:
        raise JaxpflError(f"{path}: truncated: its gzip stream of {path.stat().st_size} bytes ends early") from error
    except (gzip.BadGzipFile, zlib.error) as error:
        raise JaxpflError(f"{path}: damaged gzip stream: {error}") from error
    except OSError as error:
        raise JaxpflError(f"{path}: cannot be read: {error.strerror or error}") from error
    found = len(content) + rest
    if found != expected:
        problem = "truncated" if found < expected else "too long"
        more = " or more" if rest == _MOST_TOO_LONG else ""
        raise JaxpflError(
            f"{path}: {problem}: {found} bytes{more} of data, expected {expected} for the header's shape {shape}"
        )
    return np.frombuffer(content, dtype=np.uint8).reshape(shape)


def read_idx_pair(images: str | Path, labels: str | Path) -> tuple[np.ndarray, np.ndarray]:
    """Read images [N, H, W] and their labels [N], both uint8.

    Raises:
      JaxpflError: as in `read_idx`; if the two files' counts differ, or there are no images.
    """
    x, y = read_idx(images, 3), read_idx(labels, 1)
    if len(x) != len(y):
        raise JaxpflError(f"{images} holds {len(x)} images but {labels} holds {len(y)} labels")
    if x.size == 0:
        raise JaxpflError(f"{images}: no pixels: its shape is {x.shape}")
    return x, y


def _opened(path: Path) -> tuple[IO[bytes], int]:
    """Open a file, inflated as it is read if compressed, with an upper bound on its number of bytes."""
    with path.open("rb") as file:
        zipped = file.read(2) == b"\x1f\x8b"
    size = path.stat().st_size
    return (cast("IO[bytes]", gzip.open(path)), _MOST_INFLATED * size) if zipped else (path.open("rb"), size)


def _shape(path: Path, header: bytes, ndim: int) -> tuple[int, ...]:
    """Array shape given by a header."""
    expected_magic = bytes((0, 0, 0x08, ndim))
    magic = header[:4]
    if len(magic) < 4 or magic[:2] != b"\0\0" or magic[2] not in _TYPES:
        raise JaxpflError(
            f"{path}: wrong magic number {_hex(magic)}: not an IDX file (expected {_hex(expected_magic)})"
        )
    if magic[2] != 0x08:
        raise JaxpflError(f"{path}: IDX elements of type {_TYPES[magic[2]]}; only unsigned bytes are read")
    if magic[3] != ndim:
        raise JaxpflError(
            f"{path}: wrong magic number {_hex(magic)}: {magic[3]} dimensions, "
            f"expected {ndim} ({_hex(expected_magic)}); images and labels swapped?"
        )
    if len(header) < 4 + 4 * ndim:
        raise JaxpflError(f"{path}: truncated header: {len(header)} bytes, expected {4 + 4 * ndim}")
    return tuple(int(size) for size in np.frombuffer(header, dtype=">u4", offset=4))


def _hex(magic: bytes) -> str:
    return f"0x{magic.hex()}" if magic else "(empty file)"

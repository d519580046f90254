"""The IDX format of MNIST and its kin: a big-endian header, then raw numbers.

Header: two zero bytes, a type code (0x08: unsigned byte), the number of dimensions, then one 32-bit size
each. Reference: http://yann.lecun.com/exdb/mnist (section "FILE FORMATS").
"""

from __future__ import annotations

import gzip
import math
import os
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, cast

import numpy as np

from jaxpfl.support.errors import JaxpflError
from jaxpfl.support.files import check_fits, opened

_TYPES = {
    0x08: "unsigned byte",
    0x09: "signed byte",
    0x0B: "short",
    0x0C: "int",
    0x0D: "float",
    0x0E: "double",
}
_MOST_INFLATED = 1032  # times its length that deflate can make of a stream


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
    with _inflated(path) as (file, most):
        shape = _shape(path, file.read(4 + 4 * ndim), ndim)
        expected, most = math.prod(shape), most - 4 - 4 * ndim
        zipped = isinstance(file, gzip.GzipFile)
        found, more = most, " or less" if zipped else ""
        if expected <= most:
            check_fits(path, expected)
            content = file.read(expected + 1)
            if zipped:
                found, more = len(content), " or more" if len(content) > expected else ""
            if found == expected:
                return np.frombuffer(content, dtype=np.uint8).reshape(shape)
    problem = "truncated" if found < expected else "too long"
    raise JaxpflError(
        f"{path}: {problem}: {found} bytes{more} of data, expected {expected} for the header's shape {shape}"
    )


def read_idx_pair(images: str | Path, labels: str | Path) -> tuple[np.ndarray, np.ndarray]:
    """Read images [N, H, W] and their labels [N], both uint8.

    Raises:
      JaxpflError: as in `read_idx`; if the two files' counts differ, or there are no images.
    """
    shape, (count,) = _shape_of(Path(images), 3), _shape_of(Path(labels), 1)
    if shape[0] != count:
        raise JaxpflError(f"{images} holds {shape[0]} images but {labels} holds {count} labels")
    if 0 in shape:
        raise JaxpflError(f"{images}: no pixels: its shape is {shape}")
    return read_idx(images, 3), read_idx(labels, 1)


@contextmanager
def _inflated(path: Path) -> Iterator[tuple[IO[bytes], int]]:
    """A file's bytes, inflated as they are read if it is compressed, and an upper bound on their number."""
    try:
        with opened(path) as raw:
            size = os.fstat(raw.fileno()).st_size
            zipped = raw.peek(2)[:2] == b"\x1f\x8b"
            yield (cast("IO[bytes]", gzip.GzipFile(fileobj=raw)), _MOST_INFLATED * size) if zipped else (raw, size)
    except EOFError as error:
        raise JaxpflError(f"{path}: truncated: its gzip stream of {path.stat().st_size} bytes ends early") from error
    except (gzip.BadGzipFile, zlib.error) as error:
        raise JaxpflError(f"{path}: damaged gzip stream: {error}") from error
    except OSError as error:
        raise JaxpflError(f"{path}: cannot be read: {error.strerror or error}") from error


def _shape_of(path: Path, ndim: int) -> tuple[int, ...]:
    with _inflated(path) as (file, _):
        return _shape(path, file.read(4 + 4 * ndim), ndim)


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

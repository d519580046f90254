"""The IDX format of MNIST and its kin: a big-endian header, then raw numbers.

Header: two zero bytes, a type code (0x08: unsigned byte), the number of dimensions, then one 32-bit size
each. Reference: http://yann.lecun.com/exdb/mnist (section "FILE FORMATS").
"""

from __future__ import annotations

import gzip
import zlib
from pathlib import Path

import numpy as np

from jaxpfl.errors import JaxpflError

_TYPES = {
    0x08: "unsigned byte",
    0x09: "signed byte",
    0x0B: "short",
    0x0C: "int",
    0x0D: "float",
    0x0E: "double",
}


def read_idx(path: str | Path, ndim: int) -> np.ndarray:
    """Reads one IDX file of unsigned bytes, gzip-compressed or not (told by its content, not by its name).

    Args:
      path: the file.
      ndim: the number of dimensions it must have: 3 for images, 1 for labels.

    Returns:
      uint8 array of the shape that the header gives.

    Raises:
      JaxpflError: one line with the file, what was found and what is expected: no such file, damaged gzip,
        wrong magic number, element type or number of dimensions, truncated or over-long data.
    """
    path = Path(path)
    content = _read_bytes(path)
    expected_magic = bytes((0, 0, 0x08, ndim))
    magic = content[:4]
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
    start = 4 + 4 * ndim
    if len(content) < start:
        raise JaxpflError(f"{path}: truncated header: {len(content)} bytes, expected {start}")
    shape = tuple(int(size) for size in np.frombuffer(content, dtype=">u4", count=ndim, offset=4))
    expected = int(np.prod(shape, dtype=object))
    found = len(content) - start
    if found != expected:
        problem = "truncated" if found < expected else "too long"
        raise JaxpflError(
            f"{path}: {problem}: {found} bytes of data, expected {expected} for the header's shape {shape}"
        )
    return np.frombuffer(content, dtype=np.uint8, offset=start).reshape(shape)


def read_idx_pair(images: str | Path, labels: str | Path) -> tuple[np.ndarray, np.ndarray]:
    """Images [N, H, W] and their labels [N], both uint8.

    Raises:
      JaxpflError: as `read_idx`, or the two files' counts differ, or there are no images.
    """
    x, y = read_idx(images, 3), read_idx(labels, 1)
    if len(x) != len(y):
        raise JaxpflError(f"{images} holds {len(x)} images but {labels} holds {len(y)} labels")
    if x.size == 0:
        raise JaxpflError(f"{images}: no pixels: its shape is {x.shape}")
    return x, y


def _read_bytes(path: Path) -> bytes:
    try:
        content = path.read_bytes()
    except OSError as error:
        raise JaxpflError(f"{path}: cannot be read: {error.strerror or error}") from error
    if content[:2] != b"\x1f\x8b":
        return content
    try:
        return gzip.decompress(content)
    except EOFError as error:
        raise JaxpflError(f"{path}: truncated: its gzip stream of {len(content)} bytes ends early") from error
    except (OSError, zlib.error) as error:
        raise JaxpflError(f"{path}: damaged gzip stream: {error}") from error


def _hex(magic: bytes) -> str:
    return f"0x{magic.hex()}" if magic else "(empty file)"

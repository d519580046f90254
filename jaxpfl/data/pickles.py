"""Pickled arrays and containers, read without executing anything from the file.

A pickle is a program: it may call any function it can name. Here it can name only what NumPy arrays need, and even
those names lead to stand-ins of this module that keep what they are given; the arrays are made afterwards, from raw
bytes and a plain element type. NumPy's own reconstruction is never run on a file's word.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from jaxpfl.data.source import one_line
from jaxpfl.errors import JaxpflError

_PLAIN_TYPES = frozenset("buif")
"""Kinds of elements that are read: booleans, unsigned and signed integers, floats."""


def read_pickle(path: Path) -> Any:
    """The object in a pickle of builtin containers, numbers, strings and plain NumPy arrays (Python 2's too).

    Strings of Python 2 come as bytes.

    Raises:
      JaxpflError: no such file, a truncated or damaged one, or one that asks for anything else: the refused global is
        named, and nothing of it has run.
    """
    try:
        content = path.read_bytes()
    except OSError as error:
        raise JaxpflError(f"{path}: cannot be read: {error.strerror or error}") from error
    try:
        return _finished(_Reader(io.BytesIO(content), encoding="bytes").load())
    except _RefusedError as refused:
        raise JaxpflError(
            f"{path}: refused: the pickle asks for {refused}, and only plain NumPy arrays and containers are read; "
            "nothing was executed"
        ) from None
    except Exception as error:  # a damaged pickle raises nearly anything
        raise JaxpflError(f"{path}: truncated or damaged pickle of {len(content)} bytes: {one_line(error)}") from error


class _RefusedError(Exception):
    """A global that is not on the list."""


class _Callable:
    """What a name in a pickle leads to. Made anew each time: a pickle may try to change what it was given."""

    __slots__ = ("make",)

    def __init__(self, make: Callable[..., Any]) -> None:
        self.make = make

    def __call__(self, *args: Any) -> Any:
        return self.make(*args)


class _Type:
    """Stands in for a ``numpy.dtype``: its code and byte order."""

    __slots__ = ("code", "order")

    def __init__(self, code: Any, align: Any = False, copy: Any = False) -> None:
        self.code, self.order = _text(code), "="

    def __setstate__(self, state: tuple) -> None:
        self.order = _text(state[1])

    def plain(self) -> np.dtype:
        dtype = np.dtype(self.code)
        if dtype.kind not in _PLAIN_TYPES:
            raise ValueError(f"elements of type {self.code!r}")
        return dtype.newbyteorder(">") if self.order == ">" else dtype


class _Array:
    """Stands in for a ``numpy.ndarray``: shape, element type, order and raw bytes."""

    __slots__ = ("state",)

    def __setstate__(self, state: tuple) -> None:
        self.state = state

    def plain(self) -> np.ndarray:
        _, shape, dtype, fortran, raw = self.state
        raw = raw.encode("latin1") if isinstance(raw, str) else raw
        flat = np.frombuffer(raw, dtype=dtype.plain())
        return flat.reshape(shape, order="F" if fortran else "C")


class _Scalar:
    """Stands in for a NumPy number."""

    __slots__ = ("dtype", "raw")

    def __init__(self, dtype: Any, raw: Any = b"") -> None:
        self.dtype, self.raw = dtype, raw

    def plain(self) -> Any:
        raw = self.raw.encode("latin1") if isinstance(self.raw, str) else self.raw
        return np.frombuffer(raw, dtype=self.dtype.plain())[0].item()


class _Reader(pickle.Unpickler):
    def find_class(self, module_name: str, global_name: str, /) -> Any:
        make = _KNOWN.get((module_name, global_name))
        if make is None:
            raise _RefusedError(f"{module_name}.{global_name}")
        return _Callable(make)

    def persistent_load(self, pid: Any, /) -> Any:
        raise _RefusedError("a persistent object")


def _reconstruct(*_: Any) -> _Array:
    return _Array()


def _from_buffer(raw: Any, dtype: Any, shape: Any, order: Any) -> _Array:
    array = _Array()
    array.state = (1, shape, dtype, _text(order) == "F", bytes(raw))
    return array


def _encode(text: Any, encoding: Any) -> bytes:
    if _text(encoding) not in ("latin1", "latin-1"):
        raise ValueError(f"text encoded as {encoding!r}")
    return text.encode("latin1")


def _text(value: Any) -> str:
    return value.decode("latin1") if isinstance(value, bytes) else str(value)


def _finished(value: Any) -> Any:
    """The value with every stand-in replaced by the array it stands for."""
    if isinstance(value, _Array | _Scalar):
        return value.plain()
    if isinstance(value, dict):
        return {_finished(key): _finished(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_finished(item) for item in value)
    if isinstance(value, _Callable | _Type):
        raise ValueError("a bare type")
    return value


_KNOWN: dict[tuple[str, str], Callable[..., Any]] = {
    ("numpy", "ndarray"): _reconstruct,
    ("numpy", "dtype"): _Type,
    ("_codecs", "encode"): _encode,
    ("__builtin__", "bytes"): lambda: b"",  # how Python 3 writes empty bytes for Python 2
    ("collections", "OrderedDict"): dict,
    ("collections", "Counter"): dict,
}
for _module in ("numpy.core", "numpy._core"):
    _KNOWN[(f"{_module}.multiarray", "_reconstruct")] = _reconstruct
    _KNOWN[(f"{_module}.multiarray", "scalar")] = _Scalar
    _KNOWN[(f"{_module}.numeric", "_frombuffer")] = _from_buffer

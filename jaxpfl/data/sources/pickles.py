"""Reader for pickled arrays and containers that executes nothing from the file.

A pickle is a program that may call any function by name. This reader allows only the names that NumPy arrays need. Each
name is replaced by an object that only records its arguments, and the arrays are built afterwards from raw bytes and a
plain dtype. A file can therefore never call NumPy's own reconstruction functions.
"""

from __future__ import annotations

import io
import pickle
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from jaxpfl.data.sources.base import one_line
from jaxpfl.support.errors import JaxpflError, printable
from jaxpfl.support.files import contents

_PLAIN_TYPES = frozenset("buif")
"""Supported kinds of dtypes: booleans, unsigned and signed integers, and floats."""

_KEYS = (str, bytes, int, float, bool, type(None))
"""Types of dictionary keys. Tuples are not allowed, because hashing nested tuples could take unlimited time."""

_MEMORY = 4  # memory of a pickle relative to its length: its bytes, copies by opcodes, and lists of small numbers
_MOST_SHARED = 8  # largest number of objects per byte of the file; an object counts each time it occurs
_LEAST_PARTS = 100_000


def read_pickle(path: Path) -> Any:
    """Read a pickle of builtin containers, numbers, strings and plain NumPy arrays (also from Python 2).

    Strings of Python 2 are returned as bytes.

    Raises:
      JaxpflError: if the file is missing, truncated or damaged, or if it refers to any function or class other than
        those of plain NumPy arrays (the message names it). Nothing in the file is executed.
    """
    content = contents(path, _MEMORY)
    try:
        return _Finish(max(_LEAST_PARTS, _MOST_SHARED * len(content))).convert(_Reader(content).load())[0]
    except _RefusedError as refused:
        raise JaxpflError(
            f"{path} is refused: its pickle asks for {printable(str(refused))}, but only plain NumPy arrays and "
            "containers are read; nothing was executed"
        ) from None
    except Exception as error:  # a damaged pickle raises many types of errors
        raise JaxpflError(f"{path} is truncated or damaged ({len(content)} bytes): {one_line(error)}") from error


class _RefusedError(Exception):
    """Error for a pickle that names a function or class that is not in `_KNOWN`."""


class _Callable:
    """Replacement for a function or class that a pickle names.

    A new one is created for each use, because a pickle may try to modify it.
    """

    __slots__ = ("make",)

    def __init__(self, make: Callable[..., Any]) -> None:
        self.make = make

    def __call__(self, *args: Any) -> Any:
        return self.make(*args)


class _Type:
    """Replacement for a ``numpy.dtype``, with a type code and a byte order."""

    __slots__ = ("code", "order")

    def __init__(self, code: Any, align: Any = False, copy: Any = False) -> None:
        self.code, self.order = _text(code), "="

    def __setstate__(self, state: tuple) -> None:
        self.order = _text(state[1])

    def build(self) -> np.dtype:
        dtype = np.dtype(self.code)
        if dtype.kind not in _PLAIN_TYPES:
            raise ValueError(f"elements of type {self.code!r}")
        return dtype.newbyteorder(">") if self.order == ">" else dtype


class _Array:
    """Replacement for a ``numpy.ndarray``, with a shape, a dtype, a memory order and raw bytes."""

    __slots__ = ("state",)

    def __setstate__(self, state: tuple) -> None:
        self.state = state

    def build(self) -> np.ndarray:
        _, shape, dtype, fortran, raw = self.state
        raw = raw.encode("latin1") if isinstance(raw, str) else raw
        flat = np.frombuffer(raw, dtype=dtype.build())
        return flat.reshape(shape, order="F" if fortran else "C")


class _Scalar:
    """Replacement for a NumPy scalar."""

    __slots__ = ("dtype", "raw")

    def __init__(self, dtype: Any, raw: Any = b"") -> None:
        self.dtype, self.raw = dtype, raw

    def build(self) -> Any:
        raw = self.raw.encode("latin1") if isinstance(self.raw, str) else self.raw
        return np.frombuffer(raw, dtype=self.dtype.build())[0].item()


_Unpickler: Any = vars(pickle)["_Unpickler"]


class _Reader(_Unpickler):
    """Python's unpickler written in Python, with checks.

    The faster unpickler in C is not used, because it allocates as many bytes as a file demands, and hashes keys of any
    type.
    """

    dispatch: ClassVar[dict[int, Callable[..., None]]] = dict(_Unpickler.dispatch)

    def __init__(self, content: bytes) -> None:
        super().__init__(io.BytesIO(content), encoding="bytes")
        self._length = len(content)

    def find_class(self, module_name: str, global_name: str, /) -> Any:
        make = _KNOWN.get((module_name, global_name))
        if make is None:
            raise _RefusedError(f"{module_name}.{global_name}")
        return _Callable(make)

    def persistent_load(self, pid: Any, /) -> Any:
        raise _RefusedError("a persistent object")

    def load_bytearray8(self) -> None:
        (length,) = struct.unpack("<Q", self.read(8))
        if length > self._length:
            raise ValueError(f"an array of {length} bytes")
        self.append(bytearray(self.read(length)))

    def load_setitem(self) -> None:
        _check_key(self.stack[-2])
        super().load_setitem()

    def load_setitems(self) -> None:
        for key in self.stack[::2]:
            _check_key(key)
        super().load_setitems()

    def load_dict(self) -> None:
        items = self.pop_mark()
        self.append(_dictionary(zip(items[::2], items[1::2], strict=True)))

    def load_set(self) -> None:
        raise ValueError("a set")

    dispatch[pickle.BYTEARRAY8[0]] = load_bytearray8
    dispatch[pickle.SETITEM[0]] = load_setitem
    dispatch[pickle.SETITEMS[0]] = load_setitems
    dispatch[pickle.DICT[0]] = load_dict
    for _opcode in (pickle.EMPTY_SET, pickle.ADDITEMS, pickle.FROZENSET):
        dispatch[_opcode[0]] = load_set


def _check_key(key: Any) -> None:
    if not isinstance(key, _KEYS):
        raise ValueError(f"a {type(key).__name__} as the key of a dictionary")


def _dictionary(items: Any = ()) -> dict[Any, Any]:
    made = {}
    for key, value in items.items() if isinstance(items, dict) else items:
        _check_key(key)
        made[key] = value
    return made


def _buffer_array(raw: Any, dtype: Any, shape: Any, order: Any) -> _Array:
    array = _Array()
    array.state = (1, shape, dtype, _text(order) == "F", raw)
    return array


def _encode(text: Any, encoding: Any) -> bytes:
    if _text(encoding) not in ("latin1", "latin-1"):
        raise ValueError(f"text encoded as {encoding!r}")
    return text.encode("latin1")


def _text(value: Any) -> str:
    return value.decode("latin1") if isinstance(value, bytes) else str(value)


class _Finish:
    """Last step of reading a pickle: conversion of `_Array` and `_Scalar` to arrays and numbers.

    An object that occurs several times is converted once.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._done: dict[int, tuple[Any, Any, int]] = {}  # also keeps the object alive, so that its id stays unique

    def convert(self, value: Any) -> tuple[Any, int]:
        """Return the value with arrays and numbers instead of their replacements, and the number of objects in it.

        Raises:
          ValueError: if an object contains itself, or if the number of objects (counting repetitions) exceeds the
            limit.
        """
        if isinstance(value, _Callable | _Type):
            raise ValueError("a bare type")
        if not isinstance(value, _Array | _Scalar | dict | list | tuple):
            return value, 1
        if id(value) not in self._done:
            self._done[id(value)] = value, _OPEN, 0
            self._done[id(value)] = value, *self._convert(value)
        _, made, parts = self._done[id(value)]
        if made is _OPEN:
            raise ValueError("an object that contains itself")
        if parts > self._most:
            raise ValueError(f"an object that contains the same parts more than {self._most} times")
        return made, parts

    def _convert(self, value: Any) -> tuple[Any, int]:
        if isinstance(value, _Array | _Scalar):
            return value.build(), 1
        if isinstance(value, dict):
            items = {key: self.convert(item) for key, item in value.items()}
            return {key: item for key, (item, _) in items.items()}, 1 + sum(parts for _, parts in items.values())
        own = [self.convert(item) for item in value]
        return type(value)(item for item, _ in own), 1 + sum(parts for _, parts in own)


_OPEN = object()
"""Marker for an object whose conversion has not finished."""


_KNOWN: dict[tuple[str, str], Callable[..., Any]] = {
    ("numpy", "ndarray"): lambda *_: _Array(),
    ("numpy", "dtype"): _Type,
    ("_codecs", "encode"): _encode,
    ("__builtin__", "bytes"): lambda: b"",  # Python 3 writes empty bytes like this in protocols for Python 2
    ("collections", "OrderedDict"): _dictionary,
    ("collections", "Counter"): _dictionary,
}
for _module in ("numpy.core", "numpy._core"):
    _KNOWN[(f"{_module}.multiarray", "_reconstruct")] = _KNOWN["numpy", "ndarray"]
    _KNOWN[(f"{_module}.multiarray", "scalar")] = _Scalar
    _KNOWN[(f"{_module}.numeric", "_frombuffer")] = _buffer_array

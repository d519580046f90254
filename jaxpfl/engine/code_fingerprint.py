"""Checksum of Python objects by their contents: code, closures, defaults and arrays, never their address.

A function given by the user (a method, a model, an optimizer, a compressor) has no name that identifies it. Two
functions with the same checksum are the same code over the same values; the converse need not hold.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import re
import types
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

_ADDRESS = re.compile(r"0x[0-9a-f]+")
_LIBRARIES = frozenset({"builtins", "chex", "flax", "functools", "jax", "jaxlib", "jaxpfl", "numpy", "optax"})
"""Packages with versions, whose functions are identified by name and closure."""
_RULES = ("fun", "jvp", "fwd", "bwd")
"""Attributes of ``jax.custom_jvp`` and ``jax.custom_vjp`` that hold a user's functions."""


def checksum(*values: Any) -> str:
    """Hexadecimal SHA-256 of the values' contents."""
    digest = hashlib.sha256()
    for piece in _pieces(values, {}):
        digest.update(len(piece).to_bytes(8, "little"))
        digest.update(piece)
    return digest.hexdigest()


def without_addresses(text: str) -> str:
    """The text without the memory addresses of Python's representations."""
    return _ADDRESS.sub("", text)


def _pieces(value: Any, seen: dict[int, tuple[int, Any]]) -> Iterator[bytes]:
    if value is None or isinstance(value, bool | int | float | complex | str | bytes | np.dtype):
        yield f"{type(value).__name__} {value!r}".encode()
        return
    if id(value) in seen:  # the object is kept with its number, so that its address is not given to another
        yield f"again {seen[id(value)][0]}".encode()
        return
    seen[id(value)] = len(seen), value
    kind = type(value)
    yield f"{kind.__module__}.{kind.__qualname__}".encode()
    if isinstance(value, jax.Array | np.ndarray | np.generic):
        yield from _array(value)
    elif isinstance(value, set | frozenset):
        yield from sorted(checksum(one).encode() for one in value)
    else:
        for part in _parts(value):
            yield from _pieces(part, seen)


def _array(value: Any) -> Iterator[bytes]:
    if isinstance(value, jax.Array) and jax.numpy.issubdtype(value.dtype, jax.dtypes.prng_key):
        value = jax.random.key_data(value)
    held = np.asarray(value)
    yield f"{held.dtype} {held.shape}".encode()
    yield held.tobytes()


def _parts(value: Any) -> Iterator[Any]:
    """Parts of an object."""
    if isinstance(value, dict):
        for key in sorted(value, key=repr):
            yield from (key, value[key])
    elif isinstance(value, tuple | list):
        yield from value
    elif isinstance(value, functools.partial):
        yield from (value.func, value.args, value.keywords)
    elif isinstance(value, types.MethodType):
        yield from (value.__func__, value.__self__)
    elif isinstance(value, types.FunctionType):
        yield from _function(value)
    elif isinstance(value, types.CodeType):
        yield from (value.co_code, value.co_names, value.co_varnames, value.co_consts)
    elif isinstance(value, types.ModuleType):
        yield value.__name__
    elif isinstance(value, type):
        yield from (value.__module__, value.__qualname__)
        if not _from_library(value):
            yield {name: own for name, own in vars(value).items() if callable(own)}
    elif dataclasses.is_dataclass(value):
        yield {field.name: getattr(value, field.name, None) for field in dataclasses.fields(value)}
    elif hasattr(value, "__wrapped__"):  # jax.jit
        yield value.__wrapped__
        yield {name: vars(value)[name] for name in _RULES if name in getattr(value, "__dict__", {})}
    elif hasattr(value, "__dict__") and not _from_library(type(value)):
        yield vars(value)
    else:
        yield without_addresses(repr(value))
        yield {name: vars(value)[name] for name in _RULES if name in getattr(value, "__dict__", {})}


def _function(value: types.FunctionType) -> Iterator[Any]:
    yield from (value.__module__, value.__qualname__, value.__defaults__, value.__kwdefaults__)
    for cell in value.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:  # not filled yet
            yield "empty"
    if not _from_library(value):
        yield value.__code__
        yield {name: value.__globals__[name] for name in _names(value.__code__) if name in value.__globals__}


def _names(code: types.CodeType) -> set[str]:
    """Names that a function and its inner functions look up."""
    nested = (one for one in code.co_consts if isinstance(one, types.CodeType))
    return set(code.co_names).union(*map(_names, nested))


def _from_library(value: Any) -> bool:
    return (getattr(value, "__module__", None) or "").partition(".")[0] in _LIBRARIES

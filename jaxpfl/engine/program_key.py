"""Key of a compiled program for reuse: equal keys, equal programs.

A program is a function of the Python function that was traced, of the shapes of its arguments, and of JAX's settings.
The key is a SHA-256 of all of these: code, closures, defaults, the globals that the code names, classes, instances and
arrays, everything that can be reached. An object that cannot be read completely (an iterator, a lock, an open file, a
random generator, an extension's object, a module that reads the clock) gives no key, and its program is compiled anew.
(`code_fingerprint` requires less: it distinguishes noise streams and never equates programs.)
"""

from __future__ import annotations

import hashlib
import os
from types import CodeType
from typing import Any, NamedTuple

import flax.linen as nn
import jax

from jaxpfl.engine.code_lookups import Untold
from jaxpfl.engine.contents import ARRAYS, ATOMS, array, device, is_key, is_librarys, parts_of

MOST_BYTES = 2**28
"""Largest size of the arrays within functions: reading more would take longer than most compilations."""
_MOST_OBJECTS = 10**6


class Key(NamedTuple):
    """Key of a compiled program.

    Attributes:
      digest: 64 hexadecimal digits of all contents, the same in every process.
      classes: the user's and our own classes among them. Two classes of one text differ: a program's results are
        instances of those that it was traced with.
    """

    digest: str
    classes: tuple[type, ...]

    @property
    def parts(self) -> tuple[Any, ...]:
        """Values to compare, in this process and while the key is alive."""
        return self.digest, *map(id, self.classes)


def key_of(*values: Any) -> Key | None:
    """Key of some values under JAX's current settings; None if their contents cannot be read."""
    classes: dict[int, type] = {}
    try:
        return Key(_digest((*values, *_environment()), classes), tuple(classes.values()))
    except Exception:  # `Untold`, or an object that does not let itself be read
        return None


def _environment() -> tuple[Any, ...]:
    """Implicit inputs of a program: settings, flags, devices and contexts."""
    config, defaults = jax.config, jax.config.values
    names = (name for name in sorted(defaults) if "compilation_cache" not in name and "persistent" not in name)
    if list(nn.module._global_interceptor_stack):  # flax.linen.intercept_methods: modules do what their code hides
        raise Untold("a method interceptor")
    return (
        repr([(name, getattr(config, name, defaults[name])) for name in names]),
        [os.environ.get(name) for name in ("XLA_FLAGS", "LIBTPU_INIT_ARGS")],
        jax.__version__,
        jax.default_backend(),
        [device(one) for one in jax.devices()],
        repr(jax.sharding.get_abstract_mesh()),
    )


class _Part:
    """Stands, in the line of a whole, for a part that has a line of its own; no atom is written as this is."""

    def __repr__(self) -> str:
        return "<>"


_PART = _Part()


def _digest(root: Any, classes: dict[int, type] | None = None) -> str:
    """SHA-256 of a value: each object in the order in which it is reached, as a line of its kind and its parts.

    Parts that are atoms are written out; an array's line has the checksum of its bytes, and that of an object which was
    reached before has its number alone. So the lines can be read in one way only.

    Classes that are not of a library are collected in ``classes``.
    """
    lines: list[str] = []
    left = MOST_BYTES
    seen: dict[int, tuple[int, Any]] = {}
    todo = [(root,)]
    while todo:
        value = todo.pop()
        kind = type(value)
        if id(value) in seen:  # held by `seen`, so that its address is not given to another
            lines.append(f"again {seen[id(value)][0]}")
            continue
        # Whether equal constants are one object depends on how their module was loaded.
        if kind is not tuple and kind is not frozenset and kind is not CodeType:
            seen[id(value)] = len(seen), value
            if len(seen) > _MOST_OBJECTS:
                raise Untold("too many objects")
        own = ""
        if isinstance(value, ARRAYS):
            left -= value.nbytes if not is_key(value) else 0
            if left < 0:
                raise Untold("too many bytes")
            content, parts = array(value)
            own = hashlib.sha256(content).hexdigest()
        else:
            parts = parts_of(value)
            if classes is not None and isinstance(value, type) and not is_librarys(value):
                classes[id(value)] = value
        inner = [part for part in parts if type(part) not in ATOMS]
        told = [part if type(part) in ATOMS else _PART for part in parts] if inner else list(parts)
        lines.append(f"{kind.__module__}.{kind.__qualname__} {own}{told}")
        todo += reversed(inner)
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()

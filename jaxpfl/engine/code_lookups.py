"""The names that a function looks up outside itself, read from its compiled code."""

from __future__ import annotations

import dis
import functools
import types


class Untold(Exception):
    """Raised for an object whose contents cannot be read, or may change unnoticed."""


_LIBRARIES = frozenset(
    (
        # Their code has a version of its own, and nothing but JAX's settings changes what it does;
        *("builtins", "chex", "equinox", "flax", "jax", "jaxlib", "jaxtyping", "ml_dtypes", "numpy", "optax"),
        # of the standard library, what reads neither clock, environment, files nor a random generator.
        *("__future__", "abc", "ast", "bisect", "cmath", "collections", "contextlib", "copy", "copyreg", "dataclasses"),
        *("difflib", "enum", "functools", "heapq", "inspect", "itertools", "math", "numbers", "operator", "re"),
        *("reprlib", "statistics", "string", "textwrap", "types", "typing", "typing_extensions", "warnings"),
        *("_abc", "_ast", "_bisect", "_collections", "_collections_abc", "_functools", "_heapq", "_operator"),
    )
)
_IMPURE_MODULES = (
    "numpy.random",
    "numpy.ctypeslib",
    "flax.config",
    "flax.configurations",
    "flax.io",
    "flax.training.checkpoints",
)
READERS = frozenset(("DataSource", "fromfile", "fromregex", "genfromtxt", "load", "loadtxt", "memmap", "open_memmap"))
"""Functions of NumPy and `jax.numpy` that read files."""
IMPURE_BUILTINS = frozenset(
    (
        *("__import__", "aiter", "anext", "breakpoint", "compile", "eval", "exec", "globals", "hash", "id", "input"),
        *("locals", "open", "vars"),
    )
)
"""Builtins that read more than a function's own names."""


def is_library(module: object) -> bool:
    """True if a module's functions are identified by name alone."""
    if not isinstance(module, str):  # an extension's class may have anything in this place
        return False
    return module.partition(".")[0] in _LIBRARIES and not module.startswith(_IMPURE_MODULES)


@functools.lru_cache(maxsize=4096)
def lookups(code: types.CodeType) -> tuple[tuple[str, ...], ...]:
    """The dotted global names that a function and those inside it read, ``("jnp", "sum")`` for ``jnp.sum(x)``.

    Raises:
      Untold: if the function imports a module that is not of a library, or may read files or draw numbers by one that
        it imports.
    """
    found: dict[tuple[str, ...], None] = {}
    instructions = [one for one in dis.get_instructions(code) if one.opname not in ("EXTENDED_ARG", "CACHE")]
    for i, one in enumerate(instructions):
        if one.opname == "IMPORT_NAME":
            level = instructions[i - 2].argval
            if level != 0 or not is_library(one.argval):
                raise Untold(f"import {one.argval}")
            hidden = READERS | {"checkpoints"} | ({"random", "ctypeslib"} if one.argval.startswith("numpy") else set())
            if used := hidden & _attributes(code):
                raise Untold(f"import {one.argval}, {used}")
        if one.opname not in ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS"):
            continue
        path = [one.argval]
        for after in instructions[i + 1 :]:
            if after.opname not in ("LOAD_ATTR", "LOAD_METHOD"):
                break
            path.append(after.argval)
        found[tuple(path)] = None
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            found |= dict.fromkeys(lookups(inner))
    return tuple(found)


def _attributes(code: types.CodeType) -> set[str]:
    """All names of attributes and globals in a function and those inside it."""
    inner = (_attributes(one) for one in code.co_consts if isinstance(one, types.CodeType))
    return set(code.co_names).union(*inner)

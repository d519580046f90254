"""Decomposition of Python objects into text, numbers and bytes, for those whose contents can be read completely.

A function consists of its code, defaults, closure, and the values of its global names. Functions of libraries
(`code_lookups.is_library`) are identified by their names and closures.
"""

from __future__ import annotations

import builtins
import dataclasses
import enum
import functools
import hashlib
import re
import sys
import types
import typing
import weakref
from collections.abc import Sequence
from contextvars import ContextVar
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import numpy as np
from jax.core import Tracer
from jax.sharding import Mesh, NamedSharding, Sharding

from jaxpfl.engine.code_lookups import IMPURE_BUILTINS, READERS, Untold, is_library, lookups
from jaxpfl.models.rewriting import Context

ATOMS = frozenset((type(None), bool, int, float, complex, str, bytes, type(...), type(NotImplemented)))
"""Types whose instances are their ``repr``."""

ARRAYS = (np.ndarray, np.generic, jax.Array)
"""Types that `array` reads."""

_CONTAINERS = (dict, list, tuple, set, frozenset, str, bytes, int, float)
_NOT_OF_A_CLASS = frozenset(
    (
        *("__dict__", "__weakref__", "__doc__", "__module__", "__annotations__", "__annotate__", "__annotate_func__"),
        *("__annotations_cache__", "__qualname__", "__firstlineno__", "__static_attributes__", "__abstractmethods__"),
        *("_abc_impl", "__parameters__", "__orig_bases__", "__slotnames__", "__hash__"),
    )
)
_HEAP_TYPE = 1 << 9
_POINTER = object.__basicsize__ // 2
_PLAIN = (np.ndarray, np.memmap, np.recarray, np.matrix)
_OF_A_MODULE = frozenset(("parent", "_parent_ref", "_id", "_state"))
_OF_A_MEMBER = frozenset(("_name_", "_value_", "__objclass__", "_sort_order_"))
_OF_JIT = (
    *("static_argnums", "static_argnames", "donate_argnums", "donate_argnames", "inline", "keep_unused"),
    *("compiler_options_kvs", "in_shardings_leaves", "out_shardings_leaves"),
)


def is_key(value: Any) -> bool:
    """True for an array of random keys."""
    return isinstance(value, jax.Array) and jax.numpy.issubdtype(value.dtype, jax.dtypes.prng_key)


def array(value: Any) -> tuple[bytes, tuple[Any, ...]]:
    """Bytes of an array, and its other properties."""
    about: tuple[Any, ...] = (str(value.dtype), tuple(value.shape))
    if isinstance(value, jax.Array):
        if isinstance(value, Tracer) or value.is_deleted() or not value.is_fully_addressable:
            raise Untold("an array without values")
        about = (*about, value.weak_type if hasattr(value, "weak_type") else None, value.sharding)
        value = jax.random.key_data(value) if is_key(value) else value
    elif isinstance(value, np.ndarray) and type(value) not in _PLAIN:  # such as the mask of a masked array
        raise Untold(type(value).__name__)
    held = np.asarray(value)
    if held.dtype.hasobject:
        return b"", (*about, held.tolist())
    return held.tobytes(), about


def parts_of(value: Any) -> Sequence[Any]:
    """Parts of an object, such that two of one type with equal parts compute the same in a traced program.

    Args:
      value: neither one of `ATOMS` nor an array.

    Raises:
      Untold: if parts of it cannot be read, or may change unseen.
    """
    kind = type(value)
    if kind is tuple or kind is list:  # most of them
        return value
    if kind is types.FunctionType:
        return _function(value)
    if kind is types.CodeType:
        return (_of_code(value),)
    if kind is dict:
        return _contents(value, dict)
    if isinstance(value, type):
        return _class(value)
    if isinstance(value, types.ModuleType):
        return _module(value)
    if isinstance(value, types.MethodType):
        return (value.__func__, value.__self__)
    if isinstance(value, types.BuiltinFunctionType | types.MethodWrapperType):
        return _builtin(value)
    if isinstance(value, nn.Module):
        if value.scope is not None:
            raise Untold("a module at work")
        # Not its number, which no other instance has; but what `__post_init__` left beside the fields.
        names = [field.name for field in dataclasses.fields(value)]
        names += sorted(vars(value).keys() - set(names))
        return (type(value), *((name, getattr(value, name)) for name in names if name not in _OF_A_MODULE))
    if isinstance(value, enum.Enum):
        own = [(name, one) for name, one in vars(value).items() if name not in _OF_A_MEMBER]
        return (type(value), value.name, own)
    librarys = is_librarys(kind)
    if librarys and hasattr(value, "__wrapped__") and hasattr(value, "lower"):  # jax.jit
        return _jitted(value)
    for kinds, parts in _KINDS:
        if isinstance(value, kinds):
            own = parts(value)
            return own if librarys or kind is kinds else (kind, list(own), *_attributes(value))
    if librarys and kind.__module__ in ("typing", "types"):
        return (_without_address(repr(value)),)
    return _instance(value)


def _now(variable: ContextVar[Any]) -> tuple[Any, ...]:
    """A variable's value where the key is taken, which is where the program is traced; none if it has none."""
    try:
        return (variable.get(),)
    except LookupError:
        return ()


def _without_address(text: str) -> str:
    """The text, refused if it contains a memory address."""
    if re.search(r"0x[0-9a-f]+", text):
        raise Untold(text)
    return text


def _function(value: types.FunctionType) -> Sequence[Any]:
    if _is_named(value):
        return _name(value)
    cells = [_filled(cell) for cell in value.__closure__ or ()]
    # Which cells are filled and what kind each name is say how many parts follow, as any of these may be text too.
    own = f"{_of_code(value.__code__)} {[len(cell) for cell in cells]}"
    parts: list[Any] = [own, value.__defaults__, value.__kwdefaults__, *(one for cell in cells for one in cell)]
    parts.append(sorted(vars(value).items()) or None)
    if not is_library(_home(value)):
        for path in lookups(value.__code__):
            kind, found = _looked_up(path, value.__globals__)
            parts += (f"{'.'.join(path)} {kind}", *found)
    return parts


def _filled(cell: types.CellType) -> tuple[Any, ...]:
    """Contents of a closure's cell; none if it is not filled yet."""
    try:
        return (cell.cell_contents,)
    except ValueError:
        return ()


def _home(value: types.FunctionType) -> str:
    """Module whose names a function reads; ``functools.wraps`` copies ``__module__`` from another."""
    return value.__globals__.get("__name__", "")


def _looked_up(path: tuple[str, ...], names: dict[str, Any]) -> tuple[str, Sequence[Any]]:
    """Kind and values of what a dotted name in a function refers to, with modules resolved to their members."""
    first, *rest = path
    if first not in names:
        if first in IMPURE_BUILTINS:
            raise Untold(first)
        return ("builtin" if hasattr(builtins, first) else "missing"), ()
    value = names[first]
    while isinstance(value, types.ModuleType) and rest:
        inner = getattr(value, rest[0], None)
        if is_library(value.__name__) and not isinstance(inner, types.ModuleType):
            return "member", (*_module(value), _pure(rest[0]))
        value, rest = inner, rest[1:]
    return "value", (value,)


def _module(value: types.ModuleType) -> Sequence[Any]:
    if not is_library(value.__name__):  # handed on as a value: any of its names may be read
        raise Untold(value.__name__)
    return (value.__name__,)


def _builtin(value: Any) -> Sequence[Any]:
    owner = value.__self__
    if owner is None or isinstance(owner, types.ModuleType):
        return _name(value)
    return (value.__name__, owner)


def _is_named(value: Any) -> bool:
    """True if a library's module holds this very object under its name."""
    module = getattr(value, "__module__", None) or ""
    if not is_library(module):
        return False
    found: Any = sys.modules.get(module)
    for name in (getattr(value, "__qualname__", None) or "?").split("."):
        found = getattr(found, name, None)
    return found is value


def _name(value: Any) -> tuple[Any, ...]:
    module = getattr(value, "__module__", None) or ""
    if not is_library(module):
        raise Untold(f"{module}.{value.__qualname__}")
    return module, _pure(value.__qualname__)


def _pure(name: str) -> str:
    """The name of a library's function, refused if it reads files."""
    if name.partition(".")[0] in READERS:
        raise Untold(name)
    return name


def _jitted(value: Any) -> Sequence[Any]:
    if _is_named(value):
        return _name(value)
    info = getattr(value, "_jit_info", None)
    return (value.__wrapped__, [repr(getattr(info, name, None)) for name in _OF_JIT])


def is_librarys(kind: type) -> bool:
    """True for a class that its library and its name identify.

    Python gives a class the module ``builtins`` or ``types`` too if it is made where there is no ``__name__``, as by
    `dataclasses.make_dataclass`.
    """
    made = kind.__module__ in ("builtins", "types") and bool(kind.__flags__ & _HEAP_TYPE)
    return is_library(kind.__module__) and (not made or _is_named(kind))


def _class(value: type) -> Sequence[Any]:
    if is_librarys(value):
        return value.__module__, _pure(value.__qualname__)
    if not _is_python(value):
        raise Untold(f"{value.__module__}.{value.__qualname__}")
    named = value.__module__, value.__qualname__  # where the results that are on disk find it
    if issubclass(value, enum.Enum):
        members = value.__members__
        own = [(name, one) for name, one in vars(value).items() if name not in members and _is_own(name, one)]
        return (*named, value.__bases__, [(name, one.value) for name, one in members.items()], own)
    held = [part for item in vars(value).items() if item[0] not in _NOT_OF_A_CLASS for part in item]
    return (*named, value.__bases__, type(value), *held)


def _is_own(name: str, value: Any) -> bool:
    """True for an attribute of an enum that `enum` has not made."""
    return isinstance(value, _BY_CODE) or not (name.startswith("_") and name.endswith("_"))


def _is_python(kind: type) -> bool:
    """True if a class is defined by Python code: its instances hide nothing from Python."""
    file = getattr(sys.modules.get(kind.__module__), "__file__", None) or ""
    built_in = kind.__module__ in sys.builtin_module_names
    if built_in or file.endswith((".so", ".pyd")):
        return False
    return bool(kind.__flags__ & _HEAP_TYPE) and not _hides(kind)


def _hides(kind: type) -> bool:
    """True if instances have memory beside the slots that the class declares, as `operator.itemgetter`'s have."""
    held, slots = vars(kind), vars(kind).get("__slots__", ())
    count = 1 if isinstance(slots, str) else len(tuple(slots))
    count += ("__dict__" in held) + ("__weakref__" in held)
    base = kind.__base__
    return base is not None and kind.__basicsize__ - base.__basicsize__ > _POINTER * count


def _instance(value: Any) -> Sequence[Any]:
    """Class, attributes and contents (of a container) of an object of a Python class."""
    kinds = type(value).__mro__[:-1]
    for kind in kinds:
        if kind not in _CONTAINERS and not _is_python(kind):
            raise Untold(f"{kind.__module__}.{kind.__qualname__}")
    contents = [(kind.__name__, _contents(value, kind)) for kind in kinds if kind in _CONTAINERS]
    return (type(value), *contents, *_attributes(value))


def _attributes(value: Any) -> Sequence[Any]:
    """Values in the slots and the dictionary of an object, each after its name."""
    parts: list[Any] = []
    for kind in type(value).__mro__[:-1]:
        slots = kind.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if name not in ("__dict__", "__weakref__"):
                hidden = name.startswith("__") and not name.endswith("__")
                attribute = f"_{kind.__name__.lstrip('_')}{name}" if hidden else name
                parts += (name, getattr(value, attribute)) if hasattr(value, attribute) else (f"{name} unset", None)
    for name, own in getattr(value, "__dict__", {}).items():
        if name not in _NOT_OF_A_CLASS:
            parts += (name, own)
    return parts


def _contents(value: Any, kind: type) -> Sequence[Any]:
    if kind is dict:  # their order may matter
        return [part for item in dict.items(value) for part in item]
    if kind in (set, frozenset):
        return sorted(kind.__iter__(value), key=lambda one: _without_address(repr(one)))
    if kind in (list, tuple):
        return list(kind.__iter__(value))
    return (kind.__repr__(value),)  # pyright: ignore[reportCallIssue]


def device(value: Any) -> tuple[Any, ...]:
    """Identity of a device."""
    return value.platform, value.id, value.device_kind, value.process_index


def _mesh(value: Mesh) -> Sequence[Any]:
    devices = [device(one) for one in value.devices.flat]
    return value.axis_names, value.devices.shape, repr(value.axis_types), devices


def _sharding(value: Sharding) -> Sequence[Any]:
    if isinstance(value, NamedSharding) and isinstance(value.mesh, Mesh):
        return value.mesh, repr(value.spec), value.memory_kind
    devices = sorted(device(one) for one in value.device_set)
    return _without_address(repr(value)), value.memory_kind, devices


def _tree(value: Any) -> Sequence[Any]:
    return value.node_data(), value.children(), value.num_leaves


def _pattern(value: re.Pattern[Any]) -> Sequence[Any]:
    return value.pattern, value.flags


def _field(value: dataclasses.Field[Any]) -> Sequence[Any]:
    return value.name, value.default, value.default_factory, value.init, dict(value.metadata), value.kw_only


_BY_CODE = (
    types.FunctionType,
    property,
    staticmethod,
    classmethod,
    functools.cached_property,
    types.DynamicClassAttribute,
)


class _Two(NamedTuple):
    one: int
    other: int


_KINDS: tuple[tuple[Any, Any], ...] = (
    (functools.partial, lambda value: (value.func, value.args, value.keywords, vars(value))),
    (jax.Device, device),
    (Mesh, _mesh),
    (Sharding, _sharding),
    (jax.tree_util.PyTreeDef, _tree),
    (re.Pattern, _pattern),
    (np.dtype, lambda value: (str(value), value.descr if value.names else ())),
    (np.ufunc, lambda value: (value.__name__, getattr(np, value.__name__, None) is value or _refuse(value))),
    (property | types.DynamicClassAttribute, lambda value: (value.fget, value.fset, value.fdel)),
    (staticmethod | classmethod, lambda value: (value.__func__,)),
    (functools.cached_property, lambda value: (value.func, value.attrname)),
    (dataclasses.Field, _field),
    (Context, lambda value: (value.value,)),
    (ContextVar, lambda value: (value.name, *_now(value))),
    (functools._lru_cache_wrapper, lambda value: (value.__wrapped__, vars(value))),
    (weakref.ref, lambda value: (value(),)),
    (types.MappingProxyType, lambda value: _contents(dict(value), dict)),
    (range | slice, lambda value: (repr(value),)),
    (
        types.WrapperDescriptorType
        | types.MethodDescriptorType
        | types.ClassMethodDescriptorType
        | types.GetSetDescriptorType
        | types.MemberDescriptorType,
        lambda value: (value.__objclass__.__qualname__, value.__name__),
    ),
    (type(_Two.__dict__["one"]), lambda value: ()),
    (types.GenericAlias | types.UnionType | typing.TypeVar, lambda value: (_without_address(repr(value)),)),
)
"""Types with a decomposition of their own -> their parts."""


def _refuse(value: Any) -> Any:
    raise Untold(repr(value))


@functools.lru_cache(maxsize=4096)
def _of_code(code: types.CodeType) -> str:
    """SHA-256 of compiled code, without its name and its place in a file."""
    numbers = code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, code.co_flags
    names = code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars
    constants = tuple(map(_constant, code.co_consts))
    table = getattr(code, "co_exceptiontable", b"")
    return hashlib.sha256(repr((code.co_code, numbers, names, constants, table)).encode()).hexdigest()


def _constant(value: Any) -> str:
    if isinstance(value, types.CodeType):
        return _of_code(value)
    if isinstance(value, tuple):
        return f"({','.join(map(_constant, value))})"
    if isinstance(value, frozenset):  # their order differs from process to process
        return f"{{{','.join(sorted(map(_constant, value)))}}}"
    return f"{type(value).__name__} {value!r}"

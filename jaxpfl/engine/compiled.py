"""Cache of compiled programs for later simulations. In a folder that the user chooses, other processes find them too.

The key of a program (`key_of`) describes everything that determines the program. Settings, shapes and JAX's
configuration are compared by value. Functions of jaxpfl and of known libraries are compared by their names and the
values that they capture. A user's functions and objects are compared by equality or identity, as `jax.jit` compares its
static arguments. A second run that differs in traced values only is therefore neither traced nor compiled. A user's
function that is defined again, or in another process, is traced again. Values that a user's function captures are read
during tracing, so a later change of such a value in place has no effect.

The cache contains the `MOST` most recently used programs, or fewer if the process has too many memory mappings.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import math
import os
import pickle
import sys
import threading
import time
import types
from collections import OrderedDict
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from platform import python_version
from tempfile import NamedTemporaryFile
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.core import Tracer
from jax.experimental import serialize_executable

from jaxpfl.core.types import PyTree
from jaxpfl.privacy import noise
from jaxpfl.support import files

MOST = 128
"""Maximum number of programs and shapes in the cache. A program of a small model takes 1 to 3 MiB."""

MAPPINGS = 0.5
"""Largest fraction of a process's memory mappings that may be in use. (By default, Linux allows 65530.) If more are in
use, the older half of the cache is removed before a program is compiled. On a CPU, a round of a small model takes over
500 mappings, and LLVM aborts the process if no mapping is left."""

_FEW = 4
"""Number of programs up to which memory mappings are not counted, because so few programs use only few mappings."""

LOADED = "/jaxpfl/programs/load_duration"
"""Name of the `jax.monitoring` event for the loading of a program from disk."""

WAITED = "/jaxpfl/programs/wait_duration"
"""Name of the `jax.monitoring` event for the wait for a program that another thread compiles."""

_kept: OrderedDict[Key, Future[Any]] = OrderedDict()
_lock = threading.Lock()
_folder: Path | None = None


def keep_in(folder: Path | None) -> None:
    """Store programs also in a folder, from which other processes can load them; with None, only in memory.

    The folder's files are executed without a check, so nobody else may have write access to it.
    """
    global _folder
    _folder = folder


def clear() -> None:
    """Remove every program from memory."""
    with _lock:
        _kept.clear()


def compiled(function: Callable[..., Any], arguments: tuple[Any, ...], **options: Any) -> jax.stages.Compiled:
    """Compile a function for arguments of these shapes and shardings, unless its program is in the cache.

    Args:
      function: pure function. The cache keeps a reference to every object that is compared by equality or identity,
        such as a user's function, until it removes the program.
      arguments: arrays, or their shapes. If a shape has no sharding, the array may be on any device.
      options: arguments of `jax.jit`.
    """
    key = key_of(function, options, _places(arguments))
    # If unused arguments were dropped, the program's text would not show which arguments the program reads.
    function = jax.jit(function, keep_unused=not key.named, **options)
    return cached(key, lambda: _load_or_compile(key, lambda: function.lower(*arguments)))


def digest(function: Callable[..., Any], arguments: tuple[Any, ...], **options: Any) -> str:
    """Digest of the program that `compiled` returns for these arguments, without compiling it.

    The digest is the same in every process, unless the program depends on a user's function or object.
    """
    key = key_of(function, options, _places(arguments))
    return key.text if key.named else f"{hash(key) % 2**64:016x}"


def shapes(function: Callable[..., Any], *arguments: Any) -> PyTree:
    """`jax.eval_shape` with a cache, which evaluates equal functions once."""
    return cached(key_of("shapes", function, _places(arguments)), lambda: jax.eval_shape(function, *arguments))


def cached(key: Key, make: Callable[[], Any]) -> Any:
    """Return the value for a key, which is computed at the first request.

    If several threads request the same key, one of them computes the value and the others wait.
    """
    mine = Future[Any]()
    with _lock:
        held = _kept.setdefault(key, mine)
        _kept.move_to_end(key)
        while len(_kept) > MOST:
            _kept.popitem(last=False)
    if held is not mine:
        began, waits = time.perf_counter(), not held.done()
        value = held.result()
        if waits:
            jax.monitoring.record_event_duration_secs(WAITED, time.perf_counter() - began)
        return value
    try:
        if len(_kept) > _FEW:
            _make_room()
        made = make()
    except BaseException as error:
        with _lock:
            _kept.pop(key, None)
        mine.set_exception(error)
        raise
    mine.set_result(made)
    return made


def _make_room() -> None:
    """Remove the older half of the cache if more than `MAPPINGS` of the process's memory mappings are in use."""
    used, allowed = _mappings()
    if used > MAPPINGS * allowed:
        with _lock:
            for _ in range(len(_kept) // 2):
                _kept.popitem(last=False)


def _mappings() -> tuple[int, float]:
    """This process's number of memory mappings and their limit; 0 and infinity on systems other than Linux."""
    try:
        allowed = int(Path("/proc/sys/vm/max_map_count").read_text())
        with Path("/proc/self/maps").open("rb") as lines:
            return sum(1 for _ in lines), allowed
    except (OSError, ValueError):
        return 0, math.inf


def _places(arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    """Tree structure of arguments, and shape, dtype and sharding of each leaf."""
    leaves, structure = jax.tree.flatten(arguments)
    return structure, *map(_place, leaves)


def _place(leaf: Any) -> Any:
    """Shape, dtype, weak type and sharding of an argument; the sharding is None if JAX may still move the array."""
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return leaf.shape, str(leaf.dtype), leaf.weak_type, leaf.sharding
    if isinstance(leaf, np.ndarray):  # not converted to a JAX array, because it may be a file larger than memory
        return leaf.shape, str(jax.dtypes.canonicalize_dtype(leaf.dtype)), False, None
    if not isinstance(leaf, jax.Array):
        leaf = jax.numpy.asarray(leaf)
    committed = getattr(leaf, "committed", True)
    return leaf.shape, str(leaf.dtype), leaf.aval.weak_type, leaf.sharding if committed else None


def _load_or_compile(key: Key, lower: Callable[[], jax.stages.Lowered]) -> jax.stages.Compiled:
    """Load the program of a key from the folder; if there is none, compile the program and write it there.

    If the key contains a user's object, the program is traced first, and a digest of the traced program's text is part
    of the file's name.
    """
    folder, lowered, text = _folder, None, key.text
    if folder is None:
        return lower().compile()
    if not key.named:
        lowered = lower()
        text = hashlib.sha256(f"{text} {lowered.as_text()}".encode()).hexdigest()
    path = folder / f"program-{_versions()}-{text}-cache"
    began = time.perf_counter()
    with _discarded(path):
        serialized, numbers = pickle.loads(files.own_contents(path))
        by_number = {device.id: device for device in jax.devices()}
        devices = [by_number[number] for number in numbers]
        program = serialize_executable.deserialize_and_load(*serialized, execution_devices=devices)
        jax.monitoring.record_event_duration_secs(LOADED, time.perf_counter() - began)
        # The text of a program does not contain the classes of its arguments and results.
        if lowered is None or (lowered.in_tree, lowered.out_tree) == (program.in_tree, program.out_tree):
            return program
    with _hits() as hits:
        program = (lowered or lower()).compile()
    # If XLA has read an executable from JAX's own cache, it would serialize the executable without its code.
    if not hits:
        with suppress(Exception):  # the program cannot be serialized, or the disk is full
            devices = jax.tree.leaves(program.output_shardings)[0].device_set
            numbers = sorted(device.id for device in devices)  # the order of `placement.place`
            _write(path, pickle.dumps((serialize_executable.serialize(program), numbers)))
    return program


@contextmanager
def _discarded(path: Path) -> Iterator[None]:
    """Suppress errors within a ``with`` block that reads a file; after an error, delete the file."""
    try:
        yield
    except FileNotFoundError:
        pass
    except Exception:
        with suppress(OSError):
            path.unlink()


@contextmanager
def _hits() -> Iterator[list[str]]:
    """Context that records the hits of JAX's own compilation cache in this thread."""
    found: list[str] = []
    thread = threading.get_ident()

    def hear(event: str, **_: Any) -> None:
        if event == "/jax/compilation_cache/cache_hits" and threading.get_ident() == thread:
            found.append(event)

    jax.monitoring.register_event_listener(hear)
    try:
        yield found
    finally:
        jax.monitoring.unregister_event_listener(hear)


# Read at import: files that change later are not the code of this process.
_STATS = [(path, path.stat()) for path in sorted(Path(__file__).parents[1].rglob("*.py"))]


@functools.cache
def _versions() -> str:
    """Versions of the libraries, and a checksum of this package's files.

    They are part of a file's name because a key identifies the functions of libraries and of this package by name only.
    """
    own = repr([(str(path), stat.st_mtime_ns, stat.st_size) for path, stat in _STATS])
    versions = [version(name) for name in ("jax", "flax", "optax", "numpy", "chex", "equinox") if find_spec(name)]
    return "-".join((python_version(), *versions, hashlib.sha256(own.encode()).hexdigest()[:16]))


def _write(path: Path, content: bytes) -> None:
    """Write a file atomically, so that no other process reads an incomplete file.

    If the process is killed, the temporary file remains. Its suffix lets `compile_cache.trim` find and delete it.
    """
    with NamedTemporaryFile(dir=path.parent, prefix=".program-", suffix="-cache", delete=False) as file:
        try:
            file.write(content)
            file.close()
            Path(file.name).replace(path)
        except BaseException:
            Path(file.name).unlink(missing_ok=True)
            raise


_LIBRARIES = frozenset(
    (
        *("jaxpfl", "jax", "jaxlib", "flax", "optax", "chex", "equinox", "numpy", "ml_dtypes", "jaxtyping"),
        *("builtins", "collections", "enum", "functools", "itertools", "math", "operator", "re", "types", "typing"),
    )
)
"""Packages whose functions and classes a key identifies by name."""

_ATOMS = (type(None), bool, int, float, complex, str, bytes, type(...))
_COLLECTIONS = (tuple, list, types.MappingProxyType, dict, set, frozenset)


class Key(NamedTuple):
    """Key of a cached value.

    Attributes:
      text: digest (64 hexadecimal digits) of settings, shapes and names; the same in every process.
      objects: objects that ``text`` does not describe, which are compared by equality or identity.
      named: whether ``text`` alone identifies the value, because none of the objects belongs to the user.
    """

    text: str
    objects: tuple[_Same, ...]
    named: bool


def key_of(*values: Any) -> Key:
    """Key for the given values and for every program's common inputs: JAX's configuration, flags and devices."""
    config, defaults = jax.config, jax.config.values
    names = (name for name in sorted(defaults) if "compilation_cache" not in name and "persistent" not in name)
    environment = (
        repr([(name, getattr(config, name, defaults[name])) for name in names]),
        [os.environ.get(name) for name in ("XLA_FLAGS", "LIBTPU_INIT_ARGS")],
        jax.default_backend(),
        jax.devices(),
        repr(jax.sharding.get_abstract_mesh()),
        noise.recording(),
    )
    reading = _Reading()
    text = reading.text((*values, *environment))
    return Key(text, tuple(reading.objects), reading.named)


def named(*values: Any) -> str | None:
    """Digest (64 hexadecimal digits) that describes only the values; None if a value contains a user's object."""
    reading = _Reading()
    text = reading.text(values)
    return text if reading.named else None


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class _Same:
    """Wrapper that compares a value by the value's own equality, or by identity if the value is not hashable."""

    value: Any
    hash: int | None

    def __hash__(self) -> int:
        return id(self.value) if self.hash is None else self.hash

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _Same):
            return NotImplemented
        if self.value is other.value:
            return True
        if type(self.value) is not type(other.value) or self.hash is None or self.hash != other.hash:
            return False
        try:
            return bool(self.value == other.value)
        except Exception:  # for example, if a field is an array, whose comparison has no truth value
            return False


@dataclasses.dataclass(eq=False)
class _Reading:
    """Converter of values to strings.

    Objects that a string cannot describe are collected and numbered, and the string contains their numbers.

    Attributes:
      objects: collected objects, with their numbers.
      named: whether the strings alone identify the values.
    """

    objects: dict[_Same, int] = dataclasses.field(default_factory=dict)
    named: bool = True
    _known: dict[int, tuple[str, Any]] = dataclasses.field(default_factory=dict)  # keeps values alive: ids stay unique
    _depth: int = 0

    def text(self, value: Any) -> str:
        """String that describes a value: the value itself if it is a scalar or a string, otherwise a digest."""
        if type(value) in _ATOMS:
            return f"{type(value).__name__} {value!r}"
        if id(value) in self._known:
            return self._known[id(value)][0]
        self._known[id(value)] = f"within {self._depth}", value  # ends the recursion if a value contains itself
        self._depth += 1
        parts = [self.text(part) for part in self._parts(value)]
        self._depth -= 1
        text = hashlib.sha256(repr(parts).encode()).hexdigest()
        self._known[id(value)] = text, value
        return text

    def _parts(self, value: Any) -> list[Any]:
        """Return a name for the kind of a value, followed by the values that identify the value."""
        kind = type(value)
        if kind is types.FunctionType:
            return self._function(value)
        if kind is types.MethodType:
            return ["method", value.__func__, value.__self__]
        if kind is types.BuiltinFunctionType:
            owner = value.__self__
            return ["builtin", value.__qualname__, owner.__name__ if isinstance(owner, types.ModuleType) else owner]
        if kind is types.ModuleType:
            return ["module", value.__name__, *self._itself(value, _is_library(value.__name__))]
        if isinstance(value, type):
            return ["class", value.__module__, value.__qualname__, *self._itself(value, _is_known(value))]
        if isinstance(value, jax.Device):
            return ["device", value.platform, value.id, value.device_kind, value.process_index]
        if kind in (np.ndarray, np.memmap) or isinstance(value, np.generic | jax.Array):
            return self._array(value)
        if isinstance(value, functools.partial):
            return ["partial", kind, value.func, value.args, value.keywords]
        if isinstance(value, tuple) or (isinstance(value, _COLLECTIONS) and _is_known(kind)):
            if isinstance(value, dict | types.MappingProxyType):
                items = [part for item in value.items() for part in item]
            else:
                items = sorted(value, key=repr) if isinstance(value, set | frozenset) else list(value)
            return ["collection", kind, *items]
        if isinstance(value, jax.sharding.Mesh):
            return ["mesh", repr(value), *value.devices.flat, *self._itself(value, True)]
        if isinstance(value, jax.sharding.Sharding):
            devices = sorted(value.device_set, key=lambda device: device.id)
            return ["sharding", repr(value), *devices, *self._itself(value, True)]
        if not _is_known(kind):
            return ["object", kind.__module__, kind.__qualname__, *self._itself(value, False)]
        if dataclasses.is_dataclass(value):
            names = [field.name for field in dataclasses.fields(value)]
            return ["fields", kind, *((name, getattr(value, name, None)) for name in names)]
        wrapped: Any = getattr(value, "__wrapped__", None)  # jax.jit, functools.lru_cache
        if wrapped is not None:
            return ["wrapped", kind, wrapped]
        said = repr(value)
        if "0x" not in said:
            return ["library", kind, said, *self._itself(value, True)]
        if hasattr(value, "__dict__"):
            return ["attributes", kind, vars(value)]
        return ["library", kind, *self._itself(value, False)]

    def _function(self, value: types.FunctionType) -> list[Any]:
        home = value.__globals__.get("__name__", "")
        if not _is_library(home):
            return ["function", home, value.__qualname__, *self._itself(value, False)]
        cells = []
        for cell in value.__closure__ or ():
            try:
                cells.append((cell.cell_contents,))
            except ValueError:  # the captured variable has no value yet
                cells.append(())
        code = value.__code__
        number = self._itself(code, True)  # a reloaded module has new code objects
        return ["function", home, _position(code), *number, value.__defaults__, value.__kwdefaults__, cells]

    def _array(self, value: Any) -> list[Any]:
        if isinstance(value, jax.Array):
            if isinstance(value, Tracer) or value.is_deleted() or not value.is_fully_addressable:
                return ["array", *self._itself(value, False)]
            if jax.numpy.issubdtype(value.dtype, jax.dtypes.prng_key):
                return ["keys", str(value.dtype), jax.random.key_data(value)]
        held = np.asarray(value)
        if held.dtype.hasobject:
            return ["array", *self._itself(value, False)]
        layout = (value.weak_type, value.sharding) if isinstance(value, jax.Array) else ()
        return ["array", str(held.dtype), str(held.shape), hashlib.sha256(held.tobytes()).hexdigest(), layout]

    def _itself(self, value: Any, has_name: bool) -> list[int]:
        """Add a value to the collected objects; return its number.

        Args:
          value: the object.
          has_name: whether the rest of the string identifies the object in other processes too.
        """
        try:
            hashed = hash((type(value), value))
        except Exception:  # a user's class may raise anything
            hashed = None
        same = _Same(value, hashed)
        self.named &= has_name and same.hash is not None
        return [self.objects.setdefault(same, len(self.objects))]


def _is_library(module: object) -> bool:
    return isinstance(module, str) and module.partition(".")[0] in _LIBRARIES


def _is_known(kind: type) -> bool:
    """True if a class belongs to a known library.

    The module must also have an attribute with the class's name, because a class that was made where ``__name__`` is
    not defined has the module ``builtins`` too.
    """
    module = sys.modules.get(kind.__module__) if _is_library(kind.__module__) else None
    return hasattr(module, kind.__qualname__.partition(".")[0])


@functools.lru_cache(maxsize=4096)
def _position(code: types.CodeType) -> str:
    """Name and position of a function in its file. The columns distinguish two functions on one line."""
    *_, last = code.co_positions()
    return f"{code.co_qualname} {code.co_firstlineno} {last}"

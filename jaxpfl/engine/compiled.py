"""Compiled programs that are kept for later simulations of this process, and optionally on disk.

A program is kept under what it is made of (`key_of`): settings, shapes and JAX's configuration by their values, our own
and the libraries' functions by their names and what they were made with, and the user's functions and objects by
equality or identity, as `jax.jit` keeps its static arguments. A second run that differs in traced values only compiles
and traces nothing; a function that is defined again is traced again; what a function of the user's captures is read
when it is traced, so that a later change in place of it is not seen.

The most recent `MOST` programs are kept, or fewer where they take too many of the process's memory mappings.
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
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from platform import python_version
from tempfile import NamedTemporaryFile
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.core import Tracer
from jax.experimental import serialize_executable

from jaxpfl.core.types import Device, PyTree
from jaxpfl.privacy import noise
from jaxpfl.support import files

MOST = 128
"""Number of programs and shapes kept, the most recently used ones; 1 to 3 MiB for a program of a small model."""

MAPPINGS = 0.5
"""Share of the memory mappings which Linux allows a process (65530 by default) that may be in use before a program is
made; beyond it, the older half of the programs is forgotten. A round of a small model takes over 500 on a CPU, and
without any left LLVM ends the process."""

LOADED = "/jaxpfl/programs/load_duration"
"""The event of `jax.monitoring` that a program was loaded from disk."""

WAITED = "/jaxpfl/programs/wait_duration"
"""The event that a thread waited for a program that another one was making."""

_kept: OrderedDict[Key, Future[Any]] = OrderedDict()
_lock = threading.Lock()
_folder: Path | None = None


def keep_in(folder: Path | None) -> None:
    """Keep programs in a folder too, where other processes find them; None for in memory only.

    Its files are run as they are: no one else may be able to write to it.
    """
    global _folder
    _folder = folder


def clear() -> None:
    """Forget every program that is in memory."""
    with _lock:
        _kept.clear()


def compiled(function: Callable[..., Any], arguments: tuple[Any, ...], **options: Any) -> jax.stages.Compiled:
    """Compile a function for arguments of these shapes and placements, unless its program is kept.

    Args:
      function: a pure function. What is compared by equality or identity, such as a function of the user's, stays
        alive as long as its program is kept.
      arguments: arrays, or their shapes; a shape without a sharding may be placed anywhere.
      options: arguments of `jax.jit`.
    """
    key = key_of(function, options, _places(arguments))
    return _get_or_make(key, lambda: jax.jit(function, **options).lower(*arguments).compile(), _load_or_make)


def digest(function: Callable[..., Any], arguments: tuple[Any, ...], **options: Any) -> str:
    """Name of the program that `compiled` makes of these arguments, without making it.

    The same in every process, but in this one alone where a function or object of the user's is part of it.
    """
    key = key_of(function, options, _places(arguments))
    return key.text if key.named else f"{hash(key) % 2**64:016x}"


def shapes(function: Callable[..., Any], *arguments: Any) -> PyTree:
    """`jax.eval_shape`, evaluated once for equal functions."""
    return cached(key_of("shapes", function, _places(arguments)), lambda: jax.eval_shape(function, *arguments))


def cached(key: Key, make: Callable[[], Any]) -> Any:
    """Value that is kept under a key, made at the first request, in the folder too."""
    return _get_or_make(key, make, _read_or_make)


def _get_or_make(
    key: Key, make: Callable[[], Any], stored: Callable[[Key, Callable[[], Any]], Any] | None = None
) -> Any:
    """Value kept under a key, made if there is none yet; threads that ask for one key wait for one making.

    Args:
      key: identity of the value.
      make: function that makes it.
      stored: ``(key, make) -> value``, which reads the value from the folder, or makes it and writes it there; None for
        a value that is kept in memory only.
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
        _make_room()
        # Of something of the user's the text alone is no name in other processes.
        made = stored(key, make) if stored is not None and _folder is not None and key.named else make()
    except BaseException as error:
        with _lock:
            _kept.pop(key, None)
        mine.set_exception(error)
        raise
    mine.set_result(made)
    return made


def _make_room() -> None:
    """Forget the older half of what is kept where most of the process's memory mappings are in use."""
    used, allowed = _mappings()
    if used > MAPPINGS * allowed:
        with _lock:
            for _ in range(len(_kept) // 2):
                _kept.popitem(last=False)


def _mappings() -> tuple[int, float]:
    """Number of memory mappings of this process, and its limit; 0 and infinity on systems other than Linux."""
    try:
        allowed = int(Path("/proc/sys/vm/max_map_count").read_text())
        with Path("/proc/self/maps").open("rb") as lines:
            return sum(1 for _ in lines), allowed
    except (OSError, ValueError):
        return 0, math.inf


def _places(arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    """Structure of arguments, and the place of each leaf."""
    leaves, structure = jax.tree.flatten(arguments)
    return structure, *map(_place, leaves)


def _place(leaf: Any) -> Any:
    """Shape, type and placement of an argument; no placement for an array that JAX may still move."""
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return leaf.shape, str(leaf.dtype), leaf.weak_type, leaf.sharding
    if isinstance(leaf, np.ndarray):  # without a copy: it may be a file larger than memory
        return leaf.shape, str(jax.dtypes.canonicalize_dtype(leaf.dtype)), False, None
    if not isinstance(leaf, jax.Array):
        leaf = jax.numpy.asarray(leaf)
    committed = getattr(leaf, "committed", True)
    return leaf.shape, str(leaf.dtype), leaf.aval.weak_type, leaf.sharding if committed else None


def _read_or_make(key: Key, make: Callable[[], Any]) -> Any:
    """The value of that key in the folder; made and written there if there is none."""
    path = _path("told", key)
    with _discarded(path):
        return pickle.loads(files.own_contents(path))
    value = make()
    with suppress(Exception):
        _write(path, pickle.dumps(value))
    return value


def _load_or_make(key: Key, make: Callable[[], jax.stages.Compiled]) -> jax.stages.Compiled:
    """The program of that key in the folder; made and written there if there is none."""
    path = _path("program", key)
    began = time.perf_counter()
    with _discarded(path):
        serialized, numbers = pickle.loads(files.own_contents(path))
        by_number = {device.id: device for device in jax.devices()}
        devices = [by_number[number] for number in numbers]
        program = serialize_executable.deserialize_and_load(*serialized, execution_devices=devices)
        jax.monitoring.record_event_duration_secs(LOADED, time.perf_counter() - began)
        return program
    with _hits() as hits:
        program = make()
    # XLA writes an executable that it has itself read (from JAX's cache) without its code.
    if not hits:
        with suppress(Exception):  # a program or a structure that cannot be written, or no room
            devices = jax.tree.leaves(program.output_shardings)[0].device_set
            numbers = sorted(device.id for device in devices)  # as `placement.place` takes them
            _write(path, pickle.dumps((serialize_executable.serialize(program), numbers)))
    return program


@contextmanager
def _discarded(path: Path) -> Iterator[None]:
    """A block that reads a file and gives up if there is none; one that cannot be read is deleted, to be made again."""
    try:
        yield
    except FileNotFoundError:
        pass
    except Exception:
        with suppress(OSError):
            path.unlink()


@contextmanager
def _hits() -> Iterator[list[str]]:
    """The hits of JAX's own cache in the block, in this thread."""
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


def _path(kind: str, key: Key) -> Path:
    """The file of a key."""
    assert _folder is not None
    return _folder / f"{kind}-{_versions()}-{key.text}-cache"


@functools.cache
def _versions() -> str:
    """Versions of the libraries, and a checksum of this package's files: their functions have names alone in a key."""
    root = Path(__file__).parents[1]
    stats = ((path, path.stat()) for path in sorted(root.rglob("*.py")))
    own = repr([(str(path), stat.st_mtime_ns, stat.st_size) for path, stat in stats])
    names = "jax", "flax", "optax", "numpy", "chex", "equinox"
    return "-".join((python_version(), *map(_version, names), hashlib.sha256(own.encode()).hexdigest()[:16]))


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "none"


def _write(path: Path, content: bytes) -> None:
    """Write a file at once, so that no other process sees a part of it.

    What a kill leaves has the suffix by which `compile_cache.trim` finds it.
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
"""Packages whose functions and classes are known by their names."""

_ATOMS = (type(None), bool, int, float, complex, str, bytes, type(...))
_COLLECTIONS = (tuple, list, types.MappingProxyType, dict, set, frozenset)


class Key(NamedTuple):
    """Identity of a program by what it is made of.

    Attributes:
      text: 64 hexadecimal digits of settings, shapes and names, the same in every process.
      objects: whatever is compared by equality or identity.
      named: no function or object of the user's is among them, so that the text alone says what it is.
    """

    text: str
    objects: tuple[_Same, ...]
    named: bool


def key_of(*values: Any) -> Key:
    """Key of some values under JAX's current configuration, flags and devices, the implicit inputs of a program."""
    config, defaults = jax.config, jax.config.values
    names = (name for name in sorted(defaults) if "compilation_cache" not in name and "persistent" not in name)
    environment = (
        repr([(name, getattr(config, name, defaults[name])) for name in names]),
        [os.environ.get(name) for name in ("XLA_FLAGS", "LIBTPU_INIT_ARGS")],
        jax.default_backend(),
        [_device(one) for one in jax.devices()],
        repr(jax.sharding.get_abstract_mesh()),
        noise.recording(),
    )
    reading = _Reading()
    text = reading.text((*values, *environment))
    return Key(text, tuple(reading.objects), reading.named)


def named(*values: Any) -> str | None:
    """Text of some values alone, 64 hexadecimal digits; None if a function or object of the user's is among them."""
    reading = _Reading()
    text = reading.text(values)
    return text if reading.named else None


def _device(device: Device) -> tuple[Any, ...]:
    return device.platform, device.id, device.device_kind, device.process_index


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class _Same:
    """A value compared by its own equality, or by identity where it has no hash."""

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
        except Exception:  # as of a field that is an array
            return False


@dataclasses.dataclass(eq=False)
class _Reading:
    """Values as text, as far as they have one, beside the objects that are compared themselves.

    Attributes:
      objects: the objects, with their numbers in the text.
      named: whether the text alone says what the values are.
    """

    objects: dict[_Same, int] = dataclasses.field(default_factory=dict)
    named: bool = True
    _known: dict[int, tuple[str, Any]] = dataclasses.field(default_factory=dict)  # the value, to keep its address
    _depth: int = 0

    def text(self, value: Any) -> str:
        """Text of a value."""
        if type(value) in _ATOMS:
            return f"{type(value).__name__} {value!r}"
        if id(value) in self._known:
            return self._known[id(value)][0]
        self._known[id(value)] = f"within {self._depth}", value  # where a value holds itself
        self._depth += 1
        parts = [self.text(part) for part in self._parts(value)]
        self._depth -= 1
        text = hashlib.sha256(repr(parts).encode()).hexdigest()
        self._known[id(value)] = text, value
        return text

    def _parts(self, value: Any) -> list[Any]:
        """Kind of a value, and its parts."""
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
            return ["mesh", repr(value), *map(_device, value.devices.flat), *self._itself(value, True)]
        if isinstance(value, jax.sharding.Sharding):
            devices = sorted(map(_device, value.device_set))
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
            except ValueError:  # not filled yet
                cells.append(())
        code = value.__code__
        number = self._itself(code, True)  # another one after its module was loaded again
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
        """The number of a value among the objects.

        Args:
          value: the object.
          has_name: whether the text beside the number says what it is.
        """
        try:
            hashed = hash((type(value), value))
        except Exception:  # whatever a class of the user's raises
            hashed = None
        same = _Same(value, hashed)
        self.named &= has_name and same.hash is not None
        return [self.objects.setdefault(same, len(self.objects))]


def _is_library(module: object) -> bool:
    return isinstance(module, str) and module.partition(".")[0] in _LIBRARIES


def _is_known(kind: type) -> bool:
    """True for a class of a library; Python also says ``builtins`` of classes made where there is no ``__name__``."""
    module = sys.modules.get(kind.__module__) if _is_library(kind.__module__) else None
    return hasattr(module, kind.__qualname__.partition(".")[0])


@functools.lru_cache(maxsize=4096)
def _position(code: types.CodeType) -> str:
    """Name of a function and its place in its file: two of one line have other columns."""
    *_, last = code.co_positions()
    return f"{code.co_qualname} {code.co_firstlineno} {last}"

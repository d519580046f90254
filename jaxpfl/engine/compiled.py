"""Cache of compiled programs, for later simulations of this process, and optionally on disk.

A program is looked up by everything that it depends on (`program_key`), so a second run that differs in traced values
only compiles and traces nothing. A program without such a key, or with host callbacks, is compiled anew each time. The
cache holds executables and shapes, the most recent `MOST` of them, or fewer where they take too many of the process's
memory mappings, but no data, states or functions.
"""

from __future__ import annotations

import math
import pickle
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from platform import python_version
from tempfile import NamedTemporaryFile
from typing import Any

import jax
import numpy as np
from jax.experimental import serialize_executable

from jaxpfl.core.types import PyTree
from jaxpfl.engine.program_key import Key, key_of
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

_kept: OrderedDict[tuple[Any, ...], tuple[Key, Future[Any]]] = OrderedDict()
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


def compiled(
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
    *,
    donate_argnums: tuple[int, ...] = (),
    out_shardings: Any = None,
    compiler_options: dict[str, Any] | None = None,
) -> jax.stages.Compiled:
    """Compiled program of a function for arguments of these shapes and placements.

    Args:
      function: a pure function; no reference to it is kept.
      arguments: arrays, or their shapes; a shape without a sharding may be placed anywhere.
      donate_argnums: as `jax.jit`.
      out_shardings: as `jax.jit`; the compiler's choice if None.
      compiler_options: as `jax.jit`.
    """
    options = _options(donate_argnums, out_shardings, compiler_options)

    def make() -> tuple[jax.stages.Compiled, bool]:
        lowered = jax.jit(function, **options).lower(*arguments)
        # A callback belongs to the very function that was traced, and to its contents.
        return lowered.compile(), "callback" not in lowered.as_text()

    key = key_of(function, options, jax.tree.map(_place, arguments))

    def made() -> tuple[jax.stages.Compiled, bool]:
        _make_room()
        return make() if key is None else _from_disk(key.digest, make)

    return made()[0] if key is None else _found(key, made)


def digest(function: Callable[..., Any], arguments: tuple[Any, ...], **more: Any) -> str | None:
    """Name of the program that `compiled` makes of these arguments, without making it; None for one without a key."""
    key = key_of(function, _options(**more), jax.tree.map(_place, arguments))
    return None if key is None else key.digest


def _options(
    donate_argnums: tuple[int, ...] = (), out_shardings: Any = None, compiler_options: dict[str, Any] | None = None
) -> dict[str, Any]:
    options: dict[str, Any] = {"donate_argnums": donate_argnums, "compiler_options": compiler_options}
    return options if out_shardings is None else options | {"out_shardings": out_shardings}


def shapes(function: Callable[..., Any], *arguments: Any) -> PyTree:
    """`jax.eval_shape`, evaluated once for equal functions."""
    key = key_of("shapes", function, jax.tree.map(_place, arguments))
    return found(key, lambda: jax.eval_shape(function, *arguments))


def found(key: Key | None, make: Callable[[], Any]) -> Any:
    """Cached value of a key, made at the first request; threads that ask for the same key wait for one making."""
    if key is None:
        return make()
    path = _path("told", key.digest)

    def read_or_make() -> tuple[Any, bool]:
        if path is None:
            return make(), True
        with _discarded(path):
            return pickle.loads(files.own_contents(path)), True
        value = make()
        with suppress(Exception):
            _write(path, pickle.dumps(value))
        return value, True

    return _found(key, read_or_make)


def _found(key: Key, make: Callable[[], tuple[Any, bool]]) -> Any:
    """Return the value kept under a key, made if there is none yet; threads that ask for one key wait for one making.

    ``make`` also says whether the result may be used again.
    """
    mine = Future[Any]()
    with _lock:
        held = _kept.get(key.parts)
        if held is None:
            _kept[key.parts] = key, mine  # the key, as it holds the classes whose addresses are in its parts
            while len(_kept) > MOST:
                _kept.popitem(last=False)
        else:
            _kept.move_to_end(key.parts)
    if held is not None:
        began, waits = time.perf_counter(), not held[1].done()
        value, reusable = held[1].result()
        if waits:
            jax.monitoring.record_event_duration_secs(WAITED, time.perf_counter() - began)
        return value if reusable else make()[0]
    try:
        made = make()
    except BaseException as error:
        _forget(key)
        mine.set_exception(error)
        raise
    if not made[1]:
        _forget(key)
    mine.set_result(made if made[1] else (None, False))
    return made[0]


def _make_room() -> None:
    """Forget the older half of what is kept where most of the process's memory mappings are in use."""
    used, allowed = _mappings()
    if used > MAPPINGS * allowed:
        with _lock:
            for _ in range(len(_kept) // 2):
                _kept.popitem(last=False)


def _mappings() -> tuple[int, float]:
    """Memory mappings of this process, and those that it may have; without a limit but on Linux."""
    try:
        allowed = int(Path("/proc/sys/vm/max_map_count").read_text())
        with Path("/proc/self/maps").open("rb") as lines:
            return sum(1 for _ in lines), allowed
    except (OSError, ValueError):
        return 0, math.inf


def _forget(key: Key) -> None:
    with _lock:
        _kept.pop(key.parts, None)


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


def _from_disk(digest: str, make: Callable[[], tuple[jax.stages.Compiled, bool]]) -> tuple[jax.stages.Compiled, bool]:
    """The program of that digest in the folder; made and written there if there is none."""
    path = _path("program", digest)
    if path is None:
        return make()
    began = time.perf_counter()
    with _discarded(path):
        serialized, numbers = pickle.loads(files.own_contents(path))
        by_number = {device.id: device for device in jax.devices()}
        devices = [by_number[number] for number in numbers]
        program = serialize_executable.deserialize_and_load(*serialized, execution_devices=devices)
        jax.monitoring.record_event_duration_secs(LOADED, time.perf_counter() - began)
        return program, True
    with _hits() as hits:
        program, reusable = make()
    # XLA writes an executable that it has itself read (from JAX's cache) without its code.
    if reusable and not hits:
        with suppress(Exception):  # a program or a structure that cannot be written, or no room
            devices = jax.tree.leaves(program.output_shardings)[0].device_set
            numbers = sorted(device.id for device in devices)  # as `placement.place` takes them
            _write(path, pickle.dumps((serialize_executable.serialize(program), numbers)))
    return program, reusable


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


def _path(kind: str, digest: str) -> Path | None:
    """The file of a digest; None without a folder. Libraries' functions are in a digest by their names only."""
    if _folder is None:
        return None
    names = "jax", "flax", "optax", "numpy", "chex", "equinox"
    versions = "-".join((python_version(), *map(_version, names)))
    return _folder / f"{kind}-{versions}-{digest}-cache"


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

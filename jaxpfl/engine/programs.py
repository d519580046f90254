"""Compiled programs of a simulation, and their cache for later simulations.

A program is compiled on its first call, and its memory use is then checked. In a folder that the user chooses, other
processes find it too.

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
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from functools import partial
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from platform import python_version
from tempfile import NamedTemporaryFile
from typing import Any, Literal, NamedTuple

import jax
import numpy as np
from jax.core import Tracer
from jax.experimental import serialize_executable

from jaxpfl.algorithms.parts import linear_kernel, optimizers
from jaxpfl.core import trees
from jaxpfl.core.participation import Availability, Participation
from jaxpfl.core.protocol import Algorithm, Client, Reduction, Server, any_data, round_robin
from jaxpfl.core.types import PyTree
from jaxpfl.engine.cohort import Group
from jaxpfl.engine.evaluate import adapt_all, cluster_all, personalize_all, score_all
from jaxpfl.engine.execution_plan import ExecutionPlan, Resolved
from jaxpfl.engine.placement import Placement, program_bytes, too_little
from jaxpfl.engine.round import RoundPlan, several_rounds
from jaxpfl.engine.state import init_state, over_runs
from jaxpfl.models import Task, convolution
from jaxpfl.models.convolution import Form
from jaxpfl.privacy import noise
from jaxpfl.support import files, processes
from jaxpfl.support.errors import OutOfMemoryError, is_exhausted
from jaxpfl.support.host_memory import readable

Name = Literal["start", "advance", "scores", "personal", "clusters", "unseen"]

_USED: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "start": (("init",), ("init", "broadcast")),
    "advance": (("update", "idle", "gradients"), ("broadcast", "update")),
    "scores": (("personalize", "predict"), ("broadcast", "predict_global")),
    "personal": (("personalize",), ("broadcast",)),
    "clusters": (("cluster",), ("broadcast",)),
    "unseen": (("init", "update", "personalize", "predict", "gradients"), ("broadcast", "welcome", "predict_global")),
}
"""For each program, the functions of `Client` and of `Server` that the program calls."""


_UNOPTIMIZED = {"compiler_options": {"xla_backend_optimization_level": 0}}
"""Options of ``start`` on a CPU. The program makes dozens of random draws and runs once, so optimizing it would cost
seconds and save nothing."""


class Setting(NamedTuple):
    """Static inputs of the programs.

    Attributes:
      algorithm: the method.
      task: model, loss and metrics.
      participation: sampling of the cohorts.
      availability: kinds of failures (dropout, stragglers); the failure rates are arguments of the programs.
      plan: execution plan, as the user gave it.
      scoring: resolved plan of the programs that run over all clients.
      placement: placement of states and data on the devices.
      groups: groups of the trained clients.
      unseen: groups of the unseen clients, if any.
    """

    algorithm: Algorithm
    task: Task
    participation: Participation
    availability: Availability
    plan: ExecutionPlan
    scoring: Resolved
    placement: Placement
    groups: tuple[Group, ...]
    unseen: tuple[Group, ...] = ()


class Programs:
    """The compiled programs of a simulation with one `Setting`.

    Attributes:
      execution: resolved plan of a round, with a smaller block of clients if the first choice did not fit in memory.
      made: compiled programs, by name and number of runs.
    """

    def __init__(self, setting: Setting, execution: Resolved):
        self.execution = execution
        self.made: dict[tuple[Name, int], jax.stages.Compiled] = {}
        self._of = setting
        self._without_kernel = False  # true once the kernel of linear models has failed to compile

    def get(self, name: Name, runs: int, arguments: tuple[Any, ...]) -> jax.stages.Compiled:
        """Compiled program for S runs and arguments of these shapes.

        If the program does not fit in memory, it is compiled again with a smaller block of clients, unless
        ``plan.clients`` fixes the block. If the plan automatically chose the kernel of linear models, and the kernel
        does not compile, the plain form replaces it.

        Raises:
          OutOfMemoryError: if the program does not fit, even with the smallest block.
        """
        if (name, runs) in self.made:
            return self.made[name, runs]
        devices, block = self._of.placement.devices, self._plan_of(name).block
        least = 1 if name == "start" or self._of.plan.clients == "auto" else block
        one_gpu = [device.platform for device in devices] == ["gpu"]
        while True:
            options = self.execution.compiler_options | self.options(name, arguments)
            try:
                with _draws_as_calls() if name == "start" and one_gpu else nullcontext():
                    program = compiled(self.function(name, block), arguments, **options)
            except Exception as error:
                if self._linear(name) != "kernel" or self._of.plan.linear != "auto" or is_exhausted(error):
                    raise
                self._without_kernel = True
                why = f"the kernel does not compile: {str(error).partition(chr(10))[0]}"
                self.execution = self.execution._replace(linear=("plain", why))
                continue
            need = program_bytes(program, devices)
            if (free := too_little(need, devices)) is None:
                break
            short = f"{readable(need)} of memory beside data and states, but only {readable(free)} is free"
            if block <= least:
                smaller = "a smaller plan.clients, " if block > 1 else ""
                raise OutOfMemoryError(
                    f"with {block} client(s) at once, the program {name!r} needs {short}: use {smaller}"
                    "fewer runs at once (plan.runs = map), fewer clients or a smaller model"
                )
            fewer = max(1, min(block // 2, block * free // need))
            if name == "advance":
                first, _, *others = self.execution.reasons
                reasons = (first, f"{block} at once would need {short}", *others)
                self.execution = self.execution._replace(block=fewer, reasons=reasons)
            block = fewer
        self.made[name, runs] = program
        return program

    def digest(self, name: Name, arguments: tuple[Any, ...]) -> str:
        """Digest of a program (`digest`)."""
        block = self._plan_of(name).block
        options = self.execution.compiler_options | self.options(name, arguments)
        return digest(self.function(name, block), arguments, **options)

    def options(self, name: Name, arguments: tuple[Any, ...]) -> dict[str, Any]:
        """Options of `compiled` for a program."""
        placement = self._of.placement
        if name == "start":
            layout = placement.state
            if placement.model is not None:
                layout = placement.layout(shapes(self.function(name, placement.rows), *arguments))
            return {"out_shardings": layout} | (_UNOPTIMIZED if jax.default_backend() == "cpu" else {})
        if name != "advance":  # with several processes, each must be able to read the whole result
            return {"out_shardings": placement.everywhere} if processes.several() else {}
        return {
            "donate_argnums": (0,) if self._of.plan.donate else (),
            "out_shardings": (
                placement.state if placement.model is None else placement.layout(arguments[0]),
                placement.everywhere,
            ),
        }

    def function(self, name: Name, block: int) -> Callable[..., Any]:
        """Function from which a program is compiled; ``block`` is the number of clients in one vectorized operation.

        The program ``start`` makes the initial states, ``(keys, hp, clients) -> states``. Here ``keys`` is a pair: the
        run keys [S], and the noise keys [S] or None if the runs have no noise.
        """
        of, algorithm = self._of, part_used(self._of.algorithm, name)
        plan = RoundPlan(of.participation, of.groups, block, of.placement.spread, model=of.placement.model)
        if name == "start":
            rows = of.placement.rows
            at_once = block if block < rows else None
            one = partial(init_state, algorithm, of.participation, of.groups, rows, at_once, of.placement.model)
        elif name == "advance":
            one = partial(
                several_rounds, algorithm, plan._replace(availability=of.availability), of.plan.rounds_per_call
            )
        elif name == "personal":
            one = partial(personalize_all, algorithm, plan)
        elif name == "clusters":
            one = partial(cluster_all, algorithm, plan)
        elif name == "unseen":
            one = partial(adapt_all, algorithm, of.task, plan._replace(groups=of.unseen))
        else:
            assert name == "scores"
            one = partial(score_all, algorithm, of.task, plan)
        chosen = self._plan_of(name)
        runs = partial(over_runs, one, vectorised=self.execution.vmap_runs, in_place=name == "advance")
        more = {"apart": of.placement.model is not None, "linear": self._linear(name), "one_vector": chosen.one_vector}
        return traced_as(runs, chosen.form, chosen.matmul, **more)

    def _plan_of(self, name: Name) -> Resolved:
        """Resolved plan of a program. For ``start``, one block contains all clients."""
        if name == "start":
            return self.execution._replace(block=self._of.placement.rows, form=None, linear=None)
        return self.execution if name == "advance" else self._of.scoring

    def _linear(self, name: Name) -> linear_kernel.Form | None:
        """Form of a linear model's local SGD in a program; None for other models."""
        chosen = self._plan_of(name).linear
        if chosen is None:
            return None
        return "plain" if self._without_kernel else chosen[0]


def traced_as(
    function: Callable[..., Any],
    form: Form | None,
    matmul: str | None,
    *,
    apart: bool = False,
    linear: linear_kernel.Form | None = None,
    one_vector: bool = False,
) -> Callable[..., Any]:
    """Wrap a function so that it is traced with a given form of convolutions and precision of matrix products.

    Args:
      function: function of arrays.
      form: form of convolutions (`Resolved.form`).
      matmul: precision of matrix products (`Resolved.matmul`).
      apart: whether leaves are sharded over several devices, in which case they are never concatenated.
      linear: form of a linear model's local SGD (`Resolved.linear`).
      one_vector: whether plain SGD stores a client's parameters as one vector (`Resolved.one_vector`).

    Returns:
      The wrapped function, or the function itself if no option is given.
    """
    if form is matmul is linear is None and not (apart or one_vector):
        return function

    def traced(*given: Any) -> Any:
        with ExitStack() as stack:
            if form is not None:
                stack.enter_context(convolution.form(form))
            if matmul is not None:
                stack.enter_context(jax.default_matmul_precision(matmul))
            if linear is not None:
                stack.enter_context(linear_kernel.form(linear))
            if one_vector:
                stack.enter_context(optimizers.one_vector(True))
            if apart:
                stack.enter_context(trees.leaves_apart(True))
            return function(*given)

    return traced


_CALLS = "jax_threefry_gpu_kernel_lowering"
_calls_lock = threading.Lock()


@contextmanager
def _draws_as_calls() -> Iterator[None]:
    """Within the ``with`` block, compile each random draw on a GPU as a call of a kernel that JAX contains.

    Otherwise every draw becomes a kernel of its own with hundreds of operations: initial states of the papers' CNN then
    take five times as long to compile. The drawn numbers are the same. XLA cannot distribute such a call over devices.
    """
    config: Any = jax.config
    with _calls_lock:
        before = getattr(config, _CALLS, True)  # a later JAX may lack the setting
        if not before:
            config.update(_CALLS, True)
        try:
            yield
        finally:
            if not before:
                config.update(_CALLS, False)


def part_used(algorithm: Algorithm, name: Name) -> Algorithm:
    """The algorithm with only the functions that a program uses, so that methods with equal functions share the
    program.
    """
    of_client, of_server = _USED[name]
    others = dict.fromkeys(set(Client._fields) - set(of_client), _unused)
    clients = tuple(client._replace(**others) for client in algorithm.clients)
    server = algorithm.server._replace(**dict.fromkeys(set(Server._fields) - set(of_server), _unused))
    if name == "advance":
        clients = tuple(c._replace(gradients=c.gradients and c.gradients._replace(personalize=0)) for c in clients)
    algorithm = algorithm._replace(clients=clients, server=server, check_data=any_data, clusters=None, noise=None)
    if name == "advance":
        return algorithm
    rest = {"idle_cap": 0, "group_of": round_robin, "reduction": Reduction.SUM, "counts_bits": False}
    own_steps = algorithm.own_steps if name == "unseen" else None
    return algorithm._replace(**rest, local_steps=0, own_steps=own_steps)


def _unused(*given: Any) -> Any:
    raise AssertionError("bug in jaxpfl: a program called a function that _USED does not list for it")


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
        noise.ledger is not None,
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

"""Kernels that a GPU launches in a round, and CPU seconds of compilation, counted without a GPU.

    python -m benchmarks kernels

XLA compiles the programs of ``fit`` for an H200 that is only described. This needs JAX's CUDA plugin, but no GPU. The
problem is the papers' CNN on enlarged digits. The plan is chosen for a short run on one GPU, with one exception: XLA
does not tune the matrix products, because it would have to time them on the device.

Each operation of a compiled program counts as one launch, unless it needs no kernel. The body of a loop counts as often
as it runs; the loop over rounds, whose length is an argument, counts once. Of the branches of a condition, the largest
counts. Some operations launch several kernels, and XLA may put launches into one CUDA graph: the counts compare
programs, but do not predict times.

``start`` makes the initial states, ``advance`` runs rounds (what comes before and after the loop over rounds does not
count), and ``scores`` scores all clients. Two programs are also compiled in an older form: ``start`` with random draws
as operations instead of calls of JAX's kernel, and ``advance`` with a client's parameters in separate arrays instead of
one vector. Each method is compiled in a new process; seconds are medians.
"""

from __future__ import annotations

import math
import re
import statistics
import time
from collections.abc import Callable
from contextlib import nullcontext
from importlib.metadata import entry_points
from typing import Any, NamedTuple

if not __package__:
    import _script

    __package__ = _script.package

from .harness import Job, JobError, once
from .problems import Problem, simulate
from .record import command, parser, table, write

METHODS = ("fedavg", "fedprox", "ditto", "adaped")
SETTINGS = {"clients": 50, "cohort": 5, "steps": 10, "batch": 20, "source": "digits"}
UNTUNED = {"xla_gpu_autotune_level": 0}
H200 = """
gpu_device_info {
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: 49152
  shared_memory_per_core: 233472
  threads_per_core_limit: 2048
  core_count: 132
  fpus_per_core: 128
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  memory_bandwidth: 4800000000000
  l2_cache_size: 52428800
  clock_rate_ghz: 1.98
  device_memory_size: 151397597184
  shared_memory_per_block_optin: 232448
  cuda_compute_capability { major: 9 }
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 10 }
runtime_version { major: 12 minor: 8 }
device_description_str: "NVIDIA H200 141GB HBM3e"
"""
"""XLA's ``GpuTargetConfigProto`` of the device, as text."""

_FREE = {
    *("parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "add-dependency"),
    *("optimization-barrier", "copy-done", "async-done"),
}


@command
def main(argv: list[str] | None = None) -> None:
    args = parser("kernels", __doc__, repetitions=3).parse_args(argv)
    if not any(plugin.name.startswith("xla_cuda") for plugin in entry_points(group="jax_plugins")):
        raise JobError("JAX's CUDA plugin is missing: pip install 'jax[cuda12]' (no GPU is needed)")
    methods, repetitions = (METHODS[:1], 1) if args.quick else (METHODS, args.repetitions)
    runs: dict[str, list[dict[str, Any]]] = {method: [] for method in methods}
    for _ in range(repetitions):
        for method in methods:
            runs[method].append(once(Job("kernels", SETTINGS | {"method": method})))
    results: dict[str, dict[str, Any]] = {}
    for method, found in runs.items():
        results[method] = {}
        for program, row in found[0].items():
            seconds = [run[program]["seconds"] for run in found]
            results[method][program] = row | {"seconds": seconds, "median": statistics.median(seconds)}
    rows = [
        (method, program, row["launches"], row["median"])
        for method, programs in results.items()
        for program, row in programs.items()
    ]
    table("programs for an H200", ("method", "program", "launches", "CPU s to compile"), rows)
    settings = SETTINGS | {"repetitions": repetitions, "target": H200, "options": UNTUNED}
    write(args.json, "kernels", settings, results)


def work(settings: dict[str, Any]) -> dict[str, Any]:
    """Compile the programs of one method, one after the other; return the launches and the CPU seconds of each."""
    import jax

    jax.config.update("jax_platforms", "cpu")
    from jaxpfl import ExecutionPlan
    from jaxpfl.engine.programs import Programs, _draws_as_calls
    from jaxpfl.engine.state import rows_of

    simulation = simulate(Problem(**settings), plan=ExecutionPlan(devices=1, tuning="quick"))
    programs, given = simulation._on("cuda", 1)
    scoring = simulation._resolve(simulation.plan, settings["clients"], "cuda")
    setting, execution = programs._of._replace(scoring=scoring), programs.execution
    options = UNTUNED | execution.compiler_options["compiler_options"]
    start = (simulation._run_keys([0]), rows_of(simulation.hp, 1), simulation._inputs)
    leaves = execution._replace(tuning=None)  # no longer one vector; ``options`` stay the same
    cases = (
        ("start", execution, start, _draws_as_calls()),
        ("start, draws as operations", execution, start, nullcontext()),
        ("advance", execution, given, nullcontext()),
        ("advance, separate arrays", leaves, given, nullcontext()),
        ("scores", execution, simulation._arguments("scores", 1), nullcontext()),
    )
    compile_for_target(jax.numpy.sin, (jax.numpy.zeros(3),), options)  # the first compilation also starts the compiler
    results = {}
    for case, plan, arguments, context in cases:
        name: Any = case.partition(",")[0]
        programs = Programs(setting, plan)
        with context:
            function = programs.function(name, programs._plan_of(name).block)
            compiled, seconds = compile_for_target(function, arguments, options)
        results[case] = {"launches": launches(compiled.as_text(), in_loops=name == "advance"), "seconds": seconds}
    return results


def compile_for_target(function: Any, arguments: Any, options: dict[str, Any]) -> tuple[Any, float]:
    """Compile a function for the described device; return the compiled program, and the CPU seconds."""
    import jax
    from jax.experimental import topologies

    # Exported first, because the function's placement names devices of this machine.
    shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), arguments)
    checks = [jax.export.DisabledSafetyCheck.custom_call("__gpu$xla.gpu.triton")]
    exported = jax.export.export(jax.jit(function), platforms=("cuda",), disabled_checks=checks)(*shapes)
    given, _ = jax.tree.unflatten(exported.in_tree, exported.in_avals)
    described = topologies.get_topology_desc(platform="cuda", target_config=H200, topology="1x1x1")
    where = jax.sharding.SingleDeviceSharding(described.devices[0])
    traced = jax.jit(exported.call, in_shardings=where, out_shardings=where).trace(*given)
    lowered = traced.lower(lowering_platforms=("cuda",))
    began = time.process_time()
    compiled = lowered.compile(compiler_options=options)
    return compiled, time.process_time() - began


class _Operation(NamedTuple):
    """An operation of a compiled program: its name, the shapes of its results, its kind, and the rest of its line."""

    name: str
    shapes: str
    kind: str
    rest: str


def launches(text: str, *, in_loops: bool = False) -> int:
    """Count the launches of a compiled program, given as text; with ``in_loops``, only those in loops."""
    return _total(text, lambda *_: 1, in_loops)


def moved(text: str, *, in_loops: bool = False) -> int:
    """Count the bytes that the operations of a compiled program read and write.

    These are all of their results, and all of their operands, or only the parts that a fusion slices or gathers. Caches
    and repeated reads are left out.
    """
    return _total(text, _bytes_of, in_loops)


_Computations = dict[str, list[_Operation]]


def _total(text: str, cost: Callable[[_Operation, str, _Computations], int], in_loops: bool) -> int:
    """Sum a cost over the operations that run; it is a function of an operation and its computation's name."""
    computations: _Computations = {}
    entry = name = ""
    for line in text.splitlines():
        if head := re.match(r"(ENTRY )?%?([\w.\-]+) .*\{$", line):
            name = head[2]
            computations[name] = []
            entry = name if head[1] else entry
        elif operation := re.match(r"  (?:ROOT )?%?(\S+) = (.*?) ([a-z][a-z0-9\-]*)\((.*)", line):
            computations[name].append(_Operation(*operation.groups()))

    def of(name: str) -> int:
        return sum(of_one(operation, name) for operation in computations[name])

    def of_one(operation: _Operation, within: str) -> int:
        called = [name for name in re.findall(r"%([\w.\-]+)", operation.rest) if name in computations]
        if operation.kind == "while":
            condition, body = called
            known = re.search(r'"known_trip_count":\{"n":"(\d+)"', operation.rest)
            return int(known[1]) * of(body) if known else of(condition) + of(body)
        if operation.kind in ("call", "conditional"):
            return max(map(of, called))
        return 0 if operation.kind in _FREE else cost(operation, within, computations)

    return sum(of_one(one, entry) for one in computations[entry] if one.kind == "while" or not in_loops)


_SIZES = {"pred": 1, "s8": 1, "u8": 1, "s16": 2, "u16": 2, "f16": 2, "bf16": 2, "s64": 8, "u64": 8, "f64": 8}
_PARTS = "dynamic-slice", "slice", "gather"


def _size(shapes: str) -> int:
    """Bytes of arrays whose shapes are given as text, such as ``(f32[2,3]{1,0}, s8[4]{0})``."""
    found = re.findall(r"\b([a-z]+\d*)\[([\d,]*)\]", shapes)
    return sum(_SIZES.get(dtype, 4) * math.prod(map(int, filter(None, dims.split(",")))) for dtype, dims in found)


def _operands(operation: _Operation) -> list[str]:
    return re.findall(r"%([\w.\-]+)", operation.rest.partition(")")[0])


def _bytes_of(operation: _Operation, within: str, computations: _Computations) -> int:
    shapes = {one.name: one.shapes for one in computations[within]}
    reads = [_size(shapes.get(name, "")) for name in _operands(operation)]
    if called := re.search(r"calls=%([\w.\-]+)", operation.rest):
        body = computations.get(called[1], [])
        for parameter in (one for one in body if one.kind == "parameter"):
            place = int(parameter.rest.partition(")")[0])
            users = [one for one in body if parameter.name in _operands(one)]
            if users and all(one.kind in _PARTS and _operands(one)[0] == parameter.name for one in users):
                reads[place] = min(reads[place], sum(_size(one.shapes) for one in users))
    elif operation.kind in _PARTS:
        reads[0] = _size(operation.shapes)
    return _size(operation.shapes) + sum(reads)


if __name__ == "__main__":
    main()

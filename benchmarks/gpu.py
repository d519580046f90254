"""Measurements on an accelerator: fits, rounds of all kinds, sweeps, own models, clients in host memory, and torch.

    python -m benchmarks gpu --data digits --json gpu.json

Each configuration runs in a separate process, one after the other, because each may need all memory. It runs one round
to warm up, and is then timed. For ``fit``, a sweep and ``compare``, the whole call counts as a round, and ``first``
includes its compilation (``compare warm`` finds the programs of ``compare cold`` on disk). The most informative
configurations come first. Each has a time limit, and none starts after the budget is spent. If a configuration fails
(for example, for lack of memory), its error is recorded and the others continue. The record is written after each
configuration, so that an interrupted run keeps its results.

In most configurations, all clients take part in a round, and each has 60 examples; if there are more clients than data,
the data are repeated. The torch loop runs fewer clients, because its time is linear in their number. Ratios compare the
time of one step of one client. GB/s of linear clients are computed from the bytes that must come from memory once per
round, counted by hand (``flops.py``). ``kernels_ms`` has the times of a round's kernels by name, from JAX's profiler.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import os
import statistics
import tempfile
import time
from collections import Counter
from contextlib import nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

if not __package__:
    import _script

    __package__ = _script.package

from .flops import cnn_step, linear_bytes
from .harness import SHORTEST, Job, JobError, once
from .problems import EXAMPLES, FEATURES, Problem, make_federation, rounds_of, simulate, use_devices
from .record import command, parser, positive, table, target, write
from .worker import Contender

ASKED = target(50, 300)  # targeted speedup over the torch loop, per step of a client, for AdaPeD at m = 1000
TORCH_CLIENTS = 20
TF32X3 = "TF32_TF32_F32_X3"  # float32 products as three products of tf32


@command
def main(argv: list[str] | None = None) -> None:
    args = _parser().parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        _measure(args, Path(folder))


def _measure(args: argparse.Namespace, folder: Path) -> None:
    device = once(Job("gpu", {"probe": True}))
    if device["platform"] == "cpu" and not args.anywhere:
        raise JobError("JAX finds no accelerator (--anywhere runs on a CPU)")
    wanted = [c for c in _configurations(args, folder) if all(text in c["name"] for text in args.only)]
    repetitions, began = 2 if args.quick else args.repetitions, time.monotonic()
    results: dict[str, Any] = {}
    summary: dict[str, Any] = {}
    for place, configuration in enumerate(wanted):
        name, *left = (one["name"] for one in wanted[place:])
        left_s = args.budget - (time.monotonic() - began)
        if left_s <= 0:
            print(f"not started, because the budget was spent: {', '.join((name, *left))}")
            break
        try:
            job = Job("gpu", configuration | {"repetitions": repetitions})
            found = once(job, timeout=min(args.timeout or configuration["limit"], left_s))
            results[name] = configuration | found | _rates(configuration, found)
        except JobError as error:
            results[name] = configuration | {"error": str(error)}
        results[name].get("problem", {}).pop("data_dir", None)
        print(f"{time.monotonic() - began:6.0f} s  {name}: {results[name].get('error', 'done')}", flush=True)
        summary = _summary(results)
        settings = {"repetitions": repetitions, "source": args.data, "quick": args.quick}
        write(args.json, "gpu", settings, results, device=device, summary=summary, asked=ASKED, not_started=left)
    _report(device, results, summary)


def _parser() -> argparse.ArgumentParser:
    result = parser("gpu", __doc__)
    result.add_argument("--anywhere", action="store_true", help="run on a CPU if there is no accelerator")
    result.add_argument("--data", choices=("digits", "mnist"), default="digits", help="digits needs no files")
    result.add_argument("--clients", type=positive, default=1000)
    result.add_argument("--many", type=positive, default=10_000, help="larger number of clients")
    result.add_argument("--steps", type=positive, default=10)
    result.add_argument("--linear", type=positive, nargs="+", default=[100_000, 1_000_000], metavar="M")
    result.add_argument(
        "--only",
        nargs="+",
        default=[],
        metavar="TEXT",
        help="run only configurations whose names contain all these words",
    )
    result.add_argument("--timeout", type=positive, help="seconds for one configuration; by default, its own limit")
    result.add_argument("--budget", type=positive, default=560, help="seconds for all configurations")
    return result


def _configurations(args: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    """Return the configurations to measure, the most informative first, because the budget may end early."""
    m, many, linear, steps, most = args.clients, args.many, args.linear, args.steps, (64, 256)
    if args.quick:
        m, many, linear, steps, most = 4, 6, [50], 2, (2,)
    cnn = Problem(clients=m, steps=steps, cap=60, source=args.data, data_dir=args.data_dir)
    found: list[dict[str, Any]] = []

    def add(name: str, problem: Problem, **settings: Any) -> None:
        found.append({"name": name, "problem": asdict(problem), "clients": "vmap", "limit": limit // 2} | settings)

    def add_whole(name: str, module: str, once: bool = True, **settings: Any) -> None:
        found.append({"name": name, "module": module, "once": once, "given": settings, "limit": limit})

    q, limit = args.quick, 600 if args.anywhere else 90  # time limit in seconds; a CPU gets more
    few = replace(cnn, clients=4 if q else 50, cohort=2 if q else 5)
    fitted: dict[str, Any] = {"fit": asdict(replace(few, cap=None)), "rounds": 2 if q else 100}
    for tuning, seeds in (("auto", 1), ("full", 1), ("auto", 5)):
        add_whole(f"fit {tuning}, {seeds} seed(s)", "gpu", tuning=tuning, seeds=seeds, **fitted)
    add("fedavg K=5 vmap", few)
    methods = [replace(cnn, method=method) for method in ("adaped", "fedavg")]
    for problem in methods:
        add(f"{problem.method} vmap", problem, tuning="full")
    for form, matmul in (("kernel", None), ("kernel", TF32X3), ("products", TF32X3)):  # to compare with the last
        name = f"fedavg vmap convolutions {form}{' tf32x3' * (matmul is not None)}"
        add(name, methods[1], tuning="full", convolutions=form, matmul=matmul, equal=True)
    for clients in sorted(linear, reverse=True):
        problem = Problem("linear", clients, steps=10, batch=EXAMPLES)
        for plan, form in (("vmap", "kernel"), ("vmap", "plain"), (min(clients, 10_000), "auto")):
            add(f"linear m={clients} {plan} {form}", problem, clients=plan, linear=form, equal=form == "plain")
    sweep = asdict(Problem("mlp", clients=50, cohort=10, steps=10, batch=10))
    size: dict[str, Any] = {"size": 2 if q else 56, "rounds": 2 if q else 100}
    add_whole("sweep of 56 runs", "sweep", problem=sweep, how="in one program", **size)
    short = ["fedavg", "--clients", "4", "--rounds", "2", "--seeds", "1", "--local-steps", "2"] if q else []
    for how in ("cold", "warm"):
        given = [*short, "--output", str(folder / how), "--quiet"]
        add_whole(f"compare {how}", "gpu", compare=given, cache=str(folder / "cache"))
    ten = replace(cnn, clients=2 if q else 10, batch=64, cap=128)
    add("fedavg batch 64 vmap", ten)
    loops = [replace(one, clients=min(one.clients, TORCH_CLIENTS)) for one in (*methods, ten)]

    def add_torch(precision: str) -> None:
        for problem in loops if importlib.util.find_spec("torch") else ():
            name = f"{problem.method} torch loop{' batch 64' * (problem.batch == 64)} {precision}".strip()
            add(name, problem, torch=True, anywhere=args.anywhere, precision=precision or "float32")

    add_torch("")
    own = asdict(replace(cnn, clients=2 if q else 20, cap=None, source="digits"))
    for name in ("LeNet linen", "ResNet-8 linen", "transformer linen"):
        add_whole(f"own {name}", "own_models", False, problem=own, model=name, form="products")
    small = {"steps": 1, "batch": 2} if q else {}
    add("resnet18 batch 64 vmap", replace(ten, source="cifar", **small), model="resnet18")
    for place in ("device", "host"):
        given = {"clients": 6 if q else 2000, "cohort": 2 if q else 100, "devices": None, "model": "cnn"}
        add_whole(f"clients in {place}", "streamed", False, clients_in=place, folder=str(folder), **given)
    for precision in ("tf32", "bfloat16"):
        add_torch(precision)
    for problem in methods:
        add(f"{problem.method} vmap quick", problem, tuning="quick")
        for precision in ("tf32", "bfloat16"):
            add(f"{problem.method} vmap {precision}", problem, precision=precision)
        for clients in ("vmap", most[-1]):
            add(f"{problem.method} m={many} {clients}", replace(problem, clients=many), clients=clients)
        for clients in (*most, "map"):
            add(f"{problem.method} {clients}", problem, clients=clients)
        for layers in ("lax.conv vmap", f"lax.conv {most[-1]}"):
            add(f"{problem.method} {layers}", problem, clients=layers.split()[1], layers="lax")
        add(f"{problem.method} vmap bfloat16 parameters", problem, parameters="bfloat16")
    return found


def _rates(configuration: dict[str, Any], found: dict[str, Any]) -> dict[str, float]:
    seconds, flops = found["median"], found.get("flops")
    if "problem" not in configuration:
        if flops is None:
            return {}
        steps = Problem(**configuration["given"]["problem"]).client_steps
        return {"us_per_step": 1e6 * seconds / steps, "tflops": flops * steps / seconds / 1e12}
    problem = Problem(**configuration["problem"])
    rates = {"us_per_step": 1e6 * seconds / problem.client_steps}
    if configuration.get("model"):
        return rates
    if problem.model == "cnn":
        return rates | {"tflops": cnn_step(problem.method, problem.batch) * problem.client_steps / seconds / 1e12}
    moved = linear_bytes(problem.clients, problem.steps, EXAMPLES, FEATURES, problem.outputs)
    return rates | {"gb_per_second": moved["memory"] / seconds / 1e9}


def _summary(results: dict[str, Any]) -> dict[str, Any]:
    """Return the speedup of each configuration over the torch loop on the same device, per step of a client."""
    summary = {}
    for name, row in results.items():
        problem = row.get("problem", {})
        loop = f"{problem.get('method')} torch loop" + " batch 64" * (problem.get("batch") == 64)
        torch = results.get(loop, {})
        if {"us_per_step"} <= row.keys() & torch.keys() and problem["model"] == "cnn" and not row.get("model"):
            summary[name] = torch["us_per_step"] / row["us_per_step"]
    return summary


def _report(device: dict[str, Any], results: dict[str, Any], summary: dict[str, Any]) -> None:
    rows = []
    for name, row in results.items():
        if "error" not in row:
            rate = row.get("tflops"), row.get("gb_per_second")
            asked = tuple(ASKED.values()) if name == "adaped vmap" else (None, None)
            memory = row.get("device_bytes") and row["device_bytes"] / 2**30
            rows.append(
                (name, row["median"], row.get("us_per_step"), *rate, memory, row["first"], summary.get(name), *asked)
            )
    columns = ("", "s a round", "us a step", "TFLOP/s", "GB/s", "GiB", "first s", "x torch", "floor", "aim")
    table(f"{device['count']} x {device['kind']}", columns, rows)
    for name, row in results.items():
        if "error" in row:
            print(f"failed: {name}: {row['error']}")


def work(settings: dict[str, Any]) -> dict[str, Any]:
    """Measure one configuration: seconds of a round, all timings and their median."""
    if "probe" in settings:
        import jax

        device = jax.devices()[0]
        return {"platform": device.platform, "kind": device.device_kind, "count": len(jax.devices())}
    once = settings.get("once", False)
    if "module" in settings:
        module = importlib.import_module(f".{settings['module']}", __package__)
        make = _whole if settings["module"] == "gpu" else module.work
        run, facts = make(settings["given"])
    else:
        run, facts = (_torch if settings.get("torch") else _jax)(settings)
    first = _seconds(run, 1)
    rounds = 1 if once else min(max(1, round(SHORTEST / _seconds(run, 1))), 100)
    if "compare" in settings.get("given", {}):  # a second one in the same process would find all programs in memory
        return {"first": first, "rounds": 1, "seconds": [first], "median": first}
    seconds = [_seconds(run, rounds) / rounds for _ in range(settings["repetitions"])]
    found = {"first": first, "rounds": rounds, "seconds": seconds, "median": statistics.median(seconds)} | facts()
    return found if once or settings.get("torch") else found | {"kernels_ms": _kernels(run)}


def _kernels(run: Any) -> dict[str, float]:
    """Return the milliseconds of a round's kernels by name, the longest 30 first (on a CPU, of XLA's operations)."""
    import jax

    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            run(1)
        (path,) = Path(folder).rglob("*.xplane.pb")
        planes = jax.profiler.ProfileData.from_file(str(path)).planes
        lines = [line for plane in planes for line in plane.lines if line.name.startswith(("Stream", "tf_XLA"))]
        found: Counter[str] = Counter()
        for event in (event for line in lines for event in line.events):
            if not event.name.startswith(("ThreadpoolListener", "end: ")):
                found[event.name] += event.duration_ns / 1e6
    return dict(found.most_common(30))


def _seconds(run: Any, rounds: int) -> float:
    began = time.perf_counter()
    run(rounds)
    return time.perf_counter() - began


def _whole(settings: dict[str, Any]) -> Contender:
    """Run a whole ``fit``, or a whole ``jaxpfl compare`` with its programs on disk."""
    if "compare" in settings:
        os.environ["XDG_CACHE_HOME"] = settings["cache"]
        from jaxpfl.cli import main

        return Contender(lambda rounds: main(["compare", *settings["compare"]]))
    import jaxpfl

    problem = Problem(**settings["fit"])
    use_devices()
    federation, plan = make_federation(problem), jaxpfl.ExecutionPlan(tuning=settings["tuning"])
    given = {"cohort": problem.cohort, "local_steps": problem.steps, "batch_size": problem.batch, "model": "cnn"}
    given |= {"rounds": settings["rounds"], "seeds": settings["seeds"], "plan": plan}
    tuned: list[Any] = []

    def run(times: int) -> None:
        for _ in range(times):
            tuned[:] = [jaxpfl.fit(problem.method, federation, **given).simulation.execution.tuning]

    return Contender(run, lambda: {"tuning": tuned[0]})


def _jax(settings: dict[str, Any]) -> Any:
    import jax

    from jaxpfl import ExecutionPlan

    problem = Problem(**settings["problem"])
    use_devices()
    precision = settings.get("precision", "float32")
    model = settings.get("model")
    if settings.get("layers") == "lax":
        from .round_cnn import naive_cnn

        model = naive_cnn()
    if settings.get("parameters"):
        model = _with_parameters(settings["parameters"])
    form = "plain" if settings.get("layers") == "lax" else settings.get("convolutions", "auto")
    if settings.get("matmul") and jax.default_backend() != "cpu":
        jax.config.update("jax_default_matmul_precision", settings["matmul"])
    tuning = settings.get("tuning", "auto")
    given = {"convolutions": form, "precision": precision, "tuning": tuning, "linear": settings.get("linear", "auto")}
    plan = ExecutionPlan(clients=settings["clients"], **given)
    contender = rounds_of(simulate(problem, plan=plan, model=model))

    def facts() -> dict[str, Any]:
        stats = jax.devices()[0].memory_stats() or {}  # None on a CPU
        known = contender.facts() | {"device_bytes": stats.get("peak_bytes_in_use")}
        return known | (_differences(problem, form) if settings.get("equal") else {})

    return contender.run, facts


def _differences(problem: Problem, convolutions: Any) -> dict[str, float]:
    """Return the largest difference between the global models of two forms after two rounds: kernel and plain form of
    linear models, or the form of ``convolutions``, in the precision that is set, and float32 products.
    """
    import jax

    from jaxpfl import ExecutionPlan

    def model(**forms: Any) -> Any:
        simulation = simulate(problem, plan=ExecutionPlan(clients="vmap", **forms))
        return jax.tree.leaves(jax.device_get(simulation.advance(simulation.init([0]), 2)[0].server))

    ours = model(linear="kernel", convolutions=convolutions)
    jax.config.update("jax_default_matmul_precision", None)
    plain = model(linear="plain", convolutions="auto")
    return {"difference": max(float(abs(a - b).max()) for a, b in zip(ours, plain, strict=True))}


def _with_parameters(dtype: str) -> Any:
    """Return the papers' CNN with parameters of this type; its layers compute in the type of their parameters."""
    import jax

    from jaxpfl.models.images import cnn

    model = cnn(10)

    def init(key: Any, x: Any) -> Any:
        return jax.tree.map(lambda a: a.astype(dtype), model.init(key, x))

    return model._replace(init=init)


def _torch(settings: dict[str, Any]) -> Any:
    import torch

    from .torch_rounds import Clients, Server, unpad

    if not torch.cuda.is_available() and not settings["anywhere"]:
        raise RuntimeError("torch has no CUDA here")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    problem = Problem(**settings["problem"])
    data = unpad(make_federation(problem).train)
    server = Server(problem.method, Clients(data, problem.steps, problem.batch, channels_last=False, device=device), [])

    precision = settings.get("precision", "float32")
    # torch's defaults are tf32 for convolutions and float32 for products.
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = precision == "tf32"
    half = precision == "bfloat16"

    def run(rounds: int) -> None:
        with torch.autocast(device, torch.bfloat16) if half else nullcontext():
            server.run(rounds)

    def facts() -> dict[str, Any]:
        memory = torch.cuda.max_memory_allocated() if device == "cuda" else None
        return {"device": device, "device_bytes": memory, "torch": torch.__version__}

    return run, facts


if __name__ == "__main__":
    main()

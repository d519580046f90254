"""Graphs of many clients: solvers of the network lasso, and exact and approximate nearest neighbors.

    python -m benchmarks graphs --json FILE

Network lasso (``--nodes``): N clients around N / 50 centers, with vectors of ``--numbers`` numbers, are joined with
their 5 nearest neighbors. Rounds are warm: every vector has moved a little since the last one. The solvers by spectrum
and by conjugate gradients run in turn in one process, in float32 as in a run. ``error`` is the largest distance of a
fused vector from a float64 solution with a thousandth of the tolerance, relative to the largest norm. The spectrum is
computed once per run.

Nearest neighbors (``--vectors``): for N vectors of 64 numbers near a surface of six dimensions, 5 neighbors are found
by comparing all pairs and by NN-descent (the package pynndescent, whose code compiles at the first call), each in its
own process. ``recall`` is the fraction of the edges from 500 vectors to their true neighbors that the graph contains.
"""

from __future__ import annotations

import importlib.util
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np

if not __package__:
    import _script

    __package__ = _script.package

from .harness import Job, once
from .problems import peak_bytes
from .record import command, parser, positive, table, write

NODES, NUMBERS, NEIGHBOURS = (500, 1000, 2000), 60, 5
STRENGTHS = {"drawn together": 0.5, "fused": 1.0}
"""Strengths of the penalty: one too weak to fuse any clients, and one that fuses all clients around each center."""
TOLERANCE = 1e-5
"""Default tolerance of the solver's residuals."""
VECTORS, Q, CHECKED = (10_000, 100_000), 64, 500
WAYS = {"all pairs": "exact", "pynndescent": "approximate"}


@command
def main(argv: list[str] | None = None) -> None:
    options = parser("graphs", __doc__)
    options.add_argument(
        "--nodes", type=positive, nargs="*", default=NODES, metavar="N", help="numbers of clients for the network lasso"
    )
    options.add_argument(
        "--numbers", type=positive, default=NUMBERS, help="length of each client's vector in the network lasso"
    )
    options.add_argument(
        "--vectors",
        type=positive,
        nargs="*",
        default=VECTORS,
        metavar="N",
        help="numbers of vectors for nearest neighbors",
    )
    args = options.parse_args(argv)
    nodes, numbers, vectors, repetitions = (
        ([30, 60], 4, [200], 1) if args.quick else (args.nodes, args.numbers, args.vectors, args.repetitions)
    )
    common = {"numbers": numbers, "repetitions": repetitions}
    lasso = {
        f"{n}, {kind}": once(Job("graphs", common | {"nodes": n, "strength": strength}))
        for n in nodes
        for kind, strength in STRENGTHS.items()
    }
    columns = (
        "N",
        "clusters",
        "spectrum s",
        "by it, ms",
        "by CG, ms",
        "CG over it",
        "error",
        "error of CG",
        "steps",
        "of CG",
    )
    rows = [
        (
            name,
            found["clusters"],
            found["spectrum_seconds"],
            *(1e3 * found[how]["median"] for how in ("spectrum", "cg")),
            found["ratio"],
            *(found[how]["error"] for how in ("spectrum", "cg")),
            *(found[how]["steps"] for how in ("spectrum", "cg")),
        )
        for name, found in lasso.items()
    ]
    table(f"a warm round of network lasso on {numbers} numbers, processor time", columns, rows)
    results: dict[str, Any] = {"network lasso": lasso}
    skipped: dict[str, str] = {}
    for n in vectors:
        for name, how in WAYS.items():
            if how == "approximate" and importlib.util.find_spec("pynndescent") is None:
                skipped[name] = "pynndescent is not installed"
                continue
            results[f"{name}, {n}"] = once(Job("graphs", {"vectors": n, "how": how}))
    neighbours = {name: row for name, row in results.items() if name != "network lasso"}
    keys = ("seconds", "cpu_seconds", "first_seconds", "edges", "recall")
    rows = [(name, *(row[key] for key in keys), row["peak_bytes"] / 2**30) for name, row in neighbours.items()]
    columns = ("", "s", "processor s", "s of a first call", "edges", "recall", "peak GiB")
    table(f"{NEIGHBOURS} nearest of {Q} numbers", columns, rows)
    for name, why in skipped.items():
        print(f"left out: {name}: {why}")
    settings = {"nodes": nodes, "numbers": numbers, "vectors": vectors, "repetitions": repetitions}
    settings |= {"neighbours": NEIGHBOURS, "strengths": STRENGTHS, "tolerance": TOLERANCE, "checked": CHECKED}
    write(args.json, "graphs", settings, results, skipped=skipped)


def work(settings: dict[str, Any]) -> dict[str, Any]:
    """Run both solvers on one graph, or find the neighbors of all vectors in one way."""
    if "nodes" in settings:
        return _lasso(**settings)
    return _neighbours(settings["vectors"], settings["how"])


def _lasso(nodes: int, numbers: int, repetitions: int, strength: float) -> dict[str, Any]:
    import jax
    import jax.numpy as jnp

    from jaxpfl.similarity import admm, graphs

    rng = np.random.default_rng(0)
    centres = rng.normal(size=(max(nodes // 50, 2), numbers))
    first = centres[np.arange(nodes) % len(centres)] + 0.3 * rng.normal(size=(nodes, numbers))
    rounds = first + 0.02 * rng.normal(size=(repetitions + 2, nodes, numbers)).cumsum(axis=0)
    graph = graphs.nearest_vectors(first, NEIGHBOURS)
    began = time.process_time()
    spectrum = graphs.spectrum(graph)
    spectrum_seconds = time.process_time() - began

    def solver(dense: bool, tolerance: float) -> Callable[..., admm.Fused]:
        given = {"tolerance": tolerance, "most": 20_000, "dense": dense, "spectrum": spectrum if dense else None}
        return jax.jit(lambda y, warm: admm.fuse(graph, y, strength, 2.0, warm=warm, **given))

    solvers = {"spectrum": solver(True, TOLERANCE), "cg": solver(False, TOLERANCE)}
    start = admm.cold(graph, jnp.asarray(rounds[0], jnp.float32))
    warms, spent, ends = dict.fromkeys(solvers, start), {name: [] for name in solvers}, {}
    for y in rounds:
        for name, solve in solvers.items():
            began = time.process_time()
            ends[name] = jax.block_until_ready(solve(jnp.asarray(y, jnp.float32), warms[name]))
            spent[name].append(time.process_time() - began)
            warms[name] = ends[name].warm
    with jax.enable_x64(True):
        last = jnp.asarray(rounds[-1])
        exact = np.asarray(solver(True, TOLERANCE / 1000)(last, admm.cold(graph, last)).z)
    largest = np.linalg.norm(exact, axis=1).max()
    warm = {name: seconds[2:] for name, seconds in spent.items()}  # the first compiles, and starts cold
    results: dict[str, Any] = {
        name: {
            "seconds": seconds,
            "median": statistics.median(seconds),
            "steps": int(ends[name].steps),
            "error": float(np.linalg.norm(np.asarray(ends[name].z, np.float64) - exact, axis=1).max() / largest),
        }
        for name, seconds in warm.items()
    }
    ratios = [cg / dense for dense, cg in zip(warm["spectrum"], warm["cg"], strict=True)]
    fused = int(graphs.components(graph, (np.asarray(ends["cg"].warm.w) == 0).all(axis=1)).max()) + 1
    facts = {"spectrum_seconds": spectrum_seconds, "ratio": statistics.median(ratios), "edges": graph.edges}
    return results | facts | {"clusters": fused}


def _neighbours(number: int, how: str) -> dict[str, Any]:
    from jaxpfl.similarity import graphs

    find = graphs.nearest_vectors if how == "exact" else graphs.approximate
    rng = np.random.default_rng(0)
    vectors = np.cos(rng.normal(size=(number, 6)) @ rng.normal(size=(6, Q))).astype(np.float32)
    began = time.perf_counter()
    find(vectors[:100], NEIGHBOURS)
    first_seconds = time.perf_counter() - began
    began, cpu = time.perf_counter(), time.process_time()
    graph = find(vectors, NEIGHBOURS)
    seconds, cpu_seconds = time.perf_counter() - began, time.process_time() - cpu
    facts = {"peak_bytes": peak_bytes()}
    return facts | {
        "seconds": seconds,
        "cpu_seconds": cpu_seconds,
        "first_seconds": first_seconds,
        "edges": graph.edges,
        "recall": _recall(vectors, graph, rng),
    }


def _recall(vectors: np.ndarray, graph: Any, rng: np.random.Generator) -> float:
    """Return the fraction of the edges to true neighbors of `CHECKED` vectors that a graph contains."""
    edges = graph.first.astype(np.int64) * graph.nodes + graph.second
    rows, there = rng.choice(len(vectors), min(CHECKED, len(vectors)), replace=False), []
    for i in rows:
        apart = np.zeros(len(vectors))
        for column in vectors.T:
            apart += (column.astype(np.float64) - column[i]) ** 2
        apart[i] = np.inf
        true = np.argsort(apart, kind="stable")[:NEIGHBOURS]
        there.append(np.isin(np.minimum(i, true) * graph.nodes + np.maximum(i, true), edges).mean())
    return float(np.mean(there))


if __name__ == "__main__":
    main()

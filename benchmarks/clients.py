"""Seconds per round, compile seconds and memory for 10 to a million clients.

    python -m benchmarks clients --plot sweep.png

All clients take part in each round, on all devices. Linear clients (d = 50, n = 10, ten full-batch steps) fit a
regression with one output for m = 1e3 ... 1e6, or with ``--classes 2`` a softmax regression on two classes. Clients of
the MNIST CNN (``--model cnn``) take ten steps of batch 20 for m = 10 ... 5000. Each CNN client keeps 60 examples, and
the clients of a 50-client split are repeated, because 5000 clients of 1200 images would need 19 GB. This does not
change the work of a step. All counts are measured in turn in the same run, so that their ratios are comparable.
"""

from __future__ import annotations

import argparse
import math
from dataclasses import asdict
from typing import Any

if not __package__:
    import _script

    __package__ = _script.package

from .harness import Job, compare
from .problems import EXAMPLES, Problem, rounds_of, simulate, use_devices
from .record import command, own_file, parser, positive, save_picture, table, target, write
from .timing import with_compile_seconds
from .worker import Contender

COUNTS = {"linear": (1_000, 10_000, 100_000, 1_000_000), "cnn": (10, 50, 500, 5_000)}
QUICK = {"linear": (100, 400), "cnn": (2, 4)}
CAP = 60
GIB = 2**30
ASKED_SECONDS, ASKED_GIGABYTES = target(1.0, 0.3), {"floor": 8.0}  # limits for a round of 1e6 linear clients
ASKED_PER_CLIENT = target(1.15, 1.0)  # limit for the CNN, m = 500 relative to m = 50


@command
def main(argv: list[str] | None = None) -> None:
    args = _parser().parse_args(argv)
    counts = args.counts or (QUICK if args.quick else COUNTS)[args.model]
    repetitions = 1 if args.quick else args.repetitions
    jobs = {f"{m:,}": Job("clients", asdict(_problem(args, m))) for m in counts}
    results = compare(jobs, repetitions=repetitions)
    rows = []
    for m, (name, row) in zip(counts, results.items(), strict=True):
        row["clients"], row["per_client"] = m, row["median"] / m
        facts = row["facts"]
        memory = facts["peak_bytes"] / GIB, facts["temporary_bytes"] / GIB
        compiling = facts["round"]["total"], facts["start"]["total"]
        rows.append((name, row["median"], 1e6 * row["per_client"], *compiling, *memory, facts["train_loss"]))
    columns = ("m", "s a round", "us a client", "compile s", "start s", "peak GiB", "temp. GiB", "train loss")
    table(f"{args.model} clients, {_problem(args, 1).steps} steps", columns, rows)
    slope = _slope([(row["clients"], row["median"]) for row in results.values()])
    if slope is not None:
        print(f"\nseconds grow as m to the power {slope:.3f}")
    asked = _asked(args, results)
    if asked:
        rows = [(what, row["found"], row.get("floor"), row.get("aim")) for what, row in asked.items()]
        table("asked (at most)", ("", "found", "floor", "aim"), rows)
    settings = asdict(_problem(args, 0)) | {"clients": list(counts), "repetitions": repetitions}
    write(args.json, "clients", settings, results, slope=slope, asked=asked)
    if args.plot:
        _plot(args, results, slope)


def _parser() -> argparse.ArgumentParser:
    result = parser("clients", __doc__, repetitions=3)
    result.add_argument("--model", choices=tuple(COUNTS), default="linear")
    result.add_argument("--counts", type=positive, nargs="+", metavar="M")
    result.add_argument(
        "--classes", type=positive, default=1, help="classes of linear models; 1 (default) is regression"
    )
    result.add_argument("--method", choices=("fedavg", "adaped"), default="fedavg")
    result.add_argument(
        "--plot", type=own_file("clients", picture=True), metavar="FILE", help="plot seconds per round against m"
    )
    return result


def _problem(args: argparse.Namespace, clients: int) -> Problem:
    if args.model == "linear":
        return Problem("linear", clients, steps=10, batch=EXAMPLES, method=args.method, outputs=args.classes)
    source = "digits" if args.quick else "mnist"
    steps = 2 if args.quick else 10
    return Problem(clients=clients, steps=steps, method=args.method, cap=CAP, source=source, data_dir=args.data_dir)


def _asked(args: argparse.Namespace, results: dict[str, Any]) -> dict[str, Any]:
    by_count = {row["clients"]: row for row in results.values()}
    if args.model == "cnn" and {50, 500} <= set(by_count):
        found = by_count[500]["per_client"] / by_count[50]["per_client"]
        return {"time of a client-step, m = 500 over m = 50": {"found": found} | ASKED_PER_CLIENT}
    if args.model == "linear" and 1_000_000 in by_count:
        row = by_count[1_000_000]
        return {
            "seconds a round, m = 1e6": {"found": row["median"]} | ASKED_SECONDS,
            "peak GB, m = 1e6": {"found": row["facts"]["peak_bytes"] / 1e9} | ASKED_GIGABYTES,
        }
    return {}


def _slope(points: list[tuple[int, float]]) -> float | None:
    """Return the least-squares slope of log seconds over log m; None for a single count."""
    logs = [(math.log(m), math.log(seconds)) for m, seconds in points]
    mean_x, mean_y = (sum(column) / len(logs) for column in zip(*logs, strict=True))
    spread = sum((x - mean_x) ** 2 for x, _ in logs)
    return sum((x - mean_x) * (y - mean_y) for x, y in logs) / spread if spread else None


def _plot(args: argparse.Namespace, results: dict[str, Any], slope: float | None) -> None:
    from matplotlib.figure import Figure

    counts = [row["clients"] for row in results.values()]
    seconds = [row["median"] for row in results.values()]
    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.subplots()
    axes.loglog(counts, seconds, "o", label="median of a round")
    if slope is not None:
        x, y = (sum(map(math.log, values)) / len(values) for values in (counts, seconds))
        fitted = [math.exp(y + slope * (math.log(m) - x)) for m in counts]
        axes.loglog(counts, fitted, "-", linewidth=1, label=f"slope {slope:.2f}")
    axes.set_xlabel("clients")
    axes.set_ylabel("seconds a round")
    axes.set_title(f"{args.method}, {args.model} clients")
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    save_picture(figure, args.plot, "clients")


def work(settings: dict[str, Any]) -> Contender:
    """Run rounds with one number of clients on all devices."""
    use_devices()
    return with_compile_seconds(lambda: rounds_of(simulate(Problem(**settings))))


if __name__ == "__main__":
    main()

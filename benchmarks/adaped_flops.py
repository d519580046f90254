"""FLOP/s of AdaPeD relative to FedAvg: does 2.74 times the work take 2.74 times as long?

    python -m benchmarks adaped_flops --data-dir DIR

Both methods run rounds of the MNIST CNN on all devices, in turn. A step of AdaPeD has 4 forward passes (F) and 2
backward passes (B), which is (4F + 2B) / (F + B) = 2.74 times the work of a FedAvg step. The operations are counted by
hand in ``flops.py``.
"""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

if not __package__:
    import _script

    __package__ = _script.package

from .flops import cnn_step
from .harness import Job, compare
from .problems import Problem, rounds_of, simulate, use_devices
from .record import command, parser, positive, table, target, write
from .worker import Contender

ASKED = target(1.0, 1.1)


@command
def main(argv: list[str] | None = None) -> None:
    options = parser("adaped_flops", __doc__, repetitions=7)
    options.add_argument("--clients", type=positive, default=50)
    options.add_argument("--steps", type=positive, default=60)
    args = options.parse_args(argv)
    problem = Problem(clients=args.clients, steps=args.steps, data_dir=args.data_dir)
    if args.quick:
        problem = replace(problem, clients=2, steps=2, source="digits")
    repetitions = 1 if args.quick else args.repetitions
    jobs = {method: Job("adaped_flops", asdict(replace(problem, method=method))) for method in ("fedavg", "adaped")}
    results = compare(jobs, repetitions=repetitions)
    rows = []
    for method, row in results.items():
        row["flops_per_second"] = cnn_step(method, problem.batch) * problem.client_steps / row["median"]
        rows.append((method, row["median"], 1e6 * row["median"] / problem.client_steps, row["flops_per_second"] / 1e9))
    table(
        f"MNIST CNN, m = {problem.clients}, {problem.steps} steps of batch {problem.batch}",
        ("", "s a round", "us a step", "GFLOP/s"),
        rows,
    )
    work = cnn_step("adaped") / cnn_step("fedavg")
    cost = results["adaped"]["median"] / results["fedavg"]["median"]
    ratios = {"work": work, "time": cost, "flops_per_second": work / cost}
    rows = [("work", work), ("time", cost), ("FLOP/s", work / cost, *ASKED.values())]
    table("AdaPeD over FedAvg", ("", "ratio", "floor", "aim"), [(*row, None, None)[:4] for row in rows])
    settings = asdict(problem) | {"repetitions": repetitions}
    write(args.json, "adaped_flops", settings, results, ratios=ratios, asked=ASKED)


def work(settings: dict[str, Any]) -> Contender:
    """Run rounds of one method on all devices."""
    use_devices()
    return rounds_of(simulate(Problem(**settings)), score=True)


if __name__ == "__main__":
    main()

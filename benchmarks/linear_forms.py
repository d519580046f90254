"""Rounds of linear clients: the steps of several clients in one loop, compared with the method's own steps.

    python -m benchmarks linear_forms

FedAvg runs with full participation, ten steps, and 50 features and 10 examples per client. Both forms run in turn in
one process, and a ratio compares seconds of the same repetition. CPU seconds include all threads, so other work on the
machine matters less.
"""

from __future__ import annotations

import statistics
import time
from typing import Any

if not __package__:
    import _script

    __package__ = _script.package

from .harness import Job, once
from .problems import EXAMPLES, Problem, device_facts, simulate, use_devices
from .record import command, parser, positive, table, target, write

CASES = {"regression": (1, EXAMPLES), "two classes": (2, EXAMPLES), "four classes, batches of 5": (4, 5)}
"""Case -> number of outputs and batch size."""
FORMS = "plain", "loop"
ROUNDS = 5  # rounds in a timing
ASKED = target(1.3, 1.5)  # minimum CPU seconds of the plain form relative to the loop


@command
def main(argv: list[str] | None = None) -> None:
    options = parser("linear_forms", __doc__, repetitions=7)
    options.add_argument("--clients", type=positive, default=50_000, metavar="M")
    options.add_argument("--cases", nargs="+", choices=list(CASES), default=list(CASES), metavar="CASE")
    args = options.parse_args(argv)
    clients, repetitions = (200, 1) if args.quick else (args.clients, args.repetitions)
    settings = {"clients": clients, "repetitions": repetitions}
    results = {
        case: once(Job("linear_forms", settings | {"outputs": CASES[case][0], "batch": CASES[case][1]}))
        for case in args.cases
    }
    rows = [
        (case, *(1e6 * row[form]["median"] / clients for form in FORMS), row["ratio"], *ASKED.values())
        for case, row in results.items()
    ]
    table(f"{clients:,} clients", ("", "plain, CPU us a client", "loop", "ratio", "floor", "aim"), rows)
    write(args.json, "linear_forms", settings, results, asked=ASKED)


def work(settings: dict[str, Any]) -> dict[str, Any]:
    """Return the CPU and wall seconds of a round in each form, and the median ratio of the forms' CPU seconds."""
    use_devices()
    from jaxpfl import ExecutionPlan

    problem = Problem("linear", settings["clients"], steps=10, batch=settings["batch"], outputs=settings["outputs"])
    plans = ExecutionPlan(linear="plain"), ExecutionPlan(linear="auto")
    simulations = {form: simulate(problem, plan=plan) for form, plan in zip(FORMS, plans, strict=True)}
    states = {form: simulation.advance(simulation.init([0]), 1)[0] for form, simulation in simulations.items()}
    found: dict[str, Any] = {form: {"cpu": [], "wall": []} for form in FORMS}
    for _ in range(settings["repetitions"]):
        for form, simulation in simulations.items():
            cpu, wall = time.process_time(), time.perf_counter()
            states[form], _ = simulation.advance(states[form], ROUNDS)
            found[form]["cpu"].append((time.process_time() - cpu) / ROUNDS)
            found[form]["wall"].append((time.perf_counter() - wall) / ROUNDS)
    ratios = [plain / loop for plain, loop in zip(*(found[form]["cpu"] for form in FORMS), strict=True)]
    for row in found.values():
        row["median"] = statistics.median(row["cpu"])
    return found | {"ratio": statistics.median(ratios)} | device_facts()


if __name__ == "__main__":
    main()

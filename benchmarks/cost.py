"""Seconds per round predicted by the cost model and measured, and the constants that fit this machine best.

    python -m benchmarks cost --data-dir DIR

The model has three constants, the shares in `cost_model.machine`, which are fitted to eight problems. The other
problems are predicted with the package's shares, which were fitted without them. The target is an error below 25 %.
"""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

import numpy as np

if not __package__:
    import _script

    __package__ = _script.package

from .harness import Job, compare
from .problems import EXAMPLES, Problem, rounds_of, simulate, use_devices
from .record import command, parser, table, write
from .worker import Contender

ASKED = 0.25
CNN, MLP, LINEAR = Problem(clients=10, steps=20), Problem("mlp", 26, steps=50, batch=10), Problem("linear", 50_000)
FITTED = {
    "CNN, fedavg": CNN,
    "CNN, fedavg, batch 5": replace(CNN, batch=5),
    "CNN, fedavg, batch 80": replace(CNN, batch=80),
    "CNN, adaped": replace(CNN, method="adaped"),
    "MLP, fedavg": MLP,
    "MLP, pfedme": replace(MLP, method="pfedme"),
    "linear, 1 output": replace(LINEAR, cohort=None, steps=10, batch=EXAMPLES),
    "linear, 2 outputs": replace(LINEAR, cohort=None, steps=10, batch=EXAMPLES, outputs=2),
}
HELD_OUT = {
    "CNN, scaffold, m = 50": replace(CNN, clients=50, method="scaffold"),
    "CNN, ditto, batch 10": replace(CNN, batch=10, method="ditto"),
    "CNN, fedem": replace(CNN, method="fedem"),
    "CNN, apfl": replace(CNN, method="apfl"),
    "MLP, apfl": replace(MLP, method="apfl"),
    "MLP, fedavg, batch 20": replace(MLP, batch=20),
    "MLP, scaffold, batch 5": replace(MLP, batch=5, method="scaffold"),
    "linear, 3 outputs, ditto": replace(LINEAR, cohort=None, steps=5, batch=EXAMPLES, outputs=3, method="ditto"),
    "linear, 5 outputs, m = 200,000": replace(LINEAR, clients=200_000, cohort=None, steps=5, batch=EXAMPLES, outputs=5),
}


@command
def main(argv: list[str] | None = None) -> None:
    args = parser("cost", __doc__, repetitions=3).parse_args(argv)
    problems = {name: replace(p, data_dir=args.data_dir) for name, p in (FITTED | HELD_OUT).items()}
    repetitions = args.repetitions
    if args.quick:
        names = ("MLP, fedavg", "MLP, apfl")
        problems, repetitions = {name: replace(problems[name], clients=4, steps=2) for name in names}, 1
    results = compare({name: Job("cost", asdict(p)) for name, p in problems.items()}, repetitions=repetitions)
    for row in results.values():
        row["ratio"] = row["facts"]["predicted"] / row["median"]
    rows = [
        (name, row["median"], row["facts"]["predicted"], row["ratio"], "" if name in FITTED else "held out")
        for name, row in results.items()
    ]
    table("seconds a round", ("", "measured", "predicted", "ratio", ""), rows)
    shares = _fitted([row for name, row in results.items() if name in FITTED])
    print("\nshares that fit best: " + ", ".join(f"{share:.3g}" for share in shares))
    write(args.json, "cost", {"repetitions": repetitions}, results, shares=shares, asked=ASKED)


def _fitted(rows: list[dict[str, Any]]) -> list[float]:
    """Return the shares that minimize the squared relative errors, by non-negative least squares."""
    from scipy.optimize import nnls

    columns = np.array([row["facts"]["parts"] for row in rows]) / np.array([[row["median"]] for row in rows])
    return nnls(columns, np.ones(len(rows)))[0].tolist()


def work(settings: dict[str, Any]) -> Contender:
    """Run rounds; the facts include the prediction and its unweighted parts, in seconds."""
    use_devices()
    simulation = simulate(Problem(**settings))
    rounds = rounds_of(simulation)

    def facts() -> dict[str, Any]:
        from .cost_model.machine import this_core
        from .cost_model.rounds import cost

        found = cost(simulation)
        (done,), (turns,) = found.works, found.turns
        devices = simulation.execution.devices
        parts = [turns * part for part in this_core().parts(done, found.together, devices)]
        return rounds.facts() | {"predicted": found.seconds, "parts": parts, "flops": done.flops}

    return Contender(rounds.run, facts)


if __name__ == "__main__":
    main()

"""Seeds and learning rates in ONE program compared with a separate run for each setting.

    python -m benchmarks sweep

Each of the S settings is a whole run of a small perceptron on digits: 50 clients, 10 in a round, ten steps of batch 10.
If S is a multiple of seven, there are seven rates with S / 7 seeds each, otherwise S pairs of a seed and a rate. One
program has the settings as an axis. A separate run compiles its own program, as in a new process. The runs of ``kept``
share the program that the first of them compiled, as calls of ``fit`` in one process do. ``first s`` is the time of a
whole sweep with all its compilation, and ``seconds`` the time of another sweep with the compiled programs.
"""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

import numpy as np

if not __package__:
    import _script

    __package__ = _script.package

from .harness import Job, compare
from .problems import Problem, device_facts, simulate, use_devices
from .record import command, parser, positive, table, target, write
from .worker import Contender

PROBLEM = Problem("mlp", clients=50, cohort=10, steps=10, batch=10)
ASKED = {8: target(0.5, 0.2), 56: target(0.55, 0.2)}  # maximum time of one program relative to separate runs
ASKED_COMPILED = {56: target(0.15, 0.05)}  # the same with compilation
HOW = ("in one program", "kept", "separate")
RATES = 7


@command
def main(argv: list[str] | None = None) -> None:
    options = parser("sweep", __doc__)
    options.add_argument("--settings", type=positive, nargs="+", default=[1, 8, 56], metavar="S")
    options.add_argument("--rounds", type=positive, default=100, help="number of rounds of each run")
    options.add_argument("--method", choices=("fedavg", "adaped"), default="fedavg")
    args = options.parse_args(argv)
    problem = replace(PROBLEM, method=args.method)
    sizes, rounds, repetitions = args.settings, args.rounds, args.repetitions
    if args.quick:
        sizes, rounds, repetitions = [2], 2, 1
    common = {"problem": asdict(problem), "rounds": rounds}
    jobs = {f"{size} {how}": Job("sweep", common | {"size": size, "how": how}) for size in sizes for how in HOW}
    results = compare(jobs, repetitions=repetitions, rounds=1)
    rows, ratios = [], {}
    for size in sizes:
        one, kept, separate = (results[f"{size} {how}"] for how in HOW)
        ratios[size] = {
            "run": one["median"] / separate["median"],
            "with_compilation": one["first"] / separate["first"],
            "with_compilation_kept": one["first"] / kept["first"],
            "asked": ASKED.get(size),
            "asked_with_compilation": ASKED_COMPILED.get(size),
        }
        asked = tuple((ratios[size]["asked"] or {}).values()) or (None, None)
        rows.append((size, one["median"], separate["median"], ratios[size]["run"], *asked))
        rows[-1] += (one["first"], kept["first"], separate["first"], ratios[size]["with_compilation"])
    columns = ("settings", "one program s", "separate s", "ratio", "floor", "aim")
    columns += ("one, first s", "kept", "separate", "ratio")
    table(f"{args.method}, {rounds} rounds of each setting", columns, rows)
    settings = asdict(problem) | {"rounds": rounds, "sizes": sizes, "repetitions": repetitions}
    write(args.json, "sweep", settings, results, ratios=ratios)


def work(settings: dict[str, Any]) -> Contender:
    """Run a sweep, which counts as one "round" of this contender."""
    use_devices()
    from jaxpfl.engine import programs

    problem, size, rounds = Problem(**settings["problem"]), settings["size"], settings["rounds"]
    seeds, rates = _settings(size)
    one = settings["how"] == "in one program"
    parts = [list(range(size))] if one else [[i] for i in range(size)]
    simulations: list[Any] = []
    losses: list[float] = []

    def run(sweeps: int) -> None:
        for _ in range(sweeps):
            losses.clear()
            for i, part in enumerate(parts):
                if len(simulations) == i:
                    if settings["how"] == "separate":
                        programs.clear()
                    simulations.append(
                        simulate(problem, hyper={"lr": rates[part] if len(part) > 1 else rates[part[0]]})
                    )
                _, history = simulations[i].advance(simulations[i].init([seeds[j] for j in part]), rounds)
                losses.extend(history["train_loss"][:, -1].tolist())

    return Contender(run, lambda: {"train_losses": losses} | device_facts())


def _settings(size: int) -> tuple[list[int], np.ndarray]:
    """Return the seeds and rates of the given number of settings."""
    if size % RATES == 0:
        return [i // RATES for i in range(size)], np.tile(np.geomspace(0.01, 0.3, RATES), size // RATES)
    return list(range(size)), np.geomspace(0.01, 0.3, size) if size > 1 else np.array([0.1])


if __name__ == "__main__":
    main()

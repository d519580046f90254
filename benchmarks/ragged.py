"""Ragged clients: memory and time of federations with unequal clients, relative to equal clients.

    python -m benchmarks ragged

Memory: for 2000 clients of 30 images and one of 20,000, the bytes of the data on the device are compared with the bytes
of the examples.

Rounds: FedAvg runs on equal clients, on log-normal sizes (sigma 2), on power-law sizes (exponent 1.2) and, for the
linear model, on 99 clients with 30 examples and one client with 5000. The numbers of clients, of steps and (except for
the last federation) of examples are equal. Batches are mini-batches, or all of a client's examples. The results are
milliseconds of processor time on one device, for a round and for an evaluation of all clients, and ratios to the equal
clients. Processor time is least affected by other work on the machine. ``--against FOLDER`` also runs the equal clients
with the jaxpfl of another checkout, timed in turn with this one.
"""

from __future__ import annotations

import statistics
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

if not __package__:
    import _script

    __package__ = _script.package

from .harness import Job, compare, once
from .record import command, parser, table, target, write
from .worker import Contender

ASKED = {"memory": {"floor": 1.1, "aim": 1.01}, "round": target(1.3, 1.0), "against": {"floor": 1.02, "aim": 1.0}}
KINDS = ("equal", "log-normal", "power law")
TAIL = "one of 5000"
MODELS = {
    "linear": {"clients": 1000, "mean": 60, "cohort": 100, "steps": 10, "batch": 10},
    "cnn": {"clients": 60, "mean": 60, "cohort": 10, "steps": 10, "batch": 10},
}
QUICK = {"clients": 20, "mean": 8, "cohort": 5, "steps": 2, "batch": 4}


@command
def main(argv: list[str] | None = None) -> None:
    options = parser("ragged", __doc__, repetitions=5)
    options.add_argument("--against", type=Path, metavar="FOLDER", help="checkout of another commit")
    options.add_argument("--models", nargs="+", choices=tuple(MODELS), default=list(MODELS))
    args = options.parse_args(argv)
    images = (
        {"clients": 20, "size": 3, "largest": 200} if args.quick else {"clients": 2000, "size": 30, "largest": 20_000}
    )
    results: dict[str, Any] = {"memory": once(Job("ragged", {"what": "memory"} | images))}
    for name, value in results["memory"].items():
        print(f"{name:<20}{value:.4g}")
    for model in args.models:
        chosen = MODELS[model] | (QUICK if args.quick else {})
        for draws in ("mini-batches", "full batches"):
            if model == "cnn" and draws == "full batches":
                continue
            kinds = (*KINDS, TAIL) if model == "linear" and draws == "mini-batches" else KINDS
            if args.quick:  # each once
                kinds = KINDS[:2] if draws == "full batches" else (KINDS[0], *kinds[2:])
            given = {"what": "rounds", "model": model, "full": draws == "full batches"} | chosen
            jobs = {kind: Job("ragged", given | {"kind": kind}) for kind in kinds}
            title = f"{model}, {draws}"
            results[title] = _shown(title, compare(jobs, repetitions=1 if args.quick else args.repetitions))
            if args.against:
                before = Job("ragged", given | {"kind": "equal", "path": str(args.against.resolve())})
                both = {"equal": before, "equal, now": jobs["equal"]}
                found = compare(both, repetitions=1 if args.quick else args.repetitions)
                results[f"{title}, against"] = _shown(f"{title}, another checkout", found)
    settings = {"models": args.models, "repetitions": args.repetitions, "memory": images, "against": bool(args.against)}
    write(args.json, "ragged", settings, results, asked=ASKED)


def _shown(title: str, found: dict[str, Any]) -> dict[str, Any]:
    """Print the results with ratios to the equal federation."""
    base, rows = found["equal"]["facts"], []
    for name, row in found.items():
        facts = row["facts"]
        row["over_equal"] = {part: facts[part] / base[part] for part in ("round_ms", "evaluation_ms")}
        largest = facts["largest"]
        rows.append((name, largest, facts["round_ms"], facts["evaluation_ms"], *row["over_equal"].values()))
    table(title, ("", "largest", "round ms", "evaluation ms", "round over equal", "evaluation over equal"), rows)
    return found


def sizes_of(kind: str, clients: int, mean: int) -> np.ndarray:
    """Return numbers of training examples, with a sum of about ``clients * mean`` except for `TAIL`."""
    rng = np.random.default_rng(0)
    if kind == TAIL:
        return np.array([30] * 99 + [5000])
    if kind == "equal":
        return np.full(clients, mean)
    raw = rng.lognormal(0.0, 2.0, clients) if kind == "log-normal" else rng.pareto(1.2, clients) + 1
    return np.maximum(np.rint(raw / raw.sum() * clients * mean), 1).astype(int)


def work(settings: dict[str, Any]) -> Contender | dict[str, Any]:
    """Measure the bytes of ragged images, or run rounds of one federation."""
    if "path" in settings:
        sys.path.insert(0, settings["path"])
    return _memory(settings) if settings["what"] == "memory" else _rounds(settings)


def _memory(settings: dict[str, Any]) -> dict[str, Any]:
    import jax

    import jaxpfl

    sizes = [settings["size"]] * settings["clients"] + [settings["largest"]]
    given = [(np.zeros((n, 28, 28, 1), np.float32), np.arange(n) % 10) for n in sizes]
    plan = jaxpfl.ExecutionPlan(devices=1)
    found = jaxpfl.fit(
        "fedavg", jaxpfl.stack_clients(given, test=given), model="linear", rounds=2, cohort=10, local_steps=2,
        batch_size=10, plan=plan,
    )  # fmt: skip
    own = 2 * sum(x.nbytes + 4 * len(y) for x, y in given)
    held = sum(leaf.nbytes for leaf in jax.tree.leaves(found.simulation.federations))
    return {"examples_bytes": own, "held_bytes": held, "over_examples": held / own} | found.simulation.memory()


def _rounds(settings: dict[str, Any]) -> Contender:
    import jaxpfl

    rng = np.random.default_rng(0)
    image, kind = settings["model"] == "cnn", settings["kind"]
    sizes = sizes_of(kind, settings["clients"], settings["mean"])

    def examples(n: int) -> tuple[np.ndarray, np.ndarray]:
        shape = (n, 28, 28, 1) if image else (n, 60)
        return rng.standard_normal(shape, np.float32), rng.integers(10, size=n)

    federation = jaxpfl.stack_clients([examples(n) for n in sizes], test=[examples(max(n // 2, 1)) for n in sizes])
    found = jaxpfl.fit(
        "fedavg",
        federation,
        model=settings["model"],
        rounds=1,
        cohort=min(settings["cohort"], len(sizes)),
        local_steps=settings["steps"],
        batch_size=int(sizes.max()) if settings["full"] else settings["batch"],
        lr=0.01,
        plan=jaxpfl.ExecutionPlan(devices=1),
    )
    simulation, state = found.simulation, found.state
    rounds_ms: list[float] = []

    def run(rounds: int) -> None:
        nonlocal state
        began = time.process_time()
        state, _ = simulation.advance(state, rounds)
        rounds_ms.append(1e3 * (time.process_time() - began) / rounds)

    def evaluation() -> float:
        began = time.process_time()
        np.asarray(simulation.evaluate(state)["after"]["loss"])
        return 1e3 * (time.process_time() - began)

    def facts() -> dict[str, Any]:
        return {
            "largest": int(sizes.max()),
            "examples": int(sizes.sum()),
            "round_ms": statistics.median(rounds_ms[2:] or rounds_ms),
            "evaluation_ms": statistics.median([evaluation() for _ in range(10)]),
        }

    return Contender(run, facts)


if __name__ == "__main__":
    main()

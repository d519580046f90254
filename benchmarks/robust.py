"""Attacks and robust aggregation: accuracy of personalized methods on digits at equal numbers of gradients.

    python -m benchmarks robust --json FILE

Every method, with its default rates, computes about the same number of gradients per client, with personalization, on
the same split, for every pair of an attack and an aggregation. Scores are the honest clients' scores on test examples
after the last round; nothing was chosen by these scores. The record is written after each method and aggregation, so
that an interrupted study can continue, and a later study can add methods or attacks.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

if not __package__:
    import _script

    __package__ = _script.package

from .problems import use_devices
from .record import command, parser, stored, write
from .robust_page import tables

CLIENTS, COHORT, STEPS, GRADIENTS, ATTACKERS, SEEDS = 40, 20, 10, 400, 0.2, 3
METHODS: Mapping[str, int] = {
    "local": 80,
    "fedavg": 80,
    "fedavg-ft": 68,
    "ditto": 40,
    "fedper": 80,
    "fedrep": 80,
    "mr-mtl": 80,
    "apfl": 40,
    "fedrod": 40,
    "adaped": 40,
}
"""Number of rounds of each method. A client takes part in every second round. A step of Ditto, APFL, FedROD and AdaPeD
has two gradients, and FedAvg-ft adds 60 steps."""
AGGREGATES = (
    "mean",
    "median",
    "geometric-median",
    "norm-bound",
    "multi-krum:attackers=6",
    "trimmed-mean:fraction=0.3",
)
ATTACKS = ("none", "label-flip", "sign-flip:factor=3", "noise:deviation=0.2", "scale:factor=10")


@command
def main(argv: list[str] | None = None) -> None:
    args = parser("robust", __doc__).parse_args(argv)
    from jaxpfl.runs import compile_cache

    use_devices()
    compile_cache.enable()
    settings = {
        "data": "digits",
        "model": "linear" if args.quick else "mlp:32",
        "clients": CLIENTS,
        "cohort": COHORT,
        "local_steps": STEPS,
        "gradients": GRADIENTS,
        "attackers": ATTACKERS,
        "seeds": SEEDS,
        "quick": args.quick,
    }
    results: dict[str, Any] = stored(args.json, settings) or {}
    methods = {"local": 2, "ditto": 2} if args.quick else METHODS
    for aggregate in AGGREGATES[: 2 if args.quick else None]:
        for method, rounds in methods.items():
            _study(results, method, aggregate, rounds, args.json, settings)
    if not args.quick:
        print(tables({"settings": settings, "results": results}))


def _study(
    results: dict[str, Any], method: str, aggregate: str, rounds: int, path: Path | None, settings: dict[str, Any]
) -> None:
    """Run a method with an aggregation under the missing attacks; a method that uploads nothing is run once."""
    if method == "local" and aggregate != "mean":
        return
    key = f"{method} {aggregate}"
    done = {row["attack"] for row in results.get(key, [])}
    attacks = ATTACKS[:1] if method == "local" else ATTACKS[1:2] if settings["quick"] else ATTACKS
    lacking = [attack for attack in attacks if attack not in done]
    if not lacking:
        return
    results[key] = results.get(key, []) + [_run(method, aggregate, attack, rounds, settings) for attack in lacking]
    print(*(f"{row['attack']}: {sum(row['personalized']) / len(row['personalized']):.2f}" for row in results[key]), key)
    write(path, "robust", settings, results)


def _run(method: str, aggregate: str, attack: str, rounds: int, settings: Mapping[str, Any]) -> dict[str, Any]:
    import numpy as np

    import jaxpfl

    federation = jaxpfl.federate(jaxpfl.load("digits"), clients=CLIENTS, classes_per_client=3)
    adversary = {} if attack == "none" else {"attack": attack, "attackers": ATTACKERS}
    found = jaxpfl.fit(
        method,
        federation,
        model=settings["model"],
        rounds=rounds,
        cohort=COHORT,
        local_steps=STEPS,
        batch_size=10,
        seeds=SEEDS,
        aggregate=aggregate,
        **adversary,
    )
    gradients = found.gradients
    assert gradients is not None
    spent = gradients.training.mean() + gradients.personalization.mean()

    def percent(model: str) -> list[float]:
        return [round(100 * float(value), 3) for value in found.mean(model=model)]

    return {
        "method": method,
        "aggregate": aggregate,
        "attack": attack,
        "rounds": rounds,
        "gradients": round(float(spent), 1),
        "personalized": percent("after"),
        "global": percent("global") if "global" in found.scores else None,
        "diverged": int((np.asarray(found.simulation.counts(found.state).diverged) > 0).any(axis=0).sum()),
    }


if __name__ == "__main__":
    main()

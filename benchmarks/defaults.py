"""Search for the methods' default hyper-parameters, by scores on validation examples of three data sets.

    python -m benchmarks defaults --data-dir DIR --json FILE

Digits, MNIST and CIFAR-10 are split as in their presets. A fifth of each client's training examples is held out, and
every try (hyper-parameter setting) of a method trains on the rest with the same seed. All tries of a method run as one
program. The score is the accuracy of the personalized models on the held-out examples, averaged over the data sets;
test examples are never used.

The best try replaces a default only if its lead, paired over the clients of all data sets, exceeds two standard errors.
Among tries that are level with the best one by the same criterion, the one that changes the fewest values is chosen.
The record contains every try. It is written after each program, so that an interrupted search can continue.
"""

from __future__ import annotations

import argparse
import itertools
import math
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

if not __package__:
    import _script

    __package__ = _script.package

from .problems import use_devices
from .record import command, parser, stored, table, write

SEED = 100
ROUNDS = {"digits": 100, "mnist": 150, "cifar10": 150}
"""Number of rounds: as in the preset for digits, half as many for MNIST, and a tenth for CIFAR-10. The search takes one
core an hour or two."""
DEVIATIONS = 2.0
"""Number of standard errors by which a try must lead before it replaces a default."""

Try = dict[str, float]


def _grid(**values: Iterable[float]) -> list[Try]:
    return [dict(zip(values, row, strict=True)) for row in itertools.product(*values.values())]


def _tied(names: tuple[str, ...], values: Iterable[float]) -> list[Try]:
    return [dict.fromkeys(names, value) for value in values]


RATES = _grid(lr=(0.03, 0.1, 0.2))
PRIOR = _grid(scale_floor=(1e-3, 0.01, 0.1, 0.3), lr_location=(0.1, 1.0))
TRIES: dict[str, list[Try]] = {
    "perfedavg": _grid(alpha=(1e-3, 0.01, 0.03, 0.1), lr=(0.075, 0.15)),
    "scaffold": _grid(lr=(0.01, 0.015, 0.02, 0.03, 0.05, 0.1)),
    "fml": _tied(("alpha", "beta"), (0.25, 0.5, 0.75, 0.9)),
    "fedrep": RATES,
    "l2gd": [{"lam": lam, "p": p} for lam, p in ((0.5, 0.1), (0.1, 0.1), (0.1, 0.02), (0.02, 0.02), (0.04, 0.01))],
    "map-gaussian": PRIOR,
    "map-laplace": PRIOR + _grid(scale_floor=(0.6, 1.0), lr_location=(1.0,)),
    "local": RATES,
    "fedavg": RATES,
    "fedavg-ft": RATES,
    "fedprox": _grid(prox=(0.01, 0.1, 1.0)),
    "fedper": RATES,
    "ditto": _grid(lam=(0.01, 0.1, 0.3, 1.0)),
    "pfedme": [{"lam": lam, "lr_global": eta} for lam, eta in ((0.5, 0.2), (0.1, 0.1), (0.5, 1.0), (2.0, 0.2))],
    "apfl": _grid(alpha_init=(0.25, 0.5, 0.75)),
    "quped": _grid(lam=(0.1, 0.25, 0.5, 1.0)),
    "map-kd": _grid(c=(1.0, 5.0), scale_floor=(0.5, 1.0)),
    "fedbn": RATES,
    "adaped": _grid(psi_init=(1.0, 3.5), c=(1.0, 5.0)),
    "adamix": _grid(scale_floor=(1e-3, 0.01, 0.1)),
    "ifca": RATES,
    "network-lasso": _grid(lam=(0.003, 0.01, 0.03, 0.1)),
    "fedem": _grid(lr=(0.1, 0.2, 0.3)),
    "fedamp": _grid(alpha=(1.0, 10.0, 100.0, 1e4), sigma=(1.0, 100.0)),
    "fedala": _grid(lr_weights=(1.0,)),
}
"""Tries of each method, including the default before the search. PersFL, which distills FedAvg's models, keeps FedAvg's
rate."""
BEFORE: dict[str, Try] = {
    "perfedavg": {"alpha": 1e-3, "lr": 0.075},
    "scaffold": {"lr": 0.01},
    "fml": {"alpha": 0.25, "beta": 0.25},
    "l2gd": {"lam": 0.5, "p": 0.1},
    "map-gaussian": {"scale_floor": 0.01, "lr_location": 0.1},
    "map-laplace": {"scale_floor": 0.01, "lr_location": 0.1},
    "fedprox": {"prox": 0.1},
    "ditto": {"lam": 0.1},
    "pfedme": {"lam": 0.5, "lr_global": 0.2},
    "apfl": {"alpha_init": 0.5},
    "quped": {"lam": 0.25},
    "map-kd": {"c": 1.0, "scale_floor": 0.5},
    "adaped": {"psi_init": 3.5, "c": 5.0},
    "adamix": {"scale_floor": 0.01},
    "network-lasso": {"lam": 0.03},
    "fedem": {"lr": 0.2},
    "fedamp": {"alpha": 1.0, "sigma": 1.0},
    "fedala": {"lr_weights": 1.0},
} | {name: {"lr": 0.1} for name in ("fedrep", "local", "fedavg", "fedavg-ft", "fedper", "fedbn", "ifca")}
"""Defaults of version 0.1, taken from the papers if these state them."""
OPTIONS: dict[str, list[dict[str, Any]]] = {"fedrep": [{}, {"head_steps": 2}], "fedala": [{}, {"weight_steps": 60}]}
"""Static options that are tried in addition to the default options; each is a separate program."""
_SMALL = {"digits": "mlp", "mnist": "cnn", "cifar10": "mlp"}
MODELS = {"fedbn": {"mnist": "cnn-gn", "cifar10": "cnn-gn"}, "fedamp": _SMALL, "fedala": _SMALL}
"""Models that replace the preset's. FedBN needs normalization layers, which no preset of digits has. FedAMP and FedALA
were searched later, with the small network on CIFAR-10."""


@command
def main(argv: list[str] | None = None) -> None:
    args = _parser().parse_args(argv)
    from jaxpfl.runs import compile_cache

    use_devices()
    compile_cache.enable()
    record = _Record(args)
    names = args.methods or list(TRIES)
    for data in args.data:
        held_out = _HeldOut(data, args)
        for name in names:
            if not _takes(name, data):
                continue
            for options in OPTIONS.get(name, [{}]):
                record.take(name, options, data, held_out)
    record.show(names, args.data)


def _takes(method: str, data: str) -> bool:
    """Return whether there is a model of the data set that the method can train."""
    return method not in MODELS or data in MODELS[method]


def _parser() -> argparse.ArgumentParser:
    options = parser("defaults", __doc__)
    options.add_argument(
        "--methods", nargs="+", choices=sorted(TRIES), metavar="NAME", help="methods to search; all by default"
    )
    options.add_argument("--data", nargs="+", choices=sorted(ROUNDS), default=list(ROUNDS), metavar="NAME")
    return options


class _HeldOut:
    """A data set in which held-out training examples replace the test examples."""

    def __init__(self, data: str, args: argparse.Namespace):
        from jaxpfl.runs.config import RunConfig, resolve
        from jaxpfl.runs.setup import load_federation

        small: dict[str, Any] = {"clients": 6, "cohort": 3} if args.quick else {}
        name = "digits" if args.quick else data
        self.config = resolve(RunConfig(name, args.data_dir, validation_share=0.2, **small))
        self.rounds = 2 if args.quick else ROUNDS[data]
        self.data = data
        _, federation = load_federation(self.config)
        self.federation = federation._replace(test=federation.validation)

    def accuracies(self, method: str, options: Mapping[str, Any], tries: list[Try]) -> Any:
        """Return the validation accuracy of every client's personalized model, [tries, m]."""
        import jaxpfl
        from jaxpfl.runs.setup import require

        config = self.config
        return jaxpfl.fit(
            method,
            self.federation,
            model=MODELS.get(method, {}).get(self.data) or require(config.model),
            rounds=self.rounds,
            cohort=config.cohort,
            local_steps=require(config.local_steps),
            batch_size=require(config.batch_size),
            seeds=[SEED] * len(tries),
            hyper=_values(method, tries),
            options=dict(options),
        ).personalized_accuracy


def _values(method: str, tries: list[Try]) -> dict[str, list[float]]:
    """Return each hyper-parameter's values over the tries; ``lr`` also sets all rates that ``--lr`` would set."""
    import jaxpfl
    from jaxpfl.algorithms.parts.hyper import rates

    values = {name: [one[name] for one in tries] for name in tries[0]}
    if "lr" in values:
        values |= {name: values["lr"] for name in rates(jaxpfl.METHODS[method].hyper) if name not in values}
    return values


class _Record:
    """Results so far, stored in a file if one is given."""

    def __init__(self, args: argparse.Namespace):
        self.path: Path | None = args.json
        self.settings = {"rounds": ROUNDS, "seed": SEED, "quick": args.quick}
        self.results = stored(self.path, self.settings)

    def take(self, method: str, options: dict[str, Any], data: str, held_out: _HeldOut) -> None:
        """Run the tries of a method on one data set that are not in the record."""
        label = " ".join([method, *(f"{name}={value}" for name, value in options.items())])
        known = self.results.setdefault(label, {}).setdefault(data, {"tries": [], "seconds": 0.0})
        made = [each["set"] for each in known["tries"]]
        tries = [one for one in TRIES[method] if one not in made]
        if not tries:
            return
        began = time.monotonic()
        scores = held_out.accuracies(method, options, tries)
        seconds = time.monotonic() - began
        known["seconds"] += seconds
        known["tries"] += [
            {"set": one, "accuracy": float(own.mean()), "clients": [round(float(a), 4) for a in own]}
            for one, own in zip(tries, scores, strict=True)
        ]
        best = max(known["tries"], key=lambda one: one["accuracy"])
        print(f"{seconds:6.0f} s  {label} on {data}: {best['set']} {100 * best['accuracy']:.2f}", flush=True)
        write(self.path, "defaults", self.settings, self.results)

    def show(self, names: list[str], data: list[str]) -> None:
        """Print each try's accuracies, its lead over the default before the search, and the conclusion."""
        for name in names:
            rows = compared(name, self.results, data)
            if not rows:
                continue
            cells = [
                (
                    " ".join([*row.options, *(f"{k}={v:g}" for k, v in row.set.items())]),
                    *(f"{100 * accuracy:.2f}" for accuracy in row.accuracies),
                    f"{row.mean:.2f}",
                    f"{row.lead:+.2f}",
                    f"{row.error:.2f}",
                )
                for row in rows
            ]
            on = [one for one in data if one in self.results[name]]
            table(f"{name}: validation accuracy in %", ("", *on, "mean", "lead", "s.e."), cells)
            chosen = choice(name, rows)
            print("stays" if chosen == (BEFORE[name], ()) else f"moves to {chosen}")


class Compared(NamedTuple):
    """Results of a try on all data sets together.

    Attributes:
      options: static options, as strings.
      set: hyper-parameters.
      accuracies: accuracy on each data set.
      mean: mean accuracy of the clients of all data sets, in %.
      lead, error: lead over the mean of the default before the search, and its standard error over clients, paired.
      clients: accuracy of every client, in %.
    """

    options: tuple[str, ...]
    set: Try
    accuracies: list[float]
    mean: float
    lead: float
    error: float
    clients: Any


def compared(name: str, results: Mapping[str, Any], data: Iterable[str] = tuple(ROUNDS)) -> list[Compared]:
    """Return a method's tries in a record; empty if a data set or the default before the search is missing."""
    import numpy as np

    data = [one for one in data if _takes(name, one)]
    if not set(data) <= set(results.get(name, {})):
        return []

    found = []
    for label in (one for one in results if one.split()[0] == name):
        for one in TRIES[name]:
            each = [t for d in data for t in results[label].get(d, {"tries": ()})["tries"] if t["set"] == one]
            clients = np.array([accuracy for t in each for accuracy in t["clients"]])
            found.append((tuple(label.split()[1:]), one, [t["accuracy"] for t in each], clients))
    default = next((clients for options, one, _, clients in found if not options and one == BEFORE[name]), None)
    if default is None:
        return []
    rows = []
    for options, one, accuracies, clients in found:
        if len(clients) == len(default):
            lead, error = _lead(100 * clients, 100 * default)
            rows.append(Compared(options, one, accuracies, 100 * clients.mean(), lead, error, 100 * clients))
    return rows


def _lead(clients: Any, others: Any) -> tuple[float, float]:
    """Return the mean difference between the accuracies of the same clients, and its standard error."""
    difference = clients - others
    return difference.mean(), difference.std(ddof=1) / math.sqrt(len(difference))


def choice(name: str, rows: list[Compared]) -> tuple[Try, tuple[str, ...]]:
    """Return the hyper-parameters and static options that this search's rule chooses as the default."""
    best = max(rows, key=lambda row: row.mean)
    if best.lead <= DEVIATIONS * best.error:
        return BEFORE[name], ()

    def changes(row: Compared) -> int:
        return sum(value != BEFORE[name][key] for key, value in row.set.items()) + len(row.options)

    def level(row: Compared) -> bool:
        behind, error = _lead(best.clients, row.clients)
        return behind <= DEVIATIONS * error and row.lead > DEVIATIONS * row.error

    chosen = min((row for row in rows if row is best or level(row)), key=lambda row: (changes(row), -row.mean))
    return chosen.set, chosen.options


if __name__ == "__main__":
    main()

"""AdaPeD-plus compared with other methods at equal numbers of gradients and tries, with rates chosen by validation.

    python -m benchmarks adaped_plus --data-dir DIR --json FILE

On each data set, every method has the same number of tries (hyper-parameter settings), and a client computes the same
number of gradients in each try, including the gradients for its personalized model. A method with more gradients per
step or per personalized model therefore trains for fewer rounds. Tries train on four fifths of each client's training
examples, with one seed and a part of the gradients, and are scored on the last fifth. The best try of each method then
trains on all training examples, with other seeds, and is scored once on test examples.

AdaPeD-plus uses the same static options on all data sets: the options whose best tries have the best mean over the data
sets. Each ablation changes one ingredient, at the chosen rates. The record contains every try. It is written after each
program, so that an interrupted search can continue.

With ``--held-out``, the comparison runs on CIFAR-10 and on PersFL's splits of MNIST, which were not used to choose the
static options of AdaPeD-plus. These options are taken from the first record.
"""

from __future__ import annotations

import argparse
import itertools
import json
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

if not __package__:
    import _script

    __package__ = _script.package

from .adaped_plus_page import PLUS, tables
from .problems import use_devices
from .record import JobError, command, parser, stored, write

SEARCH_SEED, SEEDS = 100, (0, 1, 2, 3, 4)
FIRST = Path(__file__).resolve().parent / "results" / "adaped_plus_cpu2.json"
"""Record of the runs that chose AdaPeD-plus's static options."""


class Case(NamedTuple):
    """A data set with its preset.

    Attributes:
      search: mean number of gradients of a client in a try.
      full: mean number of gradients of a client in a reported run.
      model: model that replaces the preset's model.
    """

    search: int
    full: int
    model: str | None = None


CASES = {"digits": Case(400, 400), "mnist-writers": Case(400, 800, "mlp:100"), "mnist": Case(120, 160)}
HELD_OUT = {
    "ds1": Case(400, 800, "mlp:100"),
    "ds2": Case(400, 800, "mlp:100"),
    "ds3": Case(400, 800, "mlp:100"),
    "cifar10": Case(120, 300),
}
"""Data sets on which nothing except the rates was chosen."""
_USERS: Mapping[str, Any] = {
    **{"data": "mnist", "clients": 10, "cohort": 10, "local_steps": 10, "batch_size": 20},
    **{"pool_test": True, "test_share": 0.2},
}
CONFIGS: Mapping[str, Mapping[str, Any]] = {
    "ds1": {**_USERS, "classes_per_client": 4},
    "ds2": {**_USERS, "partition": "dirichlet-class", "alpha": 0.9},
    "ds3": {**_USERS, "classes_per_client": 2, "sigma": 2.0},
}
"""Config fields that differ from the data set's preset: the splits of Divi et al. 2021."""


class Try(NamedTuple):
    """Static options and hyper-parameters of one try."""

    options: Mapping[str, Any]
    set: Mapping[str, float]


def _tries(options: Mapping[str, Any], **values: Iterable[float]) -> list[Try]:
    rows = itertools.product(*values.values())
    return [Try(options, dict(zip(values, row, strict=True))) for row in rows]


def _tied(other: str, rates: Iterable[float], **fixed: float) -> list[Try]:
    """Return tries that use one rate for both models."""
    return [Try({}, {"lr": rate, other: rate, **fixed}) for rate in rates]


RATES = (0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3)
FOUR = (0.03, 0.05, 0.1, 0.2)
KEPT = {"keep": True, "fine_tune_steps": 0}
TRIES: dict[str, list[Try]] = {
    "local": _tries({}, lr=RATES),
    "fedavg-ft": _tries({"fine_tune_steps": 60}, lr=FOUR) + _tries({"fine_tune_steps": 20}, lr=FOUR),
    "fedper": _tries({}, lr=RATES),
    "ditto": _tied("lr_personal", FOUR, lam=0.1) + _tied("lr_personal", FOUR, lam=1.0),
    "adaped": _tied("lr_global", FOUR, psi_init=3.5, c=5.0) + _tied("lr_global", FOUR, psi_init=1.0, c=1.0),
    PLUS: [
        Try({}, {"lr": lr, "lr_global": both, "psi_init": psi})
        for lr, both, psi in (
            (0.05, 0.05, 1.0),
            (0.1, 0.1, 1.0),
            (0.05, 0.1, 1.0),
            (0.03, 0.1, 0.5),
            (0.05, 0.2, 1.0),
            (0.1, 0.2, 0.5),
        )
    ]
    + [
        Try({"fine_tune_steps": 20}, {"lr": 0.05, "lr_global": 0.1, "psi_init": 1.0}),
        Try(KEPT, {"lr": 0.1, "lr_global": 0.1, "psi_init": 1.0, "c": 1.0}),
    ],
}
assert len({len(tries) for tries in TRIES.values()}) == 1

DISTILLED = {"ce_global": 0.0, "kd_global": 1.0}
ABLATIONS: dict[str, Try] = {
    "no distillation in fine-tuning": Try({}, {"psi_init": 1e6}),
    "no fine-tuning": Try({"fine_tune_steps": 0}, {}),
    "theta kept": Try(KEPT, {"c": 1.0}),
    "theta kept, mu by distillation alone": Try(KEPT, {"c": 1.0, **DISTILLED}),
    "theta kept, from round 0": Try(KEPT | {"start": "init"}, {"c": 1.0}),
    "theta kept, mu by both": Try(KEPT, {"c": 1.0, "kd_global": 1.0}),
    "theta kept, fine-tuned for 20 steps": Try({"keep": True, "fine_tune_steps": 20}, {"c": 1.0}),
    "theta kept, idle rounds": Try(KEPT | {"idle_rounds": 3}, {"c": 1.0}),
    "psi of each client": Try({"own_psi": True}, {"c": 1.0}),
    "psi from 3.5": Try({}, {"psi_init": 3.5}),
    "weights that sum to one": Try({"normalize": True}, {}),
    "gate": Try({"gate": True}, {}),
}
"""Changes to the chosen try, by name of the ablation."""
DEAR = (
    "no distillation in fine-tuning",
    "no fine-tuning",
    "theta kept",
    "theta kept, mu by distillation alone",
)
"""Ablations on data sets with a convolutional model; digits has all ablations."""


@command
def main(argv: list[str] | None = None) -> None:
    options = parser("adaped_plus", __doc__)
    said = "data sets to search on; the reported runs follow once all have been searched"
    options.add_argument("--data", nargs="+", choices=sorted({**CASES, **HELD_OUT}), metavar="NAME", help=said)
    held_out = "use the data sets that were not used to choose the options"
    options.add_argument("--held-out", action="store_true", help=held_out)
    args = options.parse_args(argv)
    cases = HELD_OUT if args.held_out else CASES
    if unknown := set(args.data or ()) - set(cases):
        raise JobError(
            f"--data {' '.join(sorted(unknown))}: {'with' if args.held_out else 'without'} --held-out, the "
            f"data sets are {', '.join(cases)}"
        )
    from jaxpfl.runs import compile_cache

    use_devices()
    compile_cache.enable()
    study = _Study(args, cases)
    data = tuple(cases)[:1] if args.quick else tuple(args.data or cases)
    for name in data:
        study.search(name)
    if args.quick or args.held_out or set(study.results["search"]) == set(cases):
        for part in (study.report, study.ablate):
            for name in data:
                part(name)
        if not args.quick:
            print(tables(study.record))


class _Study:
    """The record, and the runs that fill it."""

    def __init__(self, args: argparse.Namespace, cases: Mapping[str, Case]):
        self.path: Path | None = args.json
        self.cases, self.held_out = cases, args.held_out
        self.data_dir, self.quick = args.data_dir, args.quick
        self.methods = ("local", PLUS) if args.quick else tuple(TRIES)
        self.settings: dict[str, Any] = {
            "cases": {name: case._asdict() for name, case in cases.items()},
            "quick": args.quick,
        }
        self.options: Mapping[str, Any] | None = None
        if self.held_out:
            if not FIRST.exists():
                raise JobError("--held-out reads AdaPeD-plus's options from a checkout's results/adaped_plus_cpu2.json")
            self.options = structure(json.loads(FIRST.read_text())["results"])
            self.settings |= {"configs": CONFIGS, "options": self.options}
        self.results: dict[str, Any] = stored(self.path, self.settings) or {
            "search": {},
            "reported": {},
            "ablations": {},
        }

    @property
    def record(self) -> dict[str, Any]:
        """Part of the record that the page shows."""
        return {"settings": self.settings, "results": self.results}

    def search(self, data: str) -> None:
        for method in self.methods:
            tries = TRIES[method][: 1 if self.quick else None]
            self.run("search", data, method, {str(i): one for i, one in enumerate(tries)})

    def report(self, data: str) -> None:
        for method in self.methods:
            self.run("reported", data, method, {method: chosen(self.results, method, data, self.options)})

    def ablate(self, data: str) -> None:
        base = chosen(self.results, PLUS, data, self.options)
        for label, change in ABLATIONS.items():
            few = DEAR[:1] if self.quick else DEAR[:2] if self.held_out else ABLATIONS if data == "digits" else DEAR
            if label in few:
                one = Try({**base.options, **change.options}, {**base.set, **change.set})
                self.run("ablations", data, PLUS, {label: one})

    def run(self, part: str, data: str, method: str, tries: Mapping[str, Try]) -> None:
        """Run the tries that are not in the record; tries with the same static options run as one program."""
        known = self.results[part].setdefault(data, [])
        have = {(row["method"], row["label"]) for row in known}
        missing = {label: one for label, one in tries.items() if (method, label) not in have}
        for options in {str(sorted(one.options.items())): one.options for one in missing.values()}.values():
            same = {label: one for label, one in missing.items() if one.options == options}
            began = time.monotonic()
            rows = self.fitted(part, data, method, same)
            known += rows
            write(self.path, "adaped_plus", self.settings, self.results)
            best = max(rows, key=lambda row: sum(row["accuracy"]))
            mean = sum(best["accuracy"]) / len(best["accuracy"])
            print(
                f"{time.monotonic() - began:6.0f} s  {part} {data} {method} {dict(options)}: {best['set']} {mean:.2f}",
                flush=True,
            )

    def fitted(self, part: str, data: str, method: str, tries: Mapping[str, Try]) -> list[dict[str, Any]]:
        """Return the accuracy in % of each try and seed, on validation examples in a search, else on test examples."""
        import numpy as np

        import jaxpfl
        from jaxpfl.runs.config import RunConfig, resolve
        from jaxpfl.runs.setup import load_federation, require

        searching = part == "search"
        small: dict[str, Any] = {"data": "digits", "clients": 6, "cohort": 3}
        asked = small if self.quick else {"data": data, **CONFIGS.get(data, {})}
        config = resolve(RunConfig(**asked, data_dir=self.data_dir, validation_share=0.2 * searching))
        _, federation = load_federation(config)
        if searching:
            federation = federation._replace(test=federation.validation)
        options = dict(next(iter(tries.values())).options)
        budget = self.cases[data].search if searching else self.cases[data].full
        steps, share = require(config.local_steps), require(config.cohort) / federation.num_clients
        rounds = 2 if self.quick else rounds_of(method, options, budget, steps, share)
        seeds = (SEARCH_SEED,) if searching else SEEDS[:1] if self.quick else SEEDS
        names = list(next(iter(tries.values())).set)
        fit = jaxpfl.fit(
            method,
            federation,
            model="linear" if self.quick else self.cases[data].model or require(config.model),
            rounds=rounds,
            cohort=config.cohort,
            local_steps=steps,
            batch_size=require(config.batch_size),
            seeds=list(seeds) * len(tries),
            hyper={name: [one.set[name] for one in tries.values() for _ in seeds] for name in names},
            options=options,
        )
        own = 100 * fit.personalized_accuracy.reshape(len(tries), len(seeds), -1)
        common = None if fit.global_accuracy is None else 100 * fit.global_accuracy.reshape(own.shape)
        assert fit.gradients is not None
        train, adapt = (float(np.mean(count)) for count in fit.gradients)
        return [
            {
                "method": method,
                "label": label,
                "options": options,
                "set": dict(one.set),
                "rounds": rounds,
                "gradients": [round(train, 1), round(adapt, 1)],
                "diverged": int(np.asarray(fit.state.diverged).reshape(own.shape)[i].sum()),
                "accuracy": [round(float(a), 4) for a in own[i].mean(axis=1)],
                "tenth": [round(float(a), 4) for a in np.percentile(own[i], 10, axis=1)],
                "global": None if common is None else [round(float(a), 4) for a in common[i].mean(axis=1)],
            }
            for i, (label, one) in enumerate(tries.items())
        ]


def rounds_of(method: str, options: Mapping[str, Any], budget: int, steps: int, share: float) -> int:
    """Return the number of rounds in which a client computes about ``budget`` gradients, with personalization."""
    each = 1 if method in ("local", "fedavg-ft", "fedper") or (method == PLUS and not options.get("keep")) else 2
    tuned = {"fedavg-ft": 60, PLUS: 60}.get(method, 0)
    adapt = options.get("fine_tune_steps", tuned)
    idle = options.get("idle_rounds", 0)
    outside = sum((1 - share) ** j for j in range(1, idle + 1))
    return max(1, round((budget - adapt) / (share * steps * (each + outside))))


def chosen(results: Mapping[str, Any], method: str, data: str, options: Mapping[str, Any] | None = None) -> Try:
    """Return the best try of a method on a data set.

    For AdaPeD-plus, only tries with the given static options count; by default, tries with the best overall options.
    """
    rows = [row for row in results["search"][data] if row["method"] == method and not row["diverged"]]
    if method == PLUS:
        options = structure(results) if options is None else options
        rows = [row for row in rows if row["options"] == options]
    best = max(rows, key=lambda row: row["accuracy"][0])
    return Try(best["options"], best["set"])


def structure(results: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the static options of AdaPeD-plus whose best tries have the best mean over the data sets."""

    def best(rows: list[dict[str, Any]], options: Mapping[str, Any]) -> float:
        return max(row["accuracy"][0] for row in rows if row["method"] == PLUS and row["options"] == options)

    searched = list(results["search"].values())
    tried = [row["options"] for row in searched[0] if row["method"] == PLUS]
    return max(tried, key=lambda options: sum(best(rows, options) for rows in searched))


if __name__ == "__main__":
    main()

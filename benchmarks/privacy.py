"""Accuracy under user-level differential privacy: Table 2 and Figure 1b of Ozkara et al., with valid accounting.

    python -m benchmarks privacy table2 --data-dir DIR --json FILE

``table2`` uses MNIST, split among 50 clients with three classes each, which all take part in each of 300 rounds.
``figure1b`` uses writers of MNIST instead of FEMNIST: 66 clients of three writers, a third of which take part in each
of 240 rounds. Noise is added once to the clipped sum of a round, and calibrated by dp-accounting. Hyper-parameters are
each method's defaults, except the clipping norm. It is chosen first, for each row of the table, on a held-out fifth of
the clients' training examples, with a separate seed. For federated averaging, it is chosen at every epsilon; for the
other methods, which cost more, at the middle epsilon. Test examples are used once, by ``--seeds`` runs that train on
all training examples. The record contains every try. It is written after each program, so that an interrupted run can
continue. Local training has no clipping norm, so its second row has as many tries of its learning rate.

Reference: Ozkara et al. 2023, Figure 1b; Ozkara et al. 2023, Table 2; Ozkara et al. 2022, Figure 1.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

if not __package__:
    import _script

    __package__ = _script.package

from .problems import use_devices
from .record import command, parser, positive, stored, table, write

DELTA, TRIAL_SEED = 1e-4, 100


@dataclass(frozen=True)
class Study:
    """A setting: the data set's preset, the values of epsilon, and the clipping norms to try."""

    data: str
    cohort: int
    epsilons: tuple[float, ...]
    norms: tuple[float, ...]


STUDIES = {
    "table2": Study("mnist", 50, (3.35, 13.16, 27.30), (0.01, 0.03, 0.1, 0.3)),
    "figure1b": Study("mnist-writers", 22, (4.0, 6.0, 9.0), (0.01, 0.03, 0.1, 0.3)),
}
PROGRAMS: dict[str, tuple[str, dict[str, Any]]] = {
    "local": ("local", {}),
    "local-idle": ("local", {}),
    "local-rate": ("local", {}),
    "fedavg": ("fedavg-ft", {}),
    "adaped": ("adaped", {}),
    "adaped-gated": ("adaped", {"gate": True}),
    "adaped-idle": ("adaped", {"idle_rounds": 10}),
    "adaped-gated-idle": ("adaped", {"gate": True, "idle_rounds": 10}),
    "fedem": ("fedem", {}),
}
"""Trained programs: method and options. Local training with idle rounds trains all clients in every round."""
ROWS = {
    "local": ("local", "after"),
    "local, rate chosen": ("local-rate", "after"),
    "local, idle": ("local-idle", "after"),
    "FedAvg": ("fedavg", "global"),
    "FedAvg+": ("fedavg", "after"),
    "FedEM": ("fedem", "after"),
    "AdaPeD": ("adaped", "after"),
    "AdaPeD, gated": ("adaped-gated", "after"),
    "AdaPeD, idle": ("adaped-idle", "after"),
    "AdaPeD, gated, idle": ("adaped-gated-idle", "after"),
}
"""Rows of the table -> program, and the program's model that is scored."""
LOCAL = ("local", "local-idle", "local-rate")
RATES = (0.01, 0.03, 0.1, 0.3)


@command
def main(argv: list[str] | None = None) -> None:
    args = _parser().parse_args(argv)
    from jaxpfl.runs import compile_cache

    use_devices()
    compile_cache.enable()
    record = _Record(args)
    setting = _Setting(STUDIES[args.study], args)
    idlers = not setting.participation.everyone
    for program in args.programs or [name for name in PROGRAMS if idlers or not name.endswith("idle")]:
        if program in LOCAL:  # uploads nothing, so there is no noise and no clipping norm to choose
            hyper = {}
            if program == "local-rate":
                record.take(f"{program}, trials", partial(setting.rates, program))
                tried = record.results[f"{program}, trials"]["found"]
                hyper["lr"] = max(tried, key=lambda t: (t["after"], -t["lr"]))["lr"]
            record.take(program, partial(setting.test, program, **hyper))
            continue
        tried = setting.epsilons if program == "fedavg" else setting.epsilons[len(setting.epsilons) // 2 :][:1]
        tries = [(eps, norm) for eps in tried for norm in setting.norms]
        record.try_out(program, tries, setting)
        for eps in setting.epsilons:
            chosen = {record.chosen(row, eps) for row, (of, _) in ROWS.items() if of == program}
            for norm in sorted(chosen | set(args.also)):
                record.take(f"{program}, eps {eps:g}, C {norm:g}", partial(setting.test, program, eps, norm))
    record.show(setting.epsilons)


def _parser() -> argparse.ArgumentParser:
    options = parser("privacy", __doc__)
    options.add_argument("study", choices=sorted(STUDIES))
    options.add_argument(
        "--programs", nargs="+", choices=sorted(PROGRAMS), metavar="NAME", help="programs to run; all by default"
    )
    options.add_argument("--seeds", type=positive, default=5)
    options.add_argument("--rounds", type=positive, help="number of rounds; by default, the preset's")
    options.add_argument("--epsilons", type=float, nargs="+", metavar="EPS")
    options.add_argument(
        "--also",
        type=float,
        nargs="+",
        default=[],
        metavar="C",
        help="clipping norms to run in addition to the chosen one",
    )
    return options


class _Setting:
    """Data, participation and calibrated noise of a study."""

    def __init__(self, study: Study, args: argparse.Namespace):
        import numpy as np

        from jaxpfl.engine.build import cohorts_of
        from jaxpfl.engine.spec import RunSpec
        from jaxpfl.privacy import Mechanism, calibrated
        from jaxpfl.runs.config import RunConfig, resolve
        from jaxpfl.runs.setup import load_federation, require

        small: dict[str, Any] = {"clients": 6, "model": "linear", "rounds": 2} if args.quick else {}
        data = "digits" if args.quick else study.data
        cohort = 6 if args.quick else study.cohort
        self.config = resolve(RunConfig(data, args.data_dir, cohort=cohort, participation=None, **small))
        self.rounds = args.rounds or require(self.config.rounds)
        self.federation: Any
        _, self.federation = load_federation(self.config)
        _, held_out = load_federation(replace(self.config, validation_share=0.2))
        self.held_out = held_out._replace(test=held_out.validation)
        self.epsilons, self.norms = tuple(args.epsilons or study.epsilons), study.norms
        self.seeds = 1 if args.quick else args.seeds
        kind = "full" if cohort == self.clients else "poisson"
        self.participation = cohorts_of(
            RunSpec(method="fedavg", cohort=self.config.cohort, participation=kind), self.clients
        )
        self.noise = {}
        for eps in self.epsilons:
            found = calibrated(Mechanism(1.0), self.participation, eps, DELTA, rounds=self.rounds)
            self.noise[eps] = float(np.asarray(found.noise_multiplier))

    @property
    def clients(self) -> int:
        return self.federation.num_clients

    def trials(self, program: str, runs: list[tuple[float, float]]) -> list[dict[str, Any]]:
        """Run each pair (epsilon, clipping norm), all in one program, and score the runs on the held-out examples."""
        from jaxpfl.privacy import Mechanism

        z, norms = tuple(self.noise[eps] for eps, _ in runs), tuple(norm for _, norm in runs)
        scores, _ = self._fit(program, self.held_out, [TRIAL_SEED] * len(runs), Mechanism(z, norms))
        return [
            {"epsilon": eps, "clipping_norm": norm, **{which: float(own[i].mean()) for which, own in scores.items()}}
            for i, (eps, norm) in enumerate(runs)
        ]

    def rates(self, program: str) -> list[dict[str, Any]]:
        """Run each learning rate, all in one program, and score the runs on the held-out examples."""
        scores, _ = self._fit(program, self.held_out, [TRIAL_SEED] * len(RATES), None, lr=list(RATES))
        return [{"lr": lr, "after": float(own.mean())} for lr, own in zip(RATES, scores["after"], strict=True)]

    def test(self, program: str, eps: float | None = None, norm: float | None = None, **hyper: float) -> dict[str, Any]:
        """Run the final runs, and score them on the test examples."""
        from jaxpfl.privacy import Mechanism, plan_of

        mechanism = None if eps is None or norm is None else Mechanism(self.noise[eps], norm)
        scores, psi = self._fit(program, self.federation, list(range(self.seeds)), mechanism, **hyper)
        found: dict[str, Any] = {"epsilon": eps, "clipping_norm": norm, "psi": psi, **hyper}
        if mechanism is not None:
            found["statement"] = str(plan_of(mechanism, self.participation, rounds=self.rounds).statement(DELTA))
        return found | {which: own.mean(axis=1).tolist() for which, own in scores.items()}

    def _fit(
        self, program: str, federation: Any, seeds: list[int], mechanism: Any, **hyper: Any
    ) -> tuple[dict[str, Any], Any]:
        """Return the accuracies [S, m] of each model, and the mean psi after every tenth round (if any)."""
        import numpy as np

        import jaxpfl

        config, (method, options) = self.config, PROGRAMS[program]
        result = jaxpfl.fit(
            method,
            federation,
            model=config.model or "mlp",
            rounds=self.rounds,
            cohort=None if program == "local-idle" else config.cohort,
            local_steps=config.local_steps or 10,
            batch_size=config.batch_size or 20,
            seeds=seeds,
            hyper=hyper,
            options=options,
            privacy=mechanism,
            participation=None if mechanism is None or config.cohort == self.clients else "poisson",
        )
        psi = result.history.get("psi")
        scores = {which: np.asarray(own["accuracy"][-1]) for which, own in result.scores.items()}
        return scores, None if psi is None else np.asarray(psi).mean(axis=0)[::10].tolist()


class _Record:
    """Results so far, stored in a file if one is given."""

    def __init__(self, args: argparse.Namespace):
        self.path: Path | None = args.json
        self.settings = {"study": args.study, "seeds": args.seeds, "rounds": args.rounds, "quick": args.quick}
        self.results = stored(self.path, self.settings)

    def try_out(self, program: str, tries: list[tuple[float, float]], setting: _Setting) -> None:
        """Run the tries that are not in the record, and write them."""
        name = f"{program}, trials"
        known = self.results.get(name, {"found": [], "seconds": 0.0})
        done = {(t["epsilon"], t["clipping_norm"]) for t in known["found"]}
        if left := [each for each in tries if each not in done]:
            began = time.monotonic()
            self._keep(name, known["found"] + setting.trials(program, left), known["seconds"] - began)

    def take(self, name: str, measure: Any) -> None:
        """Measure what is not in the record, and write it."""
        if name not in self.results:
            began = time.monotonic()
            self._keep(name, measure(), -began)

    def _keep(self, name: str, found: Any, offset: float) -> None:
        seconds = time.monotonic() + offset
        self.results[name] = {"found": found, "seconds": seconds}
        print(f"{seconds:6.0f} s  {name}", flush=True)
        write(self.path, "privacy", self.settings, self.results)

    def chosen(self, row: str, eps: float) -> float:
        """Return the clipping norm of a row: the best on the held-out examples, and of equally good norms the smallest.

        If no norm was tried at this epsilon, the tries at the other epsilons are compared.
        """
        program, which = ROWS[row]
        tries = self.results[f"{program}, trials"]["found"]
        tries = [t for t in tries if t["epsilon"] == eps] or tries
        return max(tries, key=lambda t: (t[which], -t["clipping_norm"]))["clipping_norm"]

    def show(self, epsilons: tuple[float, ...]) -> None:
        """Print the table: mean and standard deviation over seeds, in %."""
        import statistics

        rows = []
        for row, (program, which) in ROWS.items():
            cells = []
            for eps in epsilons:
                norm = None if program in LOCAL or f"{program}, trials" not in self.results else self.chosen(row, eps)
                name = program if norm is None else f"{program}, eps {eps:g}, C {norm:g}"
                if name not in self.results:
                    break
                each = [100 * value for value in self.results[name]["found"][which]]
                spread = f" ± {statistics.stdev(each):.2f}" if len(each) > 1 else ""
                cells.append(f"{statistics.mean(each):.2f}{spread}" + ("" if norm is None else f" (C {norm:g})"))
            else:
                rows.append((row, *cells))
        table("accuracy in % over the clients", ("", *[f"eps {eps:g}" for eps in epsilons]), rows)


if __name__ == "__main__":
    main()

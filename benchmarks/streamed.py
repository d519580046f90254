"""Federations larger than memory: rounds of clients in files, compared with a federation on the device.

    python -m benchmarks streamed --clients 100000 --folder DIR

Every client has the papers' CNN as its personal model (AdaPeD, 44 k parameters) and ten images. K = 100 clients take 10
steps of 10 images in a round. The contender in files has all m clients, with images in a memory-mapped file. The
contenders in memory have as many clients as fit (`FITS`). A round of every contender is the same work. The files are
deleted at the end.

    python -m benchmarks streamed --model linear --clients 1000000 --folder DIR

runs the same with linear models and 100 examples of 60 floats per client, which is 24 GB for a million clients.

    python -m benchmarks streamed --model mlp --clients 1000 10000 100000 --plot curves.png

measures the largest resident size and the seconds per round against m, for clients in three places: on the device, in
host memory, and in files. Each place and count has its own process, and processes with the same count are timed in
turn. Counts whose states and examples exceed ``--memory`` are measured in files only. A resident size includes pages of
mapped files, which the kernel may reclaim at any time.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

if not __package__:
    import _script

    __package__ = _script.package

from .harness import Job, compare
from .problems import rounds_of, use_devices
from .record import command, own_file, parser, positive, save_picture, table, target, write
from .worker import Contender

FITS = 2000
STEPS, BATCH, COHORT = 10, 10, 100
ROUNDS = 10
"""Number of rounds in one timing of the CNN: rows are transferred while the previous round computes, which a timing of
a single round would not show."""
PLACES = ("device", "host", "disk")
GIB = 2**30
ASKED = target(0.8, 0.95)  # minimum rate relative to clients on the device
ASKED_GIB = {"floor": 3.0}  # maximum resident size with clients in files


class Kind(NamedTuple):
    """Clients of one model.

    Attributes:
      name: registered name of the model.
      examples: number of examples per client.
      shape: shape of one example.
      parameters: number of parameters of the model.
    """

    name: str
    examples: int
    shape: tuple[int, ...]
    parameters: int

    @property
    def client_bytes(self) -> int:
        """Bytes of a client's personal model and of its examples with their labels."""
        return 4 * (self.parameters + self.examples * (int(np.prod(self.shape)) + 1))


KINDS = {
    "cnn": Kind("cnn", 10, (28, 28), 44_426),
    "mlp": Kind("mlp:16", 10, (28, 28), 12_730),
    "linear": Kind("linear", 100, (60,), 610),
}


@command
def main(argv: list[str] | None = None) -> None:
    options = parser("streamed", __doc__)
    options.add_argument("--clients", type=positive, nargs="+", default=[100_000], metavar="M")
    options.add_argument("--model", choices=tuple(KINDS), default="cnn")
    options.add_argument(
        "--memory", type=positive, default=4, metavar="GIB", help="memory of the clients that are measured in memory"
    )
    options.add_argument(
        "--folder", help="folder of the files, 24 GiB for 100000 clients; by default, a temporary folder"
    )
    options.add_argument("--devices", type=positive, default=None)
    options.add_argument(
        "--plot", type=own_file("streamed", picture=True), metavar="FILE", help="plot several numbers of clients"
    )
    args = options.parse_args(argv)
    if args.plot and len(args.clients) == 1:
        options.error("argument --plot: give several --clients")
    if len(args.clients) > 1:
        _curves(args)
    else:
        _asked(args)


def _asked(args: argparse.Namespace) -> None:
    """Measure all clients in files, and as many clients in memory as fit."""
    (given,) = args.clients
    clients, fits, cohort = (60, 30, 5) if args.quick else (given, min(FITS, given), COHORT)
    counts = {"device": fits, "host": fits, "disk": clients}
    results = _measured(args, counts, cohort)
    base = results["device"]["median"]
    rates = {name: base / found["median"] for name, found in results.items()}
    rows = [(name, counts[name], *_figures(found), rates[name]) for name, found in results.items()]
    table(f"AdaPeD, {args.model}, K = {cohort}", ("clients live", "m", "round s", "peak GiB", "rate"), rows)
    asked = [("rate, at least", rates["disk"], ASKED["floor"]), ("GiB, at most", rows[-1][3], ASKED_GIB["floor"])]
    table("asked of clients in files", ("", "found", "floor"), asked)
    settings = {"model": args.model, "clients": clients, "fits": fits}
    settings |= {"cohort": cohort, "repetitions": args.repetitions}
    write(args.json, "streamed", settings, results, rates=rates, asked=ASKED, asked_gib=ASKED_GIB)


def _curves(args: argparse.Namespace) -> None:
    """Measure every count in every place, in memory only if it fits."""
    counts, cohort, memory = sorted(set(args.clients)), COHORT, args.memory * GIB
    if args.quick:
        counts, cohort, memory = [20, 40], 5, 30 * KINDS[args.model].client_bytes
    results: dict[str, Any] = {}
    for m in counts:
        fits = m * KINDS[args.model].client_bytes <= memory
        found = _measured(args, dict.fromkeys(PLACES if fits else PLACES[-1:], m), min(cohort, m))
        results |= {f"{place}, {m}": row | {"place": place, "clients": m} for place, row in found.items()}
    rows = [(row["place"], row["clients"], *_figures(row)) for row in results.values()]
    table(f"AdaPeD, {args.model}, K = {cohort}", ("clients live", "m", "round s", "peak GiB"), rows)
    settings = {"model": args.model, "clients": counts, "cohort": cohort, "repetitions": args.repetitions}
    settings |= {"memory": args.memory, "client_bytes": KINDS[args.model].client_bytes}
    write(args.json, "streamed", settings, results)
    if args.plot:
        _plot(args, counts, list(results.values()))


def _measured(args: argparse.Namespace, counts: Mapping[str, int], cohort: int) -> dict[str, Any]:
    """Measure clients in each place, with the given count, in turn."""
    folder = Path(tempfile.mkdtemp(prefix="jaxpfl-streamed-", dir=args.folder))
    common = {"cohort": cohort, "devices": args.devices, "folder": str(folder), "model": args.model}
    jobs = {where: Job("streamed", common | {"clients_in": where, "clients": m}) for where, m in counts.items()}
    try:
        rounds = ROUNDS if args.model == "cnn" and not args.quick else None  # others have many anyway
        return compare(jobs, repetitions=1 if args.quick else args.repetitions, rounds=rounds)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _figures(found: Mapping[str, Any]) -> tuple[float, float]:
    """Return the seconds per round, and the largest resident size in GiB."""
    return found["median"], found["facts"]["peak_bytes"] / GIB


def _plot(args: argparse.Namespace, counts: list[int], rows: list[dict[str, Any]]) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.6), layout="constrained")
    memory, seconds = figure.subplots(1, 2)
    labels = {"device": "on the device", "host": "in the host's memory", "disk": "in files"}
    for place, marker in zip(PLACES, "os^", strict=True):
        of_place = [row for row in rows if row["place"] == place]
        ms = [row["clients"] for row in of_place]
        taken, peaks = zip(*map(_figures, of_place), strict=True) if of_place else ((), ())
        memory.semilogx(ms, peaks, f"{marker}-", label=labels[place])
        seconds.semilogx(ms, taken, f"{marker}-", label=labels[place])
    between = np.geomspace(counts[0], counts[-1])
    memory.semilogx(
        between, between * KINDS[args.model].client_bytes / GIB, "k:", linewidth=1, label="states and examples"
    )
    memory.set_ylabel("largest resident size, GiB")
    seconds.set_ylabel("seconds a round")
    for axes in (memory, seconds):
        axes.set_xlabel("clients")
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
    memory.legend(frameon=False)
    figure.suptitle(f"AdaPeD, {KINDS[args.model].name}, {COHORT} clients in a round", fontsize=10)
    save_picture(figure, args.plot, "streamed")


def work(settings: dict[str, Any]) -> Contender:
    """Run rounds of clients in one of the places."""
    use_devices(settings["devices"])
    import jaxpfl
    from jaxpfl.core import participation
    from jaxpfl.engine.build import Assembled
    from jaxpfl.engine.spec import RunSpec
    from jaxpfl.engine.tasks import make_task

    folder = Path(settings["folder"]) / settings["clients_in"]
    kind = KINDS[settings["model"]]
    jaxpfl.save_federation(_federation(settings["clients"], kind.examples, kind.shape), folder)
    federation = jaxpfl.open_federation(folder)
    task = make_task(kind.name, federation, 10)
    method = jaxpfl.METHODS["adaped"]
    local = jaxpfl.LocalWork(np.asarray(federation.train.size), STEPS, BATCH)
    cohorts = participation.uniform(settings["clients"], settings["cohort"])
    plan = jaxpfl.ExecutionPlan(clients_in=settings["clients_in"])
    spec = RunSpec(method=method, plan=plan)
    simulation = Assembled(spec, task, federation, None, method.hyper, cohorts, None, local).simulation()
    simulation.keep_clients_in(Path(settings["folder"]) / "clients", [])
    return rounds_of(simulation)


def _federation(clients: int, examples: int, shape: tuple[int, ...]) -> Any:
    """Return clients whose examples overlap at random places of a small array; if saved, each client has a copy."""
    from jaxpfl import ClientData, Federation
    from jaxpfl.core.types import Examples

    rng, stored = np.random.default_rng(0), 20_000
    y = rng.integers(0, 10, stored).astype(np.int32)
    means = rng.standard_normal((10, *shape), np.float32)
    x = means[y] + rng.standard_normal((stored, *shape), np.float32)
    start = rng.integers(0, stored - examples, clients).astype(np.int32)
    train = ClientData(Examples(x, y), start, np.full(clients, examples, np.int32), examples, examples)
    nothing = ClientData.stacked(Examples(x[:0], y[:0]), np.zeros(clients, np.int64))
    return Federation(np.arange(clients, dtype=np.int32), train, nothing, nothing)


if __name__ == "__main__":
    main()

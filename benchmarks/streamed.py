"""Clients beyond memory: rounds of clients whose data and states live in files, against a federation on the device.

    python -m benchmarks streamed --clients 100000 --folder DIR

Every client has the papers' CNN as its personal model (AdaPeD, 44 k parameters) and ten images of its own; K = 100 of
them take 10 steps of 10 in a round. The contender in files has all m clients, its images in a memory-mapped file; the
ones in memory have as many as fit (`FITS`). A round's work is the same. The files are deleted at the end.

    python -m benchmarks streamed --linear --clients 1000000 --folder DIR

The same with linear models and 100 examples of 60 floats a client, 24 GB of them for a million.
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

if not __package__:
    import _script

    __package__ = _script.package

from .harness import Job, compare
from .problems import rounds_of, use_devices
from .record import command, parser, positive, table, target, write
from .worker import Contender

FITS = 2000
STEPS, BATCH, COHORT = 10, 10, 100
KINDS = {"cnn": (10, (28, 28)), "linear": (100, (60,))}
"""Models: examples of a client, and the shape of one."""
ASKED = target(0.8, 0.95)  # of the resident rate, at least


@command
def main(argv: list[str] | None = None) -> None:
    options = parser("streamed", __doc__)
    options.add_argument("--clients", type=positive, default=100_000)
    options.add_argument("--linear", action="store_true", help="linear models of 60 features")
    options.add_argument("--folder", help="for the files, 24 GiB for 100000 clients; a temporary one unless given")
    options.add_argument("--devices", type=positive, default=None)
    args = options.parse_args(argv)
    clients, fits, cohort = (60, 30, 5) if args.quick else (args.clients, min(FITS, args.clients), COHORT)
    folder = Path(tempfile.mkdtemp(prefix="jaxpfl-streamed-", dir=args.folder))
    model = "linear" if args.linear else "cnn"
    common = {"cohort": cohort, "devices": args.devices, "folder": str(folder), "model": model}
    contenders = {"device": ("device", fits), "host": ("host", fits), "disk": ("disk", clients)}
    jobs = {
        name: Job("streamed", common | {"clients_in": where, "clients": m}) for name, (where, m) in contenders.items()
    }
    try:
        results = compare(jobs, repetitions=1 if args.quick else args.repetitions)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    base = results["device"]["median"]
    rates = {name: base / found["median"] for name, found in results.items()}
    rows = [
        (name, m, found["median"], rates[name], found["facts"]["peak_bytes"] / 2**30)
        for (name, found), (_, m) in zip(results.items(), contenders.values(), strict=True)
    ]
    table(f"AdaPeD, {model}, K = {cohort}", ("clients live", "m", "round s", "rate", "peak GiB"), rows)
    settings = {"model": model, "clients": clients, "fits": fits, "cohort": cohort, "repetitions": args.repetitions}
    write(args.json, "streamed", settings, results, rates=rates, asked=ASKED)


def work(settings: dict[str, Any]) -> Contender:
    """Rounds of clients that live in one of the places."""
    use_devices(settings["devices"])
    import jaxpfl
    from jaxpfl import participation
    from jaxpfl.engine.assemble import make_simulation, make_task

    folder = Path(settings["folder"]) / settings["clients_in"]
    jaxpfl.save_federation(_federation(settings["clients"], *KINDS[settings["model"]]), folder)
    federation = jaxpfl.open_federation(folder)
    task = make_task(settings["model"], federation, 10)
    method = jaxpfl.METHODS["adaped"]
    local = jaxpfl.LocalWork(np.asarray(federation.train.size), STEPS, BATCH)
    cohorts = participation.uniform(settings["clients"], settings["cohort"])
    plan = jaxpfl.ExecutionPlan(clients_in=settings["clients_in"])
    simulation = make_simulation(method, task, local, federation, cohorts, method.hyper, options={}, plan=plan)
    simulation.keep_clients_in(Path(settings["folder"]) / "clients", [])
    return rounds_of(simulation)


def _federation(clients: int, examples: int, shape: tuple[int, ...]) -> Any:
    """Clients whose examples lie at random places of a small store, where they overlap; saved, each has its own."""
    from jaxpfl import ClientData, Federation
    from jaxpfl.types import Examples

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

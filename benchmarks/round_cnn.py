"""A round of the papers' MNIST CNN: jaxpfl compared with torch, fedjax, and vmap with lax convolutions.

    python -m benchmarks round_cnn --method fedavg --clients 50 --steps 60 --data-dir DIR

Every contender trains on the same split at the same learning rates, in its own process. To show that the work is real,
the accuracy of its global model after the measured rounds is printed. Ratios are relative to jaxpfl on all devices. If
torch or fedjax cannot be imported, it is left out with a note.
"""

from __future__ import annotations

import importlib.util
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

if not __package__:
    import _script

    __package__ = _script.package

from .harness import Job, compare, once
from .problems import Problem, make_federation, rounds_of, simulate, use_devices
from .record import command, parser, positive, table, target, write
from .worker import Contender

CORES, ONE, NAIVE = "jaxpfl, a device a core", "jaxpfl, one device", "vmap + lax.conv, one device"
THREE, LOOP, PAIR = "three jax.grad calls", "torch loop, all threads", "torch, two processes of one thread"
FEDJAX = "fedjax"
CONTENDERS = (CORES, ONE, THREE, PAIR, LOOP, FEDJAX, NAIVE)
AGREEMENT = 1e-5

# Minimum slowdown relative to jaxpfl, at m = 50 and 60 steps of batch 20.
ASKED = {
    "fedavg": {LOOP: target(4.5, 8), PAIR: target(2.6, 5), NAIVE: target(18, 40)},
    "adaped": {LOOP: target(4.8, 10), PAIR: target(2.9, 6)},
}


@command
def main(argv: list[str] | None = None) -> None:
    args = _parser().parse_args(argv)
    source = "digits" if args.quick else "mnist"
    clients, steps = (4, 2) if args.quick else (args.clients, args.steps)
    problem = Problem(
        clients=clients, steps=steps, batch=args.batch, method=args.method, source=source, data_dir=args.data_dir
    )
    repetitions = 1 if args.quick else args.repetitions
    with tempfile.TemporaryDirectory() as folder:
        jobs, skipped = _jobs(args, problem, Path(folder))
        results = compare(jobs, repetitions=repetitions, rounds=args.rounds)
    asked = ASKED[args.method] if (clients, steps, args.batch) == (50, 60, 20) else {}
    best = next(iter(results.values()))["median"]
    rows = []
    for name, row in results.items():
        row["ratio"], row["asked"] = row["median"] / best, asked.get(name)
        step = 1e6 * row["median"] / problem.client_steps
        floor, aim = (row["asked"] or {}).values() or (None, None)
        accuracy = f"{row['facts']['accuracy']:.4f}"
        rows.append((name, row["median"], step, row["ratio"], floor, aim, row["first"], accuracy))
    title = f"{args.method}, m = {clients}, {steps} steps of batch {args.batch}, a round"
    table(title, ("", "seconds", "us a step", "ratio", "floor", "aim", "first s", "accuracy"), rows)
    for name, why in skipped.items():
        print(f"left out: {name}: {why}")
    write(args.json, "round_cnn", asdict(problem) | {"repetitions": repetitions}, results, skipped=skipped)


def _parser() -> Any:
    result = parser("round_cnn", __doc__)
    result.add_argument("--method", choices=("fedavg", "adaped"), default="fedavg")
    result.add_argument("--clients", type=positive, default=50)
    result.add_argument("--steps", type=positive, default=60)
    result.add_argument("--batch", type=positive, default=20)
    result.add_argument("--rounds", type=positive, default=1, help="number of rounds in one timing")
    result.add_argument("--only", nargs="+", choices=CONTENDERS, default=CONTENDERS, metavar="CONTENDER")
    result.add_argument("--fedjax-python", metavar="PATH", help="interpreter that has fedjax, if this one has not")
    return result


def _jobs(args: Any, problem: Problem, folder: Path) -> tuple[dict[str, Job], dict[str, str]]:
    """Return the contenders that can run here, and the reasons why others cannot."""
    not_this = FEDJAX if args.method == "adaped" else THREE  # fedjax has no AdaPeD
    wanted = [name for name in CONTENDERS if name in args.only and name != not_this]
    reasons = {}
    if not args.fedjax_python and not importlib.util.find_spec("fedjax"):
        reasons[FEDJAX] = "fedjax is not installed"
    if not importlib.util.find_spec("torch"):
        reasons |= dict.fromkeys((LOOP, PAIR), "torch is not installed")
    jobs = {
        name: Job("round_cnn", {"contender": name, "problem": asdict(problem)})
        for name in wanted
        if name not in reasons
    }
    if FEDJAX in jobs:
        data = str(folder / "clients.npz")
        once(Job("round_cnn", {"save": data, "problem": asdict(problem)}))
        settings = {"data": data, "steps": problem.steps, "batch": problem.batch}
        jobs[FEDJAX] = Job("fedjax_rounds", settings, args.fedjax_python or sys.executable)
    return jobs, {name: why for name, why in reasons.items() if name in wanted}


def work(settings: dict[str, Any]) -> Contender | dict[str, Any]:
    """Run one contender; if the settings contain ``save``, write the clients' data to a file instead."""
    problem = Problem(**settings["problem"])
    if "save" in settings:
        from .fedjax_rounds import save

        save(settings["save"], make_federation(problem))
        return {}
    name = settings["contender"]
    return _torch(problem, name) if name in (LOOP, PAIR) else _jax(problem, name)


def _jax(problem: Problem, name: str) -> Contender:
    from jaxpfl import ExecutionPlan

    use_devices(None if name in (CORES, THREE) else 1)
    if name == NAIVE:
        plan = ExecutionPlan(clients="vmap", convolutions="plain")
        return rounds_of(simulate(problem, plan=plan, model=naive_cnn()), score=True)
    if name == THREE:
        from dataclasses import replace

        from .three_grads import disagreement, three_grads

        # Few steps, because in a long round float32 training amplifies the rounding differences of any two programs.
        small = replace(problem, clients=min(problem.clients, 4), steps=min(problem.steps, 5))
        found = disagreement(small)
        if found > AGREEMENT:
            raise AssertionError(f"three jax.grad calls differ from AdaPeD by {found:.2g} after one round")
        contender = rounds_of(simulate(problem, method=three_grads), score=True)
        return contender._replace(facts=lambda: {"disagreement": found} | contender.facts())
    return rounds_of(simulate(problem), score=True)


def naive_cnn() -> Any:
    """Return the same network with flax's own layers, which vmap turns into grouped convolutions."""
    import flax.linen as nn
    import jax

    class Naive(nn.Module):
        @nn.compact
        def __call__(self, x: jax.Array) -> jax.Array:
            for filters in (6, 16):
                x = nn.max_pool(nn.relu(nn.Conv(filters, (5, 5), padding="VALID")(x)), (2, 2), (2, 2))
            x = x.reshape(x.shape[0], -1)
            for size in (120, 84):
                x = nn.relu(nn.Dense(size)(x))
            return nn.Dense(10)(x)

    return Naive()


def _torch(problem: Problem, name: str) -> Contender:
    import multiprocessing

    import torch

    from .torch_rounds import Clients, Server, helper, unpad

    federation = make_federation(problem)
    data, pipes = unpad(federation.train), []
    if name == PAIR:
        torch.set_num_threads(1)
        context = multiprocessing.get_context("spawn")
        here, there = context.Pipe()
        half = len(data) // 2
        share = (problem.method, data[half:], problem.steps, problem.batch, there)
        context.Process(target=helper, args=share, daemon=True).start()
        there.close()  # so that waiting ends if a helper fails
        data, pipes = data[:half], [here]
    server = Server(problem.method, Clients(data, problem.steps, problem.batch, channels_last=name == PAIR), pipes)
    mask = federation.test.mask
    x, y = federation.test.x[mask], federation.test.y[mask]

    def facts() -> dict[str, Any]:
        return {"accuracy": server.accuracy(x, y), "threads": torch.get_num_threads()}

    return Contender(server.run, facts)


if __name__ == "__main__":
    main()

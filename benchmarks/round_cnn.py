"""One federated round of the papers' MNIST CNN: jaxpfl against PyTorch loops and against vmap with lax convolutions.

    python benchmarks/round_cnn.py --method fedavg --clients 50 --steps 60 --data-dir DIR

Every contender trains the same split at the same rates in its own process; timings are interleaved and compared by
medians. The accuracy after the measured rounds is printed for each: the work is real. Needs ``pip install '.[bench]'``.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import numpy as np
from harness import Contender, compare, environment, serve, write

CORES, ONE, NAIVE = "jaxpfl, a device a core", "jaxpfl, one device", "vmap + lax.conv, one device"
LOOP, PAIR = "torch loop, all threads", "torch, two processes of one thread"
CONTENDERS = (CORES, ONE, NAIVE, LOOP, PAIR)
BATCH = 20


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--method", choices=("fedavg", "adaped"), default="fedavg")
    parser.add_argument("--clients", type=int, default=50)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--rounds", type=int, default=1, help="rounds in one timing")
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--data-dir", default=None)
    parser.add_argument("--only", nargs="*", choices=CONTENDERS, default=list(CONTENDERS))
    parser.add_argument("--json", type=Path, default=None)
    parser.add_argument("--worker", choices=CONTENDERS, default=None, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        serve(torch_contender(args) if args.worker in (LOOP, PAIR) else jax_contender(args))
        return
    shared = ["--method", args.method, "--clients", str(args.clients), "--steps", str(args.steps)]
    shared += ["--data-dir", args.data_dir] if args.data_dir else []
    commands = {name: [sys.executable, __file__, *shared, "--worker", name] for name in args.only}
    results = compare(commands, rounds=args.rounds, repetitions=args.repetitions)
    report(args, results)
    if args.json:
        settings = {"method": args.method, "clients": args.clients, "steps": args.steps, "batch": BATCH}
        write(args.json, {"settings": settings, "environment": environment(), "results": results})


def report(args: argparse.Namespace, results: dict) -> None:
    best = results.get(CORES) or next(iter(results.values()))
    print(f"{args.method}, m = {args.clients}, {args.steps} steps of batch {BATCH}")
    print(f"{'':36}{'s a round':>10}{'us a step':>10}{'ratio':>8}{'first s':>9}{'accuracy':>10}")
    for name, row in results.items():
        step = 1e6 * row["median"] / (args.clients * args.steps)
        ratio = row["median"] / best["median"]
        print(f"{name:36}{row['median']:10.3f}{step:10.0f}{ratio:8.2f}{row['first']:9.1f}{row['accuracy']:10.4f}")


def jax_contender(args: argparse.Namespace) -> Contender:
    import os

    import jax

    jax.config.update("jax_num_cpu_devices", (os.cpu_count() or 1) if args.worker == CORES else 1)
    import flax.linen as nn

    import jaxpfl
    from jaxpfl import ExecutionPlan, LocalWork, Simulation, participation
    from jaxpfl.engine.fit import make_task

    class Naive(nn.Module):
        """What anyone writes first: flax's own layers, which vmap turns into grouped convolutions."""

        @nn.compact
        def __call__(self, x: jax.Array) -> jax.Array:
            for filters in (6, 16):
                x = nn.max_pool(nn.relu(nn.Conv(filters, (5, 5), padding="VALID")(x)), (2, 2), (2, 2))
            x = x.reshape(x.shape[0], -1)
            for size in (120, 84):
                x = nn.relu(nn.Dense(size)(x))
            return nn.Dense(10)(x)

    federation = split(args)
    method = jaxpfl.METHODS[args.method]
    task = make_task(Naive() if args.worker == NAIVE else "cnn", federation, 10)
    work = LocalWork(np.asarray(federation.train.size), args.steps, BATCH)
    plan = ExecutionPlan(clients="vmap" if args.worker == NAIVE else "auto")
    everyone = participation.full(args.clients)
    simulation = Simulation(method.build(task, work), task, federation, everyone, method.hyper, plan=plan)
    state = simulation.init([0])

    def run(rounds: int) -> None:
        nonlocal state
        state, _ = simulation.advance(state, rounds)  # returns when the history is on the host

    def accuracy() -> float:
        return float(np.nanmean(simulation.evaluate(state)["global"]["accuracy"]))

    return Contender(run, accuracy)


def torch_contender(args: argparse.Namespace) -> Contender:
    import multiprocessing

    import torch
    from torch_rounds import Clients, Server, helper

    federation = split(args)
    data = [
        (x[mask], y[mask])
        for x, y, mask in zip(federation.train.x, federation.train.y, federation.train.mask, strict=True)
    ]
    pipes = []
    if args.worker == PAIR:
        torch.set_num_threads(1)
        context = multiprocessing.get_context("spawn")
        here, there = context.Pipe()
        half = len(data) // 2
        share = (args.method, data[half:], args.steps, BATCH, there)
        context.Process(target=helper, args=share, daemon=True).start()
        data, pipes = data[:half], [here]
    clients = Clients(data, args.steps, BATCH, channels_last=args.worker == PAIR)
    server = Server(args.method, clients, pipes)
    mask = federation.test.mask
    return Contender(server.run, lambda: server.accuracy(federation.test.x[mask], federation.test.y[mask]))


def split(args: argparse.Namespace):
    import jaxpfl

    return jaxpfl.federate(jaxpfl.load("mnist", args.data_dir), clients=args.clients, classes_per_client=3)


if __name__ == "__main__":
    main()

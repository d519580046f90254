"""Gain from compiling more at once: eager operations, one compiled step, one compiled round, ten rounds in one call.

    python -m benchmarks fusion

The task is FedAvg with full participation and ten steps of batch 10, on one device. The first two contenders are FedAvg
in plain Python: loops over clients and steps, mini-batches drawn on the host, and an SGD step that is either eager
(without ``jit``) or compiled. The other two are jaxpfl with ``rounds_per_call`` 1 and 10. A timing covers ten rounds of
few clients, because eager rounds are slow. The models are a small perceptron on digits, and the papers' CNN on digits
enlarged to 28 x 28.
"""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

import numpy as np

if not __package__:
    import _script

    __package__ = _script.package

from .harness import Job, compare
from .problems import Problem, device_facts, make_federation, make_task, rounds_of, simulate, use_devices
from .record import command, parser, table, write
from .worker import Contender

EAGER, STEP, ROUND, ROUNDS = "eager", "jit a step", "jit a round", "ten rounds in one call"
PROBLEMS = {
    "perceptron": Problem("mlp", clients=10, steps=10, batch=10),
    "CNN": Problem(clients=5, steps=10, batch=10, source="digits"),
}


@command
def main(argv: list[str] | None = None) -> None:
    args = parser("fusion", __doc__, repetitions=3).parse_args(argv)
    problems, rounds, repetitions = PROBLEMS, 10, args.repetitions
    if args.quick:
        problems, rounds, repetitions = {"perceptron": replace(PROBLEMS["perceptron"], clients=4, steps=2)}, 1, 1
    results = {}
    for name, problem in problems.items():
        jobs = {how: Job("fusion", {"how": how, "problem": asdict(problem)}) for how in (EAGER, STEP, ROUND, ROUNDS)}
        results[name] = found = compare(jobs, repetitions=repetitions, rounds=rounds)
        best, rows = found[ROUNDS]["median"], []
        for how, row in found.items():
            row["ratio"] = row["median"] / best
            rows.append((how, row["median"], 1e6 * row["median"] / problem.client_steps, row["ratio"]))
        title = f"{name}, m = {problem.clients}, {problem.steps} steps of batch {problem.batch}"
        table(title, ("", "s a round", "us a step", "times slower"), rows)
    settings = {name: asdict(problem) for name, problem in problems.items()}
    write(args.json, "fusion", {"problems": settings, "rounds": rounds, "repetitions": repetitions}, results)


def work(settings: dict[str, Any]) -> Contender:
    """Run the rounds of one contender."""
    from jaxpfl import ExecutionPlan

    use_devices(1)
    problem, how = Problem(**settings["problem"]), settings["how"]
    if how in (ROUND, ROUNDS):
        return rounds_of(simulate(problem, plan=ExecutionPlan(rounds_per_call=10 if how == ROUNDS else 1)))
    return python_rounds(problem, jitted=how == STEP)


def python_rounds(problem: Problem, *, jitted: bool) -> Contender:
    """Run FedAvg as loops in Python, with a compiled or an eager step."""
    import jax
    import jax.numpy as jnp

    import jaxpfl

    federation = make_federation(problem)
    task, hp = make_task(problem, federation), jaxpfl.METHODS["fedavg"].hyper
    clients = [
        (x[mask], y[mask])
        for x, y, mask in zip(federation.train.x, federation.train.y, federation.train.mask, strict=True)
    ]
    examples = sum(len(y) for _, y in clients)
    mu, rng, losses = task.init(jax.random.key(0)), np.random.default_rng(0), [0.0]

    def loss(params: Any, x: Any, y: Any) -> Any:
        return task.loss(task.model.apply(params, x, train=True), y).mean()

    def step(params: Any, x: Any, y: Any) -> tuple[Any, Any]:
        value, gradient = jax.value_and_grad(loss)(params, x, y)
        return jax.tree.map(lambda p, g: p - hp.lr * (g + hp.weight_decay * p), params, gradient), value

    if jitted:
        step = jax.jit(step)

    def run(rounds: int) -> None:
        nonlocal mu
        for _ in range(rounds):
            total = jax.tree.map(jnp.zeros_like, mu)
            for x, y in clients:
                w = mu
                order = np.concatenate([rng.permutation(len(y)) for _ in range(problem.steps)])
                for t in range(problem.steps):
                    own = order[t * problem.batch : (t + 1) * problem.batch]
                    w, losses[0] = step(w, x[own], y[own])
                share = len(y) / examples
                total = jax.tree.map(lambda t, a, b, share=share: t + share * (a - b), total, w, mu)
            mu = jax.tree.map(jnp.add, mu, total)
        jax.block_until_ready(mu)

    return Contender(run, lambda: {"train_loss": float(losses[0])} | device_facts())


if __name__ == "__main__":
    main()

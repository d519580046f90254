"""Overhead of the engine: full and partial rounds compared with the clients' updates alone.

    python -m benchmarks overhead --data-dir DIR

The bare contender is also one program. On each device, it loops over the device's clients, slices a client's data,
calls the algorithm's ``client.update`` (which draws batches and takes the local steps) and overwrites the last result.
It lacks the work of the engine: drawing the cohort, gathering rows by index, the check for divergence, adding uploads,
sums over devices, the server's update, writing states back, metrics, and the loop over rounds with its history. A
partial bare round takes the next K clients in order, so that their data are as rarely in cache as in the engine. If K
is not a multiple of the number of devices, the devices' shares differ by at most one block.
"""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

import numpy as np

if not __package__:
    import _script

    __package__ = _script.package

from .harness import Job, compare
from .problems import EXAMPLES, Problem, device_facts, make_federation, make_task, rounds_of, simulate, use_devices
from .record import command, parser, table, target, write
from .worker import Contender

ASKED = target(0.05, 0.01)  # maximum overhead
LINEAR_BLOCK = 125  # divides the devices' shares of 1e5 and of 1e4 clients for 2, 4 and 8 devices
BLOCKS = {"cnn": 1, "linear": LINEAR_BLOCK}  # clients in one vectorized operation, in both contenders


@command
def main(argv: list[str] | None = None) -> None:
    options = parser("overhead", __doc__)
    options.add_argument("--method", choices=("fedavg", "adaped"), default="fedavg")
    options.add_argument("--only", choices=("cnn", "linear"), default=None)
    args = options.parse_args(argv)
    cnn = Problem(clients=50, method=args.method, data_dir=args.data_dir)
    linear = Problem("linear", 100_000, steps=10, batch=EXAMPLES, method=args.method)
    repetitions = args.repetitions
    if args.quick:
        cnn, linear = replace(cnn, clients=10, source="digits"), replace(linear, clients=2000)
        repetitions = 1
    problems = {f"CNN, {steps} steps": replace(cnn, steps=steps) for steps in ([2] if args.quick else [60, 10])}
    problems["linear"] = linear
    results, shares, rows = {}, {}, []
    for what, problem in problems.items():
        if args.only not in (None, problem.model):
            continue
        for cohort in (problem.clients // 10,) if args.quick else (None, problem.clients // 10):
            name = f"{what}, K = {cohort or problem.clients} of {problem.clients}"
            settings = {"problem": asdict(replace(problem, cohort=cohort)), "block": BLOCKS[problem.model]}
            jobs = {how: Job("overhead", settings | {"bare": how == "bare"}) for how in ("round", "bare")}
            results[name] = found = compare(jobs, repetitions=repetitions)
            shares[name] = found["round"]["median"] / found["bare"]["median"] - 1
            rows.append((name, found["round"]["median"], found["bare"]["median"], 100 * shares[name], 5.0, 1.0))
    table(
        f"{args.method}: what a round takes beyond its clients' updates",
        ("", "round s", "bare s", "more %", "floor", "aim"),
        rows,
    )
    settings = {"method": args.method, "repetitions": repetitions}
    write(args.json, "overhead", settings, results, shares=shares, asked=ASKED)


def work(settings: dict[str, Any]) -> Contender:
    """Run rounds of the engine, or bare updates of as many clients."""
    from jaxpfl import ExecutionPlan

    use_devices()
    problem, block = Problem(**settings["problem"]), settings["block"]
    if settings["bare"]:
        return bare_updates(problem, block)
    return rounds_of(simulate(problem, plan=ExecutionPlan(clients=block)))


def bare_updates(problem: Problem, block: int) -> Contender:
    """Call ``client.update`` for K clients per round, in shares on all devices; each result overwrites the last."""
    import jax
    import jax.numpy as jnp
    from jax.sharding import AxisType, Mesh, NamedSharding
    from jax.sharding import PartitionSpec as P

    import jaxpfl
    from jaxpfl.core.protocol import ALL_STEPS, ClientContext, ServerContext
    from jaxpfl.core.randomness import Purpose, stream
    from jaxpfl.engine.cohort import join_stores, split_stores

    federation = make_federation(problem)
    task = make_task(problem, federation)
    local = jaxpfl.LocalWork(np.asarray(federation.train.size), problem.steps, problem.batch)
    method = jaxpfl.METHODS[problem.method]
    (client,), server, *_ = method.build(task, local)
    mesh = Mesh(np.array(jax.devices()), ("device",), axis_types=(AxisType.Auto,))
    cohort = problem.cohort or problem.clients
    share = -(-cohort // mesh.size)
    key, hp = jax.random.key(0), jax.tree.map(jnp.asarray, method.hyper)
    ctx = ServerContext(jnp.int32(0), problem.clients, float(cohort))

    def update(message: Any, round: Any, row: Any, data: Any) -> Any:
        participations = round * cohort // problem.clients
        context = ClientContext(round, row, participations, ALL_STEPS, stream(key, Purpose.BATCHES, row))
        own = client.init(key, hp, context, message)  # a client with a state, as in its first round
        work_key = stream(key, Purpose.LOCAL_WORK, round, row)
        return client.update(work_key, hp, context, message, own, data)

    def some(message: Any, round: Any, first: Any, data: Any) -> Any:
        """Run the updates of ``block`` adjacent clients; a single client has no client axis."""
        if block == 1:
            return update(message, round, first, data.client(first))
        places, held = split_stores(data)
        own = jax.tree.map(lambda a: jax.lax.dynamic_slice_in_dim(a, first, block), places)
        rows = first + jnp.arange(block)
        return jax.vmap(lambda row, own: update(message, round, row, join_stores(own, held)))(rows, own)

    def on_device(data: Any, message: Any, result: Any, start: Any, rounds: Any) -> Any:
        place = jax.lax.axis_index("device") * share
        mine = -(-jnp.minimum(share, cohort - place) // block)

        def one_round(t: Any, result: Any) -> Any:
            first = (start + t) * cohort % problem.clients + place

            def body(i: Any, last: Any) -> Any:
                del last  # overwritten: nothing is summed, compared or kept
                return some(message, start + t, first + i * block, data)

            return jax.lax.fori_loop(0, mine, body, result)

        row = jax.tree.map(lambda a: a[0], result)
        return jax.tree.map(lambda a: a[None], jax.lax.fori_loop(0, rounds, one_round, row))

    each, everywhere = P("device"), P()
    spread = jax.shard_map(
        on_device,
        mesh=mesh,
        in_specs=(everywhere, everywhere, each, everywhere, everywhere),
        out_specs=each,
        check_vma=False,
    )
    program = jax.jit(spread, donate_argnums=2)
    message = server.broadcast(key, hp, ctx, server.init(key, hp, ctx))
    data, message = jax.device_put((federation.splits, message), NamedSharding(mesh, everywhere))
    shapes = jax.eval_shape(some, message, jnp.int32(0), jnp.int32(0), data)
    result = jax.tree.map(lambda s: jnp.zeros((mesh.size, *s.shape), s.dtype), shapes)
    result, done = jax.device_put(result, NamedSharding(mesh, each)), 0

    def run(rounds: int) -> None:
        nonlocal result, done
        result = jax.block_until_ready(program(data, message, result, np.int32(done), np.int32(rounds)))
        done += rounds

    def facts() -> dict[str, Any]:
        return {"train_loss": float(np.mean(result[2]["train_loss"]))} | device_facts()

    return Contender(run, facts)


if __name__ == "__main__":
    main()

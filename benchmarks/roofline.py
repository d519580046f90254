"""FLOP/s and bytes/s relative to this machine's measured peaks of matrix products and memory traffic.

    python -m benchmarks roofline --data-dir DIR

Two peaks are measured in the same run. The first is the best f32 matrix product over several sizes, in JAX (one product
per device, all at once) and in NumPy (with its own threads). The second is a triad ``x = y + a x`` over arrays far
larger than the caches, on all devices. The peaks are compared with rounds of the MNIST CNN, with operations counted by
hand (``flops.py``), and with rounds of linear clients, with bytes counted by hand. The package's convolution executes
1.44 times the counted operations; a second share counts the executed operations.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any

import numpy as np

if not __package__:
    import _script

    __package__ = _script.package

from .flops import cnn_step, cnn_step_executed, linear_bytes
from .harness import Job, compare
from .problems import EXAMPLES, FEATURES, Problem, device_facts, rounds_of, simulate, use_devices
from .record import command, parser, positive, table, target, write
from .worker import Contender

SIZES = (256, 512, 1024, 2048)
TRIAD_WORDS = 2**27  # numbers of float32 in the two arrays together, over all devices: 1 GiB
ASKED = target(0.28, 0.60)  # FedAvg's share of the matrix-product peak


@command
def main(argv: list[str] | None = None) -> None:
    options = parser("roofline", __doc__)
    options.add_argument("--clients", type=positive, default=50, help="number of CNN clients")
    options.add_argument("--linear-clients", type=positive, default=100_000)
    args = options.parse_args(argv)
    cnn = Problem(clients=args.clients, data_dir=args.data_dir)
    linear = Problem(model="linear", clients=args.linear_clients, steps=10, batch=EXAMPLES)
    sizes, words, repetitions = SIZES, TRIAD_WORDS, args.repetitions
    if args.quick:
        cnn, linear = replace(cnn, clients=2, steps=2, source="digits"), replace(linear, clients=200)
        sizes, words, repetitions = (64,), 2**18, 1
    jobs = {f"product {n}, {how}": Job("roofline", {how: n}) for n in sizes for how in ("jax", "numpy")}
    jobs["triad"] = Job("roofline", {"triad": words})
    jobs |= {m: Job("roofline", {"problem": asdict(replace(cnn, method=m))}) for m in ("fedavg", "adaped")}
    jobs["linear"] = Job("roofline", {"problem": asdict(linear)})
    results = compare(jobs, repetitions=repetitions)
    summary = _summary(results, cnn, linear, words)
    _report(results, summary)
    settings = {"cnn": asdict(cnn), "linear": asdict(linear), "triad_words": words, "repetitions": repetitions}
    for problem in (settings["cnn"], settings["linear"]):
        problem.pop("data_dir")
    write(args.json, "roofline", settings, results, summary=summary, asked=ASKED)


def _summary(results: dict[str, Any], cnn: Problem, linear: Problem, words: int) -> dict[str, Any]:
    """Return rates and shares, from medians."""
    products = {name: row["facts"]["flops"] / row["median"] for name, row in results.items() if "product" in name}
    peak = max(products.values())
    bandwidth = 3 * 4 * words / results["triad"]["median"]
    summary: dict[str, Any] = {"products": products, "peak_flops": peak, "bandwidth": bandwidth, "rounds": {}}
    for method in ("fedavg", "adaped"):
        steps_per_second = cnn.client_steps / results[method]["median"]
        rate = cnn_step(method, cnn.batch) * steps_per_second
        executed = cnn_step_executed(method, cnn.batch) * steps_per_second
        summary["rounds"][method] = {
            "flops_per_second": rate,
            "share": rate / peak,
            "executed_share": executed / peak,
        }
    moved = linear_bytes(linear.clients, linear.steps, EXAMPLES, FEATURES, linear.outputs)
    rates = {name: value / results["linear"]["median"] for name, value in moved.items()}
    summary["linear"] = {name: {"bytes_per_second": rate, "share": rate / bandwidth} for name, rate in rates.items()}
    return summary


def _report(results: dict[str, Any], summary: dict[str, Any]) -> None:
    peak = summary["peak_flops"]
    rows = [(name, rate / 1e9, rate / peak) for name, rate in summary["products"].items()]
    table("f32 matrix products", ("size and library", "GFLOP/s", "of the best"), rows)
    rows = [
        (method, results[method]["median"], row["flops_per_second"] / 1e9, row["share"], row["executed_share"])
        + (tuple(ASKED.values()) if method == "fedavg" else (None, None))
        for method, row in summary["rounds"].items()
    ]
    columns = ("", "s a round", "GFLOP/s", "of the peak", "executed", "floor", "aim")
    table(f"MNIST CNN against a peak of {peak / 1e9:.0f} GFLOP/s", columns, rows)
    rows = [
        (what, results["linear"]["median"], summary["linear"][name]["bytes_per_second"] / 1e9, share)
        for name, what in (("memory", "examples once a round"), ("steps", "examples and models each step"))
        for share in [summary["linear"][name]["share"]]
    ]
    title = f"linear clients against a triad of {summary['bandwidth'] / 1e9:.1f} GB/s"
    table(title, ("bytes counted", "s a round", "GB/s", "of the triad"), rows)


def work(settings: dict[str, Any]) -> Contender:
    """Run one product, the triad, or rounds; for the first two, a round is one pass."""
    if "numpy" in settings:
        return numpy_product(settings["numpy"])
    use_devices()
    if "jax" in settings:
        return jax_product(settings["jax"])
    if "triad" in settings:
        return triad(settings["triad"])
    return rounds_of(simulate(Problem(**settings["problem"])))


def _reflection(n: int) -> np.ndarray:
    """Return a dense orthogonal matrix: repeated products with it neither grow nor vanish."""
    v = np.random.default_rng(0).standard_normal(n)
    v /= np.linalg.norm(v)
    return (np.eye(n) - 2 * np.outer(v, v)).astype(np.float32)


def numpy_product(n: int) -> Contender:
    """Repeat ``x a`` in NumPy."""
    a = _reflection(n)
    x, y = a.copy(), np.empty_like(a)

    def run(passes: int) -> None:
        nonlocal x, y
        for _ in range(passes):
            np.matmul(x, a, out=y)
            x, y = y, x

    return Contender(run, lambda: {"flops": 2 * n**3})


def jax_product(n: int) -> Contender:
    """Repeat ``x a`` in one JAX program, on every device at once."""
    import jax
    import jax.numpy as jnp

    devices = len(jax.devices())
    a = np.stack([_reflection(n)] * devices)
    run = on_every_device(lambda c: (jnp.matmul(c[0], c[1], precision="highest"), c[1]), (a, a))
    return Contender(run, lambda: {"flops": 2 * n**3 * devices} | device_facts())


def triad(words: int) -> Contender:
    """Repeat ``x = y + a x`` on every device: three words of traffic per element, because x is written in place."""
    import jax

    ones = np.ones((len(jax.devices()), words // len(jax.devices())), np.float32)
    return Contender(on_every_device(lambda c: (c[1] + 0.5 * c[0], c[1]), (ones, ones)), device_facts)


def on_every_device(body: Callable[[Any], Any], carry: Any) -> Callable[[int], None]:
    """Return ``run(passes)``: each device applies ``body`` repeatedly to its own row of the leaves [devices, ...]."""
    import jax
    from jax.sharding import AxisType, Mesh, NamedSharding
    from jax.sharding import PartitionSpec as P

    mesh = Mesh(np.array(jax.devices()), ("device",), axis_types=(AxisType.Auto,))
    each = P("device")

    def on_one(carry: Any, passes: Any) -> Any:
        row = jax.tree.map(lambda a: a[0], carry)
        row = jax.lax.fori_loop(0, passes, lambda _, c: body(c), row)
        return jax.tree.map(lambda a: a[None], row)

    spread = jax.shard_map(on_one, mesh=mesh, in_specs=(each, P()), out_specs=each, check_vma=False)
    loop = jax.jit(spread, donate_argnums=0)
    state = jax.device_put(carry, NamedSharding(mesh, each))

    def run(passes: int) -> None:
        nonlocal state
        state = jax.block_until_ready(loop(state, np.int32(passes)))

    return run


if __name__ == "__main__":
    main()

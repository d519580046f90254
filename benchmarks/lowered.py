"""Products and bytes of a round, counted in its program for a device, compared with the roofline of an H100.

    python -m benchmarks lowered --platform cuda

Nothing is run. The round is traced for a platform's execution plan; the platform need not be present. Products are
counted (with operands and results, as if each came from memory), as is everything that reads or writes rows (gathers,
scatters, slices and updates). Element-wise operations are left out, because a compiler fuses them with the counted
operations. The body of a loop counts as often as it runs, and the loop over rounds once. The bound of a product is the
larger of two times: its operations at the peak rate of its type, and its bytes at the bandwidth. The bound of a round
is the sum over its products. It is not a measurement.
"""

from __future__ import annotations

import math
from dataclasses import asdict
from typing import Any, NamedTuple

if not __package__:
    import _script

    __package__ = _script.package

from .problems import Problem, simulate, use_devices
from .record import command, parser, positive, table, write

H100 = {"bfloat16": 989e12, "tf32": 494e12, "float32": 67e12, "bandwidth": 3.35e12}
"""Peaks of an H100 SXM without sparsity: operations per second by type, and bytes per second (NVIDIA's data sheet)."""

_ROWS = ("gather", "scatter", "scatter-add", "dynamic_slice", "dynamic_update_slice")


class Operation(NamedTuple):
    """An operation of a round.

    Attributes:
      name: name of the primitive.
      shapes: shapes of operands and result, as a string.
      times: number of times that it runs in a round.
      flops: floating-point operations of one run; zero for operations that only move data.
      bytes: bytes of operands and result of one run; for a gather or a slice, of the rows that are moved.
      dtype: type of the operands.
    """

    name: str
    shapes: str
    times: float
    flops: float
    bytes: float
    dtype: str


@command
def main(argv: list[str] | None = None) -> None:
    options = parser("lowered", __doc__)
    options.add_argument("--platform", choices=("cuda", "tpu", "cpu"), default="cuda")
    options.add_argument("--clients", type=positive, default=1000)
    options.add_argument("--steps", type=positive, default=10)
    options.add_argument("--precision", choices=("float32", "tf32", "bfloat16"), default="float32")
    options.add_argument("--rows", type=positive, default=6, help="number of products in each table")
    args = options.parse_args(argv)
    from jaxpfl import ExecutionPlan

    use_devices(1)
    clients, steps = (4, 2) if args.quick else (args.clients, args.steps)
    results: dict[str, Any] = {}
    for method in ("fedavg", "adaped"):
        problem = Problem(method=method, clients=clients, steps=steps, cap=60, source="digits")
        simulation = simulate(problem, plan=ExecutionPlan(devices=1, precision=args.precision))
        found = operations(simulation.program(args.platform).jaxpr)
        results[method] = summary(found, args.precision) | {"problem": asdict(problem), "steps": problem.client_steps}
        results[method] |= {"products": products(found, args.precision)}
        results[method]["problem"].pop("data_dir")
        _report(method, results[method], args.rows)
    settings = {"platform": args.platform, "clients": clients, "precision": args.precision, "peaks": H100}
    write(args.json, "lowered", settings, results)


def _report(method: str, total: dict[str, Any], rows: int) -> None:
    lines = [
        (one["shapes"], one["times"], one["flops"] / 1e9, one["bytes"] / 1e9, 1e3 * one["seconds"], one["bound_by"])
        for one in total["products"][:rows]
    ]
    columns = ("largest products", "times", "GFLOP", "GB", "ms at least", "bound by")
    table(f"{method}, a round", columns, lines)
    print(
        f"in all {total['flops'] / 1e12:.3g} TFLOP and {total['product_bytes'] / 1e9:.3g} GB in products, "
        f"{total['row_bytes'] / 1e9:.3g} GB in rows: at least {1e3 * total['seconds']:.3g} ms\n"
    )


def products(found: list[Operation], precision: str) -> list[dict[str, Any]]:
    """Return the products of a round, sorted by decreasing number of operations.

    Each has ``shapes`` and ``times``; and, for all its runs together, ``flops``, ``bytes``, and the bound in
    ``seconds`` with its cause ``bound_by``.
    """
    rows = []
    for one in sorted((one for one in found if one.flops), key=lambda one: one.times * one.flops, reverse=True):
        seconds, limit = bound(one, precision)
        sums = {"flops": one.times * one.flops, "bytes": one.times * one.bytes, "seconds": one.times * seconds}
        rows.append({"shapes": one.shapes, "times": one.times} | sums | {"bound_by": limit})
    return rows


def summary(found: list[Operation], precision: str) -> dict[str, float]:
    """Return sums over a round: ``flops``, ``product_bytes``, ``row_bytes``, and its bound in ``seconds``."""
    products = [one for one in found if one.flops]
    rows = sum(one.times * one.bytes for one in found if not one.flops)
    return {
        "flops": sum(one.times * one.flops for one in products),
        "product_bytes": sum(one.times * one.bytes for one in products),
        "row_bytes": rows,
        "seconds": sum(one.times * bound(one, precision)[0] for one in products) + rows / H100["bandwidth"],
    }


def bound(one: Operation, precision: str) -> tuple[float, str]:
    """Return the least seconds of an operation on an H100, and the resource that limits it."""
    peak = H100["bfloat16"] if one.dtype == "bfloat16" else H100["tf32" if precision == "tf32" else "float32"]
    arithmetic, memory = one.flops / peak, one.bytes / H100["bandwidth"]
    return max(arithmetic, memory), "arithmetic" if arithmetic > memory else "memory"


def operations(jaxpr: Any) -> list[Operation]:
    """Return the products and row moves of a program and its inner programs. The body of a `while` loop counts once."""
    from .cost_model.count import equations, flops

    found = []
    for eqn, times in equations(jaxpr):
        name = eqn.primitive.name
        avals: list[Any] = [var.aval for var in (*eqn.invars, *eqn.outvars)]
        if name in ("dot_general", "conv_general_dilated"):
            shapes = f"{_shape(avals[0])} x {_shape(avals[1])}"
            found.append(Operation(name, shapes, times, flops(eqn), sum(map(_bytes, avals[:3])), str(avals[0].dtype)))
        elif name in _ROWS:
            # The rows that are read and written count, not the array that contains them.
            moved = avals[-1] if name in ("gather", "dynamic_slice") else avals[2 if name.startswith("scatter") else 1]
            found.append(Operation(name, _shape(moved), times, 0.0, 2 * _bytes(moved), str(moved.dtype)))
    return found


def _bytes(aval: Any) -> float:
    return math.prod(aval.shape) * getattr(aval.dtype, "itemsize", 8)


def _shape(aval: Any) -> str:
    return str(list(aval.shape))


if __name__ == "__main__":
    main()

"""``python -m benchmarks NAME [options]``; without a name, the benchmarks are listed."""

from __future__ import annotations

import importlib
import json
import sys

if not __package__:
    import _script

    __package__ = _script.package

NAMES = (
    "round_cnn",
    "own_models",
    "adaped_flops",
    "roofline",
    "clients",
    "linear_forms",
    "sweep",
    "sweep_clients",
    "orders",
    "streamed",
    "overhead",
    "compile",
    "second_fit",
    "fusion",
    "sums",
    "drift",
    "processes",
    "ragged",
    "estimators",
    "estimators_compared",
    "interval_coverage",
    "bernoulli_coverage",
    "needles",
    "histograms",
    "graphs",
    "defaults",
    "adaped_plus",
    "robust",
    "privacy",
    "private_gain",
    "silos",
    "adapters",
    "lowered",
    "kernels",
    "convolutions",
    "cost",
    "gpu",
)


def main(argv: list[str] | None = None) -> None:
    """Run one benchmark, or list them. For an unknown name, print one line on standard error and exit with status 2."""
    args = sys.argv[1:] if argv is None else argv
    if not args or args[0] in ("-h", "--help", "--json"):
        lines = {name: (_module(name).__doc__ or "").splitlines()[0] for name in NAMES}
        if "--json" in args:
            print(json.dumps(lines))
            return
        from jaxpfl.cli.help import filled, table

        print("\n".join([*table(lines.items()), "", *filled("NAME --help shows a benchmark's options.")]))
        return
    if args[0] not in NAMES:
        from jaxpfl.support.errors import unknown_name

        print(f"error: {unknown_name('benchmark', args[0], NAMES)}", file=sys.stderr)
        raise SystemExit(2)
    _module(args[0]).main(args[1:])


def _module(name: str):
    return importlib.import_module(f".{name}", __package__)


if __name__ == "__main__":
    main()
